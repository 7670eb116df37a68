"""What the parts of control share: everything known about this node, and the doors to change it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from forktree.kube.client import KubeClient
from forktree.kube.events import Announcer
from forktree.models import Fork, ForkStatus, Session, SessionPhase, SessionStatus, Uid
from forktree_agent.control.activity import Activity
from forktree_agent.control.branch_logs import BranchLogs
from forktree_agent.control.living import Living
from forktree_agent.control.newborns import Newborns
from forktree_agent.control.objects import Store
from forktree_agent.control.records import Records
from forktree_agent.control.status_writer import Outdated, StatusWriter
from forktree_agent.control.traces import Traces
from forktree_agent.control.tree import Node, Place, Tree, owner_place
from forktree_agent.control.waiting import SourceName, Waiting
from forktree_agent.control.workers import Workers
from forktree_agent.engine.contract import Engine, Machine, Owner, Point
from forktree_agent.metrics import Metrics
from forktree_agent.settings import Settings

COLLECTORS_FINALIZERS = frozenset({"foregroundDeletion", "orphan"})
"""The garbage collector's own: it takes them away when it is done with what hangs below."""


@dataclass(kw_only=True)
class World:
    """One agent's view of its node. Everything in it lives on one event loop."""

    settings: Settings
    client: KubeClient
    engine: Engine
    records: Records
    writer: StatusWriter
    announcer: Announcer
    metrics: Metrics
    traces: Traces
    living: Living
    activity: Activity
    session_work: Workers
    fork_work: Workers
    prune_work: Workers
    branch_work: Workers
    early_work: Workers
    logs: BranchLogs
    sessions: Store[Session]
    forks: Store[Fork] = field(default_factory=Store[Fork])
    tree: Tree = field(default_factory=Tree)
    waiting: Waiting = field(default_factory=Waiting)
    newborns: Newborns = field(default_factory=Newborns)
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    """Every kind was listed once: absence from the stores means something from here on."""
    sweep_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    use_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Machines came or went, and the node's reserved memory with them."""

    @property
    def node(self) -> str:
        return self.settings.node_name

    def machine(self, owner: Owner) -> Machine | None:
        return self.engine.machine_of(owner)

    def point(self, owner: Owner) -> Point | None:
        return self.engine.point_of(owner)

    def room_changed(self) -> None:
        """Something ended: those who wait for room ask again, and the report of use is outdated."""
        self.use_changed.set()
        for uid in self.waiting.on_room():
            self.poke(uid)

    def poke(self, uid: Uid) -> None:
        """Have the object looked at, whichever kind it is."""
        if self.sessions.get(uid) is not None:
            self.session_work.poke(uid)
        if self.forks.get(uid) is not None:
            self.fork_work.poke(uid)

    def above(self, item: Session | Fork) -> Place | None:
        """What `item` hangs below. A Fork under way hangs below its source before its object says so."""
        told = owner_place(item)
        if told is not None or isinstance(item, Session):
            return told
        record = self.records.fork(item.metadata.uid)
        if record is None or item.status.parent_uid is not None:
            return None  # With a parent but without an owner it was orphaned on purpose: never taken back.
        return Place(
            kind=Session if record.above_kind == "Session" else Fork,
            namespace=record.namespace,
            name=record.above_name,
            uid=record.above,
        )

    def held(self, node: Node) -> bool:
        """Whether somebody's finalizer keeps a deleted object there: this one, or one that it hangs below."""
        looked: set[Uid] = set()  # Owners given by hand can form a ring.
        below: Node | None = node
        while below is not None and below.place.uid not in looked:
            uid = below.place.uid
            looked.add(uid)
            item = self.sessions.get(uid) or self.forks.get(uid)
            if (
                item is not None
                and item.metadata.deleting
                and not COLLECTORS_FINALIZERS.issuperset(item.metadata.finalizers)
            ):
                return True
            below = None if below.above is None else self.tree.get(below.above)
        return False

    def observed(self, item: Session | Fork) -> None:
        """Take in a version of an object from wherever it came, and have what it concerns looked at."""
        if isinstance(item, Fork):
            if not self.forks.observe(item):
                return
        else:
            old = self.sessions.get(item.metadata.uid)
            if not self.sessions.observe(item):
                return
            if item.spec.fork_ref is not None and _shown(old) != _shown(item):
                self.fork_work.poke(Uid(item.spec.fork_ref.uid))  # It counts its children, and their scores.
        self.poke(item.metadata.uid)
        name = SourceName(item.kind, item.metadata.namespace or "", item.metadata.name)
        for uid in self.waiting.on_source(name):
            self.fork_work.poke(uid)

    async def write_session(self, session: Session, status: SessionStatus) -> Session:
        """Write a status and take in what the object then is. Raises as `StatusWriter.write` does."""
        if status == session.status:
            return session
        try:
            written = await self.writer.write(session, status)
        except Outdated:
            self.observed(await self.writer.newest(session))
            raise
        if written is not session:  # Taking in what is known already would only ask for this very step again.
            self.observed(written)
        return written

    async def write_fork(self, fork: Fork, status: ForkStatus) -> Fork:
        """Write a status and take in what the object then is. Raises as `StatusWriter.write` does."""
        if status == fork.status:
            return fork
        try:
            written = await self.writer.write(fork, status)
        except Outdated:
            self.observed(await self.writer.newest(fork))
            raise
        if written is not fork:  # Taking in what is known already would only ask for this very step again.
            self.observed(written)
        return written


def _shown(child: Session | None) -> tuple[SessionPhase, float | None]:
    """What a Fork says of its children from their own objects. One that is new to us is on its way to run."""
    if child is None:
        return SessionPhase.RUNNING, None
    phase = child.status.phase
    started = phase in {SessionPhase.PENDING, SessionPhase.STARTING}
    return SessionPhase.RUNNING if started else phase, child.spec.score


def loop_now() -> float:
    """Seconds of the loop's clock: for deadlines."""
    return asyncio.get_running_loop().time()


def boot_now() -> float:
    """Seconds of a clock that all processes of one boot share: for times that are journalled."""
    return time.monotonic()


def wall_now() -> datetime:
    """For people."""
    return datetime.now(UTC)
