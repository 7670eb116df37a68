"""The keeper as the engine asks it: bounded in time, and failing in the engine's own terms."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from forktree_agent.engine.contract import AtCapacity, DeadlineExceeded, EngineError, MachineGone
from forktree_agent.keeper_client import Code, KeeperError, KeeperGone, StaleEpoch

ANSWER_SECONDS = 30.0
"""It answers in microseconds, and a kill when the machine's memory is torn down. More is a stuck kernel."""


class KeeperRefused(EngineError):
    """The keeper did not do what was asked: a defect, or a node that is out of something."""


def soon() -> float:
    """Loop time until when a request that has no deadline of its own is waited for."""
    return asyncio.get_running_loop().time() + ANSWER_SECONDS


@contextmanager
def asking(what: str) -> Generator[None]:
    """Translate the keeper's failures. `what` names the thing asked for, for people."""
    try:
        yield
    except KeeperError as err:
        if err.code is Code.DESCRIPTORS_EXHAUSTED:
            raise AtCapacity(f"the keeper of this node has no descriptors left for {what}") from err
        raise KeeperRefused(f"{what}: {err}") from err
    except (KeeperGone, StaleEpoch) as err:
        raise MachineGone(f"{what}: {err}") from err
    except TimeoutError as err:
        raise DeadlineExceeded(f"{what}: the keeper did not answer in time") from err
