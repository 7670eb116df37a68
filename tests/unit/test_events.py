"""Events for people: what is written, how fast, and that nobody ever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest
from aiohttp import web

from forktree.kube.events import NOTE_BYTES, Announcer, Subject, shortened, weight
from forktree.models import EventReason, Fork, ForkNode, Uid
from unit.api_server import ScriptedServer, refuses
from unit.control_facts import fork


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer.running() as running:
        yield running


def takes(bodies: list[dict[str, object]]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response({}, status=201)

    return answer


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def written(server: ScriptedServer, announcer: Announcer, requests: int) -> None:
    """Let it write until the server has seen so many requests."""
    task = asyncio.create_task(announcer.run())
    try:
        await until(lambda: len(server.seen) >= requests)
        await until(lambda: not server.script or len(server.seen) > requests)
        await asyncio.sleep(0.02)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_an_event_names_the_object_the_speaker_and_what_happened(server: ScriptedServer) -> None:
    bodies: list[dict[str, object]] = []
    server.script.append(takes(bodies))
    async with server.client() as client:
        announcer = Announcer(client, reporter="forktree.dev/agent", instance="here")
        announcer.say(Subject.of(fork()), EventReason.FORKED, "2 started")
        await written(server, announcer, 1)
    assert server.seen[0].path == "/apis/events.k8s.io/v1/namespaces/ns/events"
    (body,) = bodies
    assert "'split." in str(body.pop("metadata"))
    assert str(body.pop("eventTime")).endswith("Z")
    assert body == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "reportingController": "forktree.dev/agent",
        "reportingInstance": "here",
        "regarding": {
            "apiVersion": "forktree.dev/v1alpha1",
            "kind": "Fork",
            "namespace": "ns",
            "name": "split",
            "uid": "fork-uid",
        },
        "reason": "Forked",
        "action": "Forked",
        "note": "2 started",
        "type": "Normal",
    }


async def test_what_has_no_namespace_is_told_of_where_kubectl_looks(server: ScriptedServer) -> None:
    bodies: list[dict[str, object]] = []
    server.script.append(takes(bodies))
    async with server.client() as client:
        announcer = Announcer(client, reporter="forktree.dev/operator", instance="op")
        announcer.say(Subject.named(ForkNode, None, "node", Uid("u")), EventReason.NODE_LOST, "gone")
        await written(server, announcer, 1)
    assert server.seen[0].path == "/apis/events.k8s.io/v1/namespaces/default/events"
    assert "namespace" not in str(bodies[0]["regarding"])


async def test_a_server_that_hangs_delays_nobody_and_what_does_not_fit_is_dropped(
    server: ScriptedServer,
) -> None:
    async with server.client(timeout_seconds=60) as client:
        announcer = Announcer(client, reporter="r", instance="i", queue_length=10)
        task = asyncio.create_task(announcer.run())
        await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        for _ in range(1000):
            announcer.say(Subject.of(fork()), EventReason.FAILED, "no")
        assert asyncio.get_running_loop().time() - began < 1
        assert announcer.dropped == 990
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_one_that_is_refused_is_dropped_and_the_next_is_written(server: ScriptedServer) -> None:
    bodies: list[dict[str, object]] = []
    server.script += [refuses(403, "Forbidden", "the namespace is being terminated"), takes(bodies)]
    async with server.client() as client:
        announcer = Announcer(client, reporter="r", instance="i")
        announcer.say(Subject.of(fork()), EventReason.PRUNED, "first")
        announcer.say(Subject.of(fork()), EventReason.PRUNED, "second")
        await written(server, announcer, 2)
    assert ([body["note"] for body in bodies], announcer.dropped) == (["second"], 1)


async def test_after_a_burst_they_come_at_an_even_pace(server: ScriptedServer) -> None:
    bodies: list[dict[str, object]] = []
    server.script += [takes(bodies)] * 8
    async with server.client() as client:
        announcer = Announcer(client, reporter="r", instance="i", writes_per_second=20, writes_at_once=4)
        for number in range(8):
            announcer.say(Subject.of(fork()), EventReason.PRUNED, str(number))
        began = asyncio.get_running_loop().time()
        await written(server, announcer, 8)
        assert asyncio.get_running_loop().time() - began >= 4 / 20
    assert [body["note"] for body in bodies] == [str(number) for number in range(8)]


async def test_many_forks_are_not_all_told_of_and_keep_no_other_news_waiting(server: ScriptedServer) -> None:
    bodies: list[dict[str, object]] = []
    server.script += [takes(bodies)] * 3
    async with server.client() as client:
        announcer = Announcer(client, reporter="r", instance="i", writes_at_once=2)
        for number in range(100):
            announcer.say(Subject.of(fork()), EventReason.FORKED, str(number))
        announcer.say(Subject.of(fork()), EventReason.FAILED, "no room")
        assert announcer.dropped == 98
        await written(server, announcer, 3)
    assert [body["note"] for body in bodies] == ["0", "1", "no room"]


def test_a_note_is_cut_where_the_api_server_would_refuse_it() -> None:
    assert shortened("short") == "short"
    cut = shortened("ü" * NOTE_BYTES)
    assert len(cut.encode()) <= NOTE_BYTES
    assert cut.endswith("ü...")


def test_every_reason_has_its_weight() -> None:
    assert {reason for reason in EventReason if weight(reason) == "Warning"} == {
        EventReason.UNSCHEDULED,
        EventReason.AT_CAPACITY,
        EventReason.FAILED,
        EventReason.REJECTED,
        EventReason.NODE_LOST,
    }
    assert Subject.of(fork()) == Subject.named(Fork, "ns", "split", Uid("fork-uid"))
