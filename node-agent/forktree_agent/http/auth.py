"""Who is asking, and may they: both are the API server's answers, kept for seconds.

Only a bearer token made for the audience `forktree.dev` counts. A default-audience token is good for the
whole API server, so a caller who sends one here hands us power that we must not hold; it is refused even
though it would prove the same identity.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

import msgspec

from forktree.kube.client import KubeClient
from forktree.models.base import GROUP
from forktree_agent.http.errors import Code, Refusal, shown
from forktree_agent.http.remembering import Remembered

AUDIENCE = GROUP

KEPT_SECONDS = 10.0
"""How long a right that was taken away may still be used."""

KEPT_ANSWERS = 4096
"""About 2 MiB at most."""

REVIEWS_AT_ONCE = 16
"""Callers beyond wait, so that a flood of bad tokens does not become a flood on the API server."""

HOW = f"`kubectl create token SERVICE_ACCOUNT --audience {AUDIENCE}` makes a right one"

_SERVICE_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An identity that the API server vouched for."""

    username: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    token_hash: bytes
    """SHA-256 of the token: what answers about this caller are remembered by."""

    @property
    def namespace(self) -> str | None:
        """The service account's own namespace; None for any other kind of user."""
        parts = self.username.removeprefix(_SERVICE_ACCOUNT).split(":")
        return parts[0] if self.username.startswith(_SERVICE_ACCOUNT) and len(parts) == 2 else None

    @property
    def among(self) -> str:
        """Who shares what callers have a share of: whoever may make one service account may make many."""
        return self.username if self.namespace is None else f"system:serviceaccounts:{self.namespace}"


@dataclass(frozen=True, slots=True)
class _Access:
    """What somebody would do, in the words of the API server."""

    verb: str
    namespace: str
    resource: str
    name: str
    """Empty: to any."""
    subresource: str


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, list[str]] = {}


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: _User = msgspec.field(default_factory=_User)
    audiences: tuple[str, ...] = ()


class _TokenReview(msgspec.Struct):
    status: _TokenStatus


class _AccessStatus(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus


class _Claims(msgspec.Struct):
    aud: str | list[str] = msgspec.field(default_factory=list[str])
    exp: float | None = None


class Gate:
    """Asks the API server about callers. One instance per server; it holds the bounded memory of answers."""

    def __init__(self, client: KubeClient, *, now: Callable[[], float] = time.time) -> None:
        self._client = client
        self._now = now
        self._callers: Remembered[bytes, Caller] = Remembered(KEPT_ANSWERS, now)
        self._allowed: Remembered[tuple[bytes, _Access], bool] = Remembered(KEPT_ANSWERS, now)
        self._reviews = asyncio.Semaphore(REVIEWS_AT_ONCE)

    async def caller(self, authorization: str | None) -> Caller:
        """Whom the `Authorization` header proves. Raises `Refusal` (401) that says how to get one."""
        token = _bearer(authorization)
        token_hash = hashlib.sha256(token.encode()).digest()
        if known := self._callers.get(token_hash):
            return known
        claims = claims_of(token)
        if claims is not None and AUDIENCE not in _audiences(claims):
            meant = shown(", ".join(_audiences(claims))) or "nobody"
            raise Refusal(Code.UNAUTHORIZED, f"this token is meant for {meant}, not for {AUDIENCE}; {HOW}")
        caller = await self._review(token, token_hash)
        if caller is None:
            raise Refusal(Code.UNAUTHORIZED, _why_refused(claims, self._now()))
        expires = claims.exp if claims is not None and claims.exp is not None else self._now() + KEPT_SECONDS
        self._callers.keep(token_hash, caller, min(KEPT_SECONDS, expires - self._now()))
        return caller

    async def permit(
        self,
        caller: Caller,
        verb: str,
        namespace: str,
        *,
        resource: str = "sessions",
        name: str = "",
        subresource: str = "",
    ) -> None:
        """Return if `caller` may `verb` it (or its `subresource`). Raises `Refusal` (403) otherwise.

        Only permissions are remembered: a right that is granted counts at once. Whoever may it everywhere in
        the namespace, as nearly all may, is not asked about for each name: children have new ones all along.
        """
        everywhere = _Access(verb, namespace, resource, "", subresource)
        asked = (everywhere, replace(everywhere, name=name)) if name else (everywhere,)
        if any(self._allowed.get((caller.token_hash, each)) for each in asked):
            return
        for each in asked:
            if await self._may(caller, each):
                self._allowed.keep((caller.token_hash, each), True, KEPT_SECONDS)
                return
        what = f"{resource}/{subresource}" if subresource else resource
        sentence = f"{caller.username} may not {verb} {what} of {GROUP} in the namespace {namespace}"
        raise Refusal(Code.FORBIDDEN, sentence)

    async def _may(self, caller: Caller, access: _Access) -> bool:
        spec = {
            "user": caller.username,
            "uid": caller.uid,
            "groups": list(caller.groups),
            "extra": caller.extra,
            "resourceAttributes": {"group": GROUP, **asdict(access)},
        }
        answer = await self._ask("authorization.k8s.io", "SubjectAccessReview", "subjectaccessreviews", spec)
        return msgspec.json.decode(answer, type=_AccessReview).status.allowed

    async def _review(self, token: str, token_hash: bytes) -> Caller | None:
        spec = {"token": token, "audiences": [AUDIENCE]}
        answer = await self._ask("authentication.k8s.io", "TokenReview", "tokenreviews", spec)
        status = msgspec.json.decode(answer, type=_TokenReview).status
        # An authenticator that knows nothing of audiences vouches for the user and names no audience.
        if not status.authenticated or AUDIENCE not in status.audiences or not status.user.username:
            return None
        user = status.user
        return Caller(
            username=user.username,
            uid=user.uid,
            groups=user.groups,
            extra=user.extra,
            token_hash=token_hash,
        )

    async def _ask(self, group: str, kind: str, plural: str, spec: Mapping[str, object]) -> bytes:
        """Post a review and return the API server's answer."""
        body = {"apiVersion": f"{group}/v1", "kind": kind, "spec": spec}
        async with self._reviews:
            return await self._client.raw("POST", f"/apis/{group}/v1/{plural}", body)


def _bearer(authorization: str | None) -> str:
    if not authorization:
        sentence = (
            "send `Authorization: Bearer TOKEN`: client certificates and passwords are not accepted here; "
        )
        raise Refusal(Code.UNAUTHORIZED, sentence + HOW)
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or not token.isascii():
        raise Refusal(Code.UNAUTHORIZED, f"the Authorization header must be `Bearer TOKEN`; {HOW}")
    return token


def claims_of(token: str) -> _Claims | None:
    """What a JWT says of itself, unproved: good for a clear refusal and for keeping an answer shorter."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        raw = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        return msgspec.json.decode(raw, type=_Claims)
    except (binascii.Error, ValueError, RecursionError):
        return None


def _audiences(claims: _Claims) -> list[str]:
    return [claims.aud] if isinstance(claims.aud, str) else claims.aud


def _why_refused(claims: _Claims | None, now: float) -> str:
    if claims is None:
        return f"this is no token of a Kubernetes service account, and static tokens are not accepted; {HOW}"
    if claims.exp is not None and claims.exp <= now:
        return f"this token has expired; {HOW}"
    return f"the API server does not accept this token (its account or its binding may be gone); {HOW}"
