"""What the async and the sync client do differently, written by hand in both ways.

All else is written once, in `_async`; `python -m forktree_dev.sync_client` makes `_sync` of it, where
`async_wait` becomes `wait`, `AsyncLock` becomes `Lock` and so on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

AsyncLock = asyncio.Lock
Lock = threading.Lock


async def async_wait(seconds: float) -> None:
    await asyncio.sleep(seconds)


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)


async def async_blocking(work: Callable[[], T]) -> T:
    """What `work` returns, which may block for some milliseconds."""
    return await asyncio.to_thread(work)


def blocking(work: Callable[[], T]) -> T:
    return work()


@asynccontextmanager
async def async_within(seconds: float) -> AsyncGenerator[None]:
    """Raises `TimeoutError` in the block when it has taken so long."""
    async with asyncio.timeout(seconds):
        yield


@contextmanager
def within(seconds: float) -> Generator[None]:
    """Nothing can interrupt a thread: each of its reads and writes has this long, and who reads in a loop
    looks at the clock between two."""
    del seconds
    yield


async def async_each(calls: Sequence[Callable[[], Awaitable[T]]], *, at_once: int) -> list[T]:
    """All results in order, so many at once. After the first failure none is begun any more, and it is raised
    when those under way have ended."""
    gate = asyncio.Semaphore(at_once)
    results: dict[int, T] = {}
    failures: list[Exception] = []

    async def one(index: int) -> None:
        async with gate:
            if not failures:
                try:
                    results[index] = await calls[index]()
                except Exception as err:
                    failures.append(err)

    async with asyncio.TaskGroup() as tasks:
        for index in range(len(calls)):
            tasks.create_task(one(index))
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(calls))]


def each(calls: Sequence[Callable[[], T]], *, at_once: int) -> list[T]:
    """As `async_each`, in threads."""
    results: dict[int, T] = {}
    failures: list[Exception] = []

    def one(index: int) -> None:
        if not failures:
            try:
                results[index] = calls[index]()
            except Exception as err:
                failures.append(err)

    if len(calls) == 1:  # A thread costs more than it brings.
        return [calls[0]()]
    with ThreadPoolExecutor(max(1, min(at_once, len(calls))), "forktree") as threads:
        for index in range(len(calls)):
            threads.submit(copy_context().run, one, index)  # With the span that the caller is in.
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(calls))]


@asynccontextmanager
async def async_repeating(call: Callable[[], Awaitable[None]], every_seconds: float) -> AsyncGenerator[None]:
    """`call` again and again while the block runs. What it raises ends it and is raised at the block's
    end."""

    async def again() -> None:
        while True:
            await asyncio.sleep(every_seconds)
            await call()

    task = asyncio.create_task(again(), name="forktree-repeating")
    try:
        yield
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(ended, Exception):
        raise ended


@contextmanager
def repeating(call: Callable[[], None], every_seconds: float) -> Generator[None]:
    """As `async_repeating`, in a thread."""
    over = threading.Event()
    failures: list[Exception] = []

    def again() -> None:
        while not over.wait(every_seconds):
            try:
                call()
            except Exception as err:
                failures.append(err)
                return

    thread = threading.Thread(target=again, name="forktree-repeating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]
