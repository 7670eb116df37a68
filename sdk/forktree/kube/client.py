"""Calls to the API server, typed by the model of the kind. Every one has a deadline and typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Generic, Literal, NamedTuple, TypeVar

import aiohttp
import msgspec
from pydantic import ValidationError

from forktree.kube import errors
from forktree.kube.access import AccessError, ClusterAccess
from forktree.models.base import ApiModel, ApiObject, Uid
from forktree.models.texts import is_object_name

ObjectT = TypeVar("ObjectT", bound=ApiObject)
Propagation = Literal["Background", "Foreground", "Orphan"]
Subresource = Literal["status"]
Observer = Callable[[str, str, errors.KubeError | None], None]
"""Told of each call once it is over: method, path, and what it raised."""

_PAGE_SIZE = 500
_JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML.


class Listing(NamedTuple, Generic[ObjectT]):
    """All objects of one instant."""

    items: tuple[ObjectT, ...]
    resource_version: str
    """The instant. A watch from here misses nothing."""


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw]


class KubeClient:
    """One pool of connections to one API server. May be used by many tasks at once.

    Every call raises `KubeError`: `Unavailable` when nothing was answered before `deadline` (loop time; None:
    10 s from now), and the others as their names say. Only `Unavailable` is worth repeating as it is, and a
    write that ended so may have taken effect.
    """

    def __init__(
        self,
        access: ClusterAccess,
        http: aiohttp.ClientSession,
        timeout_seconds: float,
        observe: Observer | None = None,
    ) -> None:
        self._access, self._http, self._timeout_seconds = access, http, timeout_seconds
        self._observe = observe

    @classmethod
    @asynccontextmanager
    async def connected(
        cls,
        access: ClusterAccess,
        *,
        user_agent: str = "forktree",
        timeout_seconds: float = 10.0,
        observe: Observer | None = None,
    ) -> AsyncGenerator[KubeClient]:
        """Connections are made as calls need them and closed at the end. Nothing is asked of the server."""
        # Watches stay open, so a bound on connections would let them starve the calls.
        connector = aiohttp.TCPConnector(ssl=access.tls or True, limit=0)
        async with aiohttp.ClientSession(
            connector=connector,
            headers={"User-Agent": user_agent, "Accept": _JSON},
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        ) as http:
            yield cls(access, http, timeout_seconds, observe)

    async def get(
        self, model: type[ObjectT], namespace: str | None, name: str, *, deadline: float | None = None
    ) -> ObjectT:
        return decode(model, await self.raw("GET", _object_path(model, namespace, name), deadline=deadline))

    async def list(
        self,
        model: type[ObjectT],
        namespace: str | None = None,
        *,
        field_selector: str | None = None,
        label_selector: str | None = None,
        deadline: float | None = None,
    ) -> Listing[ObjectT]:
        """All matching objects as of one instant, not before the call. Raises `Unreadable` if any one is."""
        items, version = await self.list_raw(
            model,
            namespace,
            field_selector=field_selector,
            label_selector=label_selector,
            deadline=deadline,
        )
        return Listing(tuple(decode(model, item) for item in items), version)

    async def list_raw(
        self,
        model: type[ApiObject],
        namespace: str | None = None,
        *,
        field_selector: str | None = None,
        label_selector: str | None = None,
        deadline: float | None = None,
    ) -> tuple[tuple[msgspec.Raw, ...], str]:
        """Like `list`, but the objects as JSON, so that one that cannot be read does not hide the others."""
        deadline = self._deadline(deadline)
        path = model.collection_path(namespace)
        query = selectors(field_selector, label_selector)
        items: tuple[msgspec.Raw, ...] = ()
        page = _ListMeta()
        while True:
            step = {
                **query,
                "limit": str(_PAGE_SIZE),
                **({"continue": page.continue_} if page.continue_ else {}),
            }
            try:
                body = await self.raw("GET", path, query=step, deadline=deadline)
            except errors.Expired:
                if not page.continue_:
                    raise
                # The instant of the first page is forgotten. Pages of two instants are no list: begin again.
                items, page = (), _ListMeta()
                continue
            try:
                answer = msgspec.json.decode(body, type=_List)
            except msgspec.MsgspecError as err:
                raise errors.Unreadable(f"the list of {model.resource.plural} cannot be read: {err}") from err
            items, page = (*items, *answer.items), answer.metadata
            if not page.continue_:
                return items, page.resource_version

    async def create(
        self, obj: ObjectT, *, manager: str | None = None, deadline: float | None = None
    ) -> ObjectT:
        """Create the object and return it as the server keeps it. Its status is not sent.

        `manager`: who it is said to be by; None: the name of this program.
        """
        path = obj.collection_path(obj.metadata.namespace)
        if obj.resource.namespaced and obj.metadata.namespace is None:
            raise ValueError(
                f"a {obj.resource.kind} is created in a namespace, and {obj.metadata.name} has none"
            )
        query = None if manager is None else {"fieldManager": manager}
        answer = await self.raw("POST", path, obj.manifest(), query=query, deadline=deadline)
        return decode(type(obj), answer)

    async def delete(
        self,
        model: type[ApiObject],
        namespace: str | None,
        name: str,
        *,
        uid: Uid | None = None,
        propagation: Propagation | None = None,
        deadline: float | None = None,
    ) -> None:
        """Ask for deletion. With `uid`, another object of this name is left alone and `Conflict` raised."""
        body: dict[str, object] = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if propagation is not None:
            body["propagationPolicy"] = propagation
        await self.raw("DELETE", _object_path(model, namespace, name), body, deadline=deadline)

    async def merge_patch(
        self,
        model: type[ObjectT],
        namespace: str | None,
        name: str,
        body: Mapping[str, object],
        *,
        subresource: Subresource | None = None,
        manager: str | None = None,
        deadline: float | None = None,
    ) -> ObjectT:
        """Change what `body` names; null clears. `metadata.resourceVersion` or `uid` in it must hold.

        `manager`: who it is said to be by; None: the name of this program.
        """
        path = _path(model, namespace, name, subresource)
        query = None if manager is None else {"fieldManager": manager}
        answer = await self.raw(
            "PATCH", path, body, query=query, content_type=_MERGE_PATCH, deadline=deadline
        )
        return decode(model, answer)

    async def replace_status(
        self, obj: ObjectT, status: ApiModel, *, deadline: float | None = None
    ) -> ObjectT:
        """Make `status` all that the status of `obj` says. The version of `obj` must hold.

        Costs the server two thirds of a patch: it need not write out what it has and read it again.
        """
        body = {
            "apiVersion": obj.group_version(),
            "kind": obj.resource.kind,
            "metadata": {
                "name": obj.metadata.name,
                "namespace": obj.metadata.namespace,
                "uid": obj.metadata.uid,
                "resourceVersion": obj.metadata.resource_version,
            },
            "status": status.to_json(),
        }
        path = _path(type(obj), obj.metadata.namespace, obj.metadata.name, "status")
        return decode(type(obj), await self.raw("PUT", path, body, deadline=deadline))

    async def apply(
        self,
        model: type[ObjectT],
        namespace: str | None,
        name: str,
        body: Mapping[str, object],
        *,
        manager: str,
        subresource: Subresource | None = None,
        force: bool = False,
        deadline: float | None = None,
    ) -> ObjectT:
        """Server-side apply: `body` is all that `manager` says about the object; what it said before goes.

        Kind, name and namespace are filled in. Creates the object where it is not there, but a status alone
        cannot: `NotFound`. Raises `Conflict` where another manager owns a field, unless `force`.
        """
        given = body.get("metadata")
        metadata: dict[str, object] = {**given} if isinstance(given, Mapping) else {}
        metadata["name"] = name
        if namespace is not None:
            metadata["namespace"] = namespace
        whole = {
            **body,
            "apiVersion": model.group_version(),
            "kind": model.resource.kind,
            "metadata": metadata,
        }
        answer = await self.raw(
            "PATCH",
            _path(model, namespace, name, subresource),
            whole,
            query={"fieldManager": manager, "force": "true" if force else "false"},
            content_type=_APPLY_PATCH,
            deadline=deadline,
        )
        return decode(model, answer)

    async def raw(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = _JSON,
        deadline: float | None = None,
    ) -> bytes:
        """One request of any kind: reviews, leases, nodes. Returns the body of a good answer."""
        try:
            content = await self._raw(
                method, path, body, query=query, content_type=content_type, deadline=deadline
            )
        except errors.KubeError as err:
            self._tell(method, path, err)
            raise
        self._tell(method, path, None)
        return content

    def _tell(self, method: str, path: str, error: errors.KubeError | None) -> None:
        if self._observe is not None:
            self._observe(method, path, error)

    async def _raw(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        *,
        query: Mapping[str, str] | None,
        content_type: str,
        deadline: float | None,
    ) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout_at(self._deadline(deadline)):
                for fresh in (False, True):
                    headers = await self._headers(fresh=fresh)
                    if data is not None:
                        headers["Content-Type"] = content_type
                    async with self._http.request(
                        method, self._access.server_url + path, params=query, data=data, headers=headers
                    ) as answer:
                        content = await answer.read()
                    # A token that was renewed since it was read is refused once; reading it again tells.
                    if answer.status != 401:
                        break
        except TimeoutError as err:
            raise errors.Unavailable(f"the API server did not answer {method} {path} in time") from err
        except (aiohttp.ClientError, AccessError) as err:
            raise errors.Unavailable(f"the API server was not reached for {method} {path}: {err}") from err
        if answer.status >= 400:
            raise errors.from_answer(answer.status, content, answer.headers.get("Retry-After"))
        return content

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], *, inactivity_seconds: float
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """The body of a long answer in pieces as they come. Raises as `raw` does, also in the midst.

        `Unavailable` after `inactivity_seconds` without a byte: a connection that a middle box has forgotten
        looks just like one on which nothing happens.
        """
        timeout = aiohttp.ClientTimeout(
            total=None, connect=self._timeout_seconds, sock_read=inactivity_seconds
        )
        try:
            async with self._http.get(
                self._access.server_url + path, params=query, headers=await self._headers(), timeout=timeout
            ) as answer:
                if answer.status >= 400:
                    if answer.status == 401:
                        await self._access.authorization(fresh=True)
                    content = await answer.read()
                    raise errors.from_answer(answer.status, content, answer.headers.get("Retry-After"))
                yield answer.content.iter_any()
        except TimeoutError as err:
            raise errors.Unavailable(
                f"nothing came for {inactivity_seconds:g} s on the stream of {path}"
            ) from err
        except (aiohttp.ClientError, AccessError) as err:
            raise errors.Unavailable(f"the stream of {path} broke: {err}") from err

    async def _headers(self, *, fresh: bool = False) -> dict[str, str]:
        authorization = await self._access.authorization(fresh=fresh)
        return {} if authorization is None else {"Authorization": authorization}

    def _deadline(self, deadline: float | None) -> float:
        return asyncio.get_running_loop().time() + self._timeout_seconds if deadline is None else deadline


def decode(model: type[ObjectT], data: bytes | msgspec.Raw) -> ObjectT:
    """The object in `data`. Raises `Unreadable`, naming the kind and what is wrong, but not the content."""
    try:
        return model.model_validate_json(bytes(data))
    except ValidationError as err:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in err.errors())
        raise errors.Unreadable(f"a {model.resource.kind} cannot be read: {wrong}") from err


def selectors(field_selector: str | None, label_selector: str | None) -> dict[str, str]:
    """The query of a list or watch that is narrowed so; an empty value is a selector for "not set"."""
    given = {"fieldSelector": field_selector, "labelSelector": label_selector}
    return {key: value for key, value in given.items() if value is not None}


def _path(model: type[ApiObject], namespace: str | None, name: str, subresource: Subresource | None) -> str:
    path = _object_path(model, namespace, name)
    return path if subresource is None else f"{path}/{subresource}"


def _object_path(model: type[ApiObject], namespace: str | None, name: str) -> str:
    """The path of one object. Names come from objects that users write, and are sent with our rights.

    Raises `NotFound` for what cannot be a name, so that none of it (`..`, `?`, `#`, `%`) leads anywhere else.
    """
    for part in (name, *(() if namespace is None else (namespace,))):
        if not is_object_name(part):
            raise errors.NotFound(f"there is no {model.resource.kind} of a name that is none", code=404)
    return model.object_path(namespace, name)
