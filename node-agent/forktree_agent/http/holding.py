"""What requests hold of the agent's memory: bodies, the output of commands, and answers that are being sent.

A caller who sends much, has much printed, or reads slowly makes us hold it. All requests together hold no
more than there is for them, and those of one namespace, or of one session, leave as much to others as they
have. Output for which there is no room is cut, and its answer says so; a body or an answer is refused.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from forktree_agent.commons import Commons
from forktree_agent.http.errors import Code, Refusal

HELD_BYTES = 256 << 20
"""Of all requests of all callers. A command's largest output is 16 MiB."""

SMALL_BYTES = 64 << 10
"""Up to here the prospects are better: what many say at length does not cut what others say shortly."""

NAMESPACE, SESSION, SMALL = 1.0, 0.5, 2.0
"""Times what is left for others. Where nobody else wants any: half of the whole, a third, and two thirds."""

REQUESTS = 3.0
"""The same of requests that are being answered: three quarters of them for one namespace, and as many for one
caller's that are not yet known to be allowed."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """All that the requests at one entrance hold."""

    memory: Commons
    requests: Commons


@dataclass(frozen=True, slots=True)
class Room:
    """For the output of commands in one session."""

    held: Held
    session: str

    def claim(self, count: int) -> int:
        return self.held.claim(count, self.session)


class Held:
    """What one request holds, until its answer is sent to the last byte."""

    def __init__(self, holdings: Holdings) -> None:
        self._memory = holdings.memory
        self._requests = holdings.requests
        self._holder = ""
        """Of the request and of what it holds. Empty: nobody, as of who asks what everybody may."""
        self._bytes: Counter[str] = Counter()

    def asked_by(self, caller: str) -> None:
        """Who asks. What it holds is counted as theirs, and as nobody else's, until `belongs_to`. Raises
        `Refusal` where they have too many."""
        # No namespace is called like this.
        self._move(f"by {caller}", f"of {caller}")

    def belongs_to(self, namespace: str) -> None:
        """Which namespace it is about, now that its caller may something there: it is counted as the
        namespace's, with all that it holds. Raises `Refusal` where they have too many, or hold too much."""
        self._move(namespace, f"about namespace {namespace}")

    def _move(self, holder: str, which: str) -> None:
        """It is `holder`'s from here on, or nobody's. `which` requests are those, for sentences."""
        if holder == self._holder:
            return
        held = {session: count for session, count in self._bytes.items() if count}
        self.close()
        if not self._requests.take(1, {holder: REQUESTS}):
            sentence = (
                f"{self._requests.held_by(holder)} requests {which} are being answered"
                " already, and others must get their turn; ask again later"
            )
            raise Refusal(Code.OVERLOADED, sentence)
        self._holder = holder
        for session, count in held.items():
            if self.claim(count, session) < count:
                sentence = f"requests {which} hold as much as there is room for; ask again later"
                raise Refusal(Code.OVERLOADED, sentence)

    def room(self, session: str) -> Room:
        return Room(self, session)

    def claim(self, count: int, session: str = "") -> int:
        """How much of `count` bytes may be held. It is held then."""
        is_small = self._bytes[session] + count <= SMALL_BYTES
        weights = {self._holder: SMALL if is_small else NAMESPACE}
        if session:
            weights[_of(self._holder, session)] = SMALL if is_small else SESSION
        given = self._memory.take(count, weights)
        self._bytes[session] += given
        return given

    def hold(self, count: int, what: str) -> None:
        """All of it. Raises `Refusal` where that is too much: `what` is the beginning of its sentence."""
        given = self.claim(count)
        if given < count:
            self.let_go(given)
            sentence = f"{what} of {count} bytes is more than there is room for here now; ask again later"
            raise Refusal(Code.OVERLOADED, sentence)

    def let_go(self, count: int) -> None:
        """Of what `hold` took."""
        self._give_back(count, "")

    def close(self) -> None:
        """Nothing is held any more."""
        for session, count in tuple(self._bytes.items()):
            self._give_back(count, session)
        self._bytes.clear()
        if self._holder:
            self._requests.give_back(1, [self._holder])
            self._holder = ""

    def _give_back(self, count: int, session: str) -> None:
        self._bytes[session] -= count
        holders = (self._holder, _of(self._holder, session)) if session else (self._holder,)
        self._memory.give_back(count, holders)


def _of(holder: str, session: str) -> str:
    return f"{holder}/{session}"
