"""Two whole nodes in one cluster: who gets what, who answers for whom, and what the loss of one means."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from e2e.whole import API, SECONDS, Whole, until
from forktree_agent.http.guest_headers import FROM_SESSION
from forktree_agent.http.proxying import HOP_HEADER
from forktree_dev import provisioning
from forktree_dev.system import Artifacts, Node, Sizes, System

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

NAMESPACE = "two-nodes"
NODES = ("node-a", "node-b")

_FILLING_MIB = 160
_OVERHEAD_MIB = 96
_SESSIONS = 3
"""Of the template `filling`, that a node takes."""
_TINY_BASELINE_MIB = 128
_MEMORY_LIMIT_BYTES = (_TINY_BASELINE_MIB + _FILLING_MIB + _SESSIONS * (_FILLING_MIB + _OVERHEAD_MIB)) << 20
"""Of each node: whether it has `tiny` baked or not, there is room for so many and not for one more."""


@dataclass(frozen=True)
class Pair:
    """One user, who speaks to the agents of both nodes."""

    by: dict[str, Whole]
    """Node → the user speaking to its agent."""

    @property
    def user(self) -> Whole:
        return self.by[NODES[0]]

    def node(self, name: str) -> Node:
        return self.by[name].node

    async def roots(self, *names: str, template: str = "tiny") -> dict[str, str]:
        """Two new roots, applied together: they go to different nodes if both or neither have the template.

        Node → name.
        """
        await self.said_to_be_empty()
        sessions = [
            {
                "apiVersion": API,
                "kind": "Session",
                "metadata": {"name": name, "namespace": NAMESPACE},
                "spec": {"templateRef": {"name": template}},
            }
            for name in names
        ]
        await self.user.system.kubectl.apply({"apiVersion": "v1", "kind": "List", "items": sessions})
        placed: dict[str, str] = {}
        for name in names:
            await self.user.ready("session", name)
            placed[(await self.user.status("session", name))["node"]] = name
        assert sorted(placed) == sorted(NODES)
        return placed

    async def said_to_be_empty(self) -> None:
        """Wait until no node counts a machine that ended before, and nobody holds room for one."""
        operator = self.user.system.operator
        await operator.stop()  # It may hold room for minutes after a first bake.
        operator.start()
        deadline = asyncio.get_running_loop().time() + SECONDS
        while True:
            nodes = (await self.user.system.kubectl.json("get", "forknodes"))["items"]
            told = [(node["status"]["ready"], node["status"]["reservedBytes"] >> 20) for node in nodes]
            if all(ready and mib < _TINY_BASELINE_MIB + _OVERHEAD_MIB for ready, mib in told):
                return
            assert asyncio.get_running_loop().time() < deadline, told
            await asyncio.sleep(0.1)

    def machines(self) -> dict[str, set[int]]:
        """Node → process ids of its QEMUs."""
        return {name: whole.machines() for name, whole in self.by.items()}

    async def empty(self) -> None:
        """Delete all sessions and forks, and wait until no machine is left."""
        await self.user.kubectl("delete", "sessions,forks", "--all")
        await until(lambda: not any(self.machines().values()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """On a control plane of its own: on the run's, sessions would also go to the node that lives there."""
    async with System.running(
        tmp_path_factory.mktemp("two-nodes"),
        nodes=NODES,
        sizes=Sizes(memory_limit_bytes=_MEMORY_LIMIT_BYTES),
        garbage_collector_qps=200.0,
        artifacts=artifacts,
    ) as running:
        await running.kubectl.run("create", "namespace", NAMESPACE)
        yield running


@asynccontextmanager
async def using(system: System) -> AsyncGenerator[Pair]:
    async with Whole.using(system, NAMESPACE) as near, near.at(system.nodes[1]) as far:
        yield Pair(dict(zip(NODES, (near, far), strict=True)))


@pytest_asyncio.fixture(loop_scope="module")
async def pair(system: System) -> AsyncIterator[Pair]:
    """Both nodes without sessions, and a template that they may have baked; the same at the end."""
    async with using(system) as pair:
        await pair.user.template(ports=[{"name": "web", "port": 8000}])
        yield pair
        await pair.empty()
    await system.kubectl.run("delete", "rolebinding", "tester", "-n", NAMESPACE)


async def test_roots_fill_the_node_that_has_their_template_and_then_the_other(pair: Pair) -> None:
    user = pair.user
    await user.template("filling", machine={"memory": f"{_FILLING_MIB}Mi"})

    async def baked() -> dict[str, object]:
        nodes = (await user.status("sessiontemplate", "filling")).get("nodes", [])
        return {entry["node"]: entry for entry in nodes}

    names = [f"filling-{number}" for number in range(2 * _SESSIONS)]
    await user.session(names[0], "filling")
    after_first = await baked()
    (first,) = after_first
    (other,) = set(NODES) - {first}
    for name in names[1:]:
        await user.session(name, "filling")
    nodes = [(await user.status("session", name))["node"] for name in names]
    assert nodes == [first] * _SESSIONS + [other] * _SESSIONS
    after_all = await baked()
    assert after_all[first] == after_first[first]
    assert {node: entry["phase"] for node, entry in after_all.items()} == dict.fromkeys(NODES, "Ready")  # type: ignore[index]

    await user.apply("Session", "late", {"templateRef": {"name": "filling"}})
    await user.wait("session", "late", "jsonpath={.status.reason}=Unscheduled")
    said = (await user.status("session", "late"))["message"]
    assert said.startswith("no node has room: a machine of 160 MiB takes 256 MiB, and node node-"), said
    await user.delete("session", names[1])
    await user.ready("session", "late")
    assert (await user.status("session", "late"))["node"] == first
    await pair.empty()
    await user.delete("sessiontemplate", "filling")


async def test_a_fork_runs_on_its_parents_node_and_a_prune_reaches_both_nodes(pair: Pair) -> None:
    roots = await pair.roots("left", "right")
    before = pair.machines()
    for node, root in roots.items():
        (child,) = await pair.user.forked(f"of-{root}", root)
        await pair.user.fork(f"again-{root}", f"of-{root}", kind="fork")
        await pair.user.ready("fork", f"again-{root}")
        for name in (f"of-{root}", f"again-{root}"):
            assert (await pair.user.status("fork", name))["node"] == node
        assert await pair.user.kubectl("get", "session", child, "-o", "jsonpath={.spec.nodeName}") == node
    after = pair.machines()
    assert {node: len(after[node] - before[node]) for node in NODES} == dict.fromkeys(NODES, 2)
    await pair.user.kubectl("delete", "session", *roots.values())
    await until(lambda: not any(pair.machines().values()))
    await pair.user.names_are(set())


async def test_any_agent_answers_for_the_sessions_of_all(pair: Pair) -> None:
    roots = await pair.roots("left", "right")
    for node, whole in pair.by.items():
        for there, root in roots.items():
            assert await whole.sh(root, f"echo {node} >> /tmp/asked; hostname") == f"{root}\n"
            if there == node:
                continue
            status, forked = await whole.post(f"sessions/{root}/fork", {})
            assert status == 201, forked
            assert (forked["parent_session_id"], forked["template_id"]) == (root, "tiny")
            child = forked["session_id"]
            # By way of the agent that has neither, and before there need be an object to say where it is.
            assert node in await whole.sh(child, "cat /tmp/asked")
            async with asyncio.timeout(SECONDS):
                while f"session/{child}" not in await pair.user.names():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await pair.user.ready("session", child)
            assert (await pair.user.status("session", child))["node"] == there
            status, answer = await whole.post("sessions/none/exec", {"command": "true"})
            assert (status, answer["code"]) == (404, "no_such_session")
            status, answer = await whole.post(f"sessions/{root}/exec", {"argv": ["/no/such"]})
            assert (status, answer["code"]) == (400, "bad_request")
    listings = [await whole.get("sessions") for whole in pair.by.values()]
    for status, listing in listings:
        assert status == 200
        assert len(listing) == 4
        assert {each["node"] for each in listing} == set(NODES)
    for node, whole in pair.by.items():
        (elsewhere,) = (root for there, root in roots.items() if there != node)
        status, info = await whole.get(f"sessions/{elsewhere}")
        assert (status, info["phase"], info["node"] in NODES) == (200, "Running", True)
        async with whole.http.delete(f"{whole.node.url}/ns/{NAMESPACE}/v1/sessions/{elsewhere}") as deleted:
            assert deleted.status == 200
    await until(lambda: not any(pair.machines().values()))


async def test_what_is_streamed_comes_through_another_nodes_agent_as_it_is_made(pair: Pair) -> None:
    roots = await pair.roots("left", "right")
    asked, there = NODES
    whole, root = pair.by[asked], roots[there]
    base = f"{whole.node.url}/ns/{NAMESPACE}/v1/sessions/{root}"
    body = {"command": "echo one; until [ -e /go ]; do usleep 20000; done; exit 5", "stream": True, "id": "a"}
    async with whole.http.post(f"{base}/exec", json=body) as answer:
        assert answer.content_type == "application/x-ndjson"
        started, output = [json.loads(await answer.content.readline()) for _ in range(2)]
        assert (started["id"], base64.b64decode(output["data_base64"])) == ("a", b"one\n")
        content = os.urandom(1 << 20) * 5  # The command waits for this file, so neither is held whole.
        async with whole.http.put(
            f"{base}/files", params={"path": "/go"}, data=io.BytesIO(content)
        ) as written:
            assert (await written.json())["sha256"] == hashlib.sha256(content).hexdigest()
        lines = [json.loads(line) async for line in answer.content]
        assert (lines[-1]["type"], lines[-1]["exit_code"]) == ("end", 5)
    async with whole.http.get(f"{base}/execs/a?stream=1&stdout_offset=2") as again:
        assert b'"exit_code":5' in await again.read()
    async with whole.http.get(f"{base}/files", params={"path": "/go"}) as read:
        assert (read.content_length, await read.read() == content) == (len(content), True)
    async with whole.http.get(f"{base}/files", params={"path": "/none"}) as read:
        assert (read.status, (await read.json())["code"]) == (404, "not_found")
    async with whole.http.get(f"{base}/tar", params={"path": "/etc"}) as read:
        packed = await read.read()
    async with whole.http.put(f"{base}/tar", params={"path": "/copy"}, data=io.BytesIO(packed)) as unpacked:
        assert (await unpacked.json())["bytes"] == len(packed)
    async with whole.http.ws_connect(f"{base}/terminal?argv=sh&argv=-c&argv=tty;read+x;exit+3") as socket:
        assert json.loads((await socket.receive()).data)["type"] == "started"
        await socket.send_bytes(b"\n")
        messages = [message async for message in socket]
    assert b"/dev/pts" in b"".join(each.data for each in messages[:-1])
    assert json.loads(messages[-1].data)["exit_code"] == 3


async def test_a_server_inside_is_reached_through_either_agent(pair: Pair) -> None:
    roots = await pair.roots("left", "right")
    for there, root in roots.items():
        await pair.user.sh(root, f"echo {root} > /tmp/name; busybox httpd -p 127.0.0.1:8000 -h /tmp")
        endpoint = (await pair.user.status("session", root))["endpoint"]
        own = pair.node(there).url
        assert endpoint == f"{own}/ns/{NAMESPACE}/v1/sessions/{root}/ports/web/"
    for whole in pair.by.values():
        for root in roots.values():
            url = f"{whole.node.url}/ns/{NAMESPACE}/v1/sessions/{root}/ports"
            async with whole.http.get(f"{url}/web/name?a=b") as answer:
                assert (answer.status, await answer.text()) == (200, f"{root}\n")
                assert answer.headers.getall(FROM_SESSION) == [root]
            async with whole.http.get(f"{url}/22/") as answer:
                assert (answer.status, (await answer.json())["code"]) == (409, "port_not_exposed")
                assert FROM_SESSION not in answer.headers
            async with whole.http.ws_connect(f"{url}/web") as socket:
                await socket.send_bytes(b"GET /name HTTP/1.0\r\n\r\n")
                got = b""
                while data := await socket.receive_bytes(timeout=SECONDS):
                    got += data
                assert got.endswith(f"\r\n\r\n{root}\n".encode())
    near, far = NODES
    headers = {HOP_HEADER: "node-c"}
    url = f"{pair.node(near).url}/ns/{NAMESPACE}/v1/sessions/{roots[far]}/ports/web/"
    async with pair.by[near].http.get(url, headers=headers) as answer:
        assert (answer.status, (await answer.json())["code"]) == (421, "wrong_node")


async def test_a_request_goes_one_hop_and_each_agent_asks_who_is_calling(pair: Pair) -> None:
    roots = await pair.roots("left", "right")
    near, far = NODES
    whole = pair.by[near]
    url = f"{whole.node.url}/ns/{NAMESPACE}/v1/sessions/{roots[far]}/exec"
    async with whole.http.post(url, json={"command": "true"}, headers={HOP_HEADER: "node-c"}) as answer:
        assert (answer.status, (await answer.json())["code"]) == (421, "wrong_node")
    # Being handed on proves nothing: the owner asks the API server itself who that is.
    owner = pair.by[far]
    url = f"{owner.node.url}/ns/{NAMESPACE}/v1/sessions/{roots[far]}/exec"
    claimed = {"Authorization": "Bearer x", HOP_HEADER: near}
    async with owner.http.post(url, json={"command": "true"}, headers=claimed) as answer:
        assert (answer.status, (await answer.json())["code"]) == (401, "unauthorized")


async def test_a_killed_agent_leaves_its_sessions_in_doubt_and_the_other_node_at_work(pair: Pair) -> None:
    roots = await pair.roots("left", "right")
    lost, well = NODES
    user = pair.by[well]
    await user.sh(roots[lost], "echo kept > /tmp/file")
    (child,) = await user.forked("before", roots[lost])
    before = pair.machines()
    await pair.node(lost).agent.kill()
    status, body = await user.post(f"sessions/{roots[lost]}/exec", {"command": "true"})
    assert (status, body["code"]) == (502, "upstream_error")
    assert f"the agent of node {lost}, where session {roots[lost]} is, does not answer" in body["message"]

    for name in (roots[lost], child):
        await user.wait("session", name, "jsonpath={.status.reason}=AgentLost")
        status_now = await user.status("session", name)
        (ready,) = (each for each in status_now["conditions"] if each["type"] == "Ready")
        assert (status_now["phase"], ready["status"]) == ("Running", "Unknown")
    assert await user.sh(roots[well], "echo works") == "works\n"
    await user.forked("meanwhile", roots[well])
    await user.session("new")
    assert (await user.status("session", "new"))["node"] == well

    await pair.by[lost].revive_agent()
    for name in (roots[lost], child):
        await user.ready("session", name)
        assert await user.sh(name, "cat /tmp/file") == "kept\n"
        assert "reason" not in await user.status("session", name)
    assert before[lost] == pair.machines()[lost]


async def test_lost_nodes_fail_what_ran_there_and_come_back_empty(pair: Pair) -> None:
    roots = await pair.roots("left", "right")
    for root in roots.values():
        await pair.user.forked(f"of-{root}", root)
        await pair.user.wait("fork", f"of-{root}", "condition=Complete")
        busy = [{"exec": {"argv": ["sleep", "900"], "timeoutSeconds": 900}}]
        spec: dict[str, object] = {"source": {"session": {"name": root}}, "replicas": 1}
        spec["branches"] = busy
        await pair.user.apply("Fork", f"busy-{root}", spec)
        await pair.user.ready("fork", f"busy-{root}")
    deleted, restarted = NODES
    # One goes from the cluster while its machines run on; the other loses power and boots anew.
    await pair.user.system.kubectl.run("delete", "node", deleted)
    await pair.node(restarted).power_off()
    await provisioning.create_node(pair.user.system.kubectl, restarted, boot="another-boot")
    sentences = {
        deleted: f"node {deleted} is gone, and the machine with it",
        restarted: f"node {restarted} was restarted, and the machine is gone",
    }
    for node, root in roots.items():
        for kind, name in (("session", root), ("fork", f"busy-{root}")):
            assert await pair.user.failed(kind, name) == ("NodeLost", sentences[node])
        await pair.user.wait("fork", f"of-{root}", "condition=PointAvailable=false")
        complete = await pair.user.status("fork", f"of-{root}")
        (point,) = (each for each in complete["conditions"] if each["type"] == "PointAvailable")
        assert (complete["phase"], point["reason"]) == ("Complete", "NodeLost")

    await asyncio.gather(*(pair.node(name).start() for name in NODES))
    async with using_again(pair) as again:
        await until(lambda: not any(again.machines().values()))
        assert [await again.user.failed("session", root) for root in roots.values()] == [
            ("NodeLost", sentences[node]) for node in roots
        ]
        await again.user.system.kubectl.run(
            "wait", f"forknode/{restarted}", "--for=jsonpath={.status.reservedBytes}=0", "--timeout=60s"
        )
        await again.user.template("new")
        new = await again.roots("new-left", "new-right", template="new")
        for whole in again.by.values():
            for root in new.values():
                assert await whole.sh(root, "hostname") == f"{root}\n"


@asynccontextmanager
async def using_again(pair: Pair) -> AsyncGenerator[Pair]:
    """Once both agents answer: one that lost its memory is verified by another certificate."""
    near, far = (pair.node(name) for name in NODES)
    await until(lambda: near.ca_path.exists() and far.ca_path.exists())
    async with pair.user.at(near) as first, pair.user.at(far) as second:
        for whole in (first, second):
            await whole.answered()
        yield Pair(dict(zip(NODES, (first, second), strict=True)))
