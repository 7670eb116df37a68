"""Development talks to clusters through kubectl: what works here works for whoever reads along."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from forktree_dev.parent_death import die_with_us


class KubectlFailed(Exception):
    """kubectl refused or ran out of time."""


class Kubectl:
    """kubectl for one cluster."""

    def __init__(self, program: Path, kubeconfig: Path) -> None:
        self.program = program
        self.kubeconfig = kubeconfig

    async def run(self, *arguments: str, stdin: str = "", timeout_seconds: float = 60.0) -> str:
        """Its standard output. Raises `KubectlFailed` with what it said on exit codes other than 0."""
        # A file and no pipe: uvloop fails where kubectl has ended before all was written into a pipe, if only
        # of nothing.
        with TemporaryFile() as told:
            told.write(stdin.encode())
            told.seek(0)
            process = await asyncio.create_subprocess_exec(
                *die_with_us([str(self.program), *arguments]),
                env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
                stdin=told,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        try:
            async with asyncio.timeout(timeout_seconds):
                out, err = await process.communicate()
        except TimeoutError as error:
            raise KubectlFailed(f"kubectl {shlex.join(arguments)} took over {timeout_seconds} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise KubectlFailed(f"kubectl {shlex.join(arguments)}: {err.decode(errors='replace').strip()}")
        return out.decode()

    async def json(self, *arguments: str, timeout_seconds: float = 60.0) -> Any:
        """What it printed with `-o json`, decoded."""
        return json.loads(await self.run(*arguments, "-o", "json", timeout_seconds=timeout_seconds))

    async def apply(self, manifest: object) -> None:
        """Server-side apply of one object, or of the files of a folder when given a `Path`."""
        apply = ("apply", "--server-side", "--force-conflicts", "--field-manager=forktree-dev", "-f")
        if isinstance(manifest, Path):
            await self.run(*apply, str(manifest))
        else:
            await self.run(*apply, "-", stdin=json.dumps(manifest))
