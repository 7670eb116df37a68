"""Connections: how many there may be, and how long each may take before a handler sees a request of it.

aiohttp bounds none of it where nobody asks, and knows of a connection only once its TLS handshake is over. So
connections are accepted here, counted from their first moment, and each has one task until it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import stat
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from forktree_agent.http.bodies import refused
from forktree_agent.http.errors import Code, Refusal, place_of
from forktree_agent.http.requests import HELD

log = logging.getLogger(__name__)

LAST_SECONDS = 0.5
"""Requests that are in flight at the end get this long; then they are cancelled, commands killed."""

LINGER_SECONDS = 2.0
"""What a client still sends of a refused body is read so long and dropped, so that it gets to read why."""

BACKLOG = 256
"""Connections that the kernel holds until they are accepted."""

SILENT_SECONDS = 10.0
"""Between two log lines about refused connections."""

LOCAL = "local"
"""Stands for the address of whoever comes by a socket of this machine: they have none."""

ACCEPT_AGAIN_SECONDS = 0.5
"""After the kernel had no room for another connection: descriptors or memory, which others give back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What each connection may take. A command that runs for an hour touches none of them."""

    connections: int = 1024
    """Open at once, those that still shake hands included: one descriptor and up to 1 MiB each. Twice the
    requests that run at once."""
    connections_of_a_peer: int = 512
    """Of one address. Another agent needs one for each request that it hands on."""
    handshake_seconds: float = 10.0
    """For TLS to begin: two round trips."""
    goodbye_seconds: float = 10.0
    """For TLS to end, with what is still to be sent, once a connection is to be closed."""
    idle_seconds: float = 20.0
    """From the handshake or the last answer until the whole head of the next request is there."""
    unread_seconds: float = 30.0
    """An answer may lie so long without the client taking anything of it. The kernel counts, to a second or
    so."""


class Entrance:
    """Lets clients in to one application, as long as there is room."""

    def __init__(
        self, listening: socket.socket, tls: ssl.SSLContext | None, server: web.Server, bounds: Bounds
    ) -> None:
        self._listening = listening
        self._tls = tls
        self._server = server
        self._bounds = bounds
        self._open: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent_until = 0.0

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    @classmethod
    @asynccontextmanager
    async def open(
        cls, app: web.Application, listening: socket.socket, *, tls: ssl.SSLContext | None, bounds: Bounds
    ) -> AsyncGenerator[Entrance]:
        """Serve `app` inside the block, at a socket that is closed then. Leaving it cancels what is still in
        flight after a short grace.
        """
        runner = web.AppRunner(
            app,
            handler_cancellation=True,  # A client that goes away ends its exec.
            shutdown_timeout=LAST_SECONDS,
        )
        with listening:
            await runner.setup()
            assert runner.server is not None
            entrance = cls(listening, tls, runner.server, bounds)
            async with asyncio.TaskGroup() as tasks:
                accepting = entrance._begin(entrance._accept(tasks), tasks, "accept-connections")
                try:
                    yield entrance
                finally:
                    accepting.cancel()
                    await runner.cleanup()
                    for task in tuple(entrance._tasks):  # Those that still say hello or good-bye.
                        task.cancel()

    def _begin(
        self, work: Coroutine[None, None, None], tasks: asyncio.TaskGroup, name: str
    ) -> asyncio.Task[None]:
        task = tasks.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, address = await loop.sock_accept(self._listening)
            except OSError as err:
                log.warning("accept_failed error=%s", err)
                await asyncio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            self._let_in(connected, str(address[0]) if address else LOCAL, tasks)
            await asyncio.sleep(0)  # Nor does a flood of them keep the loop from its other work.

    def _let_in(self, connected: socket.socket, peer: str, tasks: asyncio.TaskGroup) -> None:
        if not self._has_room(peer):
            connected.close()
            return
        self._open[peer] += 1

        def left(_: asyncio.Task[None]) -> None:
            connected.close()  # The transport has done so already, unless there never was one.
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]

        # Not in the task itself, which may be cancelled before it begins.
        self._begin(self._hold(connected, peer), tasks, f"connection-{peer}").add_done_callback(left)

    def _has_room(self, peer: str) -> bool:
        """Whether one more of `peer` fits. That one does not is logged now and then, however many do not."""
        whole, own = self._open.total(), self._open[peer]
        if whole < self._bounds.connections and own < self._bounds.connections_of_a_peer:
            return True
        now = asyncio.get_running_loop().time()
        if now >= self._silent_until:
            self._silent_until = now + SILENT_SECONDS
            log.warning("connections_full open=%d peer=%s of_peer=%d", whole, peer, own)
        return False

    async def _hold(self, connected: socket.socket, peer: str) -> None:
        """Shake hands, then stay until the connection is closed."""
        loop = asyncio.get_running_loop()
        connection = _Connection(self._server, loop, self._bounds.idle_seconds)
        is_local = connected.family == socket.AF_UNIX
        try:
            if not is_local:
                # Also counts while the other side's window is shut (tcp(7)), which no timer of aiohttp does.
                unread_ms = round(self._bounds.unread_seconds * 1000)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
            transport, _ = await loop.connect_accepted_socket(
                lambda: connection,
                connected,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._bounds.handshake_seconds,
                ssl_shutdown_timeout=None if self._tls is None else self._bounds.goodbye_seconds,
            )
        except OSError as err:  # All of TLS's errors too.
            log.debug("handshake_failed peer=%s error=%s", peer, type(err).__name__)
            return
        except Exception as err:  # Whatever it is, it must not take the other connections along.
            log.error("connection_crashed error=%s\n%s", type(err).__name__, place_of(err))  # noqa: TRY400
            return
        try:
            if is_local:
                await self._while_read(connection, transport)
            else:
                await connection.closed.wait()
        finally:
            transport.abort()

    async def _while_read(self, connection: _Connection, transport: asyncio.WriteTransport) -> None:
        """Until it is closed, or nothing of an answer was taken for a while: sockets of the machine itself
        have no timer for that."""
        taken = -1
        while not connection.closed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._bounds.unread_seconds):
                    await connection.closed.wait()
            waiting = transport.get_write_buffer_size()
            if waiting and connection.written - waiting == taken:
                return
            taken = connection.written - waiting


class _Connection(web.RequestHandler):
    """aiohttp's side of a connection. What is no HTTP at all is refused as everything else of this API is."""

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, idle_seconds: float) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=idle_seconds,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,  # `bodies` does, under our limit, and sees whether all is there.
        )
        self.closed = asyncio.Event()
        self._answered: web.BaseRequest | None = None

    @property
    def written(self) -> int:
        """Bytes of the answer that is being sent, or was last."""
        return 0 if self._answered is None else self._answered.writer.output_size

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.closed.set()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # Raised before any handler: an `Expect` that nobody knows.
            resp = refused(Refusal(Code.BAD_REQUEST, resp.reason or "the request is not valid HTTP"))
        self._answered = request
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            if HELD in request:  # What is no HTTP at all never got so far.
                request[HELD].close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what aiohttp could not make a request of. The connection is closed after it."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of another answer is sent already")
        if status < 500:
            log.debug("request_unreadable error=%s", type(exc).__name__)
            refusal = Refusal(Code.BAD_REQUEST, _what_is_wrong(exc))
        else:
            log.error("connection_crashed error=%s\n%s", type(exc).__name__, place_of(exc))
            refusal = Refusal(Code.INTERNAL, "something here is broken; the agent's log says more")
        response = refused(refusal)
        response.force_close()
        return response

    def log_access(self, request: web.BaseRequest, response: web.StreamResponse, time: float | None) -> None:
        """Nothing: it would log paths with queries; ours is one line with what matters."""

    def log_exception(self, *_: Any, exc_info: BaseException | None = None, **__: Any) -> None:
        """What ended this connection. A body that breaks after its answer is the client's own affair."""
        if isinstance(exc_info, HttpProcessingError | web.RequestPayloadError):
            log.debug("connection_broke error=%s", type(exc_info).__name__)
        else:
            log.error("connection_crashed error=%s\n%s", type(exc_info).__name__, place_of(exc_info))


def _what_is_wrong(error: BaseException | None) -> str:
    """In words of ours: the parser's quote what was sent."""
    match error:
        case LineTooLong():
            return "a line of the request's head is too long"
        case _:
            return "the request is not valid HTTP"


async def listening_on(host: str, port: int) -> socket.socket:
    """Bound to the first address of `host`. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = found[0]
    listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    listening.setblocking(False)
    return listening


def listening_at(path: Path) -> socket.socket:
    """Bound to a file of this machine, in place of a socket that nobody listens at any more.

    Its owner and its group may connect; in a folder with the setgid bit that is the folder's group. The file
    stays when it is closed: then clients are refused, which they take for a reason to come again.

    Raises `OSError`, also where something else is there.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(f"{path} is there already, and is no socket")
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(draft))
        draft.chmod(0o660)
        listening.listen(BACKLOG)
        draft.rename(path)
    except OSError:
        listening.close()
        raise
    listening.setblocking(False)
    return listening
