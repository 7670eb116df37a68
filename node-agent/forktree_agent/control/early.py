"""Forks that are made before anything is written to the API server: their objects follow.

Until then such a fork has a name of our own in place of a uid, here, in the tree and as its machines' owner,
and its record in the journal is all that stands for it. Once its object is there, record and machines are
given over to that, and it goes on as if the object had been first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from forktree.errors import ForktreeError
from forktree.kube.errors import AlreadyExists, Forbidden, Invalid, NoRight, NotFound
from forktree.kube.events import Subject
from forktree.metrics.table import Road, Stage
from forktree.models import (
    API_VERSION,
    EventReason,
    Fork,
    ForkSpec,
    ObjectMeta,
    OwnerReference,
    Reason,
    Session,
    Uid,
)
from forktree.models.fork import Branch, ForkSource, SourceRef
from forktree.models.names import BORN_ANNOTATION, BORN_ON_ANNOTATION, ROOT_LABEL, TRACE_ANNOTATION
from forktree.tracing.context import TraceContext, current, within
from forktree_agent.control import news
from forktree_agent.control.births import Births, end_loose, mode_of
from forktree_agent.control.decide_fork import Begin, LiveSource, Refuse, Wait, begin
from forktree_agent.control.noting import clocks_of
from forktree_agent.control.owners import child_owner, early_uid, is_early, owner_of, point_owner
from forktree_agent.control.records import ForkRecord
from forktree_agent.control.together import each_of
from forktree_agent.control.tree import Place
from forktree_agent.control.world import World, boot_now, loop_now
from forktree_agent.engine.contract import DeadlineExceeded, MachineGone, Owner

log = logging.getLogger(__name__)

UNRECORDED_MAX = 256
"""Forks whose objects are not written yet. The API server takes some hundred a second; beyond this a caller
waits for its own."""

ANSWERS_AT_ONCE = 256
"""All children of a fork: they are only waited for."""


@dataclass(frozen=True, slots=True)
class Forked:
    """All children run. `made`: by this call, and not by one before it."""

    record: ForkRecord
    made: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was made, or all of it was ended."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class NameTaken:
    """Another fork has the name."""


Outcome = Forked | Refused | NameTaken
_Name = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A fork that is to be made."""

    fork: Fork
    plan: Begin
    seen_at: float
    deadline: float
    made: asyncio.Future[ForkRecord | Refused]
    trace: TraceContext | None
    """The span of the request, if anybody follows it."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A fork whose object is not written yet. Without `asked`, one that an agent before us made."""

    uid: Uid
    above: Uid
    replicas: int
    labels: Mapping[str, str]
    asked: _Asked | None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """It has its object, or will never have one."""


class EarlyForks:
    """Makes forks, and then their objects. `round` is one worker's step."""

    def __init__(
        self, world: World, tasks: asyncio.TaskGroup, take_in: Callable[[Session | Fork], None]
    ) -> None:
        """`take_in` enters a version of an object, as a watch would."""
        self._world = world
        self._take_in = take_in
        self._births = Births(world, tasks)
        self._known: dict[_Name, _Known] = {}
        self._others = {
            (each.namespace, each.name) for each in world.records.forks() if each.born is not None
        }
        """Names of forks of an agent before us, whose objects no watch of ours need have shown yet."""
        for record in world.records.forks():
            if is_early(record.uid) and record.result is not None:
                children = len(record.result.children)
                known = _Known(record.uid, record.above, children, record.labels, None)
                self._known[record.namespace, record.name] = known
                world.newborns.known(record, range(children))

    async def fork(
        self,
        parent: Session,
        name: str,
        replicas: int,
        labels: Mapping[str, str],
        *,
        seen_at: float,
        deadline: float,
    ) -> Outcome | None:
        """Children of `parent`, as soon as all run; the API server is not asked for anything.

        `labels` are those of every child's object, beside ours.

        None: this is for a Fork object to ask for, as something has to be waited for or is not known here.
        `seen_at`: monotonic seconds. Whoever asks may go away; the fork is made all the same.
        """
        world, named = self._world, (parent.metadata.namespace or "", name)
        known = self._known.get(named)
        if known is not None:
            if (known.above, known.replicas, known.labels) != (parent.metadata.uid, replicas, labels):
                return NameTaken()
            return await self._outcome(known, named, made=False)
        taken = world.forks.named(*named) is not None or named in self._others
        if not world.synced.is_set() or taken or len(self._known) >= UNRECORDED_MAX:
            return None
        fork = Fork(
            metadata=ObjectMeta(name=name, namespace=named[0], uid=early_uid()),
            spec=_spec(parent.metadata.name, parent.metadata.uid, replicas, labels),
        )
        owner = owner_of(parent)
        source = LiveSource(
            session=parent,
            record=world.records.session(owner),
            machine=world.machine(owner),
            doomed=world.tree.doomed(parent.metadata.uid),
        )
        match begin(fork, source, world.node):
            case Wait():
                return None
            case Refuse(reason=reason, message=message):
                world.metrics.fork_failed(reason)
                return Refused(reason, message)
            case Begin() as plan:
                pass
        made: asyncio.Future[ForkRecord | Refused] = asyncio.get_running_loop().create_future()
        asked = _Asked(fork=fork, plan=plan, seen_at=seen_at, deadline=deadline, made=made, trace=current())
        known = self._known[named] = _Known(fork.metadata.uid, parent.metadata.uid, replicas, labels, asked)
        # By its worker, so that a deletion of what is above ends it as it ends all other work below.
        world.early_work.poke(fork.metadata.uid)
        return await self._outcome(known, named, made=True)

    async def recorded(self, namespace: str, name: str) -> None:
        """Until no object of that name is still to be written. Whoever waits has a deadline."""
        known = self._known.get((namespace, name))
        if known is not None:
            await known.over.wait()

    async def recorded_below(self, above: Uid) -> None:
        """Until no object of a fork of that session is still to be written. Whoever waits has a deadline."""
        while known := next((each for each in self._known.values() if each.above == above), None):
            await known.over.wait()

    def unrecorded(self) -> int:
        """How many forks run whose objects are not written yet."""
        return sum(1 for each in self._known.values() if each.asked is None or each.asked.made.done())

    # Made -------------------------------------------------------------------------------------------------

    async def _outcome(self, known: _Known, named: _Name, *, made: bool) -> Outcome:
        if known.asked is not None:
            # Shielded: one that goes away must not take the answer away from the others.
            outcome = await asyncio.shield(known.asked.made)
            if isinstance(outcome, Refused):
                return outcome
            return Forked(self._world.records.fork(known.uid) or outcome, made)
        record = self._world.records.fork(known.uid)
        if record is None:
            return Refused(Reason.SOURCE_GONE, f"fork {named[1]} came to nothing meanwhile; ask again")
        return Forked(record, made)

    async def _make(self, asked: _Asked) -> None:
        """The machines, noted. Whoever waits is told, whatever comes of it."""
        uid, above = asked.fork.metadata.uid, asked.plan.above
        refused = Refused(Reason.INTERNAL, f"session {above.name} could not be forked: see the agent's log")
        try:
            with within(asked.trace):
                record = await self._made(asked)
        except ForktreeError as err:
            refused = Refused(err.reason, err.message)
        except asyncio.CancelledError:
            refused = Refused(Reason.INTERNAL, "the agent was stopped meanwhile")
            raise
        else:
            self._world.newborns.known(record, range(asked.fork.spec.replicas))
            asked.made.set_result(record)
        finally:
            self._births.over(uid)
            if not asked.made.done():
                self._forget(uid)
                if self._world.tree.doomed(above.uid):
                    why = f"session {above.name} was deleted while it was forked"
                    refused = Refused(Reason.SOURCE_GONE, why)
                self._world.metrics.fork_failed(refused.reason)
                with within(asked.trace):
                    self._world.traces.failed(
                        asked.fork, asked.seen_at, boot_now(), refused.reason, refused.message
                    )
                asked.made.set_result(refused)

    async def _made(self, asked: _Asked) -> ForkRecord:
        fork, plan = asked.fork, asked.plan
        with (
            self._world.living.starting(fork.metadata.uid, fork.spec.replicas, plan.lineage),
            self._world.activity.during(plan.above.uid),
        ):
            return await self._births.early(fork, plan, seen_at=asked.seen_at, deadline=asked.deadline)

    # Recorded ---------------------------------------------------------------------------------------------

    async def round(self, uid: Uid) -> float | None:
        """One step for one fork that has no object yet; see `Workers`."""
        await self._world.synced.wait()
        known = next((each for each in self._known.values() if each.uid == uid), None)
        if known is not None and known.asked is not None and not known.asked.made.done():
            await self._make(known.asked)
        record = self._world.records.fork(uid)
        if record is None:
            self._forget(uid)
            return None
        if record.result is None:
            await self._end(record)  # An agent died over it, and nobody has heard of it.
            return None
        if self._world.tree.doomed(uid) or self._world.tree.doomed(record.above):
            await self._refuse(record, f"{record.above_name} or something above it was deleted")
            return None
        await self._settle(record)
        fork = await self._object(record)
        newest = self._world.records.fork(uid)
        if isinstance(fork, str):
            await self._refuse(record, fork)
        elif newest is not None:
            self._give_over(newest, fork)
        return None

    async def _settle(self, record: ForkRecord) -> None:
        """Wait until each child has answered, or was ended as it did not, and note which."""
        made = record.result
        if record.settled or made is None:
            return
        heard = await each_of(
            range(len(made.children)), lambda index: self._heard(record, index), at_once=ANSWERS_AT_ONCE
        )
        newest = self._world.records.fork(record.uid)
        if newest is None or newest.result is None:
            return
        clocks = [ready_ms for answered, ready_ms in heard if answered and ready_ms is not None]
        missing = tuple(index for index, (answered, _) in enumerate(heard) if not answered)
        ready_ms = max(clocks, default=None) if len(clocks) == len(heard) else None
        if record.trace is not None:
            told = [each_ms if answered else None for answered, each_ms in heard]
            self._world.traces.answered(record, Road.EARLY, mode_of(made), clocks_of(made), told)
        if ready_ms is not None:
            self._world.metrics.fork_took(Road.EARLY, mode_of(made), Stage.READY, ready_ms)
        self._world.records.put_fork(
            msgspec.structs.replace(
                newest,
                settled=True,
                unanswered=missing,
                result=msgspec.structs.replace(newest.result, ready_ms=ready_ms),
            )
        )

    async def _heard(self, record: ForkRecord, index: int) -> tuple[bool, float | None]:
        """Whether a child has answered, and when by the clock of its fork, where that is known."""
        machine = self._world.machine(child_owner(record.uid, index))
        if machine is None:
            return False, None
        hooks = record.lineage.hooks.commands()
        hook_seconds = 0.0 if hooks.post is None else hooks.post.timeout_seconds
        deadline = loop_now() + 2 * self._world.settings.fork_seconds + hook_seconds
        try:
            return True, await self._world.engine.answered(machine.id, deadline=deadline)
        except MachineGone:
            return False, None
        except DeadlineExceeded:  # The engine ends those by itself, and sooner.
            log.warning("child_unheard fork=%s index=%d", record.uid, index)
            await self._world.engine.release(machine.id)
            return False, None

    async def _object(self, record: ForkRecord) -> Fork | str:
        """Its object, made by this call or one before it; or why it can have none. Raises `KubeError`."""
        begun = next((each for each in self._world.records.forks() if each.born == record.uid), None)
        wanted = _object(record, self._world.node)
        try:
            if begun is None:
                return await self._world.client.create(wanted)
        except AlreadyExists:
            pass  # Ours, perhaps: the answer to a creation can be lost.
        except NoRight:
            raise  # Of a server that has just started, most likely. Whoever was told of this fork keeps it.
        except (Forbidden, Invalid) as err:
            return err.message
        try:
            present = await self._world.client.get(Fork, record.namespace, record.name)
        except NotFound as err:
            if begun is not None:
                return "its object was deleted at once"
            raise AlreadyExists(f"fork {record.name} was just deleted; it is tried again") from err
        if present.metadata.annotations.get(BORN_ANNOTATION) != record.uid:
            return f"the name {record.name} is taken by another Fork"
        return present

    def _give_over(self, record: ForkRecord, fork: Fork) -> None:
        """All that there is of it belongs to the object from here on. No await: nobody sees a part of it.

        After a crash in its midst it is done again: the record of before goes last.
        """
        world, uid, early = self._world, fork.metadata.uid, record.uid
        made = record.result
        assert made is not None
        recorded = world.records.fork(uid)
        lost = record.lost if recorded is None else record.lost | recorded.lost
        given = msgspec.structs.replace(record, uid=uid, born=early, lost=lost)
        world.records.put_fork(given)
        owners: dict[Owner, Owner] = {point_owner(early): point_owner(uid)}
        for index in range(len(made.children)):
            owners[child_owner(early, index)] = child_owner(uid, index)
        world.engine.give(owners)
        world.newborns.known(given, range(len(made.children)))
        world.records.remove_fork(early)
        world.tree.drop(early)
        self._forget(early)
        log.info("recorded uid=%s early=%s", uid, early)
        world.announcer.say(
            Subject.of(fork), EventReason.FORKED, news.forked(made, record.above_kind, record.above_name)
        )
        self._take_in(fork)

    async def _refuse(self, record: ForkRecord, why: str) -> None:
        """A late refusal: all children end, and whoever asks for one is told why."""
        log.error("early_fork_refused uid=%s name=%s error=%r", record.uid, record.name, why)
        self._world.newborns.refused(record, f"fork {record.name} was refused, and its children ended: {why}")
        await self._end(record)

    async def _end(self, record: ForkRecord) -> None:
        await end_loose(self._world, record.uid, len(record.seeds))
        self._world.records.remove_fork(record.uid)
        self._world.tree.drop(record.uid)
        self._forget(record.uid)

    def _forget(self, uid: Uid) -> None:
        for named, known in tuple(self._known.items()):
            if known.uid == uid:
                del self._known[named]
                known.over.set()


def above_place(record: ForkRecord) -> Place:
    """What a fork hangs below, as its record has it."""
    return Place(
        kind=Session if record.above_kind == Session.resource.kind else Fork,
        namespace=record.namespace,
        name=record.above_name,
        uid=record.above,
    )


def _spec(session: str, uid: Uid, replicas: int, labels: Mapping[str, str]) -> ForkSpec:
    return ForkSpec(
        source=ForkSource(session=SourceRef(name=session, uid=uid)),
        replicas=replicas,
        branches=(Branch(labels=dict(labels)),) * replicas if labels else (),
    )


def _object(record: ForkRecord, node: str) -> Fork:
    """The object to be written, in its place in the tree from the first."""
    assert record.result is not None
    annotations = {BORN_ANNOTATION: record.uid, BORN_ON_ANNOTATION: node}
    if record.trace is not None:
        annotations[TRACE_ANNOTATION] = record.trace.span
    return Fork(
        metadata=ObjectMeta(
            name=record.name,
            namespace=record.namespace,
            labels={ROOT_LABEL: record.lineage.root},
            annotations=annotations,
            owner_references=(
                OwnerReference(
                    api_version=API_VERSION,
                    kind=record.above_kind,
                    name=record.above_name,
                    uid=record.above,
                    controller=True,
                    block_owner_deletion=True,
                ),
            ),
        ),
        spec=_spec(record.above_name, record.above, len(record.result.children), record.labels),
    )
