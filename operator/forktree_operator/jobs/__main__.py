"""`python -m forktree_operator.jobs drain|clear-node|clear|try`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from forktree.errors import ForktreeError
from forktree.kube.access import AccessError, ClusterAccess
from forktree.kube.client import KubeClient
from forktree_operator.jobs import clearing, clearing_node, draining, trying
from forktree_operator.jobs.telling import NotInTime, say


def main() -> int:
    parser = argparse.ArgumentParser(prog="forktree_operator.jobs", description=__doc__)
    parser.add_argument(
        "job",
        choices=["drain", "clear-node", "clear", "try"],
        help="drain: delete all sessions and forks; clear-node: what was kept on a node; "
        "clear: what agents said of their nodes; try: fork once",
    )
    parser.add_argument("--kubeconfig", type=Path, help="default: the service account of the pod")
    parser.add_argument("--namespace", default="", help="of the agents; for `try`, of what it makes")
    parser.add_argument("--state-dir", type=Path, help="for `clear-node`")
    parser.add_argument("--image-dir", type=Path, help="for `clear-node`: where it kept images of registries")
    parser.add_argument("--image", default="builtin:tiny", help="for `try` (%(default)s)")
    parser.add_argument("--timeout-seconds", type=float, default=240.0, help="for all of it (%(default)g)")
    options = parser.parse_args()
    if options.job == "clear-node" and options.state_dir is None:
        parser.error("clear-node needs --state-dir")
    if options.job != "clear-node" and not options.namespace:
        parser.error(f"{options.job} needs --namespace")
    try:
        asyncio.run(_run(options))
    except (AccessError, ForktreeError, NotInTime) as err:
        say(f"failed: {err}")
        return 1
    return 0


async def _run(options: argparse.Namespace) -> None:
    deadline = asyncio.get_running_loop().time() + options.timeout_seconds
    if options.job == "clear-node":
        await clearing_node.clear_node(options.state_dir, options.image_dir, deadline=deadline)
        return
    access = await asyncio.to_thread(ClusterAccess.discovered, options.kubeconfig)  # Reads some files.
    async with KubeClient.connected(access, user_agent=f"forktree-{options.job}") as client:
        match options.job:
            case "drain":
                await draining.drain(client, deadline=deadline)
            case "clear":
                await clearing.clear(client, options.namespace, deadline=deadline)
            case _:
                await trying.fork_once(client, options.namespace, options.image, deadline=deadline)


if __name__ == "__main__":
    sys.exit(main())
