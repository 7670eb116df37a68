"""A caller's heartbeat: a Lease beside the root of its tree, renewed for it, and the root's word for that.

Agents may write such Leases in every namespace, so only those: they carry a label of ours, and an admission
policy holds agents to it. A Lease of the same name without it is somebody else's, and is left alone.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from forktree.kube.client import KubeClient
from forktree.kube.errors import AlreadyExists, NotFound
from forktree.models import Session
from forktree.models.names import HEARTBEAT_ANNOTATION, HEARTBEAT_LABEL
from forktree.wire_trees import HeartbeatHeard
from forktree_agent.http.describing import root_of
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.locating import no_such_session
from forktree_agent.http.naming import FOR_CALLERS
from forktree_agent.http.table import Asked


class _Meta(msgspec.Struct, frozen=True):
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class _Lease(msgspec.Struct, frozen=True):
    metadata: _Meta = _Meta()


async def hear(asked: Asked, session: Session, ttl_seconds: int) -> HeartbeatHeard:
    """The tree of `session` lives for so many seconds more. Raises `Refusal`, and `KubeError`."""
    root = await root_of(asked.client, asked.facade, session)
    if root is None:
        sentence = f"the root of the tree of session {session.metadata.name} is gone or not known yet"
        raise Refusal(Code.NOT_READY, sentence)
    # Whoever may change one session only must not set the end of all that are beside and above it.
    await asked.permit("patch", "sessions", root.metadata.name)
    lease = f"{root.metadata.name}-heartbeat"
    named = root.metadata.annotations.get(HEARTBEAT_ANNOTATION)
    if named not in {None, lease}:
        sentence = f"the heartbeat of session {root.metadata.name} is another Lease already: renew that one"
        raise Refusal(Code.CONFLICT, sentence)
    # First the Lease: a root that names one that is not there has its time counted.
    await _renew(asked.client, root, lease, ttl_seconds)
    if named is None:
        await _name_it(asked.client, root, lease)
    return HeartbeatHeard(root_session_id=root.metadata.name, renew_within_secs=float(ttl_seconds))


async def _renew(client: KubeClient, root: Session, name: str, ttl_seconds: int) -> None:
    collection = f"/apis/coordination.k8s.io/v1/namespaces/{root.metadata.namespace}/leases"
    spec: dict[str, object] = {
        "holderIdentity": FOR_CALLERS,
        "leaseDurationSeconds": ttl_seconds,
        "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
    try:
        present = msgspec.json.decode(await client.raw("GET", f"{collection}/{name}"), type=_Lease)
    except NotFound:
        await _create(client, root, collection, name, spec)
        return
    if HEARTBEAT_LABEL not in present.metadata.labels:
        raise _not_ours(name)
    await client.raw(
        "PATCH",
        f"{collection}/{name}",
        {"spec": spec},
        query={"fieldManager": FOR_CALLERS},
        content_type="application/merge-patch+json",
    )


async def _create(
    client: KubeClient, root: Session, collection: str, name: str, spec: dict[str, object]
) -> None:
    owner = {"apiVersion": root.group_version(), "kind": "Session", "name": root.metadata.name}
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": name,
            "labels": {HEARTBEAT_LABEL: "true"},
            # It goes with the tree that it is about.
            "ownerReferences": [{**owner, "uid": root.metadata.uid}],
        },
        "spec": spec,
    }
    try:
        await client.raw("POST", collection, body, query={"fieldManager": FOR_CALLERS})
    except AlreadyExists as err:
        raise _not_ours(name) from err


def _not_ours(name: str) -> Refusal:
    return Refusal(Code.CONFLICT, f"there is a Lease {name} already, which is no heartbeat of this API")


async def _name_it(client: KubeClient, root: Session, lease: str) -> None:
    metadata = root.metadata
    body = {"metadata": {"uid": metadata.uid, "annotations": {HEARTBEAT_ANNOTATION: lease}}}
    try:
        await client.merge_patch(Session, metadata.namespace, metadata.name, body, manager=FOR_CALLERS)
    except NotFound as err:
        raise no_such_session(metadata.name, metadata.namespace or "") from err
