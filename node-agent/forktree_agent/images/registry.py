"""A client of registries (the OCI distribution API), of which it only reads.

Everything that comes back is a stranger's: answers have a bound and a deadline, redirects and token services
are held to the same rule as the registry, a login goes to the registry and its token service alone, and what
is read is what its digest says or an error.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Self
from urllib.parse import urljoin

import aiohttp
import certifi
import msgspec
from yarl import URL

from forktree_agent.images.credentials import Login
from forktree_agent.images.documents import (
    DOCUMENT_BYTES,
    INDEX_TYPES,
    MANIFEST_TYPES,
    Descriptor,
    kind_of,
    lacks_digest,
    manifest_for_here,
)
from forktree_agent.images.errors import (
    ImageInvalid,
    ImageMissing,
    ImagePullFailed,
    RegistryUnwell,
    cleaned,
)
from forktree_agent.images.reaching import GuardedResolver, Rule, place_of
from forktree_agent.images.references import Reference

CONNECT_SECONDS = 15.0
SILENCE_SECONDS = 60.0
"""Without a byte, after which an answer is given up; and for its headers, however they come."""
_REDIRECTS = 5
_ERROR_BYTES = 16 << 10
_TOKEN_BYTES = 64 << 10
_CONNECTIONS, _CONNECTIONS_TO_ONE = 256, 8
"""So that a registry that holds all of its own keeps nobody from another."""
_ACCEPT = ", ".join((*MANIFEST_TYPES, *INDEX_TYPES))
_PASSING = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT})
_REDIRECTING = frozenset({301, 302, 303, 307, 308})
_PARAMETER = re.compile(r'([A-Za-z]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast an answer must come on average, once some time was waited for it."""

    bytes_per_second: int
    after_seconds: float


LOWEST_RATE = Rate(16 << 10, after_seconds=30.0)


class BadAuthorities(Exception):
    """Nobody could be trusted by that file, and one sentence says why."""


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""


class _Fault(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""


class _Faults(msgspec.Struct, frozen=True):
    errors: list[_Fault] = []


@dataclass(frozen=True, slots=True)
class FoundManifest:
    """The manifest for this platform, as its digest says."""

    digest: str
    body: bytes


@dataclass(slots=True)
class _Access:
    """How one repository is asked: found out at the first refusal, and used from there on."""

    login: Login | None
    authorization: str | None = field(default=None, repr=False)


class Registries:
    """Asks registries. One for the whole agent; connections are shared, logins are not."""

    def __init__(self, http: aiohttp.ClientSession, rule: Rule, lowest_rate: Rate) -> None:
        self._http = http
        self._rule = rule
        self._lowest_rate = lowest_rate

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        rule: Rule,
        *,
        user_agent: str,
        authorities: Path | None = None,
        lowest_rate: Rate = LOWEST_RATE,
    ) -> AsyncGenerator[Self]:
        """`authorities`, in PEM, are trusted beside the public ones. Raises `BadAuthorities`."""
        trusted = ssl.create_default_context()
        trusted.load_verify_locations(certifi.where())  # A container need not have the system's.
        if authorities is not None:
            try:
                trusted.load_verify_locations(authorities)
            except OSError as err:  # `ssl.SSLError` is one.
                raise BadAuthorities(f"{authorities} has no certificates in PEM: {err}") from err
        resolver = GuardedResolver(rule)
        connector = aiohttp.TCPConnector(
            resolver=resolver,
            use_dns_cache=False,
            limit=_CONNECTIONS,
            limit_per_host=_CONNECTIONS_TO_ONE,
            ssl=trusted,
        )
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        try:
            async with aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                headers={"User-Agent": user_agent},
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            ) as http:
                yield cls(http, rule, lowest_rate)
        finally:
            await resolver.close()  # A connector closes no resolver that it is given.

    def of(self, reference: Reference, login: Login | None) -> Repository:
        """Raises `ImagePullFailed` if it may not be asked."""
        base = self._rule.base(reference)
        return Repository(
            self._http, self._rule, reference, base, _Access(login), lowest_rate=self._lowest_rate
        )


class Repository:
    """One repository of a registry, asked with one login."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        rule: Rule,
        reference: Reference,
        base: URL,
        access: _Access,
        *,
        lowest_rate: Rate,
    ) -> None:
        self._lowest_rate = lowest_rate
        self._http = http
        self._rule = rule
        self._reference = reference
        self._base = base
        self._access = access

    @property
    def source(self) -> str:
        """Which repository of which registry this is, whatever the image in it."""
        return str(self._base / self._reference.repository)

    @property
    def login(self) -> Login | None:
        return self._access.login

    async def manifest(self) -> FoundManifest:
        """Of the reference, for linux/amd64. Raises `ImageError`."""
        kind, found = await self._document(self._reference.manifest)
        if kind in INDEX_TYPES:
            here = manifest_for_here(found.body)
            kind, found = await self._document(here.digest)
        if kind not in MANIFEST_TYPES:
            raise ImageInvalid(f"{self._reference.text} is no image: {cleaned(kind) or 'of no kind'}")
        return found

    async def _document(self, name: str) -> tuple[str, FoundManifest]:
        async with self._asking(f"manifests/{name}", accept=_ACCEPT) as answer:
            body = await self._read(answer, DOCUMENT_BYTES, "manifest")
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
            if not lacks_digest(name) and digest != name:
                raise ImageInvalid(f"the registry answers with another manifest than {name}")
            return kind_of(answer.content_type, body), FoundManifest(digest, body)

    async def small_blob(self, blob: Descriptor) -> bytes:
        """A blob that fits into memory. Raises `ImageError`."""
        pieces = [piece async for piece in self.blob(blob)]
        return b"".join(pieces)

    async def blob(self, blob: Descriptor) -> AsyncGenerator[bytes]:
        """A blob, piece by piece. Only once it has ended without an error is it what its digest says."""
        digest, left = hashlib.sha256(), blob.size
        async with (
            self._asking(f"blobs/{blob.digest}") as answer,
            aclosing(self._pieces(answer)) as pieces,
        ):
            async for piece in pieces:
                left -= len(piece)
                if left < 0:
                    raise ImageInvalid(
                        f"blob {blob.digest} is longer than the {blob.size} bytes it should have"
                    )
                digest.update(piece)
                yield piece
        if left > 0:
            raise RegistryUnwell(f"blob {blob.digest} ended {left} bytes early")
        if f"sha256:{digest.hexdigest()}" != blob.digest:
            raise ImageInvalid(f"the registry answers with another blob than {blob.digest}")

    async def _pieces(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        """Of a body that is not too slow. Only our waiting for it counts, not what we do between."""
        now, rate = asyncio.get_running_loop().time, self._lowest_rate
        received, waited, since = 0, 0.0, now()
        async for piece in answer.content.iter_any():
            received += len(piece)
            waited += now() - since
            if waited > rate.after_seconds and received < waited * rate.bytes_per_second:
                # Not tried again: it has had its time, in which it kept others waiting.
                raise ImagePullFailed(
                    f"{self._reference.registry} is slower than {rate.bytes_per_second} bytes in a second"
                )
            yield piece
            since = now()

    async def _read(self, answer: aiohttp.ClientResponse, largest: int, what: str) -> bytes:
        body = bytearray()
        async with aclosing(self._pieces(answer)) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > largest:
                    raise ImageInvalid(f"the registry's {what} is larger than {largest} bytes")
        return bytes(body)

    def _is_registry(self, url: URL) -> bool:
        return url.scheme == self._base.scheme and place_of(url) == place_of(self._base)

    @asynccontextmanager
    async def _asking(self, path: str, *, accept: str = "*/*") -> AsyncGenerator[aiohttp.ClientResponse]:
        """A successful answer. Raises `ImageError`, also for what goes wrong while it is read."""
        url = self._base / "v2" / self._reference.repository
        for part in path.split("/"):
            url /= part
        with _translated(self._reference.registry):
            for attempt in (1, 2):
                async with self._following(url, accept) as answer:
                    # Only the registry says who gets its login, and nobody that it led us to.
                    refused = answer.status == HTTPStatus.UNAUTHORIZED and self._is_registry(answer.url)
                    if refused and attempt == 1:
                        await self._authorize(answer)
                        continue
                    await self._must_succeed(answer)
                    yield answer
                    return

    @asynccontextmanager
    async def _following(self, url: URL, accept: str) -> AsyncGenerator[aiohttp.ClientResponse]:
        for _ in range(_REDIRECTS + 1):
            self._rule.check(url)
            headers = {"Accept": accept}
            if self._access.authorization is not None and self._is_registry(url):
                headers["Authorization"] = self._access.authorization
            async with self._got(url, headers) as answer:
                if answer.status not in _REDIRECTING:
                    yield answer
                    return
                url = _joined(url, answer.headers.get("Location", ""))
        raise ImagePullFailed(f"{self._reference.registry} redirects more than {_REDIRECTS} times")

    @asynccontextmanager
    async def _got(self, url: URL, headers: dict[str, str]) -> AsyncGenerator[aiohttp.ClientResponse]:
        async with asyncio.timeout(CONNECT_SECONDS + SILENCE_SECONDS):
            answer = await self._http.get(url, headers=headers, allow_redirects=False)
        async with answer:
            yield answer

    async def _authorize(self, refusal: aiohttp.ClientResponse) -> None:
        """Find out what the registry wants to see. Raises `ImagePullFailed` where we do not have it."""
        kind, _, rest = refusal.headers.get("WWW-Authenticate", "").partition(" ")
        login = self._access.login
        if kind.lower() == "basic" and login is not None:
            self._access.authorization = _basic(login)
        elif kind.lower() == "bearer":
            self._access.authorization = f"Bearer {await self._token(dict(_PARAMETER.findall(rest)))}"
        else:
            await self._must_succeed(refusal)

    async def _token(self, challenge: dict[str, str]) -> str:
        realm = _joined(self._base, challenge.get("realm", ""))
        self._rule.check(realm)
        query = {"scope": f"repository:{self._reference.repository}:pull"}
        if "service" in challenge:
            query["service"] = challenge["service"]
        login = self._access.login
        headers = {} if login is None else {"Authorization": _basic(login)}
        async with self._got(realm.update_query(query), headers) as answer:
            await self._must_succeed(answer)
            body = await self._read(answer, _TOKEN_BYTES, "token")
        try:
            found = msgspec.json.decode(body, type=_Token)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise ImagePullFailed(
                f"the token service of {self._reference.registry} answers with no token"
            ) from None
        token = found.token or found.access_token
        if re.fullmatch(r"[\x21-\x7e]+", token) is None:
            raise ImagePullFailed(f"the token service of {self._reference.registry} answers with no token")
        return token

    async def _must_succeed(self, answer: aiohttp.ClientResponse) -> None:
        if answer.status == HTTPStatus.OK:
            return
        said = await _said(answer)
        name, status = self._reference.text, answer.status
        if status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise RegistryUnwell(f"{self._reference.registry} answers {status}{said}")
        if status == HTTPStatus.NOT_FOUND:
            raise ImageMissing(f"{name} is not in its registry{said}")
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            how = "without a login" if self._access.login is None else "with the login of its imagePullSecret"
            raise ImagePullFailed(f"{name} may not be pulled {how}{said}")
        raise ImagePullFailed(f"{self._reference.registry} answers {status}{said}")


class _translated:
    """What aiohttp raises comes out as ours."""

    def __init__(self, registry: str) -> None:
        self._registry = registry

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: object) -> None:
        match err:
            case ImagePullFailed() | ImageInvalid() | ImageMissing():
                return
            case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
                raise ImagePullFailed(
                    f"{self._registry} does not prove who it is: {cleaned(str(err))}"
                ) from err
            case aiohttp.ClientConnectorError():
                raise RegistryUnwell(f"{self._registry} cannot be reached: {cleaned(str(err))}") from err
            case aiohttp.ClientError() | TimeoutError() | OSError():
                said = cleaned(str(err)) or type(err).__name__
                raise RegistryUnwell(f"{self._registry} did not answer to the end: {said}") from err
            case _:
                return


def _basic(login: Login) -> str:
    return f"Basic {base64.b64encode(f'{login.user}:{login.password}'.encode()).decode()}"


def _joined(base: URL, text: str) -> URL:
    try:
        return URL(urljoin(str(base), text))
    except ValueError:
        raise ImagePullFailed(f"the registry sends us to {cleaned(text)!r}, which is no address") from None


async def _said(answer: aiohttp.ClientResponse) -> str:
    """What a registry says of a refusal, as the end of a sentence."""
    try:
        body = await answer.content.read(_ERROR_BYTES)
        faults = msgspec.json.decode(body, type=_Faults).errors
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, aiohttp.ClientError, TimeoutError):
        return ""
    said = "; ".join(cleaned(each.message or each.code) for each in faults[:3])
    return f": {cleaned(said)}" if said else ""
