"""Who writes what: every write of a busy run, by field manager, against the design's table.

A watch shows every version of every object, and each version says who last changed which of its fields. What
nobody may write is not written, and every row of the table is seen, so the run was busy enough to tell.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest

from e2e.whole import Whole
from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree.models.base import API_VERSION
from forktree_agent.http.naming import FOR_CALLERS

pytestmark = pytest.mark.asyncio(loop_scope="session")

INACTIVE_SECONDS = 600.0


class Who(StrEnum):
    """Writers, as the design's table has them."""

    USER = "user"
    OPERATOR = "operator"
    AGENT = "agent"
    CALLER = "agent, as a caller of its HTTP API asked it to"
    COLLECTOR = "garbage collector"


Row = tuple[str, Who]
"""What kind of object, and who wrote to it."""

MAY: dict[Row, set[str]] = {
    ("root", Who.USER): {"spec", "metadata"},
    # Once: its last write to that object.
    ("root", Who.OPERATOR): {"spec.nodeName"},
    ("root", Who.AGENT): {"status"},
    # What a user may: at birth what it is told, later its numbers, its state, that it has a heartbeat.
    ("root", Who.CALLER): {
        "spec.templateRef",
        "spec.seed",
        "spec.env",
        "spec.state",
        "spec.score",
        "spec.rewards",
        "metadata.labels",
        "metadata.annotations",
    },
    ("child", Who.CALLER): {"spec.state", "spec.score", "spec.rewards"},
    ("fork", Who.CALLER): {"spec", "metadata.labels"},
    # The agent of that node alone makes children, with all that they are, and gives them their place.
    ("child", Who.AGENT): {"status", "spec", "metadata"},
    ("child", Who.USER): {"spec.state", "spec.score", "metadata.annotations"},
    ("child", Who.COLLECTOR): {"metadata.ownerReferences"},
    ("fork", Who.USER): {"spec", "metadata"},
    # With what a status cannot be without: that it is still pending.
    ("fork", Who.OPERATOR): {"status.node", "status.phase", "status.observedGeneration"},
    # All but `status.node`; a place in the tree, and its label.
    ("fork", Who.AGENT): {"status", "metadata.ownerReferences", "metadata.labels"},
    ("fork", Who.COLLECTOR): {"metadata.ownerReferences"},
    # Nobody routes it, so there is no agent to say it: the operator does.
    ("unrouted fork", Who.OPERATOR): {"status"},
    ("unrouted fork", Who.USER): {"spec", "metadata"},
    ("template", Who.USER): {"spec", "metadata"},
    ("template", Who.AGENT): {"status.nodes[own]"},
}
MAY_BUT_DID_NOT = {"metadata", "metadata.annotations"}
"""In this run. Nor can the collector be seen: who takes something away leaves no name."""
MUST_NOT: dict[Row, set[str]] = {
    ("root", Who.USER): {"spec.nodeName"},
    ("fork", Who.AGENT): {"status.node"},
}


@dataclass
class Writes:
    """Which fields of which objects were written by whom, over all versions."""

    node: str
    seen: dict[Row, set[str]] = field(default_factory=lambda: defaultdict[Row, set[str]](set))
    managers: dict[Who, set[str]] = field(default_factory=lambda: defaultdict[Who, set[str]](set))
    routed: set[str] = field(default_factory=set[str])
    versions: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: defaultdict[str, list[dict[str, Any]]](list)
    )

    async def follow(self, client: KubeClient, namespace: str, plural: str) -> None:
        """Take in every version of every object. Never ends by itself."""
        path = f"/apis/{API_VERSION}/namespaces/{namespace}/{plural}"
        async with client.stream(path, {"watch": "1"}, inactivity_seconds=INACTIVE_SECONDS) as pieces:
            rest = b""
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    assert event["type"] != "ERROR", event
                    version = event["object"]
                    self.versions[version["metadata"]["uid"]].append(version)

    def count(self) -> None:
        """Who wrote what, now that it is known what became of each object."""
        for versions in self.versions.values():
            kind = what(versions)
            for version in versions:
                for entry in version["metadata"].get("managedFields", []):
                    who = writer(entry["manager"])
                    self.managers[who].add(entry["manager"])
                    written = set(paths(entry.get("fieldsV1", {}), self.node))
                    self.seen[kind, who] |= written
                    if (kind, who) == ("fork", Who.OPERATOR) and "status.phase" in written:
                        assert version["status"]["phase"] == "Pending"
                    if (kind, who) == ("child", Who.AGENT) and "spec.state" in written:
                        assert version["spec"]["state"] == "Running", "only its user says otherwise"


def what(versions: list[dict[str, Any]]) -> str:
    last = versions[-1]
    match last["kind"]:
        case "Session":
            return "root" if "templateRef" in last["spec"] else "child"
        case "Fork":
            return "fork" if last.get("status", {}).get("node") else "unrouted fork"
        case _:
            return "template"


def writer(manager: str) -> Who:
    if manager == FOR_CALLERS:
        return Who.CALLER
    if manager.startswith("forktree-agent"):
        return Who.AGENT
    if manager.startswith("forktree-operator"):
        return Who.OPERATOR
    if manager == "kube-controller-manager":
        return Who.COLLECTOR
    return Who.USER


def paths(fields: dict[str, Any], node: str) -> Iterator[str]:
    """`status.phase`, `spec.nodeName`, `metadata.labels`, `status.nodes[own]`: two levels, and whose."""
    for top, inner in fields.items():
        for name, leaves in inner.items():
            if name == ".":
                continue
            path = f"{top.removeprefix('f:')}.{name.removeprefix('f:')}"
            entries = [key for key in leaves if key.startswith("k:")]
            if path != "status.nodes" or not entries:
                yield path
            for key in entries if path == "status.nodes" else []:
                yield f"{path}[{'own' if json.loads(key[2:]) == {'node': node} else 'other'}]"


def allowed(path: str, may: set[str]) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in may)


async def busy(whole: Whole) -> None:
    """Everything that makes anybody write."""
    await whole.template("tiny", treeLimits={"depth": 2})
    await whole.session()
    first = await whole.forked("one", replicas=3)
    await whole.fork("again", "one", kind="fork", replicas=1)
    await whole.ready("fork", "again")
    await whole.fork("nothing", "there-is-none")
    reason, _ = await whole.failed("fork", "nothing")
    assert reason == "SourceNotFound"
    (below,) = await whole.forked("two", first[0])
    await whole.fork("deep", below)
    assert (await whole.failed("fork", "deep"))[0] == "DepthLimit"
    await whole.kubectl("annotate", "session", first[1], "note=mine")
    await whole.kubectl("patch", "session", first[1], "--type=merge", '--patch={"spec":{"score":1}}')
    await whole.wait("session", first[1], "jsonpath={.status.score}=1")
    await whole.kubectl("patch", "session", first[1], "--type=merge", '--patch={"spec":{"state":"Released"}}')
    await whole.wait("session", first[1], "jsonpath={.status.phase}=Released")
    await whole.delete("session", first[2])
    await over_http(whole, first[0])
    await whole.crash_agent()
    await whole.system.operator.kill()
    whole.system.operator.start()
    await whole.forked("three", replicas=2)
    await whole.delete("fork", "three", "--cascade=orphan")
    await whole.delete("session", first[0], "--cascade=orphan")


async def over_http(whole: Whole, child: str) -> None:
    """All that a caller of the HTTP API can have an agent write for it."""
    told: dict[str, object] = {"labels": {"a": "b"}, "seed": "1", "env": {"A": "b"}}
    calls: tuple[tuple[str, dict[str, object]], ...] = (
        ("sessions", {"template_id": "tiny", "name": "trunk", **told}),
        ("sessions/trunk/score", {"score": 1, "rewards": {"a": 1}}),
        (f"sessions/{child}/score", {"score": 2, "rewards": {"b": 2}}),
        ("sessions/trunk/heartbeat", {"ttl_seconds": 3600}),
        ("sessions/trunk/checkpoints", {"name": "held"}),
        ("sessions/trunk/fork?record=wait", {"labels": {"c": "d"}}),
        ("sessions/trunk/pause", {}),
        ("sessions/trunk/resume", {}),
        (f"sessions/{child}/pause", {}),
        (f"sessions/{child}/resume", {}),
    )
    for path, body in calls:
        status, answer = await whole.post(path, body)
        assert status in {200, 201}, answer


@pytest.mark.timeout(600)
async def test_every_field_is_written_by_those_who_may_and_by_nobody_else(whole: Whole) -> None:
    writes = Writes(whole.system.node)
    access = ClusterAccess.from_kubeconfig(whole.system.kubectl.kubeconfig)
    async with KubeClient.connected(access) as client:
        watches = [
            asyncio.create_task(writes.follow(client, whole.namespace, plural), name=f"follow-{plural}")
            for plural in ("sessions", "forks", "sessiontemplates")
        ]
        busying = asyncio.create_task(busy(whole), name="busy")
        await asyncio.wait([*watches, busying], return_when=asyncio.FIRST_COMPLETED)
        for task in watches:
            task.cancel()
        outcomes = await asyncio.gather(*watches, return_exceptions=True)
        await busying
    assert all(isinstance(each, asyncio.CancelledError) for each in outcomes), outcomes
    writes.count()
    wrong = {
        f"{who} wrote {path} of a {kind}"
        for (kind, who), seen in writes.seen.items()
        for path in seen
        if not allowed(path, MAY.get((kind, who), set())) or allowed(path, MUST_NOT.get((kind, who), set()))
    }
    assert not wrong
    unseen = {
        f"{who} never wrote {path} of a {kind}"
        for (kind, who), may in MAY.items()
        for path in may - MAY_BUT_DID_NOT
        if who is not Who.COLLECTOR and not any(allowed(seen, {path}) for seen in writes.seen[kind, who])
    }
    assert not unseen
    # A template's entry is applied under a name of the node's own, so that no agent takes another's.
    assert f"forktree-agent-{whole.system.node}" in writes.managers[Who.AGENT]
