"""What every handler knows of a request beside its content."""

from __future__ import annotations

from aiohttp import web

REQUEST_ID = web.RequestKey("request_id", str)
"""Names the request in answers and in the log: `req_` and 16 hex digits."""

SEEN = web.RequestKey("seen", float)
"""When its head had come, in monotonic seconds: what all clocks of an answer begin with. Loop time is the
same clock, but uvloop reads it once a turn and in whole milliseconds: for deadlines, not for measuring."""
