"""Spans on their way to a collector, by OTLP over HTTP, while a program runs.

A collector that is slow, down or wrong costs the program nothing but a line in its log now and then: spans
wait in a bounded queue, another thread sends them, and what does not fit is lost.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from forktree.errors import ForktreeError
from forktree.models.reasons import Reason
from forktree.tracing.spans import Attribute, Tracer

if TYPE_CHECKING:
    from forktree.tracing.otlp import Sender

FLUSH_SECONDS: Final = 3.0
"""For what is still in the queue when the program ends. Well below what a pod is given to stop."""


class CannotTrace(ForktreeError):
    """Traces are asked for, and this installation cannot send any."""

    reason = Reason.INVALID


def collector_url(text: str) -> str:
    """A collector's address as the command line takes it. Raises `ValueError` with a sentence."""
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
        parts = urlsplit("")
    if not is_url or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("a collector's address looks like http://HOST:4318")
    return text.rstrip("/")


@asynccontextmanager
async def exporting(
    collector: str | None, service: str, *, version: str, about: Mapping[Attribute, str] | None = None
) -> AsyncGenerator[Tracer | None]:
    """What takes the spans of `service` inside the block; None where no collector is named, and then nothing
    is imported.

    `collector`: as `collector_url` gives it. `about`: what is so of all spans of this program. Leaving it
    sends what is left, for some seconds at most. Raises `CannotTrace`.
    """
    if collector is None:
        yield None
        return
    # Half a second of reading modules, before anything runs that would wait for it.
    sender = _sender(collector, service, version=version, about=about or {})
    try:
        yield Tracer(sender.take)
    finally:
        await _ended(sender)


def _sender(collector: str, service: str, *, version: str, about: Mapping[Attribute, str]) -> Sender:
    try:
        from forktree.tracing.otlp import Sender  # noqa: PLC0415  # Only where it is asked for.
    except ModuleNotFoundError as err:
        sentence = f"--otlp-endpoint needs the packages of `forktree[tracing]`: {err}"
        raise CannotTrace(sentence) from err
    return Sender(collector, service, version=version, about=about)


async def _ended(sender: Sender) -> None:
    """Send what is left, in a thread that nobody waits for at the end of the process."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        sender.close()
        if not loop.is_closed():
            loop.call_soon_threadsafe(over.set)

    threading.Thread(target=end, name="spans-flush", daemon=True).start()
    try:
        async with asyncio.timeout(FLUSH_SECONDS):
            await over.wait()
    except TimeoutError:
        sender.give_up()
