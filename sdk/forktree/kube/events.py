"""Kubernetes Events: what happened to an object, told to the people who look at it with kubectl.

Nothing is decided by them and nothing waits for them. What cannot be written at once waits in a short queue;
what does not fit there, or is refused, is dropped: a status says the same, and says it for sure.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from forktree.kube.client import KubeClient
from forktree.kube.errors import KubeError
from forktree.models import EventReason, Uid
from forktree.models.base import ApiObject

log = logging.getLogger(__name__)

QUEUE_LENGTH: Final = 256
WRITES_PER_SECOND: Final = 10.0
"""In the long run. A hundred nodes at this pace are as much as one API server should spend on news."""
ROUTINE_PER_SECOND: Final = 1.0
"""Of those, news that all is well: there are some for every fork, and while there are many they take what the
forks' own objects wait for. What is more is dropped at once: no other news wait behind it."""
ROUTINE: Final = frozenset({EventReason.SCHEDULED, EventReason.FORKED, EventReason.COMPLETE})
WRITES_AT_ONCE: Final = 50
"""After a quiet time: a tree that is pruned or a burst of forks is told whole."""
NOTE_BYTES: Final = 1024
"""As long as the API server lets a note be."""
_NAME_MAX: Final = 253
_HOME_OF_UNHOUSED: Final = "default"
"""Where kubectl looks for Events about objects that have no namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The object that something happened to. It need not be there any more."""

    api_version: str
    kind: str
    namespace: str | None
    name: str
    uid: Uid

    @classmethod
    def of(cls, obj: ApiObject) -> Subject:
        return cls.named(type(obj), obj.metadata.namespace, obj.metadata.name, obj.metadata.uid)

    @classmethod
    def named(cls, kind: type[ApiObject], namespace: str | None, name: str, uid: Uid) -> Subject:
        return cls(
            api_version=kind.group_version(), kind=kind.resource.kind, namespace=namespace, name=name, uid=uid
        )

    def reference(self) -> dict[str, str]:
        """As Events name objects."""
        reference = {"apiVersion": self.api_version, "kind": self.kind, "name": self.name, "uid": self.uid}
        return reference if self.namespace is None else {**reference, "namespace": self.namespace}


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One thing that happened."""

    about: Subject
    reason: EventReason
    note: str
    at: datetime


class Announcer:
    """Writes Events as fast as it may, while `run` runs."""

    def __init__(
        self,
        client: KubeClient,
        *,
        reporter: str,
        instance: str,
        queue_length: int = QUEUE_LENGTH,
        writes_per_second: float = WRITES_PER_SECOND,
        writes_at_once: int = WRITES_AT_ONCE,
    ) -> None:
        """`reporter` and `instance` say which program of which node or pod speaks."""
        self._client, self._reporter, self._instance = client, reporter, instance
        self._waiting: asyncio.Queue[News] = asyncio.Queue(queue_length)
        self._pace = _Pace(writes_per_second, writes_at_once)
        self._routine = _Pace(ROUTINE_PER_SECOND, writes_at_once)
        self.dropped = 0
        """News that were never written, since this began."""

    def say(self, about: Subject, reason: EventReason, note: str) -> None:
        """Have it told soon, or never. Does not wait and does not raise."""
        if reason in ROUTINE and not self._routine.allows(asyncio.get_running_loop().time()):
            self._drop("there is too much to tell that went well")
            return
        try:
            self._waiting.put_nowait(News(about=about, reason=reason, note=note, at=datetime.now(UTC)))
        except asyncio.QueueFull:
            self._drop("the queue is full")

    async def run(self) -> None:
        """Write what is said. Never ends by itself."""
        while True:
            news = await self._waiting.get()
            await asyncio.sleep(self._pace.wait_seconds(asyncio.get_running_loop().time()))
            try:
                await self._write(news)
            except KubeError as err:  # Also where a namespace is on its way out and takes nothing any more.
                self._drop(err.message)

    async def _write(self, news: News) -> None:
        namespace = news.about.namespace or _HOME_OF_UNHOUSED
        suffix = f".{secrets.token_hex(8)}"
        event = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": news.about.name[: _NAME_MAX - len(suffix)] + suffix, "namespace": namespace},
            "eventTime": news.at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingController": self._reporter,
            "reportingInstance": self._instance,
            "regarding": news.about.reference(),
            "reason": news.reason,
            "action": news.reason,
            "note": shortened(news.note),
            "type": weight(news.reason),
        }
        await self._client.raw("POST", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", event)

    def _drop(self, why: str) -> None:
        self.dropped += 1
        # The first of each power of two: a flood must not become a flood of lines.
        if self.dropped & (self.dropped - 1) == 0:
            log.info("event_dropped count=%d why=%r", self.dropped, why)


class _Pace:
    """A bucket of permissions that fills up steadily. Clock: the loop's."""

    def __init__(self, per_second: float, at_once: int) -> None:
        self._per_second, self._at_once = per_second, at_once
        self._left = float(at_once)
        self._filled_at: float | None = None

    def wait_seconds(self, now: float) -> float:
        """Take one permission. Returns how long to wait until it holds."""
        self._fill(now)
        self._left -= 1
        return max(0.0, -self._left / self._per_second)

    def allows(self, now: float) -> bool:
        """Take one permission if there is one that holds now."""
        self._fill(now)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _fill(self, now: float) -> None:
        passed = 0.0 if self._filled_at is None else now - self._filled_at
        self._filled_at = now
        self._left = min(self._at_once, self._left + passed * self._per_second)


def weight(reason: EventReason) -> Literal["Normal", "Warning"]:
    """Whether somebody should look at it."""
    match reason:
        case EventReason.SCHEDULED | EventReason.FORKED | EventReason.COMPLETE:
            return "Normal"
        case EventReason.PRUNED | EventReason.RELEASED | EventReason.EXPIRED:
            return "Normal"
        case EventReason.UNSCHEDULED | EventReason.AT_CAPACITY:
            return "Warning"
        case EventReason.FAILED | EventReason.REJECTED | EventReason.NODE_LOST:
            return "Warning"


def shortened(note: str) -> str:
    """`note`, cut where the API server would refuse it."""
    encoded = note.encode()
    if len(encoded) <= NOTE_BYTES:
        return note
    return encoded[: NOTE_BYTES - 3].decode(errors="ignore") + "..."
