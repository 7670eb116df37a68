"""VMMs in wait: started before the fork that needs them, with all older memory of their parent in place.

Starting a QEMU takes longer than all the rest of a fork. What waits is nobody's machine: it takes no part in
what the engine says of machines, gives way to whoever needs its room, and an agent that takes over ends it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from forktree_agent.engine.contract import EngineError, MachineGone, TreeId, TreeLimits
from forktree_agent.engine.microvm.endings import to_the_end
from forktree_agent.engine.microvm.keeping import soon
from forktree_agent.engine.microvm.records import MachineRecord
from forktree_agent.engine.microvm.shim import ShimError
from forktree_agent.engine.microvm.waiting import Origin, Standby, map_layers, start_waiting
from forktree_agent.journal import JournalError

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.calm import Calm
    from forktree_agent.engine.microvm.merging import Merged
    from forktree_agent.engine.microvm.resources import Resources
    from forktree_agent.engine.microvm.vmms import Group

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What some VMMs wait for: forks of one machine, or roots of one baseline."""

    origin: Callable[[], Origin | None]
    """What a child would start from now; None once there is nothing to start from."""
    group: Group
    """Control group that they are born in, and stay in."""
    limits: TreeLimits | None
    """Of the tree they are meant for; None: of any that has no memory limit of its own."""


@dataclass(slots=True)
class _Pool:
    source: Source
    size: int
    idle: list[Standby] = field(default_factory=list[Standby])

    @property
    def tree(self) -> str | None:
        return self.source.limits.tree if self.source.limits is not None else None


class Standbys:
    """Who waits, by the id of the machine or instant that is to be forked. `run` has to run to have any."""

    def __init__(self, resources: Resources, calm: Calm, tasks: asyncio.TaskGroup) -> None:
        self._resources = resources
        self._calm = calm
        self._tasks = tasks
        self._pools: dict[str, _Pool] = {}
        """The one that was asked for last is last."""
        self._changed = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()
        self._not_ended: set[str] = set()
        """Asked for once more at the next change."""
        self._unwanted: set[str] = set()
        """Their room was taken while they were being started or caught up."""

    def keep(self, key: str, source: Source, size: int) -> None:
        """Have so many in wait from now on, as far as there is room. 0: none."""
        pool = self._pools.pop(key, None) or _Pool(source, size)
        pool.source, pool.size = source, size
        self._pools[key] = pool
        self._changed.set()

    @asynccontextmanager
    async def taken(
        self, key: str, tree: TreeId | None, chain: tuple[str, ...], count: int
    ) -> AsyncGenerator[list[Standby]]:
        """Up to `count` that have part of `chain` mapped, or all: those kept for `key`, and then those kept
        for others of the tree. A child that is forked for the first time has none of its own, but what waits
        for its parent has all that the child was born with.

        They have no room of their own any more, and are ended when the body fails.
        """
        taken = self._take(key, tree, chain, count)
        try:
            yield taken
        except BaseException:
            for standby in taken:
                self._give_up(standby)
            raise

    async def leave_out_the_dead(self, taken: list[Standby]) -> None:
        """Of what was taken, and end them. A fork must not fail for what only was to make it fast."""
        answers = await asyncio.gather(*(_answers(standby) for standby in taken))
        dead = [standby for standby, answering in zip(taken, answers, strict=True) if not answering]
        for standby in dead:
            taken.remove(standby)
            self._give_up(standby)

    def _take(self, key: str, tree: TreeId | None, chain: tuple[str, ...], count: int) -> list[Standby]:
        own = self._pools.get(key)
        if own is not None:
            for standby in [each for each in own.idle if not _begins_with(chain, each.record.chain)]:
                own.idle.remove(standby)
                self._give_up(standby)
        fitting = [
            (pool, standby)
            for pool in self._pools.values()
            if pool is own or (tree is not None and pool.tree == tree)
            for standby in pool.idle
            if _begins_with(chain, standby.record.chain)
        ]
        # Its own first, and then those that lack the least.
        fitting.sort(key=lambda each: (each[0] is own, len(each[1].record.chain)), reverse=True)
        for pool, standby in fitting[:count]:
            pool.idle.remove(standby)
            self._resources.ledger.free(standby.name)
        if fitting:
            self._changed.set()  # Others take their places, once this fork is over.
        return [standby for _, standby in fitting[:count]]

    def names(self) -> frozenset[str]:
        """Of all that a fork could take now."""
        return frozenset(standby.name for pool in self._pools.values() for standby in pool.idle)

    async def end(self, key: str) -> None:
        """End those that wait for this, and keep none. Returns when they are gone."""
        pool = self._pools.pop(key, None)
        if pool is None:
            return
        ending = [self._give_up(standby) for standby in pool.idle]
        pool.idle.clear()
        if ending:
            await asyncio.wait(ending)

    def lost(self, name: str) -> None:
        """A process has ended. If it was one of ours, another takes its place."""
        for pool in self._pools.values():
            for standby in pool.idle:
                if standby.name == name:
                    log.warning("standby_lost machine=%s", name)
                    pool.idle.remove(standby)
                    self._give_up(standby)
                    self._changed.set()
                    return

    async def shorten(self, key: str, merged: Merged) -> None:
        """Layers were merged into one, which shows the same: what is mapped stays right."""
        pool = self._pools.get(key)
        for standby in list(pool.idle) if pool is not None else []:
            chain = merged.shorten(standby.record.chain)
            if pool is not None and chain is not None and standby in pool.idle:
                record = msgspec.structs.replace(standby.record, chain=chain)
                self._resources.register(record)
                pool.idle[pool.idle.index(standby)] = Standby(record, standby.vmm)
                await self._resources.store.leave(record.id, merged.replaced)

    async def run(self) -> None:
        """Start what is missing and end what is too much, when nobody forks, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            again, self._not_ended = self._not_ended, set()
            for name in again:
                await self._end(name)
            for key, pool in list(self._pools.items()):
                try:
                    while await self._step(key, pool):
                        pass
                except (EngineError, JournalError) as err:  # Tried again after the next fork.
                    log.info("not_kept_ready for=%s reason=%s message=%r", key, err.reason, err.message)

    async def close(self) -> None:
        """Wait for those that are being ended. Those in wait are left to the next agent, which ends them."""
        if self._ending:
            await asyncio.wait(self._ending)

    async def _step(self, key: str, pool: _Pool) -> bool:
        """One VMM more, fewer, or caught up. Returns whether there may be more to do."""
        await self._calm.comes()
        origin = pool.source.origin()
        if self._pools.get(key) is not pool:
            return False
        if origin is None or pool.size == 0:
            del self._pools[key]
            self._give_up_all(pool)
            return False
        for standby in list(pool.idle):
            if len(pool.idle) > pool.size or not _begins_with(origin.chain, standby.record.chain):
                pool.idle.remove(standby)
                self._give_up(standby)
        behind = next((each for each in pool.idle if each.record.chain != origin.chain), None)
        if behind is not None:
            pool.idle.remove(behind)
            self._settle(key, pool, await self._caught_up(behind, origin))
            return True
        if len(pool.idle) >= pool.size or not self._may_start(pool):
            return False
        self._settle(key, pool, await self._started(pool, origin))
        return True

    def _settle(self, key: str, pool: _Pool, standby: Standby | None) -> None:
        """Into its pool, unless nobody wants it any more."""
        if standby is None:
            return
        unwanted = standby.name in self._unwanted
        self._unwanted.discard(standby.name)
        if unwanted or self._pools.get(key) is not pool:
            self._give_up(standby)
        else:
            pool.idle.append(standby)

    async def _caught_up(self, standby: Standby, origin: Origin) -> Standby | None:
        """With the layers mapped that its parent has had since. None where that failed."""
        record = msgspec.structs.replace(standby.record, chain=origin.chain)
        new = origin.chain[len(standby.record.chain) :]
        try:
            self._resources.register(record)
            await map_layers(self._resources, standby.vmm, new, deadline=soon())
            standby.vmm.check_network()
        except (EngineError, JournalError) as err:
            log.info("standby_not_caught_up machine=%s message=%r", standby.name, err.message)
            self._give_up(standby)
            return None
        except BaseException:
            self._give_up(standby)
            raise
        return Standby(record, standby.vmm)

    def _may_start(self, pool: _Pool) -> bool:
        """Whether the bounds allow one more: one that was kept for an older parent makes place."""
        settings = self._resources.settings
        others = [each for each in self._pools.values() if each is not pool and each.tree is not None]
        of_tree = [each for each in others if each.tree == pool.tree] if pool.tree is not None else []
        in_tree = sum(len(each.idle) for each in of_tree) + len(pool.idle)
        if pool.tree is not None and in_tree >= settings.standbys_per_tree:
            return self._make_place(of_tree)
        if sum(len(each.idle) for each in self._pools.values()) >= settings.standbys_per_node:
            return self._make_place(others)
        # What is only there ahead of time leaves user ids to machines.
        return self._resources.vmms.uids_left() > settings.uid_count // 2

    def _make_place(self, pools: Iterable[_Pool]) -> bool:
        for pool in pools:
            if pool.idle:
                self._give_up(pool.idle.pop(0))
                pool.size = len(pool.idle)  # It would ask for its place back.
                return True
        return False

    async def _started(self, pool: _Pool, origin: Origin) -> Standby:
        name = f"m-{uuid.uuid4().hex[:12]}"
        resources, source = self._resources, pool.source
        size_bytes = origin.build.admitted_bytes
        resources.ledger.spare(name, size_bytes, source.limits, give_up=partial(self._evict, pool, name))
        try:
            record = MachineRecord(
                id=name,
                owner="",
                tree=pool.tree or "",
                baseline=origin.baseline,
                generation="",
                uid=resources.vmms.take_uid(),
                chain=origin.chain,
                build=origin.build,
                waiting=True,
            )
            try:
                resources.register(record)
            except (JournalError, EngineError):
                resources.vmms.give_back_uid(record.uid)
                raise
            await resources.vmms.join(source.group, name, deadline=soon())
            vmm = await start_waiting(resources, record, source.group.name, deadline=soon())
            vmm.check_network()
        except BaseException:
            self._unwanted.discard(name)
            await to_the_end(self._end(name), f"undo-{name}")
            raise
        return Standby(record, vmm)

    def _evict(self, pool: _Pool, name: str) -> None:
        """Its room was taken."""
        for standby in pool.idle:
            if standby.name == name:
                pool.idle.remove(standby)
                self._give_up(standby)
                return
        self._unwanted.add(name)

    def _give_up_all(self, pool: _Pool) -> None:
        for standby in pool.idle:
            self._give_up(standby)
        pool.idle.clear()

    def _give_up(self, standby: Standby) -> asyncio.Task[None]:
        """Its room is free at once; its process ends in a moment."""
        self._resources.ledger.free(standby.name)
        self._unwanted.discard(standby.name)
        task = self._tasks.create_task(self._end(standby.name), name=f"give-up-{standby.name}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _end(self, name: str) -> None:
        try:
            await self._resources.end_machine(name)
        except (EngineError, JournalError) as err:
            self._not_ended.add(name)
            log.warning("standby_not_ended machine=%s error=%r", name, err.message)


def _begins_with(chain: tuple[str, ...], part: tuple[str, ...]) -> bool:
    return chain[: len(part)] == part


async def _answers(standby: Standby) -> bool:
    """Whether it is still there."""
    vmm = standby.vmm
    try:
        hello = vmm.shim.hello(vmm.build.memory_bytes, deadline=soon())
        await vmm.answering.to(hello, "the shim's HELLO")
        vmm.check_network()
    except (MachineGone, ShimError) as err:
        log.warning("standby_lost machine=%s message=%r", standby.name, err.message)
        return False
    return True
