"""A Gymnasium environment that lives in a session: what it is can be kept, and gone back to, as a fork.

    lake = forktree.gym.ForktreeEnv(session, forktree.gym.GymAsk(), spaces.Discrete(16), spaces.Discrete(4))
    lake.reset()
    state = lake.clone_state()        # the whole machine, random generators included
    lake.step(1)
    lake.restore_state(state)         # as if the step had never been

Needs `gymnasium`: `pip install 'forktree[gym]'`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, SupportsInt, TypeVar

import gymnasium
from gymnasium import spaces

from forktree._results import ExecResult
from forktree._sync.forks import Fork
from forktree._sync.session import Session
from forktree.errors import UnexpectedAnswer

ObsT = TypeVar("ObsT")
ActT = TypeVar("ActT")
ActT_contra = TypeVar("ActT_contra", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[ObsT]):
    """What an environment shows after an action, or after nothing."""

    observation: ObsT
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict[str, Any])


class Guest(Protocol[ObsT, ActT_contra]):
    """How to speak to what runs in the session. It keeps nothing itself: all state is the session's."""

    def look(self, session: Session) -> Outcome[ObsT]:
        """What it shows now, without doing anything."""
        ...

    def step(self, session: Session, action: ActT_contra) -> Outcome[ObsT]:
        """Do it. Raises what `Session.exec` raises."""
        ...


class GymAsk:
    """The environment of image `builtin:gym`, by its command `gym-ask`."""

    def __init__(self, command: Sequence[str] = ("gym-ask",), *, timeout: float = 60.0) -> None:
        self._command = tuple(command)
        self._timeout = timeout

    def look(self, session: Session) -> Outcome[Any]:
        return _outcome(self._ask(session, "state"), 0.0)

    def step(self, session: Session, action: SupportsInt) -> Outcome[Any]:
        before = self._ask(session, "state")
        after = self._ask(session, "step", str(int(action)))
        return _outcome(after, float(after["total"]) - float(before["total"]))

    def state(self, printed: ExecResult) -> dict[str, Any]:
        """What the guest said of itself. Raises `UnexpectedAnswer`."""
        try:
            state: dict[str, Any] = json.loads(printed.stdout)
            _outcome(state, float(state["total"]))
        except (ValueError, KeyError, TypeError) as err:
            raise UnexpectedAnswer(f"{self._command[0]} printed no state: {printed.stdout!r}") from err
        return state

    def _ask(self, session: Session, *question: str) -> dict[str, Any]:
        return self.state(session.exec([*self._command, *question], timeout=self._timeout, check=True))


def _outcome(state: dict[str, Any], reward: float) -> Outcome[Any]:
    # The guest does not tell the end of an episode from its being cut off.
    return Outcome(
        observation=state["observation"], reward=reward, terminated=bool(state["ended"]), info=state
    )


@dataclass(frozen=True, slots=True)
class State:
    """A whole machine as it was at an instant. Any number of environments may go on from it."""

    point: Fork
    """A fork without children, which holds the instant."""


class ForktreeEnv(gymnasium.Env[ObsT, ActT]):
    """An environment whose episodes happen in sessions of their own, below the one that was given.

    That one is never touched but forked. `close` deletes all that was made below it.
    """

    def __init__(
        self,
        origin: Session,
        guest: Guest[ObsT, ActT],
        observation_space: spaces.Space[ObsT],
        action_space: spaces.Space[ActT],
    ) -> None:
        """`origin`: where every episode begins, and what `reset` goes back to."""
        self.observation_space = observation_space
        self.action_space = action_space
        self._origin = origin
        self._guest = guest
        self._now: Session | None = None
        self._is_kept = False
        """A state hangs below the session of now: it cannot be deleted as long as that is wanted."""
        self._made: list[Session] = []

    @property
    def session(self) -> Session:
        """Where the episode is now. Another one after `reset` and `restore_state`."""
        if self._now is None:
            raise gymnasium.error.ResetNeeded("call reset() before anything else")
        return self._now

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsT, dict[str, Any]]:
        """Begin again from the origin's state, its random generators included. `seed` seeds nothing in the
        guest, whose generators are part of its state: it is for `np_random` of this object."""
        super().reset(seed=seed, options=options)
        (child,) = self._origin.fork(1)
        self._go_on_in(child)
        seen = self._guest.look(child)
        return seen.observation, seen.info

    def step(self, action: ActT) -> tuple[ObsT, float, bool, bool, dict[str, Any]]:
        seen = self._guest.step(self.session, action)
        return seen.observation, seen.reward, seen.terminated, seen.truncated, seen.info

    def clone_state(self) -> State:
        """The whole machine as it is now, kept until `close`. It costs the memory that it had changed."""
        point = self.session.fork(0, keep_point=True)
        self._is_kept = True
        return State(point)

    def restore_state(self, state: State) -> None:
        """Go on from there. The state stays, and can be gone back to as often as wanted."""
        (child,) = state.point.fork(1)
        self._go_on_in(child)

    def render(self) -> None:
        """Nothing: what a guest shows is in its observations."""

    def close(self) -> None:
        """Delete every session that was made. States are gone with them."""
        made, self._made, self._now = self._made, [], None
        for session in reversed(made):
            session.delete()

    def _go_on_in(self, session: Session) -> None:
        before, was_kept = self._now, self._is_kept
        self._made.append(session)
        self._now, self._is_kept = session, False
        if before is None:
            return
        if was_kept:
            before.release()  # Its machine ends; the instants below it stay.
        else:
            self._made.remove(before)
            before.delete()
