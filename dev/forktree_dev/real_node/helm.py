"""helm for one cluster: the chart of this checkout, installed as a user installs it."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forktree_dev import node_programs
from forktree_dev.checkout import CHECKOUT
from forktree_dev.parent_death import die_with_us

CHART = CHECKOUT / "charts" / "forktree"
RELEASE = "forktree"
NAMESPACE = "forktree-system"


class HelmFailed(Exception):
    """helm refused or ran out of time."""


class Helm:
    """Release `forktree` in namespace `forktree-system`."""

    def __init__(self, kubeconfig: Path, home: Path) -> None:
        """`home` gets what helm remembers, instead of the user's own folder."""
        self.program = node_programs.helm()
        self._kubeconfig = kubeconfig
        self._home = home

    async def install(self, values: Mapping[str, Any], *, timeout_seconds: float = 300.0) -> str:
        """Returns what helm printed, once all pods are ready."""
        return await self._rolled_out("install", ["--create-namespace"], values, timeout_seconds)

    async def upgrade(self, values: Mapping[str, Any], *, timeout_seconds: float = 300.0) -> str:
        """Returns what helm printed, once all changed pods are ready. `values` are all there are."""
        return await self._rolled_out("upgrade", [], values, timeout_seconds)

    async def test(self, *, timeout_seconds: float = 300.0) -> str:
        """What `helm test` printed, with the log of its pod."""
        return await self._on_release(
            "test", ["--logs", f"--timeout={timeout_seconds:.0f}s"], {}, timeout_seconds + 60
        )

    async def uninstall(self, *, timeout_seconds: float = 300.0) -> str:
        options = ["--wait", f"--timeout={timeout_seconds:.0f}s"]
        return await self._on_release("uninstall", options, {}, timeout_seconds + 60)

    async def run(self, *arguments: str, stdin: str = "", timeout_seconds: float = 60.0) -> str:
        """Its standard output. Raises `HelmFailed` with what it said on exit codes other than 0."""
        folders = {
            f"HELM_{kind}_HOME": str(self._home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")
        }
        process = await asyncio.create_subprocess_exec(
            *die_with_us([str(self.program), *arguments]),
            env={**os.environ, **folders, "KUBECONFIG": str(self._kubeconfig)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout_seconds):
                out, err = await process.communicate(stdin.encode())
        except TimeoutError as error:
            raise HelmFailed(f"helm {shlex.join(arguments)} took over {timeout_seconds} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            said = (err + out).decode(errors="replace").strip()
            raise HelmFailed(f"helm {shlex.join(arguments)}: {said}")
        return out.decode()

    async def _rolled_out(
        self, verb: str, options: Sequence[str], values: Mapping[str, Any], seconds: float
    ) -> str:
        arguments = [str(CHART), *options, "--wait", f"--timeout={seconds:.0f}s"]
        return await self._on_release(verb, arguments, values, seconds + 60)

    async def _on_release(
        self, verb: str, arguments: Sequence[str], values: Mapping[str, Any], seconds: float
    ) -> str:
        given = ("--values=-",) if values else ()
        text = json.dumps(values) if values else ""
        release = (verb, RELEASE, f"--namespace={NAMESPACE}")
        return await self.run(*release, *arguments, *given, stdin=text, timeout_seconds=seconds)
