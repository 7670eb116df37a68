"""One Fork, one step: checks, the fork of machines, the answer in its status, and its children's objects."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from forktree.errors import ForktreeError
from forktree.kube.errors import Conflict, Invalid, NotFound
from forktree.kube.events import Subject
from forktree.models import EventReason, Fork, ForkPhase, Reason, Uid
from forktree.models.names import ROOT_LABEL
from forktree.models.session_template import EnvVar
from forktree_agent.control.children import Children
from forktree_agent.control.completion import Completion
from forktree_agent.control.decide_fork import (
    Begin,
    Refuse,
    Wait,
    begin,
    told,
)
from forktree_agent.control.decide_session import DOOMED_GRACE_SECONDS
from forktree_agent.control.defects import Defects
from forktree_agent.control.environment import SecretUnreadable, resolved
from forktree_agent.control.identity import child_orders
from forktree_agent.control.living import LiveLimit
from forktree_agent.control.owners import point_owner
from forktree_agent.control.patience import seconds_left
from forktree_agent.control.reaping import machines_of_fork, reap
from forktree_agent.control.records import ForkMade, ForkRecord
from forktree_agent.control.seeds import seeds_of
from forktree_agent.control.sessions import started
from forktree_agent.control.sources import above_of, source_lives, source_name, source_of
from forktree_agent.control.status_writer import Outdated, Vanished
from forktree_agent.control.statuses import fork_fails, fork_goes_on, fork_outlived, fork_runs, fork_waits
from forktree_agent.control.tree import Node, place_of
from forktree_agent.control.world import World, boot_now, loop_now, wall_now
from forktree_agent.engine.contract import (
    AtCapacity,
    EngineError,
    ForkResult,
    MachineId,
    ParentLost,
    PointId,
    PointLost,
    TreeId,
    TreeLimits,
)

log = logging.getLogger(__name__)

SLOW_FORK_SECONDS = 1.0
"""After which a Fork says that it is under way. A usual one is done before, and saves the write."""
ROOM_RETRY_SECONDS = 5.0


class Forks:
    """Brings forks to what they should be. `round` is one worker's step."""

    def __init__(self, world: World, tasks: asyncio.TaskGroup) -> None:
        self._world = world
        self._tasks = tasks
        self._children = Children(world)
        self._completion = Completion(world, self._children)
        self._defects = Defects()
        self._verdicts: dict[Uid, tuple[Reason, str]] = {}
        """Failures that are not written yet. A fork is not tried again because the API server is away."""
        self._seen: dict[Uid, float] = {}
        """When a fork that is not answered yet was first looked at."""
        self._until: dict[Uid, float] = {}
        """And until when it has to be ready, by the same clock."""

    async def round(self, uid: Uid) -> float | None:
        """One step for one fork; see `Workers`."""
        await self._world.synced.wait()
        fork = self._world.forks.get(uid)
        if fork is None or fork.metadata.deleting:
            # Deletion ends machines where it is seen, with all that hangs below.
            self._over(uid)
            return None
        self._seen.setdefault(uid, boot_now())
        if uid not in self._until:
            self._until[uid] = boot_now() + seconds_left(fork, wall_now())
        try:
            if uid in self._verdicts:
                await self._pronounce(fork)
                return 0.0
            return await self._step(fork)
        except Vanished as err:
            log.info("fork_not_there uid=%s error=%r", uid, err.message)
            self._world.sweep_wanted.set()
            return None

    async def _step(self, fork: Fork) -> float | None:
        uid = fork.metadata.uid
        record = self._world.records.fork(uid)
        node = self._world.tree.get(uid)
        if node is not None and node.doomed_at is not None:
            return await self._doomed(fork, node)
        if fork.status.phase is ForkPhase.FAILED:
            await self._clear(fork)
            return None
        if record is None and fork.status.parent_uid is not None:
            return await self._forgotten(fork)
        if record is None or record.result is None:
            return await self._begin(fork)
        if fork.status.parent_uid is None and not await self._answered(fork, record):
            return 0.0
        self._seen.pop(uid, None)
        self._until.pop(uid, None)
        await self._children.record(fork, record)
        await self._completion.advance(fork)
        await self._mirror(uid)
        if await self._completion.let_go(self._world.forks.get(uid) or fork):
            await self._mirror(uid)
        return None

    async def _forgotten(self, fork: Fork) -> float | None:
        """This node has lost its memory of a fork that ran. What was done by then was done."""
        if fork.status.phase is ForkPhase.COMPLETE:
            await self._world.write_fork(fork, fork_outlived(fork, wall_now()))
            return None
        return await self._fail(
            fork, Reason.MACHINE_LOST, "its node knows nothing of it any more, and it was not complete"
        )

    # Begun and forked ------------------------------------------------------------------------------------

    async def _begin(self, fork: Fork) -> float | None:
        if self._left(fork) <= 0:
            return await self._too_late(fork)
        source = await source_of(self._world, fork)
        match begin(fork, source, self._world.node):
            case Refuse(reason=reason, message=message):
                return await self._fail(fork, reason, message)
            case Wait(reason=reason, message=message):
                return await self._wait_for_source(fork, reason, message)
            case Begin() as plan:
                return await self._fork(fork, plan)

    async def _fork(self, fork: Fork, plan: Begin) -> float | None:
        uid = fork.metadata.uid
        # What an agent before us had made of it, and could not note any more, nobody has heard of.
        await self._end_loose(fork)
        if self._world.tree.doomed(uid) or self._world.tree.doomed(plan.above.uid):
            return 0.0
        try:
            with (
                self._world.living.starting(uid, fork.spec.replicas, plan.lineage),
                self._world.activity.during(plan.above.uid),
            ):
                forked, adopted = await self._begun_together(fork, plan)
        except LiveLimit as err:
            self._world.records.remove_fork(uid)
            return await self._fail(fork, err.reason, err.message)
        match forked:
            case ForkResult():
                pass
            case AtCapacity():
                return await self._no_room(fork, forked)
            case EngineError():
                self._world.records.remove_fork(uid)
                return await self._fail(fork, *self._blame(forked, plan))
            case SecretUnreadable():
                self._world.records.remove_fork(uid)
                return await self._fail(fork, forked.reason, forked.message)
            case BaseException():
                raise forked
        if isinstance(adopted, Exception):
            log.info("fork_not_adopted_yet uid=%s error=%r", uid, str(adopted))
        return 0.0  # The machines are noted. The next round goes on from here, adoption first.

    async def _begun_together(
        self, fork: Fork, plan: Begin
    ) -> tuple[ForkResult | BaseException, BaseException | None]:
        """The machines and, beside them, the Fork's place in its tree: what became of either."""
        record = _begun(fork, plan, self._seen.setdefault(fork.metadata.uid, boot_now()))
        self._world.records.put_fork(record)
        # From here on what is deleted above takes this fork along, though no object says so yet.
        self._world.tree.place(place_of(fork), plan.above, now=loop_now())
        return await asyncio.gather(
            self._branched(fork, plan, record), self._adopt(fork, record), return_exceptions=True
        )

    async def _branched(self, fork: Fork, plan: Begin, record: ForkRecord) -> ForkResult:
        """The machines, noted as soon as they are there."""
        limits = TreeLimits(tree=TreeId(plan.lineage.root), memory_bytes=plan.lineage.limits.memory_bytes)
        orders = child_orders(fork, plan.lineage, record.seeds, await self._environments(fork, plan))
        deadline = loop_now() + min(self._world.settings.fork_seconds, self._left(fork))
        engine, hooks = self._world.engine, plan.lineage.hooks.commands()
        telling = self._tasks.create_task(self._tell_if_slow(fork.metadata.uid), name="slow-fork")
        try:
            if plan.earlier:
                forking = engine.branch(PointId(plan.origin), orders, limits, hooks=hooks, deadline=deadline)
            else:
                machine, owner = MachineId(plan.origin), point_owner(fork.metadata.uid)
                forking = engine.fork(machine, owner, orders, limits, hooks=hooks, deadline=deadline)
            result = await self._defects.guarded(fork.metadata.uid, forking)
        finally:
            telling.cancel()
        self._world.records.put_fork(msgspec.structs.replace(record, result=_made(result)))
        self._over(fork.metadata.uid)
        self._world.use_changed.set()
        clocks = result.clocks
        log.info(
            "forked uid=%s children=%d pause_ms=%s fork_ms=%.1f ready_ms=%.1f",
            fork.metadata.uid, len(result.children), clocks.pause_ms, clocks.fork_ms, clocks.ready_ms,
        )  # fmt: skip
        self._world.announcer.say(Subject.of(fork), EventReason.FORKED, _told(plan, result))
        return result

    async def _environments(self, fork: Fork, plan: Begin) -> list[dict[str, str]]:
        """What each child is told. Children that are told the same are asked for once."""
        namespace, client = fork.metadata.namespace or "", self._world.client
        alike: dict[tuple[EnvVar, ...], dict[str, str]] = {}
        found: list[dict[str, str]] = []
        for index in range(fork.spec.replicas):
            env = told(plan.env, fork.spec.branch(index))
            if env not in alike:
                alike[env] = await resolved(client, namespace, env)
            found.append(alike[env])
        return found

    async def _tell_if_slow(self, uid: Uid) -> None:
        await asyncio.sleep(SLOW_FORK_SECONDS)
        fork = self._world.forks.get(uid)
        if fork is not None and fork.status.phase in {ForkPhase.PENDING, ForkPhase.FORKING}:
            try:
                await self._world.write_fork(fork, fork_goes_on(fork))
            except ForktreeError as err:
                log.warning("fork_not_told_slow uid=%s error=%r", uid, err.message)

    def _blame(self, error: EngineError, plan: Begin) -> tuple[Reason, str]:
        """A source that was ended on purpose is gone; one that ended by itself is lost."""
        gone = self._world.tree.doomed(plan.above.uid)
        if gone and isinstance(error, ParentLost | PointLost):
            kind = plan.above.kind.__name__.lower()
            return Reason.SOURCE_GONE, f"{kind} {plan.above.name} was deleted while it was forked"
        return error.reason, error.message

    # Answered ---------------------------------------------------------------------------------------------

    async def _answered(self, fork: Fork, record: ForkRecord) -> bool:
        """Hang the Fork in its tree and then say that it runs. False: its source is gone, and so is all."""
        if not await source_lives(self._world, record):
            await self._clear(fork)
            await self._fail(
                fork,
                Reason.SOURCE_GONE,
                f"{record.above_kind.lower()} {record.above_name} was deleted while it was forked",
            )
            return False
        await self._adopt(fork, record)
        if record.total_ms is None:
            record = msgspec.structs.replace(record, total_ms=(boot_now() - record.seen_at) * 1000)
            self._world.records.put_fork(record)
        await self._mirror(fork.metadata.uid)
        return True

    async def _adopt(self, fork: Fork, record: ForkRecord) -> None:
        """Make the Fork's one owner what it was forked from, unless it is already."""
        fork = self._world.forks.get(fork.metadata.uid) or fork
        above = above_of(self._world, record)
        if above is None:
            raise Vanished(f"{record.above_kind} {record.above_name} is not there any more")
        owner = above.owner_reference()
        if fork.metadata.owner_references == (owner,):
            return
        body = {
            # The uid must still hold, so another Fork of this name is never taken in.
            "metadata": {
                "uid": fork.metadata.uid,
                "ownerReferences": [owner.to_json()],
                "labels": {ROOT_LABEL: record.lineage.root},
            }
        }
        try:
            adopted = await self._world.client.merge_patch(
                Fork, fork.metadata.namespace, fork.metadata.name, body
            )
        except NotFound as err:
            raise Vanished(f"Fork {fork.metadata.name} is not there: {err.message}") from err
        except (Conflict, Invalid) as err:
            self._world.observed(await self._world.writer.newest(fork))
            raise Outdated(f"Fork {fork.metadata.name} was not adopted: {err.message}") from err
        self._world.observed(adopted)

    async def _mirror(self, uid: Uid) -> None:
        """Have the status say what became of the fork and of each child."""
        fork, record = self._world.forks.get(uid), self._world.records.fork(uid)
        if fork is None or record is None or record.result is None:
            return
        point = record.result.point_id
        status = fork_runs(
            fork,
            record,
            self._children.seen(fork, record),
            node=self._world.node,
            point_held=any(each.id == point for each in self._world.engine.points()),
            complete=self._completion.done(fork, record),
            now=wall_now(),
        )
        await self._world.write_fork(fork, status)

    # Waiting and failing ----------------------------------------------------------------------------------

    async def _wait_for_source(self, fork: Fork, reason: Reason, message: str) -> float | None:
        self._world.waiting.for_source(fork.metadata.uid, source_name(fork), loop_now())
        if self._left(fork) <= 0:
            return await self._fail(fork, Reason.DEADLINE_EXCEEDED, f"{_limit(fork)}, still {message}")
        await self._world.write_fork(fork, fork_waits(fork, reason, message))
        return max(0.0, self._left(fork))

    async def _no_room(self, fork: Fork, refused: AtCapacity) -> float | None:
        uid = fork.metadata.uid
        self._world.waiting.for_room(uid, loop_now())
        fork = self._world.forks.get(uid) or fork
        left = self._left(fork)
        if left <= 0:
            self._world.records.remove_fork(uid)
            return await self._fail(
                fork, refused.reason, f"there was no room {_limit(fork)}: {refused.message}"
            )
        await self._world.write_fork(
            fork, fork_waits(fork, refused.reason, f"waiting for room: {refused.message}")
        )
        return min(left, ROOM_RETRY_SECONDS)

    async def _too_late(self, fork: Fork) -> float | None:
        """Its time is over. That there was no room says more than that."""
        room = self._world.waiting.lacks_room(fork.metadata.uid)
        reason = Reason.AT_CAPACITY if room else Reason.DEADLINE_EXCEEDED
        why = "there was no room" if room else "it was not ready"
        self._world.records.remove_fork(fork.metadata.uid)
        return await self._fail(fork, reason, f"{why} {_limit(fork)}")

    def _left(self, fork: Fork) -> float:
        """Seconds until it has to be ready."""
        return self._until.get(fork.metadata.uid, boot_now()) - boot_now()

    async def _doomed(self, fork: Fork, node: Node) -> float | None:
        """Something above is deleted, and the garbage collector deletes what hangs there already."""
        if fork.status.phase.terminal:
            return None
        if not fork.metadata.owner_references:
            return await self._fail(fork, Reason.SOURCE_GONE, "its source was deleted while it was forked")
        left = (node.doomed_at or 0.0) + DOOMED_GRACE_SECONDS - loop_now()
        if left > 0:
            return left
        return await self._fail(
            fork, Reason.PARENT_LOST, "something above it was deleted, and its machines with it"
        )

    async def _fail(self, fork: Fork, reason: Reason, message: str) -> float:
        """Say so for good. Until it is written nothing is tried again; then what is left may go."""
        uid = fork.metadata.uid
        self._verdicts.setdefault(uid, (reason, message))
        await self._pronounce(self._world.forks.get(uid) or fork)
        return 0.0

    async def _pronounce(self, fork: Fork) -> None:
        uid = fork.metadata.uid
        reason, message = self._verdicts[uid]
        if not fork.status.phase.terminal:
            await self._world.write_fork(fork, fork_fails(fork, reason, message, wall_now()))
            log.error("fork_failed uid=%s reason=%s message=%r", uid, reason, message)
            self._world.announcer.say(Subject.of(fork), EventReason.REJECTED, f"{reason}: {message}")
        self._over(uid)

    def _over(self, uid: Uid) -> None:
        self._verdicts.pop(uid, None)
        self._seen.pop(uid, None)
        self._until.pop(uid, None)
        self._defects.over(uid)
        self._world.waiting.over(uid)

    async def _clear(self, fork: Fork) -> None:
        """End what this fork has that no Session object stands for, and forget that it was begun."""
        await self._end_loose(fork)
        if self._world.records.fork(fork.metadata.uid) is not None:
            self._world.records.remove_fork(fork.metadata.uid)

    async def _end_loose(self, fork: Fork) -> None:
        uid = fork.metadata.uid
        bound = {record.owner for record in self._world.records.sessions() if not record.ended}
        loose = [each for each in machines_of_fork(self._world.engine, uid) if each.owner not in bound]
        point = self._world.point(point_owner(uid))
        await reap(self._world.engine, loose, [] if point is None else [point])
        if loose or point is not None:
            log.info("ended_loose uid=%s machines=%d", uid, len(loose))
            self._world.room_changed()


def _begun(fork: Fork, plan: Begin, seen_at: float) -> ForkRecord:
    return ForkRecord(
        uid=fork.metadata.uid,
        namespace=fork.metadata.namespace or "",
        name=fork.metadata.name,
        above=plan.above.uid,
        above_kind=plan.above.kind.__name__,
        above_name=plan.above.name,
        lineage=plan.lineage,
        baseline_id=plan.baseline_id,
        seen_at=seen_at,
        seeds=seeds_of(fork.spec, plan.seed),
        parent_seed=plan.seed,
        parent_env=tuple(each.to_json() for each in plan.env),
    )


def _limit(fork: Fork) -> str:
    return f"within its timeoutSeconds of {fork.spec.timeout_seconds} s"


def _told(plan: Begin, result: ForkResult) -> str:
    """What people are told of a fork that was made."""
    pause_ms = result.clocks.pause_ms
    paused = "" if pause_ms is None else f", which stood still for {pause_ms:.1f} ms"
    source = f"{plan.above.kind.__name__.lower()} {plan.above.name}"
    return f"{len(result.children)} started from {source}{paused}"


def _made(result: ForkResult) -> ForkMade:
    clocks = result.clocks
    return ForkMade(
        point_id=result.point.id,
        point_bytes=result.point.bytes,
        children=tuple(started(each, fork_ms=clocks.fork_ms) for each in result.children),
        pause_ms=clocks.pause_ms,
        fork_ms=clocks.fork_ms,
        ready_ms=clocks.ready_ms,
    )
