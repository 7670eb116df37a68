"""What a guest may say over its channel: no matter what, nothing breaks, and all that is kept has its bound.

The first byte says whether the others are what the guest sends, or decide which frames it makes of them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import Iterator

from forktree_agent.engine.contract import Command, EngineError, ExecChunk
from forktree_agent.engine.microvm.guest import GuestChannel, Identity
from forktree_agent.engine.microvm.kept_execs import MAX_ENDED, MAX_RUNNING
from forktree_agent.engine.microvm.kept_output import STREAM_BYTES, Allowance
from fuzz.dealt import Dealt

GENERATION = "6f1c2d3e-4a5b-4c6d-8e7f-901a2b3c4d5e"
NODE_BYTES = 1 << 20
OUTPUT_LIMIT_BYTES = 1000
SENT_BYTES = 128 << 10
"""What a socket takes at once."""

_IDENTITY = Identity(generation=GENERATION, hostname="h", unix_ns=1, entropy=bytes(32), env={})
_NAMES = ("plain", "kept", "read", "born", "other", "", "x" * 128, "x" * 129)
_GENERATIONS = (GENERATION, "11111111-2222-4333-8444-555555555555", "")
_NUMBERS = (0, 1, -1, 65536, (1 << 62) - 1, 1 << 62, 1 << 70, 3.5, None, "7", True)
_STREAMS = ("stdout", "stderr", "stdin")
_LENGTHS = (0, 1, 100, 5000, 48 << 10)
_KINDS = (
    "output",
    "exit",
    "begun",
    "stdin_taken",
    "replayed",
    "running",
    "exec_failed",
    "identified",
    "identity_failed",
    "booted",
    "started",
    "start_failed",
    "workload_exit",
    "pong",
    "http_status",
    "reboot",
)


def frame(dealt: Dealt) -> dict[str, object]:
    """One that looks like those of our init, and lies."""
    kind = dealt.one_of(_KINDS)
    made: dict[str, object] = {
        "type": kind,
        "generation": dealt.one_of(_GENERATIONS),
        "id": dealt.one_of(_NAMES),
    }
    match kind:
        case "output":
            data = bytes([dealt.byte()]) * dealt.one_of(_LENGTHS)
            made |= {"stream": dealt.one_of(_STREAMS), "data": base64.b64encode(data).decode()}
            made |= {"offset": dealt.byte() * dealt.byte() if dealt.byte() % 2 else dealt.one_of(_NUMBERS)}
        case "exit":
            code = dealt.one_of((0, -1, 255, 256, None))
            made |= {"code": code, "timed_out": bool(dealt.byte() % 2), "signal": None, "truncated": False}
        case "stdin_taken":
            made |= {"bytes": dealt.one_of(_NUMBERS), "open": bool(dealt.byte() % 2)}
        case "replayed":
            made |= {"stdin_bytes": dealt.one_of(_NUMBERS), "stdin_open": bool(dealt.byte() % 2)}
        case "running":
            made |= {
                "ids": [f"n{number}" for number in range(dealt.byte())] + list(_NAMES[: dealt.byte() % 7])
            }
        case "exec_failed" | "identity_failed" | "start_failed":
            made |= {"code": dealt.one_of(("internal", "too_many", "wrong_generation", "odd"))}
            made |= {"message": "m" * dealt.one_of(_LENGTHS)}
        case _:
            made |= {
                "protocol": dealt.one_of(_NUMBERS),
                "pid": dealt.one_of(_NUMBERS),
                "nonce": dealt.one_of(_NAMES),
            }
            made |= {"status": dealt.one_of(_NUMBERS), "message": None, "code": dealt.one_of(_NUMBERS)}
    if dealt.byte() % 8 == 0:
        made.pop(dealt.one_of(sorted(made)))
    return made


def frames(dealt: Dealt) -> Iterator[bytes]:
    while dealt:
        line = json.dumps(frame(dealt)).encode() + b"\n"
        yield line[: len(line) - dealt.one_of((0, 0, 0, 0, 0, 0, 1, 20))]


def sent_by(data: bytes) -> bytes:
    """What the guest sends."""
    dealt = Dealt(data)
    return (dealt.rest() if dealt.byte() % 2 else b"".join(frames(dealt)))[:SENT_BYTES]


def one_input(data: bytes) -> None:
    """Raises where anything is not as it should be."""
    asyncio.run(_speak(sent_by(data)))


async def _speak(sent: bytes) -> None:
    loop, broken = asyncio.get_running_loop(), list[dict[str, object]]()
    loop.set_exception_handler(lambda _, context: broken.append(context))
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    node = Allowance(NODE_BYTES)
    channel = GuestChannel(ours, "m1", node)
    async with channel.running():
        channel.queue_identity(_IDENTITY)
        asked = _ask(channel)
        await asyncio.sleep(0)  # Each asks.
        theirs.send(sent[: SENT_BYTES // 2])
        await _read(channel, theirs)
        theirs.send(sent[SENT_BYTES // 2 :] or b"\n")
        await _read(channel, theirs)
        _check(channel)
        for task in asked:
            task.cancel()
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            expected = outcome is None or isinstance(outcome, EngineError | asyncio.CancelledError)
            assert expected, f"not an error that callers know: {outcome!r}"
        _check(channel)
    theirs.close()
    assert node.claim(2 * NODE_BYTES) == NODE_BYTES, "what was kept was not given back, or more than that"
    assert not broken, broken


def _ask(channel: GuestChannel) -> list[asyncio.Task[None]]:
    """All that can wait for a guest at once."""
    deadline = asyncio.get_running_loop().time() + 60

    async def plain() -> None:
        command = Command(argv=("x",), id="plain", output_limit_bytes=OUTPUT_LIMIT_BYTES)
        result = await channel.exec(command, GENERATION, deadline=deadline)
        assert len(result.stdout) + len(result.stderr) <= OUTPUT_LIMIT_BYTES

    async def kept() -> None:
        command = Command(argv=("x",), id="kept", stdin_open=True)
        await channel.kept.begin(command, "kept", GENERATION, deadline=deadline)
        await channel.kept.write("kept", bytes(1 << 20), end=True, deadline=deadline)

    async def read() -> None:
        command = Command(argv=("x",), id="read")
        async with channel.kept.streaming(command, "read", GENERATION, deadline=deadline) as reader:
            while isinstance(await reader.next(deadline=deadline), ExecChunk):
                pass

    async def born() -> None:
        await channel.identified(GENERATION, deadline=deadline)
        async with channel.kept.reading(
            "born", stdout_offset=0, stderr_offset=9, deadline=deadline
        ) as reader:
            await reader.next(deadline=deadline)

    async def booted() -> None:
        await channel.wait_booted(deadline=deadline)
        await channel.start_workload((), {}, deadline=deadline)

    return [asyncio.create_task(each()) for each in (plain, kept, read, born, booted)]


async def _read(channel: GuestChannel, theirs: socket.socket) -> None:
    """Until the channel has read all, and everybody has had a turn: a probe of the guest's own."""
    probe = json.dumps({"type": "pong", "nonce": "probe"}).encode()
    lines = -1
    theirs.send(b"\n" + probe + b"\n")
    while lines != channel.lines_read:  # It rests now and then, for milliseconds.
        lines = channel.lines_read
        await asyncio.sleep(0)
        while channel.is_resting:  # noqa: ASYNC110  # For milliseconds.
            await asyncio.sleep(0)
        await asyncio.sleep(0)


def _check(channel: GuestChannel) -> None:
    kept = list(channel.kept.all())
    assert len(kept) <= MAX_RUNNING + MAX_ENDED
    assert sum(each.kept_bytes for each in kept) <= NODE_BYTES
    for each in kept:
        assert all(len(stream) <= STREAM_BYTES for stream in each.streams.values())
        assert len(each.id) <= 128
        each.state()
    assert channel.unsent_bytes <= 4 << 20
    assert len(channel.execs()) == len({state.id for state in channel.execs()})
