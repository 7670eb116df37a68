"""Watching: nothing is missed, gaps are told by a new list, and no failure ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from forktree.kube.client import KubeClient
from forktree.kube.watching import Changed, Deleted, Event, Listed, Pace, watch
from forktree.models import Session
from unit.api_server import Answer, ScriptedServer, bookmark, event, listing, refuses, session, streams

FAST = Pace(first_retry_seconds=0.001, longest_retry_seconds=0.01, inactivity_seconds=0.3)
PATIENT = Pace(first_retry_seconds=0.001, longest_retry_seconds=0.01, inactivity_seconds=30)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer.running() as running:
        yield running


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[KubeClient]:
    async with server.client() as connected:
        yield connected


async def take(events: AsyncGenerator[Event[Session]], count: int) -> list[str]:
    """The next `count` events in short: `listed a,b`, `changed a 3`, `deleted a 4`."""
    short: list[str] = []
    async with asyncio.timeout(10), aclosing(events):
        async for each in events:
            match each:
                case Listed(objects=objects):
                    short.append("listed " + ",".join(obj.metadata.name for obj in objects))
                case Changed(obj=obj):
                    short.append(f"changed {obj.metadata.name} {obj.metadata.resource_version}")
                case Deleted(obj=obj):
                    short.append(f"deleted {obj.metadata.name} {obj.metadata.resource_version}")
            if len(short) == count:
                return short
    raise AssertionError("a watch never ends by itself")


async def test_list_comes_first_then_every_change(server: ScriptedServer, client: KubeClient) -> None:
    server.script += [
        listing(5, session("a", 1)),
        streams(
            event("ADDED", session("b", 6)),
            event("MODIFIED", session("a", 7)),
            event("DELETED", session("b", 8)),
        ),
    ]
    events = watch(client, Session, namespace="default", field_selector="spec.nodeName=n1", pace=PATIENT)
    assert await take(events, 4) == ["listed a", "changed b 6", "changed a 7", "deleted b 8"]
    for request in server.seen:
        assert request.path == "/apis/forktree.dev/v1alpha1/namespaces/default/sessions"
        assert request.query["fieldSelector"] == "spec.nodeName=n1"
    assert server.seen[1].query["resourceVersion"] == "5"
    assert server.seen[1].query["allowWatchBookmarks"] == "true"


async def test_dropped_connection_goes_on_where_it_was_without_a_list(
    server: ScriptedServer, client: KubeClient
) -> None:
    half = b'{"type":"MODIFIED","object":{"metadata":{"na'
    server.script += [
        listing(5),
        streams(event("ADDED", session("a", 6)), then="break", cut=half),
        streams(event("MODIFIED", session("a", 7))),
    ]
    assert await take(watch(client, Session, pace=PATIENT), 3) == ["listed ", "changed a 6", "changed a 7"]
    assert server.seen[2].query["resourceVersion"] == "6"


async def test_bookmark_moves_the_place_from_which_it_goes_on(
    server: ScriptedServer, client: KubeClient
) -> None:
    server.script += [
        listing(5),
        streams(bookmark(40), then="end"),
        streams(event("ADDED", session("a", 41))),
    ]
    assert await take(watch(client, Session, pace=PATIENT), 2) == ["listed ", "changed a 41"]
    assert server.seen[2].query["resourceVersion"] == "40"


@pytest.mark.parametrize(
    "forgotten",
    [
        refuses(410, "Expired", "too old resource version"),
        streams(event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}), then="end"),
    ],
    ids=["as the answer", "as an event"],
)
async def test_forgotten_place_gives_a_new_list(
    server: ScriptedServer, client: KubeClient, forgotten: Answer
) -> None:
    server.script += [
        listing(5, session("a", 1), session("b", 2)),
        forgotten,
        listing(90, session("b", 2)),
        streams(event("ADDED", session("c", 91))),
    ]
    assert await take(watch(client, Session, pace=PATIENT), 3) == ["listed a,b", "listed b", "changed c 91"]
    assert server.seen[3].query["resourceVersion"] == "90"


async def test_silence_is_taken_for_a_dead_connection(server: ScriptedServer, client: KubeClient) -> None:
    server.script += [listing(5), streams(), streams(event("ADDED", session("a", 6)))]
    assert await take(watch(client, Session, pace=FAST), 2) == ["listed ", "changed a 6"]


async def test_server_that_is_away_or_refuses_is_asked_again(
    server: ScriptedServer, client: KubeClient
) -> None:
    server.script += [
        refuses(503),
        refuses(403, "Forbidden"),
        refuses(404, "NotFound"),
        listing(5),
        refuses(500),
        streams(event("ERROR", {"kind": "Status", "code": 500}), then="end"),
        streams(then="end"),
        streams(event("ADDED", session("a", 6))),
    ]
    assert await take(watch(client, Session, pace=PATIENT), 2) == ["listed ", "changed a 6"]


async def test_object_that_cannot_be_read_is_counted_and_hides_no_other(
    server: ScriptedServer, client: KubeClient, caplog: pytest.LogCaptureFixture
) -> None:
    odd: dict[str, object] = {**session("odd", 3), "spec": dict[str, object]()}
    server.script += [
        listing(5, odd, session("a", 1)),
        streams(event("MODIFIED", odd), event("MODIFIED", session("a", 6))),
    ]
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(10), aclosing(watch(client, Session, pace=PATIENT)) as events:
            listed = await anext(events)
            changed = await anext(events)
    assert isinstance(listed, Listed)
    assert ([obj.metadata.name for obj in listed.objects], listed.unreadable) == (["a"], 1)
    assert isinstance(changed, Changed)
    assert changed.obj.metadata.resource_version == "6"
    assert "default/odd" in caplog.text


async def test_event_that_arrives_in_pieces_is_one_event(server: ScriptedServer, client: KubeClient) -> None:
    large = session("a", 6, message="x" * 1_000_000)
    server.script += [listing(5), streams(event("ADDED", large), event("DELETED", session("a", 7)))]
    assert await take(watch(client, Session, pace=PATIENT), 3) == ["listed ", "changed a 6", "deleted a 7"]


async def test_waiting_watch_can_be_cancelled(server: ScriptedServer, client: KubeClient) -> None:
    server.script += [listing(5), streams()]
    events = watch(client, Session, pace=PATIENT)
    await anext(events)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(events)
    with pytest.raises(StopAsyncIteration):
        await anext(events)
