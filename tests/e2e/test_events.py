"""What `kubectl describe` tells of sessions and forks: Events of operator and agent, on a real API server."""

from __future__ import annotations

import asyncio
import json

import pytest

from e2e.operator_rig import OperatorRig
from e2e.whole import SECONDS, Whole
from forktree.models import Fork, ForkPhase, Reason, Session


async def told(rig: OperatorRig, name: str, count: int) -> list[tuple[str, str, str]]:
    """Kind, reason and note of all Events about `name`, oldest first, as soon as there are so many."""
    path = f"/apis/events.k8s.io/v1/namespaces/{rig.namespace}/events"
    async with asyncio.timeout(SECONDS):
        while True:
            items = json.loads(await rig.client.raw("GET", path))["items"]
            found = sorted((each for each in items if each["regarding"]["name"] == name), key=_time)
            if len(found) >= count:
                assert {each["reportingController"] for each in found} == {"forktree.dev/operator"}
                return [(each["regarding"]["kind"], each["reason"], each["note"]) for each in found]
            await asyncio.sleep(0.05)


def placed(session: Session) -> bool:
    return session.spec.node_name is not None


def _time(event: dict[str, str]) -> str:
    return event["eventTime"]


async def test_the_operator_tells_once_why_a_root_waits_and_where_it_goes(rig: OperatorRig) -> None:
    async with rig.operator():
        await rig.add_session("s")
        await rig.until(Session, "s", lambda s: s.status.reason == Reason.TEMPLATE_NOT_FOUND)
        await rig.add_template(memory="512Mi")
        await rig.until(Session, "s", lambda s: s.status.reason == Reason.UNSCHEDULED)
        await rig.add_node("n1", capacity_mib=600)
        # Another sentence of the same reason: the status has it, and nobody is told a second time.
        await rig.until(Session, "s", lambda s: "no node has room" in (s.status.message or ""))
        await rig.add_node("n2", capacity_mib=4096)
        await rig.until(Session, "s", placed)
        assert await told(rig, "s", 3) == [
            (
                "Session",
                "Unscheduled",
                "TemplateNotFound: there is no session template named tiny in this namespace",
            ),
            ("Session", "Unscheduled", "no ready node"),
            ("Session", "Scheduled", "it goes to node n2"),
        ]


async def test_the_operator_tells_why_a_fork_failed(rig: OperatorRig) -> None:
    async with rig.operator("--source-exists-seconds=0.2"):
        await rig.add_fork("f", session="nobody")
        failed = await rig.until(Fork, "f", lambda f: f.status.phase is ForkPhase.FAILED)
        *_, last = await told(rig, "f", 1)
        assert last == ("Fork", "Failed", f"{failed.status.reason}: {failed.status.message}")


@pytest.mark.asyncio(loop_scope="session")
async def test_describe_shows_what_became_of_a_session_and_a_fork(whole: Whole) -> None:
    await whole.template()
    await whole.session("root")
    await whole.forked("first", replicas=2)
    await whole.wait("fork", "first", "condition=Complete")
    await whole.template("vast", machine={"memory": "64Gi"})
    await whole.apply("Session", "vast", {"templateRef": {"name": "vast"}})
    await whole.apply("Fork", "none", {"source": {"session": {"name": "nobody"}}, "timeoutSeconds": 1})
    await whole.kubectl("patch", "session", "root", "--type=merge", '-p={"spec":{"state":"Released"}}')
    for kind, name, reasons in (
        ("session", "root", ("Scheduled", "forktree.dev/operator", "Released", "forktree.dev/agent")),
        ("session", "vast", ("Unscheduled", "no node has room")),
        ("fork", "first", ("Forked", "2 started from session root", "Complete", "2 of 2 children run on")),
        ("fork", "none", ("Failed", "SourceNotFound: ")),
    ):
        async with asyncio.timeout(SECONDS):
            shown = await whole.kubectl("describe", kind, name)
            while not all(each in shown.partition("Events:")[2] for each in reasons):
                await asyncio.sleep(0.2)
                shown = await whole.kubectl("describe", kind, name)
        print(shown)
