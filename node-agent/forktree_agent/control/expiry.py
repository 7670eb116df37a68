"""The clocks of trees: machines of idle sessions are released, and trees whose time is over are deleted."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime

import msgspec

from forktree.errors import ForktreeError
from forktree.kube.errors import Conflict, KubeError, NotFound
from forktree.kube.events import Subject
from forktree.models import EventReason, Session, Uid
from forktree.models.names import HEARTBEAT_ANNOTATION
from forktree.models.texts import is_object_name
from forktree_agent.control.decide_expiry import (
    Answer,
    Heartbeat,
    Missing,
    Renewed,
    Unanswered,
    age_verdict,
    heard,
    heartbeat_verdict,
    idle_verdict,
    latest,
)
from forktree_agent.control.owners import owner_of
from forktree_agent.control.records import SessionRecord
from forktree_agent.control.together import each_of
from forktree_agent.control.world import World, loop_now, wall_now
from forktree_agent.engine.contract import MachineGone, MachineId

log = logging.getLogger(__name__)

READS_AT_ONCE = 8


class _LeaseSpec(msgspec.Struct, frozen=True, rename="camel"):
    renew_time: str | None = None
    lease_duration_seconds: float | None = None


class _Lease(msgspec.Struct, frozen=True):
    spec: _LeaseSpec = _LeaseSpec()


class Expiry:
    """Looks at all clocks of this node's trees now and then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._heartbeats: dict[Uid, Heartbeat] = {}
        self._read_at: dict[Uid, float] = {}

    async def run(self) -> None:
        """Look every `Settings.expiry_seconds`. Never ends by itself."""
        await self._world.synced.wait()
        while True:
            try:
                await self.once()
            except ForktreeError as err:
                log.warning("expiry_given_up reason=%s error=%r", err.reason, err.message)
            except Exception:  # The task's edge: the next look may well work.
                log.exception("expiry_broke")
            await asyncio.sleep(self._world.settings.expiry_seconds)

    async def once(self) -> None:
        """One look at every clock. What could not be done is found due again by the next."""
        self._release_idle()
        roots = [
            each for each in self._world.sessions.all() if each.spec.is_root and not each.metadata.deleting
        ]
        for root in roots:
            await self._end_old(root, wall_now())
        await self._end_silent(roots)

    # Idle sessions ----------------------------------------------------------------------------------------

    def _release_idle(self) -> None:
        """Note which are to be released; their own workers do it. Nothing is waited for in between."""
        world = self._world
        running = {each.owner: each.id for each in world.engine.machines()}
        live = {
            record.uid: record
            for record in world.records.sessions()
            if record.uid is not None and not record.ended and record.owner in running
        }
        for uid, record in live.items():
            if record.lineage.limits.idle_seconds is not None and self._is_busy(running[record.owner]):
                world.activity.touch(uid)
        own = world.activity.of(live, lambda uid: uid in live or world.tree.get(uid) is not None)
        active_at = latest(own, self._above)
        for uid, record in live.items():
            why = idle_verdict(record.lineage.limits, active_at[uid], loop_now())
            if why is not None and record.expired is None:
                self._expire(uid, record, why)

    def _is_busy(self, machine: MachineId) -> bool:
        """A command runs in it, whether or not anybody waits for that."""
        try:
            return any(not each.ended for each in self._world.engine.execs(machine))
        except MachineGone:
            return False

    def _expire(self, uid: Uid, record: SessionRecord, why: str) -> None:
        # Noted before anything is ended: after a crash it is still an expiry, and not a lost machine.
        self._world.records.put_session(msgspec.structs.replace(record, expired=why))
        log.info("session_expired uid=%s", uid)
        self._world.session_work.poke(uid)

    def _above(self, uid: Uid) -> Uid | None:
        node = self._world.tree.get(uid)
        return None if node is None else node.above

    # Old trees, and those of dead trainers ----------------------------------------------------------------

    async def _end_old(self, root: Session, now: datetime) -> None:
        record = self._world.records.session(owner_of(root))
        if record is None:
            return  # It never had a machine here, or its node was rebooted: nothing of it is alive.
        why = age_verdict(record.lineage.limits, root.metadata.creation_timestamp, now)
        if why is not None:
            await self._delete(root, why)

    async def _end_silent(self, roots: list[Session]) -> None:
        """Ask for the heartbeats that are due, and end the trees whose is silent."""
        leases = {
            root.metadata.uid: lease
            for root in roots
            if (lease := root.metadata.annotations.get(HEARTBEAT_ANNOTATION))
        }
        self._heartbeats = {uid: beat for uid, beat in self._heartbeats.items() if uid in leases}
        self._read_at = {uid: at for uid, at in self._read_at.items() if uid in leases}
        due = [root for root in roots if root.metadata.uid in leases and self._due(root.metadata.uid)]
        await each_of(due, lambda root: self._listen(root, leases[root.metadata.uid]), at_once=READS_AT_ONCE)

    def _due(self, uid: Uid) -> bool:
        beat = self._heartbeats.get(uid)
        return beat is None or beat.due(self._read_at.get(uid, float("-inf")), loop_now())

    async def _listen(self, root: Session, lease: str) -> None:
        uid = root.metadata.uid
        answer = await self._read(root.metadata.namespace or "", lease)
        now = loop_now()
        self._read_at[uid] = now
        beat = self._heartbeats[uid] = heard(lease, self._heartbeats.get(uid), answer, now)
        why = heartbeat_verdict(beat, now)
        if why is not None:
            await self._delete(root, why)

    async def _read(self, namespace: str, name: str) -> Answer:
        if not is_object_name(name):
            return Missing()  # No object can have it, and it must not become part of a path.
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        try:
            lease = msgspec.json.decode(await self._world.client.raw("GET", path), type=_Lease)
        except NotFound:
            return Missing()
        except (KubeError, msgspec.MsgspecError) as err:
            log.warning("heartbeat_not_read lease=%s/%s error=%r", namespace, name, str(err))
            return Unanswered()
        return Renewed(lease.spec.renew_time, lease.spec.lease_duration_seconds)

    async def _delete(self, root: Session, why: str) -> None:
        """Delete the root's object; all below it goes as with any deletion."""
        metadata = root.metadata
        try:
            await self._world.client.delete(
                Session, metadata.namespace, metadata.name, uid=metadata.uid, propagation="Background"
            )
        except (NotFound, Conflict):
            return  # Gone already; the watch says so.
        except KubeError as err:
            log.warning("tree_not_expired root=%s error=%r", metadata.uid, err.message)
            return
        log.info("tree_expired root=%s why=%r", metadata.uid, why)
        self._world.announcer.say(Subject.of(root), EventReason.EXPIRED, f"the tree was deleted: {why}")
