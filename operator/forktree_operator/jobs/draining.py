"""Delete every session and fork of the cluster while the agents still run, so that they end the machines."""

from __future__ import annotations

from collections import Counter

import msgspec

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import Fork, Session
from forktree_operator.jobs.telling import say, until

_KINDS = (Session, Fork)


class _Metadata(msgspec.Struct):
    namespace: str


class _Object(msgspec.Struct):
    metadata: _Metadata


async def drain(client: KubeClient, *, deadline: float) -> None:
    """Returns when no session and no fork is left. Templates stay: they are what somebody wrote."""

    async def look() -> str:
        left = 0
        for kind in _KINDS:
            for namespace, count in (await _counted(client, kind, deadline)).items():
                left += count
                # Each time anew: until all are gone somebody may go on creating them.
                await client.raw("DELETE", kind.collection_path(namespace), _IN_BACKGROUND, deadline=deadline)
        return f"{left} sessions and forks" if left else ""

    for kind in _KINDS:
        counts = await _counted(client, kind, deadline)
        say(f"{kind.resource.plural} to delete: {counts.total()} in {len(counts)} namespaces")
    await until(look, "all sessions and forks to be gone", deadline=deadline)
    say("no session and no fork is left")


async def _counted(client: KubeClient, kind: type[Session | Fork], deadline: float) -> Counter[str]:
    """How many there are, by namespace."""
    try:
        items, _ = await client.list_raw(kind, deadline=deadline)
    except NotFound:  # The very type is gone.
        return Counter()
    return Counter(msgspec.json.decode(item, type=_Object).metadata.namespace for item in items)


_IN_BACKGROUND = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
