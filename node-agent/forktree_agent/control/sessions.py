"""One session, one step: carries out what `decide_session` says."""

from __future__ import annotations

import logging

import msgspec

from forktree.models import Level, Mode, Reason, Session, SessionPhase, SessionTemplate, Uid
from forktree_agent.control.bakes import Bakes, TemplateNotFound
from forktree_agent.control.children import bound
from forktree_agent.control.decide_session import (
    Bind,
    EndMachine,
    Look,
    Nothing,
    ShowFailed,
    ShowRunning,
    Start,
    View,
    decide,
)
from forktree_agent.control.defects import Defects
from forktree_agent.control.identity import root_order
from forktree_agent.control.owners import owner_of
from forktree_agent.control.records import Limits, Lineage, SessionRecord
from forktree_agent.control.records import Start as Started
from forktree_agent.control.status_writer import Vanished
from forktree_agent.control.statuses import session_fails, session_runs, session_waits
from forktree_agent.control.world import World, boot_now, loop_now, wall_now
from forktree_agent.engine.contract import (
    AtCapacity,
    Baseline,
    EngineError,
    ForkResult,
    Machine,
    PointLost,
    TreeId,
    TreeLimits,
)

log = logging.getLogger(__name__)

ROOM_RETRY_SECONDS = 5.0
"""Room is told of when something of ours ends; this is for what ends without us."""
BAKES_PER_START = 3
"""A baseline can be dropped between being baked and being used; more often than this it is a defect."""


class Sessions:
    """Brings sessions to what they should be. `round` is one worker's step."""

    def __init__(self, world: World, bakes: Bakes) -> None:
        self._world = world
        self._bakes = bakes
        self._defects = Defects()
        self._verdicts: dict[Uid, tuple[Reason, str]] = {}
        """Failures that are not written yet: no bake is repeated because the API server is away."""

    async def round(self, uid: Uid) -> float | None:
        """One step for one session; see `Workers`."""
        await self._world.synced.wait()
        session = self._world.sessions.get(uid)
        if session is None or session.metadata.deleting:
            self._world.waiting.over(uid)
            self._verdicts.pop(uid, None)
            self._defects.over(uid)
            return None
        try:
            if uid in self._verdicts:
                await self._pronounce(session)
                return 0.0
            return await self._step(session)
        except Vanished as err:
            log.info("session_not_there uid=%s error=%r", uid, err.message)
            self._world.sweep_wanted.set()
            return None

    async def _step(self, session: Session) -> float | None:
        action = decide(self._view(session))
        match action:
            case Nothing():
                return None
            case Look(seconds=seconds):
                return seconds
            case Bind():
                self._bind(session)
                return 0.0
            case Start():
                return await self._start(session)
            case ShowRunning():
                await self._show_running(session)
                return None
            case ShowFailed(reason=reason, message=message):
                return await self._fail(session, reason, message)
            case EndMachine():
                machine = self._world.machine(owner_of(session))
                if machine is not None:
                    log.info("ending_machine uid=%s phase=%s", session.metadata.uid, session.status.phase)
                    await self._world.engine.release(machine.id)
                    self._world.room_changed()
                return None

    def _view(self, session: Session) -> View:
        owner = owner_of(session)
        node = self._world.tree.get(session.metadata.uid)
        reference = session.spec.fork_ref
        return View(
            session=session,
            machine=self._world.machine(owner),
            record=self._world.records.session(owner),
            fork=None if reference is None else self._world.records.fork(Uid(reference.uid)),
            doomed_seconds=None
            if node is None or node.doomed_at is None
            else max(0.0, loop_now() - node.doomed_at),
        )

    def _bind(self, session: Session) -> None:
        """A child's object is there: from here on the machine goes when the object does."""
        reference = session.spec.fork_ref
        assert reference is not None
        fork = self._world.records.fork(Uid(reference.uid))
        assert fork is not None
        self._world.records.put_session(bound(session, fork, reference.index))

    async def _start(self, session: Session) -> float | None:
        """Give a root its machine, or say why not."""
        owner = owner_of(session)
        uid = session.metadata.uid
        try:
            template = await self._bakes.template_of(session)
        except TemplateNotFound as err:
            return await self._fail(session, err.reason, err.message)
        record = self._world.records.session(owner) or _begun(session, template)
        self._world.records.put_session(record)
        machine = self._world.machine(owner)
        if machine is None:
            try:
                baseline, result = await self._branch(session, template, record)
            except AtCapacity as err:
                return await self._no_room(session, err)
            except (EngineError, TemplateNotFound) as err:
                return await self._fail(session, err.reason, err.message)
            machine, fork_ms = result.children[0], result.clocks.fork_ms
            log.info(
                "started uid=%s machine=%s baseline=%s fork_ms=%.1f",
                uid, machine.id, baseline.id, fork_ms,
            )  # fmt: skip
        else:
            fork_ms = None
        self._world.records.put_session(
            msgspec.structs.replace(record, start=started(machine, fork_ms=fork_ms))
        )
        self._world.waiting.over(uid)
        self._world.use_changed.set()
        return 0.0

    async def _branch(
        self, session: Session, template: SessionTemplate, record: SessionRecord
    ) -> tuple[Baseline, ForkResult]:
        uid = session.metadata.uid
        for _ in range(BAKES_PER_START):
            baseline = await self._baked(session, template)
            branching = self._world.engine.branch(
                baseline.point,
                [root_order(session)],
                TreeLimits(tree=TreeId(uid), memory_bytes=record.lineage.limits.memory_bytes),
                deadline=loop_now() + self._world.settings.fork_seconds,
            )
            try:
                result = await self._defects.guarded(uid, branching)
            except PointLost:
                self._bakes.forget(template)
                template = await self._bakes.template_of(session)  # It may be deleted by now.
                continue
            return baseline, result
        raise PointLost(f"the baseline of template {template.metadata.name} was dropped again and again")

    async def _baked(self, session: Session, template: SessionTemplate) -> Baseline:
        held = self._bakes.held(template)
        if held is not None:
            return held
        waits = session_waits(
            session,
            self._world.node,
            phase=SessionPhase.STARTING,
            reason=Reason.BAKING,
            message=f"template {template.metadata.name} is being made ready on node {self._world.node}",
            now=wall_now(),
        )
        self._bakes.begin(template)  # Before the write: seconds count, and the write may have to wait.
        await self._world.write_session(session, waits)
        return await self._defects.guarded(session.metadata.uid, self._bakes.baseline(template))

    async def _no_room(self, session: Session, refused: AtCapacity) -> float | None:
        """Wait for room, until that has lasted too long."""
        uid = session.metadata.uid
        limit = self._world.settings.capacity_wait_seconds
        left = self._world.waiting.for_room(uid, loop_now()) + limit - loop_now()
        session = self._world.sessions.get(uid) or session
        if left <= 0:
            return await self._fail(
                session, refused.reason, f"there was no room for {limit:.0f} s: {refused.message}"
            )
        waits = session_waits(
            session,
            self._world.node,
            phase=SessionPhase.STARTING,
            reason=refused.reason,
            message=f"waiting for room: {refused.message}",
            now=wall_now(),
        )
        await self._world.write_session(session, waits)
        return min(left, ROOM_RETRY_SECONDS)

    async def _show_running(self, session: Session) -> None:
        record = self._world.records.session(owner_of(session))
        assert record is not None
        if record.total_ms is None and session.metadata.uid == record.lineage.root:
            total_ms = (boot_now() - record.seen_at) * 1000
            record = msgspec.structs.replace(record, total_ms=total_ms)
            self._world.records.put_session(record)
        await self._world.write_session(
            session, session_runs(session, self._world.node, record, now=wall_now())
        )

    async def _fail(self, session: Session, reason: Reason, message: str) -> float:
        """Say so for good. Until it is written nothing is tried again; then what is left in memory may go."""
        uid = session.metadata.uid
        self._verdicts.setdefault(uid, (reason, message))
        await self._pronounce(self._world.sessions.get(uid) or session)
        return 0.0

    async def _pronounce(self, session: Session) -> None:
        uid = session.metadata.uid
        reason, message = self._verdicts[uid]
        record = self._world.records.session(owner_of(session))
        if record is not None and record.uid != uid:
            record = None  # Another object's.
        if not session.status.phase.terminal:
            status = session_fails(
                session, self._world.node, record, reason=reason, message=message, now=wall_now()
            )
            await self._world.write_session(session, status)
            log.error("session_failed uid=%s reason=%s message=%r", uid, reason, message)
        del self._verdicts[uid]
        self._world.waiting.over(uid)


def started(machine: Machine, *, fork_ms: float | None) -> Started:
    """What to note of a machine that has just answered."""
    return Started(
        baseline_id=machine.baseline,
        generation=machine.generation,
        mode=Mode(machine.mode),
        level=Level(machine.level),
        fork_ms=fork_ms,
        started_at=wall_now().isoformat(),
    )


def _begun(session: Session, template: SessionTemplate) -> SessionRecord:
    limits = template.spec.tree_limits
    return SessionRecord(
        owner=owner_of(session),
        uid=session.metadata.uid,
        namespace=session.metadata.namespace or "",
        name=session.metadata.name,
        lineage=Lineage(
            root=session.metadata.uid,
            parent=None,
            depth=0,
            template_uid=template.metadata.uid,
            limits=Limits(depth=limits.depth, memory_bytes=limits.memory_bytes),
        ),
        seen_at=boot_now(),
    )
