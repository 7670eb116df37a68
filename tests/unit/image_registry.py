"""A registry on loopback, and images made for it: what the distribution API says, and what it must not do."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import json
import ssl
import tarfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of an archive, as `tarfile` writes it."""

    name: str
    content: bytes = b""
    kind: bytes = tarfile.REGTYPE
    target: str = ""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    pax: dict[str, str] = field(default_factory=dict[str, str])


def folder(name: str, mode: int = 0o755, **more: Any) -> Entry:
    return Entry(name=name, kind=tarfile.DIRTYPE, mode=mode, **more)


def link(name: str, target: str, **more: Any) -> Entry:
    return Entry(name=name, kind=tarfile.SYMTYPE, target=target, **more)


def hard_link(name: str, target: str) -> Entry:
    return Entry(name=name, kind=tarfile.LNKTYPE, target=target)


def archive(*entries: Entry) -> bytes:
    """A layer, not compressed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for each in entries:
            tar.addfile(*_member(each))
    return packed.getvalue()


def _member(entry: Entry) -> tuple[tarfile.TarInfo, io.BytesIO]:
    member = tarfile.TarInfo(entry.name)
    member.type, member.linkname, member.mode = entry.kind, entry.target, entry.mode
    member.uid, member.gid, member.mtime = entry.uid, entry.gid, entry.mtime
    member.pax_headers = entry.pax
    member.size = len(entry.content)
    return member, io.BytesIO(entry.content)


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(slots=True)
class Registry:
    """Holds blobs and manifests. Its switches make it misbehave."""

    port: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict[str, bytes])
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict[str, tuple[str, bytes]])
    """By tag and by digest: media type and body."""
    asked: list[str] = field(default_factory=list[str])
    """Paths, in order."""
    logins: list[str] = field(default_factory=list[str])
    """What the token service was shown."""
    user: str = ""
    """Whom it lets in, as `name:password`. Empty: anybody."""
    basic: bool = False
    """It asks for the login itself and not for a token."""
    answer: Callable[[web.Request], Any] | None = None
    """Asked before all else; what it returns is the answer, unless None."""
    gate: asyncio.Event | None = None
    """Blobs stop in their middle until it is set."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once one has."""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def add_blob(self, data: bytes) -> dict[str, Any]:
        self.blobs[digest_of(data)] = data
        return {"digest": digest_of(data), "size": len(data)}

    def add_image(
        self,
        *layers: bytes,
        tag: str = "latest",
        config: dict[str, Any] | None = None,
        media_type: str = LAYER,
        top: dict[str, Any] | None = None,
    ) -> str:
        """An image of these layers, as they are. Returns its digest. `top` is put over the manifest."""
        document = {"architecture": "amd64", "os": "linux", "config": config or {}}
        described = self.add_blob(json.dumps(document).encode()) | {"mediaType": CONFIG}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": described,
            "layers": [self.add_blob(each) | {"mediaType": media_type} for each in layers],
        }
        return self.add_manifest(manifest | (top or {}), tag)

    def add_manifest(self, manifest: dict[str, Any], tag: str) -> str:
        body = json.dumps(manifest).encode()
        for name in (tag, digest_of(body)):
            self.manifests[name] = (str(manifest.get("mediaType", "")), body)
        return digest_of(body)

    @classmethod
    @asynccontextmanager
    async def running(cls, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncGenerator[Self]:
        registry = cls()
        application = web.Application()
        application.router.add_get("/{path:.*}", registry._serve)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        assert runner.addresses
        registry.port = runner.addresses[0][1]
        try:
            yield registry
        finally:
            await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if self.answer is not None:
            answer: web.StreamResponse | None = self.answer(request)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is not None:
                return answer
        if request.path == "/token":
            return self._token(request)
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        _, _, *repository, kind, name = request.path.split("/")
        del repository
        if kind == "manifests" and name in self.manifests:
            media_type, body = self.manifests[name]
            return web.Response(body=body, content_type=media_type)
        if kind == "blobs" and name in self.blobs:
            return await self._blob(request, self.blobs[name])
        return fault(404, "MANIFEST_UNKNOWN", "manifest unknown")

    def _token(self, request: web.Request) -> web.Response:
        shown = request.headers.get("Authorization", "")
        self.logins.append(shown)
        assert request.query["scope"].startswith("repository:")
        if self.user and shown != basic(self.user):
            return fault(401, "UNAUTHORIZED", "wrong password")
        return web.json_response({"token": "let-me-in"})

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not self.user:
            return None
        shown = request.headers.get("Authorization")
        wanted = basic(self.user) if self.basic else "Bearer let-me-in"
        if shown == wanted:
            return None
        refusal = fault(401, "UNAUTHORIZED", "authentication required")
        realm = f'Bearer realm="http://{self.host}/token",service="here"'
        refusal.headers["WWW-Authenticate"] = 'Basic realm="here"' if self.basic else realm
        return refusal

    async def _blob(self, request: web.Request, data: bytes) -> web.StreamResponse:
        if self.gate is None or len(data) < 4096:
            return web.Response(body=data)
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        self.stopped.set()
        await self.gate.wait()
        await response.write(data[len(data) // 2 :])
        return response


def fault(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"errors": [{"code": code, "message": message}]}, status=status)


def basic(user: str) -> str:
    return f"Basic {base64.b64encode(user.encode()).decode()}"


def dockerconfig(host: str, user: str) -> str:
    """What `kubectl create secret docker-registry` writes."""
    name, _, password = user.partition(":")
    return json.dumps({"auths": {host: {"username": name, "password": password}}})


def zipped(layers: Sequence[Entry]) -> bytes:
    return gzip.compress(archive(*layers), mtime=0)
