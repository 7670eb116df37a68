"""How long a Fork may take until it is ready, waiting for its source and for room included. Pure."""

from __future__ import annotations

from datetime import datetime

from forktree.models import Fork


def seconds_left(fork: Fork, now: datetime) -> float:
    """Seconds until `spec.timeoutSeconds` after the Fork's creation, for who sees it first at `now`.

    The time of creation is the API server's. An age that cannot be, or is beyond the whole time, tells of
    clocks that differ or of an agent that was away; the whole time is given then.
    """
    whole = float(fork.spec.timeout_seconds)
    created = fork.metadata.creation_timestamp
    age = 0.0 if created is None else (now - created).total_seconds()
    return whole - age if 0 < age < whole else whole
