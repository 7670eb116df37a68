"""kopf without what it writes to objects on its own: progress, last-seen state, finalizers, Events."""

from __future__ import annotations

from collections.abc import Iterable

import kopf

from forktree.models.base import GROUP, VERSION
from forktree_operator.sweep import UNPLACED, UNROUTED


def lean_settings() -> kopf.OperatorSettings:
    """Settings under which kopf only watches, and only what is not placed yet."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # Nothing would limit the rate of Event objects.
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/operator"  # Never set; the default may be another operator's.
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    settings.networking.request_timeout = 10
    settings.networking.error_backoffs = (0.05, 0.1, 0.25, 0.5, 1, 2, 5)  # The default begins at 1 s.
    settings.queueing.idle_timeout = 1.0  # Each object has a task that long after its last event.
    settings.watching.chunk_size = 500
    settings.watching.field_selectors[GROUP, VERSION, "sessions"] = UNPLACED
    settings.watching.field_selectors[GROUP, VERSION, "forks"] = UNROUTED
    settings.process.ultimate_exiting_timeout = None  # Else it kills the process some time after its end.
    return settings


class NoDiffBase(kopf.DiffBaseStorage):
    """Remembers no earlier state. Building one copies every object, and no handler asks for a difference."""

    def build(
        self, *, body: kopf.Body, extra_fields: Iterable[kopf.FieldSpec] | None = None
    ) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


class NoProgress(kopf.ProgressStorage):
    """Remembers no progress: a handler of events runs once for each, and the sweep does the rest."""

    def fetch(self, *, key: kopf.HandlerId, body: kopf.Body) -> kopf.ProgressRecord | None:
        return None

    def store(
        self, *, key: kopf.HandlerId, record: kopf.ProgressRecord, body: kopf.Body, patch: kopf.Patch
    ) -> None:
        pass

    def purge(self, *, key: kopf.HandlerId, body: kopf.Body, patch: kopf.Patch) -> None:
        pass

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        pass

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
