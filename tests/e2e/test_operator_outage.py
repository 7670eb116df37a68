"""An API server that is away, or refuses, delays the operator and makes it say nothing that is not so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from e2e.operator_rig import LEASE_SECONDS, OperatorProcess, OperatorRig
from forktree.models.session import Session

ROLE_BINDING = "forktree-operator"


def placed(session: Session) -> bool:
    return session.spec.node_name is not None


@pytest.fixture
async def patient(rig: OperatorRig) -> AsyncIterator[OperatorProcess]:
    """An operator that leads through long outages, beside one running session.

    Its sweep is so slow that what is placed in time was seen by a watch.
    """
    await rig.add_node("n1")
    await rig.add_template()
    async with rig.operator("--lease-seconds", "120", "--sweep-seconds", "600") as operator:
        await rig.running_session("root")
        yield operator


async def restart_api_server(rig: OperatorRig, *, away_seconds: float) -> None:
    await rig.plane.api_server.kill()
    await asyncio.sleep(away_seconds)
    rig.plane.api_server.start()
    await rig.plane.ready(deadline=asyncio.get_running_loop().time() + 60)


async def test_an_outage_casts_no_doubt_on_anybody_and_ends_no_watch(
    rig: OperatorRig, patient: OperatorProcess
) -> None:
    before = await rig.get(Session, "root")
    # As long as it takes for a silent agent to be lost, and for kopf's retries to be used up.
    await restart_api_server(rig, away_seconds=max(12, 2 * LEASE_SECONDS + 1))
    await rig.add_session("first")
    await rig.until(Session, "first", placed)
    await asyncio.sleep(2 * LEASE_SECONDS)
    await rig.add_session("second")
    await rig.until(Session, "second", placed, seconds=10)
    after = await rig.get(Session, "root")
    assert after.metadata.resource_version == before.metadata.resource_version
    assert patient.service.pid is not None


async def test_watches_that_are_refused_begin_again_once_they_are_allowed(
    rig: OperatorRig, patient: OperatorProcess
) -> None:
    binding = await rig.plane.kubectl.json("get", "clusterrolebinding", ROLE_BINDING)
    await rig.plane.kubectl.run("delete", "clusterrolebinding", ROLE_BINDING)
    try:
        await restart_api_server(rig, away_seconds=0)
        await patient.logged("watching_restarts")
    finally:
        kept = {key: binding[key] for key in ("apiVersion", "kind", "roleRef", "subjects")}
        await rig.plane.kubectl.apply({**kept, "metadata": {"name": ROLE_BINDING}})
    await rig.add_session("first")
    await rig.until(Session, "first", placed)
    await asyncio.sleep(1)
    await rig.add_session("second")
    await rig.until(Session, "second", placed, seconds=10)
