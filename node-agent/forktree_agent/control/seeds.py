"""What each child of a fork is to seed its random generators from. Pure but for what is random on purpose."""

from __future__ import annotations

import hashlib
import secrets

from forktree.models.fork import ForkSpec, SeedMode

SEED_DIGITS = 16


def seeds_of(spec: ForkSpec, parent: str | None) -> tuple[str, ...]:
    """A seed for each child, in order of their index. `parent` is that of the session that was forked.

    Random ones differ with each call, so whoever calls notes them before they are used.
    """
    base = spec.seed if spec.seed is not None else parent
    if base is None:
        base = fresh_seed()  # A parent without one: what they have in common is at least recorded.
    return tuple(_seed(spec, base, index) for index in range(spec.replicas))


def fresh_seed() -> str:
    return secrets.token_hex(SEED_DIGITS // 2)


def _seed(spec: ForkSpec, base: str, index: int) -> str:
    own = spec.branch(index).seed
    if own is not None:
        return own
    match spec.seed_mode:
        case SeedMode.FRESH:
            return fresh_seed()
        case SeedMode.COMMON:
            return base
        case SeedMode.DERIVED:
            return hashlib.sha256(f"{base}:{index}".encode()).hexdigest()[:SEED_DIGITS]
