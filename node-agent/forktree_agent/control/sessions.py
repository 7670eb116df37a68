"""One session, one step: carries out what `decide_session` says."""

from __future__ import annotations

import logging

import msgspec

from forktree.kube.events import Subject
from forktree.metrics.table import Road, Stage
from forktree.models import (
    EventReason,
    Reason,
    Session,
    SessionPhase,
    SessionState,
    SessionTemplate,
    Uid,
)
from forktree_agent.control.bakes import Bakes, TemplateNotFound
from forktree_agent.control.decide_session import (
    Action,
    Bind,
    EndMachine,
    Look,
    Nothing,
    Pause,
    Release,
    Resume,
    ShowDeleted,
    ShowFailed,
    ShowPaused,
    ShowRunning,
    ShowScore,
    Start,
    View,
    decide,
)
from forktree_agent.control.defects import Defects
from forktree_agent.control.environment import SecretUnreadable, resolved
from forktree_agent.control.identity import root_order
from forktree_agent.control.noting import bound, root_begun, started
from forktree_agent.control.owners import owner_of
from forktree_agent.control.records import SessionRecord
from forktree_agent.control.status_writer import Vanished
from forktree_agent.control.statuses import (
    session_delayed,
    session_fails,
    session_paused,
    session_released,
    session_runs,
    session_scored,
    session_waits,
)
from forktree_agent.control.world import World, boot_now, loop_now, wall_now
from forktree_agent.engine.contract import (
    AtCapacity,
    Baseline,
    EngineError,
    ForkResult,
    PointLost,
    TreeId,
    TreeLimits,
)
from forktree_agent.images.errors import ImageError
from forktree_agent.journal import JournalError

log = logging.getLogger(__name__)

DELETED = "it is deleted and has no machine; a finalizer still holds its object"
NOT_STARTED = {SessionPhase.PENDING, SessionPhase.STARTING}
ROOM_RETRY_SECONDS = 5.0
"""Room is told of when something of ours ends; this is for what ends without us."""
PAUSE_SECONDS = 30.0
"""For a machine to stand still or go on: milliseconds, unless it is just being forked. Then we ask again."""
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
        if session is None:
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
        try:
            return await self._carry_out(session, decide(self._view(session)))
        except JournalError as err:
            return await self._put_off(session, err)

    async def _carry_out(self, session: Session, action: Action) -> float | None:
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
            case ShowRunning() | ShowPaused():
                await self._show_live(session, paused=isinstance(action, ShowPaused))
                return None
            case Pause() | Resume():
                await self._set_paused(session, paused=isinstance(action, Pause))
                return 0.0
            case ShowScore():
                record = self._world.records.session(owner_of(session))
                await self._world.write_session(session, session_scored(session, record))
                return None
            case ShowFailed(reason=reason, message=message):
                return await self._fail(session, reason, message)
            case ShowDeleted():
                await self._show_deleted(session)
                return None
            case Release(reason=reason, message=message):
                await self._release(session, reason, message)
                return None
            case EndMachine():
                await self._end_machine(session)
                return None

    async def _release(self, session: Session, reason: Reason | None, message: str) -> None:
        """End the machine and then say so. A machine that is gone already needs the second alone."""
        await self._end_machine(session)
        session = self._world.sessions.get(session.metadata.uid) or session
        record = self._world.records.session(owner_of(session))
        status = session_released(
            session, self._world.node, record, reason=reason, message=message, now=wall_now()
        )
        await self._world.write_session(session, status)
        log.info("session_released uid=%s reason=%s", session.metadata.uid, reason)
        event = EventReason.EXPIRED if reason is Reason.EXPIRED else EventReason.RELEASED
        self._world.announcer.say(Subject.of(session), event, message)

    async def _show_deleted(self, session: Session) -> None:
        record = self._own_record(session)
        status = session_released(
            session, self._world.node, record, reason=None, message=DELETED, now=wall_now()
        )
        await self._world.write_session(session, status)

    async def _set_paused(self, session: Session, *, paused: bool) -> None:
        machine = self._world.machine(owner_of(session))
        if machine is None:
            return  # Ended meanwhile; the next look says so.
        engine, deadline = self._world.engine, loop_now() + PAUSE_SECONDS
        await (engine.pause if paused else engine.resume)(machine.id, deadline=deadline)
        log.info("%s uid=%s machine=%s", "paused" if paused else "resumed", session.metadata.uid, machine.id)

    async def _end_machine(self, session: Session) -> None:
        machine = self._world.machine(owner_of(session))
        if machine is not None:
            log.info("ending_machine uid=%s phase=%s", session.metadata.uid, session.status.phase)
            await self._world.engine.release(machine.id)
            self._world.room_changed()

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
            held=node is not None and self._world.held(node),
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
            if session.status.phase is SessionPhase.STARTING:
                # It was there when this began to wait: whoever makes one anew deletes the old one first.
                return await self._put_off(session, err)
            return await self._fail(session, err.reason, err.message)
        machine = self._world.machine(owner)
        if machine is None:
            try:
                started_from = await self._branch(session, template)
            except AtCapacity as err:
                self._world.metrics.had_no_room(Road.ROOT)
                return await self._put_off(session, err)
            except (EngineError, ImageError, TemplateNotFound, SecretUnreadable) as err:
                return await self._fail(session, err.reason, err.message)
            if started_from is None:
                return 0.0
            baseline, result = started_from
            machine, fork_ms = result.children[0], result.clocks.fork_ms
            self._world.metrics.forked(Road.ROOT, machine.mode, result.clocks)
            if (begun := self._world.records.session(owner)) is not None:
                self._world.traces.started(begun, machine.mode, result.clocks)
            log.info(
                "started uid=%s machine=%s baseline=%s fork_ms=%.1f",
                uid, machine.id, baseline.id, fork_ms,
            )  # fmt: skip
        else:
            fork_ms = None
        record = self._world.records.session(owner) or root_begun(
            session, template, self._world.traces.of(session)
        )
        self._world.records.put_session(
            msgspec.structs.replace(record, start=started(machine, fork_ms=fork_ms))
        )
        self._world.waiting.over(uid)
        self._world.use_changed.set()
        return 0.0

    async def _branch(
        self, session: Session, template: SessionTemplate
    ) -> tuple[Baseline, ForkResult] | None:
        """None: it is not wanted any more, which a bake takes long enough for."""
        uid = session.metadata.uid
        record = self._promised(session, template)
        env = await resolved(self._world.client, session.metadata.namespace or "", session.spec.env)
        for _ in range(BAKES_PER_START):
            hooks = record.lineage.hooks.commands()
            hook_seconds = 0.0 if hooks.post is None else hooks.post.timeout_seconds
            baseline = await self._baked(session, template)
            if (self._world.sessions.get(uid) or session).spec.state is SessionState.RELEASED:
                return None
            branching = self._world.engine.branch(
                baseline.point,
                [root_order(session, env)],
                TreeLimits(tree=TreeId(uid), memory_bytes=record.lineage.limits.memory_bytes),
                hooks=hooks,
                deadline=loop_now() + self._world.settings.fork_seconds + hook_seconds,
            )
            try:
                result = await self._defects.guarded(uid, branching)
            except PointLost:
                self._bakes.forget(template)
                template = await self._bakes.template_of(session)  # It may be another one by now, or none.
                record = self._promised(session, template)
                continue
            return baseline, result
        raise PointLost(f"the baseline of template {template.metadata.name} was dropped again and again")

    def _promised(self, session: Session, template: SessionTemplate) -> SessionRecord:
        """The record of a root of which nothing was started yet, so its tree is as `template` says now.

        Another template may have got the name since it was begun.
        """
        begun = root_begun(session, template, self._world.traces.of(session))
        known = self._world.records.session(begun.owner)
        record = begun if known is None else msgspec.structs.replace(known, lineage=begun.lineage)
        if record != known:
            self._world.records.put_session(record)
        return record

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
        bake = self._bakes.begin(template)  # Before the write: seconds count, and the write may have to wait.
        await self._world.write_session(session, waits)
        return await self._defects.guarded(session.metadata.uid, bake.baseline())

    async def _put_off(
        self, session: Session, refused: AtCapacity | JournalError | TemplateNotFound
    ) -> float | None:
        """Say what it waits for, and try again; a root fails when that has lasted too long."""
        uid = session.metadata.uid
        session = self._world.sessions.get(uid) or session
        if session.metadata.deleting or session.status.phase not in NOT_STARTED:
            raise refused
        if session.spec.fork_ref is not None:  # Its machine runs, and only waits to be noted.
            status = session_delayed(session, reason=refused.reason, message=refused.message, now=wall_now())
            await self._world.write_session(session, status)
            return ROOM_RETRY_SECONDS
        limit = self._world.settings.capacity_wait_seconds
        left = self._world.waiting.for_room(uid, loop_now()) + limit - loop_now()
        room = isinstance(refused, AtCapacity)
        if left <= 0:
            lasted = f"there was no room for {limit:.0f} s" if room else f"after {limit:.0f} s"
            return await self._fail(session, refused.reason, f"{lasted}: {refused.message}")
        message = f"waiting for room: {refused.message}" if room else refused.message
        waits = session_waits(
            session,
            self._world.node,
            phase=SessionPhase.STARTING,
            reason=refused.reason,
            message=message,
            now=wall_now(),
        )
        await self._world.write_session(session, waits)
        if room and session.status.reason is not Reason.AT_CAPACITY:
            self._world.announcer.say(Subject.of(session), EventReason.AT_CAPACITY, message)
        return min(left, ROOM_RETRY_SECONDS)

    async def _show_live(self, session: Session, *, paused: bool) -> None:
        record = self._world.records.session(owner_of(session))
        assert record is not None
        if record.total_ms is None and session.metadata.uid == record.lineage.root:
            total_ms = (boot_now() - record.seen_at) * 1000
            record = msgspec.structs.replace(record, total_ms=total_ms)
            self._world.records.put_session(record)
            if record.start is not None:
                self._world.metrics.fork_took(Road.ROOT, record.start.mode, Stage.TOTAL, total_ms)
        status = (session_paused if paused else session_runs)(
            session,
            self._world.node,
            record,
            now=wall_now(),
            origin=self._world.settings.advertise_url,
        )
        await self._world.write_session(session, status)

    async def _fail(self, session: Session, reason: Reason, message: str) -> float:
        """Say so for good. Until it is written nothing is tried again; then what is left in memory may go."""
        uid = session.metadata.uid
        self._verdicts.setdefault(uid, (reason, message))
        await self._pronounce(self._world.sessions.get(uid) or session)
        return 0.0

    async def _pronounce(self, session: Session) -> None:
        uid = session.metadata.uid
        reason, message = self._verdicts[uid]
        record = self._own_record(session)
        if not session.status.phase.terminal:
            status = session_fails(
                session, self._world.node, record, reason=reason, message=message, now=wall_now()
            )
            await self._world.write_session(session, status)
            log.error("session_failed uid=%s reason=%s message=%r", uid, reason, message)
            if record is None or record.start is None:  # One that ran and was lost was not rejected.
                self._world.metrics.fork_failed(reason)
                now = boot_now()
                seen_at = now if record is None else record.seen_at
                self._world.traces.not_started(session, seen_at, now, reason, message)
            self._world.announcer.say(Subject.of(session), EventReason.FAILED, f"{reason}: {message}")
        del self._verdicts[uid]
        self._world.waiting.over(uid)

    def _own_record(self, session: Session) -> SessionRecord | None:
        """What is noted of it, unless that is of another object for the same machine."""
        record = self._world.records.session(owner_of(session))
        return None if record is None or record.uid != session.metadata.uid else record
