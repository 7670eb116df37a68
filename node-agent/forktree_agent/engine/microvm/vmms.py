"""QEMU processes: started through the keeper, spoken to over three channels, ended by one ladder."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forktree_agent.commons import Commons
from forktree_agent.engine.contract import AtCapacity, EgressForbidden, EngineError, MachineGone
from forktree_agent.engine.microvm import egress
from forktree_agent.engine.microvm.answering import Answering
from forktree_agent.engine.microvm.arguments import Boot, Descriptor, Wiring, qemu_arguments
from forktree_agent.engine.microvm.guest import GuestChannel
from forktree_agent.engine.microvm.guest_execs import ExecTally
from forktree_agent.engine.microvm.guest_line import NODE_BACKLOG_BYTES, GuestError
from forktree_agent.engine.microvm.keeping import asking, soon
from forktree_agent.engine.microvm.kept_output import NODE_BYTES, Allowance
from forktree_agent.engine.microvm.monitor import Monitor
from forktree_agent.engine.microvm.pace import Pace
from forktree_agent.engine.microvm.shim import NoShim, ShimClient
from forktree_agent.engine.microvm.tracking import track
from forktree_agent.engine.microvm.vcpus import Vcpus
from forktree_agent.keeper_client import (
    Channel,
    ChannelType,
    Code,
    Exit,
    Keeper,
    KeeperError,
    child_descriptor,
)

if TYPE_CHECKING:
    import socket

    from forktree_agent.engine.microvm.images import GuestDirectory
    from forktree_agent.engine.microvm.records import Build
    from forktree_agent.engine.microvm.settings import EngineSettings

log = logging.getLogger(__name__)

CHANNELS = (
    Channel("monitor", ChannelType.STREAM),
    Channel("guest", ChannelType.STREAM),
    Channel("shim", ChannelType.SEQPACKET),
)
NAME_PREFIX = "forktree-"
EGRESS_OFF = (
    "this node lets no machine reach the outside: start its agent with --egress, or take a template without"
    " network.egress"
)


@dataclass(frozen=True, slots=True)
class Group:
    """A control group: a tree's, or the one in which a template is baked."""

    name: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VmmOrder:
    """One QEMU to be started."""

    name: str
    uid: int
    build: Build
    ram: int
    """Descriptor of the file behind its guest RAM."""
    disk: int
    """Descriptor of its root disk."""
    group: str


@dataclass(slots=True)
class Vmm:
    """One running QEMU and our ends of its channels."""

    name: str
    uid: int
    build: Build
    monitor: Monitor
    shim: ShimClient
    guest: GuestChannel
    answering: Answering
    closing: asyncio.Event
    untracked: str | None = "it was not asked yet"
    """Why its writes are not noted; None where they are."""
    pace: Pace = field(default_factory=Pace)
    vcpus: Vcpus = field(default_factory=Vcpus)
    """None are known of one that was booted or taken over: they have no siblings to give way to."""
    network_lost: str | None = None
    """How its way to the outside ended. None: it did not, or it never had one."""

    @property
    def tracked(self) -> bool:
        return self.untracked is None

    def check_network(self) -> None:
        """Raises `MachineGone` where its way out has ended: nobody has relied on it yet, and better none than
        one without."""
        if self.network_lost is not None:
            raise MachineGone(f"its way to the outside was lost: {self.network_lost}")

    async def serve(self) -> None:
        """Read the guest's channel until told to close. The one task that belongs to this machine.

        A guest that breaks its channel does not end it: whoever asks that guest next is told.
        """
        try:
            async with self.guest.running():
                await self.closing.wait()
        finally:
            await self.monitor.close()
            self.shim.close()


class Vmms:
    """Starts and ends QEMU processes. Every one has a user id and a network namespace to itself."""

    def __init__(
        self,
        settings: EngineSettings,
        guest: GuestDirectory,
        keeper: Keeper,
        tasks: asyncio.TaskGroup,
        *,
        counter_khz: int | None,
    ) -> None:
        self._settings = settings
        self._guest = guest
        self._keeper = keeper
        self._tasks = tasks
        self._allowance = Allowance(NODE_BYTES)
        self._backlog = Commons(NODE_BACKLOG_BYTES)
        self.exec_tally = ExecTally()
        """How commands ended, in all machines."""
        self._counter_khz = counter_khz
        self._vmms: dict[str, Vmm] = {}
        self._uids: set[int] = set()
        self._groups: dict[str, set[str]] = {}
        self._lost_early: dict[str, str] = {}
        """How the ways out ended of machines that are in a group and that we have no channels of yet."""
        self.no_egress: str | None = "the wall around machines with egress is not up yet"
        """Why no machine with egress can be started, in a sentence; None where one can."""

    async def raise_wall(self, *, deadline: float) -> None:
        """Let machines with egress be started, where the node is told to, and only behind its wall."""
        wanted, settings = self._settings.egress, self._settings
        if wanted is None:
            self.no_egress = EGRESS_OFF
            return
        with asking("the wall around machines with egress"):
            try:
                await self._keeper.raise_wall(
                    first_uid=settings.uid_base,
                    uids=settings.uid_count,
                    allow=wanted.allow,
                    deny=wanted.deny,
                    deadline=deadline,
                )
            except KeeperError as err:
                self.no_egress = f"this node cannot put up the wall that egress needs: {err.message}"
            else:
                self.no_egress = None
        if self.no_egress is not None:
            log.error("no_wall message=%r", self.no_egress)

    def lose_network(self, name: str, text: str) -> None:
        """Note that a machine's way to the outside has ended; it runs on.

        That can be heard before the answer to its start is: it is noted as soon as there is a machine then.
        """
        vmm = self._vmms.get(name)
        if vmm is not None:
            vmm.network_lost = text
        elif any(name in members for members in self._groups.values()):
            self._lost_early[name] = text
        else:
            return  # It is being ended.
        log.error("network_lost machine=%s text=%r", name, text)

    def disks(self) -> frozenset[str]:
        """Digests of the root disks that machines have, those that wait for a fork among them."""
        return frozenset(vmm.build.image_sha256 for vmm in self._vmms.values())

    def take_uid(self) -> int:
        """A user id that no machine has. Raises `AtCapacity` when all are taken."""
        first = self._settings.uid_base
        for uid in range(first, first + self._settings.uid_count):
            if uid not in self._uids:
                self._uids.add(uid)
                return uid
        raise AtCapacity(f"all {self._settings.uid_count} user ids for machines are in use")

    def uids_left(self) -> int:
        return self._settings.uid_count - len(self._uids)

    def keep_uid(self, uid: int) -> None:
        """Note that a machine that was adopted has this user id."""
        self._uids.add(uid)

    def give_back_uid(self, uid: int) -> None:
        self._uids.discard(uid)

    async def join(self, group: Group, name: str, *, deadline: float) -> None:
        """Say that machine `name` is about to start in `group`, which exists until its last has ended."""
        self.note_group(group.name, (name,))
        with asking(group.name):
            await self._keeper.limit_cgroup(group.name, group.memory_bytes, deadline=deadline)

    def note_group(self, group: str, machines: Iterable[str]) -> None:
        """Note that these belong to a group, whether they run or not: it goes with the last that is ended."""
        self._groups.setdefault(group, set()).update(machines)

    async def boot(self, order: VmmOrder, overlay_bytes: int, *, deadline: float) -> Vmm:
        """Start a machine that boots, its RAM written through to its file."""
        vmm, _ = await self._start(order, overlay_bytes, deadline=deadline)
        return vmm

    async def wait_for_state(self, order: VmmOrder, *, deadline: float) -> Vmm:
        """Start a machine that waits for device state, its RAM a private view of its file."""
        vmm, pid = await self._start(order, None, deadline=deadline)
        async with self.unborn(order.name):
            vmm.vcpus = Vcpus.of(pid, await vmm.monitor.vcpu_threads())
            vmm.vcpus.give_way()
            await vmm.shim.hello(order.build.memory_bytes, deadline=deadline)
            # QEMU may have written to RAM while it started; a fresh mapping makes it the file's again.
            await vmm.shim.map_all(order.ram, order.build.memory_bytes, deadline=deadline)
            await self._track(vmm, deadline=deadline)
        return vmm

    async def resume(self, name: str, uid: int, build: Build, *, deadline: float) -> Vmm:
        """Take over a machine that an earlier agent left, whatever it was in the middle of. It stays in that:
        what it is meant to be is the caller's to say."""
        with asking(name):
            channels = await self._keeper.lend(name, deadline=deadline)
        vmm = self._wired(name, uid, build, channels)
        await vmm.monitor.resume(deadline=deadline)
        await vmm.shim.resume(deadline=deadline)
        await self._track(vmm, deadline=deadline)
        return vmm

    async def end(self, name: str) -> Exit | None:
        """Kill, reap, and free what was this machine's own. Idempotent.

        There is no asking first: a machine that is to go has no state that anybody wants.
        """
        vmm = self._vmms.pop(name, None)
        if vmm is not None:
            vmm.closing.set()
        ended = None
        with asking(name):
            try:
                ended = await self._keeper.kill(name, deadline=soon())
                await self._keeper.forget(name, deadline=soon())
            except KeeperError as err:
                if err.code is not Code.NO_SUCH_MACHINE:
                    raise
        await self._leave_group(name)
        return ended

    async def _leave_group(self, name: str) -> None:
        self._lost_early.pop(name, None)
        for members in self._groups.values():
            members.discard(name)
        # Out of the table before anything is awaited: of two that end together only one drops a group.
        emptied = [group for group, members in self._groups.items() if not members]
        for group in emptied:
            del self._groups[group]
        for group in emptied:
            await self._drop_group(group)

    async def _drop_group(self, group: str) -> None:
        """What the machine held is given back whether or not this works; the next that ends tries again."""
        if group in self._groups:
            return  # Somebody joined it while we were at another.
        try:
            with asking(group):
                await self._keeper.drop_cgroup(group, deadline=soon())
        except EngineError as err:
            self._groups.setdefault(group, set())
            log.warning("group_not_dropped group=%s error=%r", group, err.message)

    @asynccontextmanager
    async def unborn(self, name: str) -> AsyncGenerator[None]:
        """While a machine is started: should its QEMU end, `MachineGone` says how, and not by what we saw it.

        A QEMU that still runs but cannot be trusted is said to be so.
        """
        try:
            yield
        except (GuestError, NoShim):
            raise
        except MachineGone:
            raise MachineGone(await self.autopsy(name)) from None

    async def autopsy(self, name: str) -> str:
        """How a machine that left us ended, and the last it said: nobody can run it again to find out."""
        with asking(name):
            try:
                # Its channels close a moment before it can be reaped; this waits for that, and takes no
                # machine away that anybody could still use.
                ended = (await self._keeper.kill(name, deadline=soon())).text
            except KeeperError as err:
                ended = f"is not known to the keeper ({err.code})"
        said = self.last_words(name)
        return f"QEMU {ended}" + (f"; it said: {said}" if said else "")

    async def own_bytes(self, name: str) -> int:
        """Memory that the machine's QEMU has for itself alone: what its guest changed, and its own."""
        with asking(name):
            return await self._keeper.own_bytes(name, deadline=soon())

    def last_words(self, name: str) -> str:
        """The end of a machine's log: QEMU's own complaints, and while it boots its console."""
        return self._keeper.log_tail(name).strip()

    async def _start(self, order: VmmOrder, overlay_bytes: int | None, *, deadline: float) -> tuple[Vmm, int]:
        """The machine and its process id, in the keeper's namespace. Raises `EgressForbidden`."""
        has_egress = order.build.egress
        if has_egress and self.no_egress is not None:
            raise EgressForbidden(self.no_egress)
        with ExitStack() as opened:
            files = [
                order.ram,
                order.disk,
                _open(self._settings.shim_library, opened),
            ]
            if overlay_bytes is not None:
                files += [_open(self._guest.kernel, opened), _open(self._guest.initrd, opened)]
            at = [Descriptor(child_descriptor(i)) for i in range(len(files) + len(CHANNELS) + 1)]
            monitor, guest, shim, network = at[len(files) :]
            arguments = qemu_arguments(
                self._settings.qemu_binary,
                NAME_PREFIX + order.name,
                accelerator=order.build.accelerator,
                vcpus=order.build.vcpus,
                memory_bytes=order.build.memory_bytes,
                wiring=Wiring(
                    ram=at[0],
                    root_disk=at[1],
                    monitor=monitor,
                    guest=guest,
                    network=network if has_egress else None,
                ),
                boot=None
                if overlay_bytes is None
                else Boot(
                    kernel=at[3],
                    initrd=at[4],
                    overlay_bytes=overlay_bytes,
                    network=has_egress,
                    counter_khz=self._counter_khz,
                ),
            )
            with asking(order.name):
                started = await self._keeper.start(
                    order.name,
                    arguments,
                    env={"LD_PRELOAD": f"/proc/self/fd/{at[2]}", "FORKTREE_SHIM_FD": str(shim)},
                    uid=order.uid,
                    gid=_gid(order.build.accelerator, order.uid),
                    cgroup=order.group,
                    network_namespace=True,
                    files=files,
                    channels=CHANNELS,
                    companion=egress.companion() if has_egress else None,
                    deadline=deadline,
                )
        vmm = self._wired(order.name, order.uid, order.build, started.channels)
        async with self.unborn(order.name):
            await vmm.monitor.connect(deadline=deadline)
        return vmm, started.pid

    async def _track(self, vmm: Vmm, *, deadline: float) -> None:
        vmm.untracked = await track(vmm.shim, self._settings.write_tracking, deadline=deadline)

    def why_untracked(self, name: str) -> str | None:
        """Why what this machine writes is not noted; None where it is. Raises `MachineGone`."""
        vmm = self._vmms.get(name)
        if vmm is None:
            raise MachineGone(f"machine {name} does not run")
        return vmm.untracked

    def _wired(self, name: str, uid: int, build: Build, channels: Mapping[str, socket.socket]) -> Vmm:
        vmm = Vmm(
            name=name,
            uid=uid,
            build=build,
            monitor=Monitor(channels["monitor"], name),
            shim=ShimClient(channels["shim"]),
            guest=GuestChannel(channels["guest"], name, self._allowance, self.exec_tally, self._backlog),
            answering=Answering(self._settings.answer_seconds),
            closing=asyncio.Event(),
            network_lost=self._lost_early.pop(name, None),
        )
        self._vmms[name] = vmm
        self._tasks.create_task(vmm.serve(), name=f"guest-{name}")
        return vmm

    def close(self) -> None:
        """Let go of all channels; the machines run on."""
        for vmm in self._vmms.values():
            vmm.closing.set()
        self._vmms.clear()


def tree_group(tree: str) -> str:
    """Name of the control group that all machines of a tree share."""
    return f"tree-{tree}"


def _open(path: Path, opened: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return descriptor


def _gid(accelerator: str, uid: int) -> int:
    """A group of its own, or the one that may open KVM's device."""
    return Path("/dev/kvm").stat().st_gid if accelerator == "kvm" else uid
