"""`make up` and `make down`: a whole system that stays when the command has ended, until it is told to go.

Lives in `$STATE`, by default in the cache folder. Everything it starts is recorded there, so `down` finds
and ends it by pid and start time, whoever calls it and after whatever crash. With `--node=real` the parts are
pods of a node with kubelet and containerd, installed by the chart; otherwise they are plain processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from forktree_dev import cache, cluster_binary, system
from forktree_dev.checkout import CHECKOUT
from forktree_dev.kubectl import Kubectl
from forktree_dev.processes import ProcessFailed, running_recorded
from forktree_dev.real_node import cluster as real_cluster
from forktree_dev.real_node import playground as real_playground
from forktree_dev.real_node.helm import HelmFailed
from forktree_dev.system import System

_CONTENT = CHECKOUT / "dev" / "playground"
"""Templates, and an account for the HTTP API; all in namespace `default`."""
_EXAMPLE = CHECKOUT / "examples" / "session.yaml"
_PARTS = 6
"""etcd, API server, controller manager, keeper, agent, operator."""


def state_dir() -> Path:
    return Path(os.environ.get("STATE") or cache.root() / "playground").absolute()


async def up(state: Path, *, real: bool) -> None:
    """Start the playground unless it runs already; a half-running one is ended and started anew."""
    parts = real_cluster.PARTS if real else _PARTS
    if _is_real(state) == real and len(running_recorded(state)) == parts and (state / "env").exists():
        print("The playground is up already.")
    else:
        await down(state)
        print(f"starting the playground ({'a minute or two' if real else 'about half a minute'})", flush=True)
        _make(state)
        try:
            variables = await (real_playground.start(state) if real else _start(state))
            await Kubectl(_kubectl(), Path(variables["KUBECONFIG"])).apply(_CONTENT)
            _write_env(state, variables)
        except BaseException:
            await _stop(state)  # The folder stays: its logs say why.
            raise
    print(_WHAT_NEXT.format(env=shlex.quote(str(state / "env")), example=_EXAMPLE.relative_to(CHECKOUT)))


async def down(state: Path) -> None:
    """End the playground and remove its folder. Safe to repeat."""
    for name in await _stop(state):
        print(f"ended {name}")
    if (state / _MARK).exists():  # Never removes a folder that we did not make.
        shutil.rmtree(state)


async def _stop(state: Path) -> list[str]:
    return await (real_cluster.stop(state) if _is_real(state) else system.stop(state))


def _is_real(state: Path) -> bool:
    return (state / "sandbox").exists()


async def _start(state: Path) -> Mapping[str, str]:
    """Start it in `state`, to stay; what a user's environment needs to know of it."""
    playground = System(state, outlives_us=True)
    await playground.start()
    return {
        "KUBECONFIG": str(playground.kubectl.kubeconfig),
        "FORKTREE_URL": playground.url,
        "FORKTREE_CA": str(playground.ca_path),
    }


def _make(state: Path) -> None:
    state.mkdir(parents=True, exist_ok=True)
    (state / _MARK).touch()


def _kubectl() -> Path:
    return cluster_binary.directory() / "kubectl"


def _write_env(state: Path, variables: Mapping[str, str]) -> None:
    """A file to source. The kubeconfig is there by a name that stays the same."""
    (state / "kubeconfig").symlink_to(variables["KUBECONFIG"])
    programs = state / "bin"  # Without the checkout's python3.
    programs.mkdir()
    for name in ("forktree", "kubectl-forktree"):
        (programs / name).symlink_to(Path(sys.executable).parent / name)
    named = {
        **variables,
        "KUBECONFIG": str(state / "kubeconfig"),
        "FORKTREE_SERVICE_ACCOUNT": "player",
    }
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in named.items()]
    path = ":".join(shlex.quote(str(folder)) for folder in (programs, _kubectl().parent))
    (state / "env").write_text("".join([*lines, f'export PATH={path}:"$PATH"\n']))


_MARK = ".forktree-playground"
_WHAT_NEXT = """
    source {env}
    kubectl apply -f {example}
    kubectl get sessions --watch
    forktree tree                 # also `kubectl forktree tree`; `forktree --help` says what else
    token=$(kubectl create token player --audience=forktree.dev)
    curl --cacert "$FORKTREE_CA" --header "Authorization: Bearer $token" "$FORKTREE_URL/v1/sessions"
    make down    # ends it all"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["up", "down"])
    parser.add_argument("--node", choices=["processes", "real"], default="processes")
    options = parser.parse_args()
    state = state_dir()
    try:
        with cache.locked(f"playground-{system.name_of(state)}"):
            asyncio.run(up(state, real=options.node == "real") if options.command == "up" else down(state))
    except (ProcessFailed, HelmFailed, TimeoutError) as error:
        print(f"{error}\nThe logs are in the folders `logs` below {state}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
