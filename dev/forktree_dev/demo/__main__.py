"""Runs the demo. Exit code 0 means: every fork was what it must be, and nothing is left.

`OUT=DIR` writes `demo.json` there. A failed demo takes all down too, and keeps its folder of logs.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree_dev import provisioning
from forktree_dev.commands import Commands, Refused
from forktree_dev.demo import growing, manifests, pruning, searching
from forktree_dev.demo.history import Contradiction
from forktree_dev.demo.leftovers import Search
from forktree_dev.demo.narrating import Narrator
from forktree_dev.demo.report import Report
from forktree_dev.demo.stage import DemoFailed, Stage
from forktree_dev.kubectl import KubectlFailed
from forktree_dev.processes import ProcessFailed
from forktree_dev.system import Sizes, System

_MEMORY_LIMIT_BYTES = 16 << 30
"""Worst case of all machines together, not what they take: the tree of twenty uses about 2 GiB."""

_EXPECTED = (DemoFailed, Contradiction, Refused, KubectlFailed, ProcessFailed, TimeoutError)
"""These say all there is to say in one sentence."""

_STEPS = 4 + growing.STEPS + searching.STEPS + pruning.STEPS


async def play(state_dir: Path, narrator: Narrator, report: Report) -> None:
    """The whole demo. Whatever happens, all that was started is ended before this returns."""
    with narrator.step(
        "preparing (the first time this builds the cluster's binaries and the guest: minutes)"
    ):
        around = await Search.begun(state_dir / "before.json")
        # Looking up what is cached, and building what is not, blocks for as long as it takes.
        system = await asyncio.to_thread(
            System, state_dir, sizes=Sizes(memory_limit_bytes=_MEMORY_LIMIT_BYTES)
        )
    objects: int | None = None
    try:
        with narrator.step("starting control plane, keeper, agent and operator; trying a canary machine"):
            await system.start()
        objects = await _perform(system, narrator, report)
    finally:
        with narrator.step("taking all down"):
            await system.stop()
        with narrator.step("searching the machine for what is left"):
            found = await around.found(system.name, str(state_dir))
        report.leftovers = {**found.counts, "objects": objects}
        for line in found.found:
            narrator.say(f"left: {line}")
    narrator.say(", ".join(f"{kind} {count}" for kind, count in report.leftovers.items()))


async def _perform(system: System, narrator: Narrator, report: Report) -> int:
    """The scenes, on a system that runs. Returns how many objects of ours the end left in the cluster."""
    kubectl = system.kubectl
    node = await kubectl.json("get", "forknode", system.node)
    narrator.say(f"{system.node}: {node['status']['accelerator']}, {node['status']['canary']['message']}")
    cluster_before = await Search.begun(system.state_dir / "before-objects.json", cluster=kubectl)
    await kubectl.apply(manifests.user())
    token = await provisioning.user_token(kubectl, manifests.USER, namespace=manifests.NAMESPACE)
    async with (
        KubeClient.connected(ClusterAccess.from_kubeconfig(kubectl.kubeconfig)) as cluster,
        Commands.connected(system.url, system.ca_path, token, manifests.NAMESPACE) as commands,
    ):
        stage = Stage(system=system, cluster=cluster, commands=commands, narrator=narrator, report=report)
        await growing.grow(stage)
        await searching.search(stage)
        report.state_equal = True  # Both raise at the first state that is not what it must be.
        await pruning.prune(stage)
    return (await cluster_before.found(system.name)).counts["objects"]


async def _until_told_to_end(state_dir: Path, narrator: Narrator, report: Report) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await play(state_dir, narrator, report)


def main() -> int:
    state_dir = Path(tempfile.gettempdir()) / f"forktree-demo-{secrets.token_hex(4)}"
    report, console = Report(), Console()
    failure: str | None = None
    with Narrator(console, _STEPS) as narrator:
        try:
            asyncio.run(_until_told_to_end(state_dir, narrator, report))
        except _EXPECTED as error:
            failure = str(error) or type(error).__name__
        except Exception as error:
            console.print_exception()
            failure = f"{type(error).__name__} that nobody expected"
        except (asyncio.CancelledError, KeyboardInterrupt):
            failure = "it was interrupted"
    if failure is None and not report.nothing_left:
        failure = "something is left on this machine"
    if out := os.environ.get("OUT"):
        report.write(Path(out))
    if failure is not None:
        console.print(f"[bold red]The demo failed:[/] {escape(failure)}", highlight=False, soft_wrap=True)
        console.print(f"Logs: in the folders `logs` below {state_dir}", soft_wrap=True)
        return 1
    shutil.rmtree(state_dir)
    console.print("[bold green]Every child went on from its parent's instant, and nothing is left.[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
