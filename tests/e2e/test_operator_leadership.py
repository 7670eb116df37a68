"""One operator leads, and another takes over."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from datetime import UTC, datetime

import aiohttp

from e2e.operator_rig import OperatorProcess, OperatorRig
from forktree.kube.client import KubeClient
from forktree.models.session import Session
from forktree_dev import provisioning
from forktree_operator.cluster import Lease, LeaseSpec
from forktree_operator.health import Health
from forktree_operator.leadership import LEASE_NAME, Leadership


def placed(session: Session) -> bool:
    return session.spec.node_name is not None


async def leader(rig: OperatorRig) -> str | None:
    lease = await rig.client.get(Lease, provisioning.SYSTEM_NAMESPACE, LEASE_NAME)
    return lease.spec.holder_identity


async def test_of_two_operators_one_leads_and_the_other_takes_over_from_a_dead_one(rig: OperatorRig) -> None:
    await rig.add_node("n1")
    await rig.add_template()
    async with rig.operator(name="first") as first:
        await rig.add_session("a")
        await rig.until(Session, "a", placed)
        async with rig.operator(name="second") as second:
            await rig.add_session("b")
            await rig.until(Session, "b", placed)
            assert await leader(rig) == first.identity
            await first.service.kill()
            await rig.add_session("c")
            await rig.until(Session, "c", placed)
            assert await leader(rig) == second.identity


async def test_an_operator_that_is_told_to_stop_hands_over_and_exits_with_0(rig: OperatorRig) -> None:
    await rig.add_node("n1")
    await rig.add_template()
    async with rig.operator() as only:
        await rig.add_session("a")
        await rig.until(Session, "a", placed)
        assert only.service.pid is not None
        os.kill(only.service.pid, signal.SIGTERM)
        assert "exited with code 0" in await only.exit_text()
    assert await leader(rig) == ""


async def test_both_who_leads_and_who_waits_are_healthy_and_say_so(rig: OperatorRig) -> None:
    listen = ("--health-listen", "127.0.0.1:0")
    async with rig.operator(*listen, name="first") as first:
        await rig.until_leader(first.identity)
        async with rig.operator(*listen, name="second") as second, aiohttp.ClientSession() as http:
            await second.logged("waiting_to_lead")
            for each in (first, second):
                for path in ("healthz", "readyz"):
                    async with http.get(f"{page(each)}/{path}") as answer:
                        assert (answer.status, await answer.text()) == (200, "ok\n")


async def test_who_cannot_reach_the_api_server_lives_and_is_not_ready(rig: OperatorRig) -> None:
    """A new process could not do more: to end this one would help nobody."""
    nobody = rig.kubeconfig_of_nobody()
    listen = ("--health-listen", "127.0.0.1:0", "--kubeconfig", str(nobody))
    async with rig.operator(*listen) as lonely, aiohttp.ClientSession() as http:
        await lonely.logged("lease_not_reached")
        async with http.get(f"{page(lonely)}/healthz") as answer:
            assert answer.status == 200
        async with http.get(f"{page(lonely)}/readyz") as answer:
            assert answer.status == 503
            assert await answer.text() == "the API server has not said who leads\n"


def page(operator: OperatorProcess) -> str:
    """Where its health is: at a port that it has found by itself, and logged."""
    (port,) = re.findall(r"health_serving host=127.0.0.1 port=(\d+)", operator.service.log_tail(1000))
    return f"http://127.0.0.1:{port}"


async def test_an_operator_that_waits_to_lead_stops_when_told(rig: OperatorRig) -> None:
    async with rig.operator(name="first") as first:
        await rig.until_leader(first.identity)
        async with rig.operator(name="second") as second:
            await second.logged("waiting_to_lead")
            assert second.service.pid is not None
            os.kill(second.service.pid, signal.SIGTERM)
            assert "exited with code 0" in await second.exit_text()
        assert await leader(rig) == first.identity


async def test_a_leader_whose_lease_is_taken_stops_and_asks_for_a_restart(rig: OperatorRig) -> None:
    async with rig.operator() as deposed:
        await rig.until_leader(deposed.identity)
        spec = LeaseSpec(holder_identity="usurper", lease_duration_seconds=1, renew_time=datetime.now(UTC))
        await rig.client.merge_patch(
            Lease, provisioning.SYSTEM_NAMESPACE, LEASE_NAME, {"spec": spec.to_json()}
        )
        text = await deposed.exit_text()
    assert "exited with code 1" in text
    assert "usurper holds the Lease now" in text
    assert await leader(rig) == "usurper"


async def test_a_dead_leaders_lease_is_taken_when_it_runs_out_and_not_a_pause_later(rig: OperatorRig) -> None:
    patient = Leadership(
        rig.client,
        namespace=provisioning.SYSTEM_NAMESPACE,
        identity="patient",
        lease_seconds=600,
        health=Health(),
    )
    await patient.acquire(asyncio.Event())
    dead = LeaseSpec(holder_identity="dead", lease_duration_seconds=1, renew_time=datetime.now(UTC))
    await rig.client.merge_patch(Lease, provisioning.SYSTEM_NAMESPACE, LEASE_NAME, {"spec": dead.to_json()})
    async with asyncio.timeout(60):  # Two minutes are a pause of one whose own Lease holds for ten.
        assert await patient.acquire(asyncio.Event())
    assert await leader(rig) == "patient"
    await patient.release()


async def test_only_one_of_many_that_ask_together_gets_the_lease(rig: OperatorRig) -> None:
    await rig.plane.kubectl.run(
        "delete", "lease", LEASE_NAME, "--namespace", provisioning.SYSTEM_NAMESPACE, "--ignore-not-found"
    )
    stop = asyncio.Event()
    parties = [party(rig.client, f"party-{number}") for number in range(5)]
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(each.acquire(stop)) for each in parties]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.5)
        assert sum(each.done() for each in asking) == 1
        (winner,) = done
        holder = parties[asking.index(winner)]
        await holder.release()
        await asyncio.wait(
            [each for each in asking if each is not winner], return_when=asyncio.FIRST_COMPLETED
        )
        assert sum(each.done() for each in asking) == 2
        stop.set()
    assert sum(each.result() for each in asking) == 2
    for each in parties:
        await each.release()


def party(client: KubeClient, identity: str) -> Leadership:
    return Leadership(
        client,
        namespace=provisioning.SYSTEM_NAMESPACE,
        identity=identity,
        lease_seconds=5,
        health=Health(),
    )
