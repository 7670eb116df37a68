"""Hands a request on to the agent of another node, and that agent's answer back.

One hop, never two: a request that was handed on once and is still at the wrong node is refused. And never to
an address of anybody's choosing: only to the one that an agent published in its own ForkNode, which nobody
else can write, and only over TLS that the certificates published beside it verify.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from yarl import URL

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import ForkNode
from forktree.wire import IDEMPOTENCY_KEY
from forktree_agent.http import bodies, streaming
from forktree_agent.http.bodies import PIECE_BYTES
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.pipes import StreamPipe
from forktree_agent.http.remembering import Remembered
from forktree_agent.http.requests import HELD, REQUEST_ID
from forktree_agent.http.sockets import MAX_MESSAGE_BYTES, joined
from forktree_agent.http.streaming import Pieces
from forktree_agent.http.trace_context import handed_on

log = logging.getLogger(__name__)

HOP_HEADER: Final = "Forktree-Handed-On-By"
"""Says which agent handed a request on; its presence means that it is not handed on again."""

CONNECT_SECONDS: Final = 5.0
"""For TCP and TLS to an agent in the same cluster: milliseconds, unless its node is gone."""

HOP_SECONDS: Final = 5.0
"""Beyond the time that the owner may take: the caller should get its refusal and not ours."""

IDLE_SECONDS: Final = 15.0
"""Below the time after which the other side closes a connection that nobody uses."""

_CONTEXTS: Final = 1024
"""As many agents are remembered by their certificates. A context costs some 50 KB and 0.2 ms to make."""

_PASSED_BACK: Final = ("WWW-Authenticate", "Retry-After")

STREAMED: Final = (streaming.NDJSON, "application/octet-stream", "application/x-tar")
"""What is handed on as it comes."""

_OF_STREAMS: Final = ("Content-Type", "Content-Length", "X-Forktree-Mode")

SILENT_SECONDS: Final = 60.0
"""Between two pieces of a streamed answer: lines come every ten seconds, and bytes as they are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What to ask of which node."""

    node: str
    path: str
    """From `/ns/` on, and a query where it takes one: made of parts that were checked, never as it came."""
    subject: str
    """What the request is about, for sentences: `session a`."""
    deadline: float
    """For all of it, in loop time."""
    body: bytes | None = None
    """What is POSTed. None: the request as it came, and what it held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the owner answered."""

    status: int
    content: bytes
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Peer:
    """Another agent as its ForkNode shows it."""

    origin: str
    tls: ssl.SSLContext

    def url(self, errand: Errand) -> URL:
        return URL(self.origin + errand.path, encoded=True)


@dataclass(frozen=True, slots=True)
class PeerPipe:
    """A connection to another agent."""

    pipe: StreamPipe
    authority: str
    """What the agent is called in a `Host` header."""
    handed_on: tuple[str, str]
    """The header that says that a request was."""


class Proxy:
    """The way to all other agents. One instance per server; it holds the connections and nothing else."""

    def __init__(self, client: KubeClient, node_name: str, http: aiohttp.ClientSession) -> None:
        self._client = client
        self._node_name = node_name
        self._http = http
        # The same context for the same certificates: connections are kept by it.
        self._contexts: Remembered[str, ssl.SSLContext] = Remembered(_CONTEXTS, time.monotonic)

    @classmethod
    @asynccontextmanager
    async def running(cls, client: KubeClient, node_name: str) -> AsyncGenerator[Proxy]:
        """For the agent of `node_name`. Connections are made when needed and closed at the end."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # Callers' tokens go to agents, not through whatever the environment names.
            auto_decompress=False,  # Agents pack nothing; what is packed could be larger than it looks.
        ) as http:
            yield cls(client, node_name, http)

    async def ask(self, request: web.Request, errand: Errand) -> Told:
        """The owner's answer, whatever it is; `request` holds it. If the caller goes away, the owner hears.

        Raises `Refusal`: `wrong_node` where the owner cannot be found, `upstream_error` where it does not
        answer; it may have begun then. And what `bodies.raw` raises.
        """
        peer, headers = await self._way(request, errand)
        # Here already where the handler had a use for it.
        body = await bodies.raw(request) if errand.body is None else errand.body
        try:
            async with (
                asyncio.timeout_at(errand.deadline),
                self._http.request(
                    request.method if errand.body is None else "POST",
                    peer.url(errand),
                    data=body or None,
                    headers=headers,
                    ssl=peer.tls,
                    allow_redirects=False,
                ) as answer,
            ):
                content = await _whole(request, answer, errand)
        except (aiohttp.ClientError, TimeoutError) as err:
            raise _silent(errand, peer, err) from err
        return _told(request, errand, answer, content)

    async def relay(
        self, request: web.Request, errand: Errand, *, body: AsyncIterator[bytes] | None = None
    ) -> web.StreamResponse:
        """The owner's answer to `request`, handed on as it comes; `body`: what is sent there, as that comes.

        The errand's deadline is for the answer's begin. Its end is that of what is asked for: the owner says
        something every few seconds, or the connection is broken. Raises as `ask` does.
        """
        peer, headers = await self._way(request, errand)
        sent = await bodies.raw(request) or None if body is None else body
        if body is not None:
            headers["Content-Type"] = "application/octet-stream"

        async def pass_on(pieces: Pieces) -> None:
            await pieces.begin()
            await pieces.send(begun)
            while chunk := await _soon(answer.content.readany()):
                await pieces.send(chunk)

        try:
            async with asyncio.timeout_at(errand.deadline) as beginning:
                async with self._http.request(
                    request.method,
                    peer.url(errand),
                    data=sent,
                    headers=headers,
                    ssl=peer.tls,
                    allow_redirects=False,
                ) as answer:
                    is_stream = answer.content_type in STREAMED and answer.status == HTTPStatus.OK
                    begun, is_all = (b"", False) if is_stream else await _beginning(answer, errand)
                    told = _told(request, errand, answer, begun)
                    if is_all:
                        return bodies.whole(told.content, told.status, told.headers)
                    beginning.reschedule(None)
                    passed = {name: answer.headers[name] for name in _OF_STREAMS if name in answer.headers}
                    return await streaming.pieces(request, pass_on, passed | told.headers, told.status)
        except (aiohttp.ClientError, TimeoutError) as err:
            raise _silent(errand, peer, err) from err

    async def relay_socket(self, request: web.Request, errand: Errand, ours: web.WebSocketResponse) -> None:
        """Join our caller's WebSocket, which is open, and the owner's, until either ends.

        Raises as `ask` does. The errand's deadline is for the owner's to open.
        """
        peer, headers = await self._way(request, errand)
        try:
            async with asyncio.timeout_at(errand.deadline) as opening:
                async with self._http.ws_connect(
                    peer.url(errand), headers=headers, ssl=peer.tls, max_msg_size=MAX_MESSAGE_BYTES
                ) as theirs:
                    opening.reschedule(None)
                    await joined(ours, theirs)
        except (aiohttp.ClientError, TimeoutError) as err:
            raise _silent(errand, peer, err) from err

    @asynccontextmanager
    async def pipe(self, request: web.Request, errand: Errand) -> AsyncGenerator[PeerPipe]:
        """A connection to the owner that is closed with the block, for `request` to be sent over as it came.

        Raises as `forward` does. The errand's deadline is for the connection to be made.
        """
        peer, _ = await self._way(request, errand)
        origin = URL(peer.origin)
        try:
            async with asyncio.timeout_at(errand.deadline), asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(origin.host, origin.port, ssl=peer.tls)
        except ssl.SSLError as err:
            cause = "what is there does not show the certificate that the agent published"
            raise _silence(errand, peer, cause) from err
        except OSError as err:  # A time that is over too.
            raise _silence(errand, peer, "it cannot be reached") from err
        try:
            yield PeerPipe(StreamPipe(reader, writer), origin.authority, (HOP_HEADER, self._node_name))
        finally:
            writer.transport.abort()  # All was said, or nobody waits for the rest.

    async def _way(self, request: web.Request, errand: Errand) -> tuple[_Peer, dict[str, str]]:
        """Where to ask, and with which headers."""
        if HOP_HEADER in request.headers:
            raise Refusal(
                Code.WRONG_NODE,
                f"{errand.subject} is on node {errand.node}, and this request was handed on before",
            )
        peer = await self._peer(errand)
        headers = {
            "Accept-Encoding": "identity",
            "Authorization": request.headers.get("Authorization", ""),
            "Content-Type": "application/json",
            HOP_HEADER: self._node_name,
            **handed_on(),
        }
        if IDEMPOTENCY_KEY in request.headers and errand.body is None:
            headers[IDEMPOTENCY_KEY] = request.headers[IDEMPOTENCY_KEY]
        return peer, headers

    async def _peer(self, errand: Errand) -> _Peer:
        """The agent of the errand's node, by the ForkNode of that name."""
        try:
            node = await self._client.get(ForkNode, None, errand.node)
        except NotFound as err:
            raise _unknown(errand, "the address of its agent is not known") from err
        told = node.status
        if node.metadata.name != errand.node:  # What names the node is no name, but a path to another object.
            raise _unknown(errand, "that is no node's name")
        origin = None if told.endpoint is None else agent_origin(told.endpoint)
        if origin is None:
            raise _unknown(errand, "its agent has published no address that requests can be sent to")
        tls = self._context(told.ca_bundle or "")
        if tls is None:
            raise _unknown(errand, f"send this request to {origin}; its agent cannot be verified from here")
        return _Peer(origin, tls)

    def _context(self, ca_bundle: str) -> ssl.SSLContext | None:
        """Trusts what `ca_bundle` holds and nothing else. None where it holds no certificate."""
        known = self._contexts.get(ca_bundle)
        if known is None:
            try:
                known = ssl.create_default_context(cadata=ca_bundle) if ca_bundle else None
            except (ssl.SSLError, ValueError):  # Not PEM, or no certificate in it.
                known = None
            if known is None:
                return None
            # A chain may be published whose root is not known: then its own certificates are the trust.
            known.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            self._contexts.keep(ca_bundle, known, seconds=3600.0)
        return known


def agent_origin(endpoint: str) -> str | None:
    """Scheme, host and port of a published endpoint; None unless it is https and nothing beside these."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port or 443
    except ValueError:
        return None
    if parts.scheme != "https" or not host or "@" in parts.netloc:
        return None
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _unknown(errand: Errand, why: str) -> Refusal:
    return Refusal(Code.WRONG_NODE, f"{errand.subject} is on node {errand.node}: {why}")


def _silent(errand: Errand, peer: _Peer, err: aiohttp.ClientError | TimeoutError) -> Refusal:
    return _silence(errand, peer, _cause(err))


def _silence(errand: Errand, peer: _Peer, cause: str) -> Refusal:
    sentence = (
        f"the agent of node {errand.node}, where {errand.subject} is, does not answer at "
        f"{peer.origin}: {cause}"
    )
    return Refusal(Code.UPSTREAM_ERROR, sentence)


def _told(request: web.Request, errand: Errand, answer: aiohttp.ClientResponse, content: bytes) -> Told:
    log.debug(
        "request_handed_on id=%s node=%s status=%d there=%s",
        request[REQUEST_ID],
        errand.node,
        answer.status,
        answer.headers.get("X-Request-Id"),
    )
    passed = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
    return Told(status=answer.status, content=content, headers=passed)


async def _soon(piece: Awaitable[bytes]) -> bytes:
    """The next piece of an answer. Raises `ConnectionError` where there is none and no end either."""
    try:
        async with asyncio.timeout(SILENT_SECONDS):
            return await piece
    except (aiohttp.ClientError, TimeoutError) as err:
        raise ConnectionError("the owner's answer broke off") from err


async def _whole(request: web.Request, answer: aiohttp.ClientResponse, errand: Errand) -> bytes:
    """All of the body, which `request` holds from here on. Raises `Refusal`."""
    _check(answer, errand)
    chunks: list[bytes] = []
    async for chunk in answer.content.iter_any():
        request[HELD].hold(len(chunk), f"an answer of node {errand.node}'s agent that goes on with a piece")
        chunks.append(chunk)
    return b"".join(chunks)


async def _beginning(answer: aiohttp.ClientResponse, errand: Errand) -> tuple[bytes, bool]:
    """Of the body, and whether that is all of it. Most bodies are short; nobody holds one that is not."""
    _check(answer, errand)
    chunks: list[bytes] = []
    while sum(map(len, chunks)) <= PIECE_BYTES:
        chunk = await answer.content.readany()
        if not chunk:
            return b"".join(chunks), True
        chunks.append(chunk)
    return b"".join(chunks), False


def _check(answer: aiohttp.ClientResponse, errand: Errand) -> None:
    """Raises `Refusal` for what is no answer of this API."""
    is_odd = 300 <= answer.status < 400 or "Content-Encoding" in answer.headers
    if is_odd or answer.content_type != "application/json":
        answer.close()
        sentence = f"the agent of node {errand.node}, where {errand.subject} is, gave no answer of this API"
        raise Refusal(Code.UPSTREAM_ERROR, sentence)


def _cause(error: aiohttp.ClientError | TimeoutError) -> str:
    """Why, in words of ours: the library's show objects of its own."""
    match error:
        case TimeoutError():
            return "its time was over"
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            return "what is there does not show the certificate that the agent published"
        case aiohttp.ClientConnectorError():
            code = error.os_error.errno
            return "it cannot be reached" if code is None else os.strerror(code).lower()
        case _:
            return "the connection broke"
