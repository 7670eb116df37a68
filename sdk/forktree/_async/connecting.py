"""Where the agent is, and the token to show it: as it was said, or as the cluster tells."""

from __future__ import annotations

import base64
import binascii
import json
import random
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from forktree._flavours import AsyncLock, async_blocking
from forktree._settings import Settings, trust
from forktree.errors import BadSettings, NoAgent, Unauthorized
from forktree.models.base import API_VERSION, GROUP

if TYPE_CHECKING:
    from forktree.kube.access import ClusterAccess

AUDIENCE = GROUP
"""Whom a token must be meant for. One for the whole API server would be refused."""

_TOKEN_SECONDS = 3600
_FRESH = 0.8
"""Of a token's life: it is renewed before it ends, since it may be used by a request that takes minutes."""
_REREAD_SECONDS = 30.0
_CLUSTER_SECONDS = 10.0
"""For each of the few questions to the Kubernetes API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where requests go."""

    url: str
    tls: ssl.SSLContext
    prefix: str
    """Of all paths: `/ns/NAMESPACE/v1`, or `/v1` for the namespace of the token's own account."""


class AsyncConnection:
    """Finds the agent when it is first needed, and keeps the token fresh."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = AsyncLock()
        self._place: Place | None = None
        self._places: dict[tuple[str, Path | str | None], Place] = {}
        """The same one for the same agent: connections are kept by it."""
        self._cluster: tuple[ClusterAccess, str] | None = None
        self._token: str | None = None
        self._token_until = 0.0

    async def place(self) -> Place:
        """Raises `BadSettings`, `NoAgent`."""
        async with self._lock:
            if self._place is None:
                self._place = await self._find()
            return self._place

    async def lost(self) -> None:
        """Nobody answers there. Where the cluster had told of it, it is asked again: there may be others."""
        async with self._lock:
            if self._settings.url is None:
                self._place = None

    async def token(self, *, fresh: bool = False) -> str:
        """`fresh`: the last one was refused. Raises `BadSettings`, `Unauthorized` where none is to be had."""
        async with self._lock:
            if self._token is None or fresh or time.monotonic() > self._token_until:
                self._token, seconds = await self._obtain()
                self._token_until = time.monotonic() + seconds
            return self._token

    @property
    def renews(self) -> bool:
        """Whether asking for a fresh token may give another."""
        return self._settings.token is None

    async def _find(self) -> Place:
        settings = self._settings
        namespace = settings.namespace
        url, ca = settings.url, settings.ca
        if settings.needs_cluster:
            access, home = await self._reach()
            namespace = namespace or home
            if url is None:
                url, published = await _ready_agent(access)
                ca = ca or published
        assert url is not None
        known = self._places.get((url, ca))
        if known is None:
            tls = await async_blocking(lambda: trust(ca))
            prefix = f"/ns/{namespace}/v1" if namespace else "/v1"
            known = self._places[url, ca] = Place(url=url, tls=tls, prefix=prefix)
        return known

    async def _obtain(self) -> tuple[str, float]:
        """A token, and for how many seconds it need not be looked at again."""
        settings = self._settings
        if settings.token is not None:
            return settings.token, float("inf")
        if settings.token_file is not None:
            file = settings.token_file
            try:
                return (await async_blocking(file.read_text)).strip(), _REREAD_SECONDS
            except OSError as err:
                raise BadSettings(f"cannot read FORKTREE_TOKEN_FILE: {err}") from err
        access, home = await self._reach()
        namespace, account = await self._account(access, settings.namespace or home)
        return await _requested_token(access, namespace, account)

    async def _account(self, access: ClusterAccess, namespace: str) -> tuple[str, str]:
        """The service account to speak as: the one named, a pod's own, else the namespace's `default`."""
        if self._settings.service_account is not None:
            return namespace, self._settings.service_account
        authorization = await async_blocking(access.read_authorization)
        return _own_account(authorization or "") or (namespace, "default")

    async def _reach(self) -> tuple[ClusterAccess, str]:
        """The cluster, and the namespace that its user works in."""
        if self._cluster is None:
            settings = self._settings

            def discover() -> tuple[ClusterAccess, str]:
                # Only now: it takes half a second to import, and who names an agent never needs it.
                from forktree.kube.access import AccessError, ClusterAccess, current_namespace  # noqa: PLC0415

                try:
                    access = ClusterAccess.discovered(settings.kubeconfig, settings.context)
                    return access, current_namespace(settings.kubeconfig, settings.context)
                except AccessError as err:
                    sentence = (
                        "set FORKTREE_URL, FORKTREE_CA and FORKTREE_TOKEN to say where an agent is, "
                        f"or have a kubeconfig to find one by: {err}"
                    )
                    raise NoAgent(sentence) from err

            self._cluster = await async_blocking(discover)
        return self._cluster


async def _ready_agent(access: ClusterAccess) -> tuple[str, str | None]:
    """URL and certificates of an agent that takes requests. Any agent hands requests on to the right one."""
    answer = await _ask(access, "GET", f"/apis/{API_VERSION}/forknodes")
    if answer.status_code == 404:
        raise NoAgent("this cluster has no forktree: it knows no ForkNodes")
    nodes: list[dict[str, Any]] = _json(answer, "list ForkNodes").get("items", [])
    statuses: list[dict[str, Any]] = [node.get("status", {}) for node in nodes]
    ready = [status for status in statuses if status.get("ready") and status.get("endpoint")]
    if ready:
        # Any of them: not all clients at one, and not for ever at one that has just died.
        status = random.choice(ready)
        return str(status["endpoint"]).rstrip("/"), status.get("caBundle")
    why = "there is no ForkNode" if not nodes else f"none of {len(nodes)} ForkNodes is ready"
    raise NoAgent(f"no agent of this cluster takes requests: {why} (`kubectl get forknodes -o wide`)")


async def _requested_token(access: ClusterAccess, namespace: str, account: str) -> tuple[str, float]:
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    spec = {"audiences": [AUDIENCE], "expirationSeconds": _TOKEN_SECONDS}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    answer = await _ask(access, "POST", path, body)
    if answer.status_code == 404:
        sentence = f"there is no service account {account} in the namespace {namespace} to speak as"
        raise BadSettings(f"{sentence}: name another (FORKTREE_SERVICE_ACCOUNT)")
    granted = _json(answer, f"get a token for the service account {account} in the namespace {namespace}")
    seconds = float(granted.get("spec", {}).get("expirationSeconds", _TOKEN_SECONDS))
    return str(granted["status"]["token"]), seconds * _FRESH


async def _ask(
    access: ClusterAccess, method: str, path: str, body: dict[str, Any] | None = None
) -> httpx2.Response:
    """The Kubernetes API's answer. Raises `NoAgent` where there is none."""
    authorization = await async_blocking(access.read_authorization)
    headers = {} if authorization is None else {"Authorization": authorization}
    tls = access.tls if access.tls is not None else False
    try:
        async with httpx2.AsyncClient(verify=tls, timeout=_CLUSTER_SECONDS, trust_env=False) as http:
            return await http.request(method, access.server_url + path, json=body, headers=headers)
    except httpx2.TransportError as err:
        raise NoAgent(f"the Kubernetes API at {access.server_url} does not answer: {err}") from err


def _json(answer: httpx2.Response, purpose: str) -> dict[str, Any]:
    if answer.is_success:
        found: dict[str, Any] = answer.json()
        return found
    try:
        why = str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        why = f"status {answer.status_code}"
    sentence = f"the Kubernetes API does not let you {purpose}: {why}"
    raise Unauthorized(sentence, code="unauthorized", status=answer.status_code)


def _own_account(authorization: str) -> tuple[str, str] | None:
    """Namespace and name of the service account whose token this is; None for any other user."""
    try:
        claims = authorization.split(".")[1]
        subject = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["sub"]
        _, _, namespace, account = str(subject).split(":")
    except (IndexError, ValueError, KeyError, TypeError, binascii.Error):
        return None
    return namespace, account
