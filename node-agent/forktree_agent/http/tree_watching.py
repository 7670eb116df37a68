"""A tree as it grows: what there is, then every change, until nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from forktree.kube.client import KubeClient
from forktree.kube.watching import Changed, Deleted, Event, Listed, watch
from forktree.models import Fork, Session, Uid
from forktree.models.names import ROOT_LABEL
from forktree.wire import Answer
from forktree.wire_trees import ForkSeen, Gone, SessionSeen, Synced
from forktree_agent.commons import Commons
from forktree_agent.http.describing import Names, describe
from forktree_agent.http.describing_forks import describe_fork, parent_among
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.trees import with_parent

WATCHED_AT_ONCE = 64
"""Trees that are watched by callers of one agent. Each costs three watches at the API server."""

WAITING = 256
"""Events that wait for a slow reader; then the API server's stream waits."""

_Event = Event[Session] | Event[Fork]
_Stream = AsyncGenerator[Event[Session]] | AsyncGenerator[Event[Fork]]


class Watchers:
    """How many watch, of all namespaces. One has at most as many as are left for others."""

    def __init__(self) -> None:
        self._places = Commons(WATCHED_AT_ONCE)

    @contextmanager
    def one_more(self, namespace: str) -> Generator[None]:
        """Raises `Refusal` where there are too many."""
        if not self._places.take(1, {namespace: 1.0}):
            all_of_them, its = self._places.held, self._places.held_by(namespace)
            sentence = (
                f"{all_of_them} trees are watched here already, {its} of them in namespace {namespace}, and"
                " others must get their turn; ask again later"
            )
            raise Refusal(Code.OVERLOADED, sentence)
        try:
            yield
        finally:
            self._places.give_back(1, [namespace])


@dataclass
class _View:
    """What a reader was told of."""

    root: Session
    sessions: dict[Uid, Session] = field(default_factory=dict[Uid, Session])
    forks: dict[Uid, Fork] = field(default_factory=dict[Uid, Fork])
    named: dict[str, Fork] = field(default_factory=dict[str, Fork])
    unlisted: set[str] = field(default_factory=lambda: {"root", "sessions", "forks"})

    def names(self, session: Session) -> Names:
        reference = self.root.spec.template_ref
        parent = self.sessions.get(session.status.parent or Uid(""))
        names = Names(
            template="" if reference is None else reference.name,
            parent=None if parent is None else parent.metadata.name,
            root=self.root.metadata.name,
        )
        return with_parent(session, names, self.named)

    def changed(self, item: Session | Fork, now: datetime) -> Answer:
        if isinstance(item, Session):
            self.sessions[item.metadata.uid] = item
            return SessionSeen(session=describe(item, now, self.names(item)))
        self.forks[item.metadata.uid] = self.named[item.metadata.name] = item
        return ForkSeen(fork=describe_fork(item, now, parent=parent_among(item, self.named)))

    def gone(self, item: Session | Fork) -> Answer | None:
        known: dict[Uid, Session] | dict[Uid, Fork]
        known = self.sessions if isinstance(item, Session) else self.forks
        if known.pop(item.metadata.uid, None) is None:
            return None
        if isinstance(item, Fork):
            self.named.pop(item.metadata.name, None)
        return Gone(kind="session" if isinstance(item, Session) else "fork", id=item.metadata.name)


async def follow(client: KubeClient, root: Session, say: Callable[[Answer], Awaitable[None]]) -> None:
    """Say what the tree of `root` has, those above before those below, and what changes.

    Returns when nothing of it is left.
    """
    events: asyncio.Queue[tuple[str, _Event]] = asyncio.Queue(WAITING)
    view = _View(root)
    metadata, selector = root.metadata, f"{ROOT_LABEL}={root.metadata.uid}"
    name = f"metadata.name={metadata.name}"
    streams: dict[str, _Stream] = {
        "root": watch(client, Session, namespace=metadata.namespace, field_selector=name),
        "sessions": watch(client, Session, namespace=metadata.namespace, label_selector=selector),
        "forks": watch(client, Fork, namespace=metadata.namespace, label_selector=selector),
    }
    gone: ConnectionError | None = None
    async with asyncio.TaskGroup() as tasks:
        following = [
            tasks.create_task(_follow(name, stream, events), name=f"follow-tree-{name}")
            for name, stream in streams.items()
        ]
        try:
            await _tell(events, view, say)
        except ConnectionError as err:
            gone = err  # By itself, and not as one of a group.
        finally:
            for task in following:
                task.cancel()
    if gone is not None:
        raise gone


async def _follow(
    name: str,
    stream: _Stream,
    events: asyncio.Queue[tuple[str, _Event]],
) -> None:
    async with aclosing(stream) as seen:
        async for event in seen:
            await events.put((name, event))


async def _tell(
    events: asyncio.Queue[tuple[str, _Event]], view: _View, say: Callable[[Answer], Awaitable[None]]
) -> None:
    first: dict[Uid, Session | Fork] = {}
    while view.unlisted:  # Nothing is told before all is known: those above come first.
        name, event = await events.get()
        match event:
            case Listed(objects=objects):
                first |= {each.metadata.uid: each for each in objects if _of(view.root, name, each)}
                view.unlisted.discard(name)
            case Changed(obj=item):
                first |= {item.metadata.uid: item} if _of(view.root, name, item) else {}
            case Deleted(obj=item):
                first.pop(item.metadata.uid, None)
    for item in sorted(first.values(), key=_order):
        await say(view.changed(item, datetime.now(UTC)))
    await say(Synced())
    while view.sessions or view.forks:
        name, event = await events.get()
        match event:
            case Listed(objects=objects):
                for line in _relisted(view, name, [each for each in objects if _of(view.root, name, each)]):
                    await say(line)
            case Changed(obj=item):
                if _of(view.root, name, item):
                    await say(view.changed(item, datetime.now(UTC)))
            case Deleted(obj=item):
                if (gone := view.gone(item)) is not None:
                    await say(gone)


def _relisted(view: _View, name: str, objects: list[Session | Fork]) -> list[Answer]:
    """After a gap in a watch: what went meanwhile, and what is there."""
    there = {each.metadata.uid for each in objects}
    known: list[Session | Fork]
    match name:
        case "root":
            known = [each for uid, each in view.sessions.items() if uid == view.root.metadata.uid]
        case "sessions":
            known = [each for uid, each in view.sessions.items() if uid != view.root.metadata.uid]
        case _:
            known = list(view.forks.values())
    gone = [view.gone(each) for each in known if each.metadata.uid not in there]
    return [
        *(line for line in gone if line is not None),
        *(view.changed(each, datetime.now(UTC)) for each in objects),
    ]


def _of(root: Session, name: str, item: Session | Fork) -> bool:
    """Whether it is of this tree: another session may have the root's name by now."""
    return name != "root" or item.metadata.uid == root.metadata.uid


def _order(item: Session | Fork) -> tuple[int, bool, str]:
    """A fork before its children, whose depth it has too; a session before its forks."""
    return (item.status.depth or 0, isinstance(item, Session), item.metadata.name)
