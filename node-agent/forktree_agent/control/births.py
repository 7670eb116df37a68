"""The machines of a Fork: all of them, and noted, or none; and beside them its place in its tree."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from forktree.errors import ForktreeError
from forktree.kube.events import Subject
from forktree.metrics.table import Road, Stage
from forktree.models import EventReason, Fork, ForkPhase, Mode, Uid
from forktree.models.session_template import EnvVar
from forktree_agent.control import news
from forktree_agent.control.belonging import adopted
from forktree_agent.control.decide_fork import Begin, told
from forktree_agent.control.defects import Defects
from forktree_agent.control.environment import resolved
from forktree_agent.control.fork_statuses import fork_goes_on
from forktree_agent.control.identity import child_orders
from forktree_agent.control.noting import fork_begun, fork_made
from forktree_agent.control.owners import is_early, point_owner
from forktree_agent.control.reaping import machines_of_fork, reap
from forktree_agent.control.records import ForkMade, ForkRecord
from forktree_agent.control.tree import place_of
from forktree_agent.control.world import World, boot_now, loop_now
from forktree_agent.engine.contract import (
    AtCapacity,
    EngineError,
    ForkResult,
    MachineId,
    ParentLost,
    PointId,
    TreeId,
    TreeLimits,
)
from forktree_agent.journal import JournalError

log = logging.getLogger(__name__)

SLOW_FORK_SECONDS = 1.0
"""After which a Fork says that it is under way. A usual one is done before, and saves the write."""


class Births:
    """Has the engine make the machines of forks."""

    def __init__(self, world: World, tasks: asyncio.TaskGroup) -> None:
        self._world = world
        self._tasks = tasks
        self._defects = Defects()

    def over(self, uid: Uid) -> None:
        """The fork is done or gone."""
        self._defects.over(uid)

    async def born(
        self, fork: Fork, plan: Begin, *, seen_at: float, deadline: float
    ) -> tuple[ForkResult | BaseException, BaseException | None]:
        """The machines and, beside them, the Fork's place in its tree: what became of either.

        `seen_at` is as in its record, `deadline` loop time. Raises `JournalError`; nothing was begun then.
        """
        record = fork_begun(fork, plan, seen_at, self._world.traces.of(fork))
        self._world.records.put_fork(record)
        # From here on what is deleted above takes this fork along, though no object says so yet.
        self._world.tree.place(place_of(fork), plan.above, now=loop_now())
        return await asyncio.gather(
            self._followed(fork, plan, record, deadline),
            adopted(self._world, fork, record),
            return_exceptions=True,
        )

    async def early(self, fork: Fork, plan: Begin, *, seen_at: float, deadline: float) -> ForkRecord:
        """The machines of a fork that has no object yet, as soon as all of them run.

        `fork` is what its object will be, but for its uid, and starts from a session. Nothing is left after a
        failure. Raises what `Engine.fork` does, `SecretUnreadable`, `KubeError` where a Secret had to be
        read, and `JournalError`.
        """
        uid = fork.metadata.uid
        record = fork_begun(fork, plan, seen_at, self._world.traces.of(fork))
        self._world.records.put_fork(record)
        self._world.tree.place(place_of(fork), plan.above, now=loop_now())
        try:
            await self._followed(fork, plan, record, deadline)
        except BaseException:
            self._world.records.remove_fork(uid)
            self._world.tree.drop(uid)
            raise
        made = self._world.records.fork(uid)
        if made is None:
            raise ParentLost(f"session {plan.above.name} was deleted while it was forked")
        return made

    async def _followed(self, fork: Fork, plan: Begin, record: ForkRecord, deadline: float) -> ForkResult:
        with self._world.traces.on(record.trace):
            return await self._branched(fork, plan, record, deadline)

    async def _branched(self, fork: Fork, plan: Begin, record: ForkRecord, deadline: float) -> ForkResult:
        """The machines, noted as soon as they are there."""
        early = is_early(fork.metadata.uid)
        road = Road.EARLY if early else Road.OBJECT
        limits = TreeLimits(
            tree=TreeId(plan.lineage.root),
            memory_bytes=plan.lineage.limits.memory_bytes,
            pause_budget_ms=plan.lineage.limits.pause_budget_ms,
        )
        orders = child_orders(fork, plan.lineage, record.seeds, await self._environments(fork, plan))
        deadline = min(deadline, loop_now() + self._world.settings.fork_seconds)
        engine, hooks = self._world.engine, plan.lineage.hooks.commands()
        telling = self._tasks.create_task(self._tell_if_slow(fork.metadata.uid), name="slow-fork")
        try:
            if plan.earlier:
                forking = engine.branch(PointId(plan.origin), orders, limits, hooks=hooks, deadline=deadline)
            else:
                machine, owner = MachineId(plan.origin), point_owner(fork.metadata.uid)
                forking = engine.fork(
                    machine, owner, orders, limits, hooks=hooks, answered=not early, deadline=deadline
                )
            result = await self._defects.guarded(fork.metadata.uid, forking)
        except AtCapacity:
            self._world.metrics.had_no_room(road)
            raise
        finally:
            telling.cancel()
        try:
            total_ms = (boot_now() - record.seen_at) * 1000 if early else None
            self._world.records.put_fork(
                msgspec.structs.replace(record, result=fork_made(result), total_ms=total_ms)
            )
        except JournalError as err:
            # The next agent would end them too, and nobody has heard of them.
            await end_loose(self._world, fork.metadata.uid, fork.spec.replicas)
            raise EngineError(f"its machines were ended, as they could not be noted: {err.message}") from err
        self._world.use_changed.set()
        clocks = result.clocks
        mode = mode_of(result)
        self._world.metrics.forked(road, mode, clocks)
        self._world.traces.forked(record, road, mode, clocks)
        if total_ms is not None:
            self._world.metrics.fork_took(road, mode, Stage.TOTAL, total_ms)
        log.info(
            "forked uid=%s children=%d pause_ms=%s fork_ms=%.1f ready_ms=%s",
            fork.metadata.uid, len(result.children), clocks.pause_ms, clocks.fork_ms, clocks.ready_ms,
        )  # fmt: skip
        if not early:
            self._world.announcer.say(
                Subject.of(fork),
                EventReason.FORKED,
                news.forked(fork_made(result), plan.above.kind.__name__, plan.above.name),
            )
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


def mode_of(made: ForkResult | ForkMade) -> Mode:
    """How its machines came to be; an instant that was only held is one of a fork."""
    return made.children[0].mode if made.children else Mode.FORK


async def end_loose(world: World, uid: Uid, replicas: int) -> None:
    """End what a fork has that no Session object stands for: nobody has heard of it."""
    loose = [
        each
        for each in machines_of_fork(world.engine, uid, replicas)
        if (record := world.records.session(each.owner)) is None or record.ended
    ]
    point = world.point(point_owner(uid))
    await reap(world.engine, loose, [] if point is None else [point])
    if loose or point is not None:
        log.info("ended_loose uid=%s machines=%d", uid, len(loose))
        world.room_changed()
