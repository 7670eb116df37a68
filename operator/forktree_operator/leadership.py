"""Who of several operators works: the one that holds a Lease.

Clocks of two machines may differ, so a foreign Lease counts as run out only after it has stayed the same for
its duration on this process's own clock. Even two leaders at once do no harm, because every write holds only
against the version that it was decided upon; they would only do the work twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from forktree.kube.client import KubeClient
from forktree.kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from forktree.models.base import ObjectMeta
from forktree_operator.cluster import Lease, LeaseSpec
from forktree_operator.health import Health

log = logging.getLogger(__name__)

LEASE_NAME: Final = "forktree-operator"
_RENEWALS: Final = 5
"""In one duration, so that some may fail."""
_GIVE_UP_SHARE: Final = 5 / 6
"""Of the duration without a renewal after which a leader stops: before anybody else may begin. Not long
before, as each leader that stops because the API server is slow leaves some seconds without one."""
_RELEASE_SECONDS: Final = 2.0
_RUN_OUT_MARGIN_SECONDS: Final = 0.05
"""After a foreign Lease ran out, so that the next try finds it so."""


class LeadershipLost(Exception):
    """Somebody else leads, or nobody can tell. Whatever works as the leader has to stop."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A foreign Lease, and since when it is the same."""

    renewed: datetime | None
    holder: str | None
    since: float
    duration_seconds: float


class Leadership:
    """One operator's part in the election. Not held at first."""

    def __init__(
        self, client: KubeClient, *, namespace: str, identity: str, lease_seconds: float, health: Health
    ) -> None:
        self._client, self._namespace, self._identity = client, namespace, identity
        self._lease_seconds = math.ceil(lease_seconds)  # The API has whole seconds only.
        self._health = health
        self._lease: Lease | None = None
        self._seen: _Seen | None = None
        self._renewed_at = float("-inf")

    async def acquire(self, stop: asyncio.Event) -> bool:
        """Wait until the Lease is held. False if `stop` came before."""
        waiting = False
        while not stop.is_set():
            try:
                taken = await self._take()
                self._health.knows_leader = True
                if taken:
                    log.info("leading identity=%s", self._identity)
                    return True
                if not waiting and self._seen is not None:
                    log.info("waiting_to_lead identity=%s leader=%s", self._identity, self._seen.holder)
                    waiting = True
            except KubeError as err:
                self._health.knows_leader = False
                log.warning("lease_not_reached error=%s", err)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rest_seconds()):
                    await stop.wait()
        return False

    def _rest_seconds(self) -> float:
        """Until the next try: a pause, or less where a foreign Lease may run out before."""
        if self._seen is None:
            return self._pause_seconds
        runs_out = self._seen.since + self._seen.duration_seconds
        left = runs_out - asyncio.get_running_loop().time()
        return min(self._pause_seconds, max(left, 0.0) + _RUN_OUT_MARGIN_SECONDS)

    async def keep(self) -> None:
        """Renew for as long as that works. Raises `LeadershipLost`, always in time for others to begin."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._pause_seconds)
            end = self._renewed_at + self._lease_seconds * _GIVE_UP_SHARE
            try:
                await self._renew(deadline=end)
            except KubeError as err:
                if loop.time() + self._pause_seconds > end:
                    raise LeadershipLost(f"the Lease could not be renewed in time: {err}") from err
                log.warning("lease_not_renewed error=%s", err)

    async def release(self) -> None:
        """Let another one begin at once. Without this it waits until the Lease runs out."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        deadline = asyncio.get_running_loop().time() + _RELEASE_SECONDS
        with suppress(KubeError):  # Then it runs out by itself.
            await self._write(lease, lease.spec.model_copy(update={"holder_identity": ""}), deadline)

    @property
    def _pause_seconds(self) -> float:
        return self._lease_seconds / _RENEWALS

    async def _take(self) -> bool:
        began = asyncio.get_running_loop().time()
        now = datetime.now(UTC)
        mine = LeaseSpec(
            holder_identity=self._identity,
            lease_duration_seconds=self._lease_seconds,
            acquire_time=now,
            renew_time=now,
            lease_transitions=0,
        )
        try:
            lease = await self._client.get(Lease, self._namespace, LEASE_NAME)
            if not self._free(lease, began):
                return False
            mine = mine.model_copy(update={"lease_transitions": (lease.spec.lease_transitions or 0) + 1})
            self._lease = await self._write(lease, mine, None)
        except NotFound:
            metadata = ObjectMeta(name=LEASE_NAME, namespace=self._namespace)
            try:
                self._lease = await self._client.create(Lease(metadata=metadata, spec=mine))
            except AlreadyExists:
                return False
        except Conflict:
            return False
        self._renewed_at = began
        return True

    def _free(self, lease: Lease, now: float) -> bool:
        spec = lease.spec
        if not spec.holder_identity:
            return True
        seen = self._seen
        if seen is None or (seen.renewed, seen.holder) != (spec.renew_time, spec.holder_identity):
            duration = float(spec.lease_duration_seconds or self._lease_seconds)
            self._seen = _Seen(spec.renew_time, spec.holder_identity, now, duration)
            return False
        return now - seen.since > seen.duration_seconds

    async def _renew(self, *, deadline: float) -> None:
        assert self._lease is not None
        began = asyncio.get_running_loop().time()
        renewed = self._lease.spec.model_copy(update={"renew_time": datetime.now(UTC)})
        try:
            self._lease = await self._write(self._lease, renewed, deadline)
        except Conflict:
            # Our own write, whose answer was lost, or another's.
            self._lease = await self._client.get(Lease, self._namespace, LEASE_NAME, deadline=deadline)
            holder = self._lease.spec.holder_identity
            if holder != self._identity:
                self._lease = None
                raise LeadershipLost(f"{holder or 'nobody'} holds the Lease now") from None
            self._lease = await self._write(self._lease, renewed, deadline)
        self._renewed_at = began

    async def _write(self, lease: Lease, spec: LeaseSpec, deadline: float | None) -> Lease:
        version = {"resourceVersion": lease.metadata.resource_version}
        patch = {"metadata": version, "spec": spec.to_merge_patch()}
        return await self._client.merge_patch(Lease, self._namespace, LEASE_NAME, patch, deadline=deadline)
