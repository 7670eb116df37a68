"""Secrets that templates and sessions name: variables of machines, logins of registries, read when needed.

What a Secret holds goes to the machine, or to the registry, and nowhere else. Nothing here, and nothing that
is given its result, may write it to an object, a log or the journal; whoever needs it again reads it again.

RBAC cannot say "only Secrets that a template or session of that namespace names", so the agent keeps to that
by itself, and the right to read is given to it namespace by namespace (the chart's `roles-agent.yaml`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from forktree.errors import ForktreeError
from forktree.kube.client import KubeClient
from forktree.kube.errors import Forbidden, NotFound, Unreadable
from forktree.models import Reason
from forktree.models.session_template import EnvVar, SecretKeyRef
from forktree.models.texts import is_object_name
from forktree_agent.engine.contract import SecretVariable
from forktree_agent.images.credentials import Login, NoLogins, login_for

PULL_KEY = ".dockerconfigjson"
VALUE_BYTES_MAX = 64 << 10
"""Linux takes no more than twice this as one variable."""


class SecretUnreadable(ForktreeError):
    """A Secret is not there, lacks the entry, may not be read, or holds what no variable can."""

    reason: ClassVar[Reason] = Reason.SECRET_UNREADABLE


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    uid: str
    resource_version: str


class _Secret(msgspec.Struct, frozen=True):
    metadata: _Metadata
    data: dict[str, str] | None = None


async def resolved(client: KubeClient, namespace: str, env: Sequence[EnvVar]) -> dict[str, str]:
    """Names and values, those of Secrets as they are now. Raises `SecretUnreadable` and `KubeError`."""
    values = {each.name: each.value for each in env if each.value is not None}
    return values | {each.name: each.value for each in await secret_variables(client, namespace, env)}


async def secret_variables(
    client: KubeClient, namespace: str, env: Sequence[EnvVar]
) -> tuple[SecretVariable, ...]:
    """Those of `env` that name a Secret, each Secret read once. Raises `SecretUnreadable` and `KubeError`."""
    read: dict[str, _Secret] = {}
    found: list[SecretVariable] = []
    for variable in env:
        if variable.value_from is None:
            continue
        wanted = variable.value_from.secret_key_ref
        secret = read.get(wanted.name)
        if secret is None:
            secret = read[wanted.name] = await _read(client, namespace, wanted.name)
        version = f"{secret.metadata.uid}/{secret.metadata.resource_version}/{wanted.key}"
        found.append(SecretVariable(name=variable.name, value=_value(secret, wanted), version=version))
    return tuple(found)


async def pull_login(client: KubeClient, namespace: str, name: str, registry: str) -> Login:
    """What a pull Secret has for a registry. Raises `SecretUnreadable` and `KubeError`."""
    secret = await _read(client, namespace, name)
    encoded = (secret.data or {}).get(PULL_KEY)
    if encoded is None:
        raise SecretUnreadable(
            f"Secret {name} has no entry {PULL_KEY}: make one by kubectl create secret docker-registry"
        )
    try:
        login = login_for(registry, base64.b64decode(encoded, validate=True))
    except binascii.Error:
        raise SecretUnreadable(f"entry {PULL_KEY} of Secret {name} is not text") from None
    except NoLogins as err:
        raise SecretUnreadable(f"entry {PULL_KEY} of Secret {name} cannot be read: {err}") from None
    if login is None:
        raise SecretUnreadable(f"Secret {name} has no login for {registry}")
    return login


async def _read(client: KubeClient, namespace: str, name: str) -> _Secret:
    if not is_object_name(name):
        # No object can have it, and it must not become part of a path to the API server.
        raise SecretUnreadable(f"there is no Secret {name!r}: no Secret can have that name")
    try:
        body = await client.raw("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
    except NotFound as err:
        raise SecretUnreadable(f"there is no Secret {name} in namespace {namespace}") from err
    except Forbidden as err:
        raise SecretUnreadable(
            f"the node agent may not read Secret {name}: to let it, bind ClusterRole forktree-agent-secrets"
            f" to ServiceAccount forktree-system/forktree-agent in namespace {namespace}"
        ) from err
    try:
        return msgspec.json.decode(body, type=_Secret)
    except msgspec.MsgspecError:
        # Without the cause: its text could hold a piece of what was read.
        raise Unreadable(f"Secret {name} is not what this version can read") from None


def _value(secret: _Secret, wanted: SecretKeyRef) -> str:
    encoded = (secret.data or {}).get(wanted.key)
    if encoded is None:
        raise SecretUnreadable(f"Secret {wanted.name} has no entry {wanted.key}")
    try:
        value = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise SecretUnreadable(f"entry {wanted.key} of Secret {wanted.name} is not text") from None
    if "\0" in value or len(value.encode()) > VALUE_BYTES_MAX:
        raise SecretUnreadable(
            f"entry {wanted.key} of Secret {wanted.name} cannot be a variable:"
            f" it holds a NUL character or more than {VALUE_BYTES_MAX >> 10} KiB"
        )
    return value
