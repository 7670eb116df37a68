"""Starts the jailed process that unpacks one image, speaks to it, and ends it whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from forktree_agent.images.errors import ImageInvalid, UnpackingBroken, cleaned

_LINE_BYTES = 64 << 10
_MODULE = "forktree_agent.images.unpacking"
_KEPT_VARIABLES = ("PYTHONPATH",)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackLimits:
    """What unpacking one image may take."""

    uid: int
    """Of the process, and nobody else's on the node."""
    unpacked_bytes: int
    """What all its layers may come to, and the file that is made of them."""
    entries: int = 500_000
    """Files, folders and links, those that later layers hide among them."""
    memory_bytes: int = 1 << 30
    """Address space. 500 000 entries take half of it."""
    cpu_seconds: int = 900


class _Answer(msgspec.Struct, frozen=True):
    bytes: int | None = None
    written: bool = False
    refused: str = ""
    broken: str = ""


async def unpack(
    layers: Sequence[int],
    out: int,
    *,
    working_folder: str,
    limits: UnpackLimits,
    make_room: Callable[[int], Awaitable[None]],
    deadline: float,
) -> int:
    """Make a root file system of the archives in `layers`, lowest first, in the empty file `out`.

    All are descriptors, which stay the caller's. `make_room` is told how large it will be before it is
    written. Returns that. Raises `ImageInvalid`, `UnpackingBroken`, `TimeoutError`, and what `make_room`
    does; no process is left in any case.
    """
    orders = {
        "parent": os.getpid(),
        "layers": list(layers),
        "out": out,
        "working_folder": working_folder,
        "uid": limits.uid,
        "unpacked_bytes": limits.unpacked_bytes,
        "entries": limits.entries,
        "memory_bytes": limits.memory_bytes,
        "cpu_seconds": limits.cpu_seconds,
    }
    async with asyncio.timeout_at(deadline), _running([*layers, out]) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        size = (await _answer(process)).bytes
        if size is None or not 0 < size <= limits.unpacked_bytes:
            raise ImageInvalid(
                f"the image unpacks to more than the {limits.unpacked_bytes} bytes it may have"
            )
        await make_room(size)
        process.stdin.write(b"go\n")
        if not (await _answer(process)).written:
            raise UnpackingBroken("unpacking answered out of turn")
    return size


@asynccontextmanager
async def _running(descriptors: Sequence[int]) -> AsyncGenerator[asyncio.subprocess.Process]:
    env = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", _MODULE,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            pass_fds=tuple(descriptors), env=env, cwd="/", limit=_LINE_BYTES,
        )  # fmt: skip
    except OSError as err:
        raise UnpackingBroken(f"the process for unpacking cannot be started: {err}") from err
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.shield(process.wait())  # SIGKILL takes no time worth a deadline.


async def _answer(process: asyncio.subprocess.Process) -> _Answer:
    """What it says next. Whatever took it over could say anything."""
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        answer = msgspec.json.decode(line, type=_Answer) if line else None
    except (msgspec.MsgspecError, ValueError) as err:
        raise UnpackingBroken("unpacking says what it cannot say") from err
    if answer is None:
        raise ImageInvalid(f"the image cannot be unpacked: {_ended(await process.wait())}")
    if answer.broken:
        raise UnpackingBroken(cleaned(answer.broken))
    if answer.refused:
        raise ImageInvalid(cleaned(answer.refused))
    return answer


def _ended(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "it took more processor time than it may"
    if code < 0:
        return f"the process that read it was killed by signal {-code}"
    return f"the process that read it ended with exit code {code}"
