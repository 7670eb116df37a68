"""What every handler knows of a request beside its content."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from forktree_agent.http.holding import Held

REQUEST_ID = web.RequestKey("request_id", str)
"""Names the request in answers and in the log: `req_` and 16 hex digits."""

SEEN = web.RequestKey("seen", float)
"""When its head had come, in monotonic seconds: what all clocks of an answer begin with. Loop time is the
same clock, but uvloop reads it once a turn and in whole milliseconds: for deadlines, not for measuring."""

HELD = web.RequestKey("held", Held)
"""What it holds of our memory."""

BODY_HELD = web.RequestKey("body_held", bool)
"""Set once its body counts in that."""

LAST = web.RequestKey("last", bool)
"""Set where the connection is to be closed after the answer."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a server does as a request comes."""

    running: int
    """Requests, this one among them."""
    at_once: int
    """As many may be."""
    draining: bool
    """It is about to stop, and begins nothing any more."""


LOAD = web.RequestKey("load", Load)
