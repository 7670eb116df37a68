"""`make up` and `make down`: a whole system that stays when the command has ended, until it is told to go.

Lives in `$STATE`, by default in the cache folder. Everything it starts is recorded there, so `down` finds
and ends it by pid and start time, whoever calls it and after whatever crash.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import sys
from pathlib import Path

from forktree_dev import cache, system
from forktree_dev.checkout import CHECKOUT
from forktree_dev.processes import ProcessFailed, running_recorded
from forktree_dev.system import System

_CONTENT = CHECKOUT / "dev" / "playground"
"""Templates, and an account for the HTTP API; all in namespace `default`."""
_EXAMPLE = CHECKOUT / "examples" / "session.yaml"
_PARTS = 6
"""etcd, API server, controller manager, keeper, agent, operator."""


def state_dir() -> Path:
    return Path(os.environ.get("STATE") or cache.root() / "playground").absolute()


async def up(state: Path) -> None:
    """Start the playground unless it runs already; a half-running one is ended and started anew."""
    if len(running_recorded(state)) == _PARTS and (state / "env").exists():
        print("The playground is up already.")
    else:
        await down(state)
        print("starting the playground (about half a minute)", flush=True)
        await _start(state)
    print(_WHAT_NEXT.format(env=shlex.quote(str(state / "env")), example=_EXAMPLE.relative_to(CHECKOUT)))


async def down(state: Path) -> None:
    """End the playground and remove its folder. Safe to repeat."""
    for name in await system.stop(state):
        print(f"ended {name}")
    if (state / _MARK).exists():  # Never removes a folder that we did not make.
        shutil.rmtree(state)


async def _start(state: Path) -> None:
    _make(state)
    playground = System(state, outlives_us=True)
    try:
        await playground.start()
        await playground.kubectl.apply(_CONTENT)
        _write_env(playground)
    except BaseException:
        await playground.stop()  # The folder stays: its logs say why.
        raise


def _make(state: Path) -> None:
    state.mkdir(parents=True, exist_ok=True)
    (state / _MARK).touch()


def _write_env(playground: System) -> None:
    kubectl = playground.kubectl
    (playground.state_dir / "kubeconfig").symlink_to(kubectl.kubeconfig)
    programs = playground.state_dir / "bin"  # Without the checkout's python3.
    programs.mkdir()
    for name in ("forktree", "kubectl-forktree"):
        (programs / name).symlink_to(Path(sys.executable).parent / name)
    lines = {
        "KUBECONFIG": shlex.quote(str(playground.state_dir / "kubeconfig")),
        "FORKTREE_URL": shlex.quote(playground.url),
        "FORKTREE_CA": shlex.quote(str(playground.ca_path)),
        "FORKTREE_SERVICE_ACCOUNT": "player",
        "PATH": f'{shlex.quote(str(programs))}:{shlex.quote(str(kubectl.program.parent))}:"$PATH"',
    }
    (playground.state_dir / "env").write_text(
        "".join(f"export {name}={value}\n" for name, value in lines.items())
    )


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
    command = up if parser.parse_args().command == "up" else down
    state = state_dir()
    try:
        with cache.locked(f"playground-{system.name_of(state)}"):
            asyncio.run(command(state))
    except (ProcessFailed, TimeoutError) as error:
        print(f"{error}\nThe logs are in the folders `logs` below {state}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
