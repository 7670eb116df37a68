"""Sessions in full on a whole system: asked to pause and to go, told secrets, forked with hooks, judged."""

from __future__ import annotations

import asyncio
import json

import pytest

from e2e.whole import Whole

pytestmark = pytest.mark.asyncio(loop_scope="session")

VALUE = "value-that-is-nowhere-else"
FROM_SECRET = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "login", "key": "token"}}}
PATIENT = "echo before; echo begun > /tmp/begun; cat /tmp/go; echo after; exit 5"


async def ask(whole: Whole, session: str, **spec: object) -> None:
    await whole.kubectl("patch", "session", session, "--type=merge", "-p", json.dumps({"spec": spec}))


async def test_a_session_pauses_over_an_agents_death_is_forked_meanwhile_and_goes_on(whole: Whole) -> None:
    await whole.template()
    await whole.session("root")
    await whole.sh("root", "echo kept > /tmp/file")
    await ask(whole, "root", state="Paused")
    await whole.wait("session", "root", "jsonpath={.status.phase}=Paused")
    status = await whole.status("session", "root")
    assert (status["ready"], status["reason"]) == (False, "Paused")
    code, body = await whole.post("sessions/root/exec", {"command": "true"})
    assert (code, body["code"]) == (409, "not_ready")
    assert "set its spec.state to Running" in body["message"]

    await whole.crash_agent()
    (child,) = await whole.forked("split")
    assert await whole.sh(child, "cat /tmp/file") == "kept\n"
    fork = await whole.status("fork", "split")
    assert "pauseMs" not in fork, "nothing was stopped"
    assert (await whole.status("session", "root"))["phase"] == "Paused"

    await ask(whole, "root", state="Running")
    await whole.ready("session", "root")
    assert await whole.sh("root", "cat /tmp/file") == "kept\n"


async def test_a_released_session_is_gone_and_its_instants_are_not(whole: Whole) -> None:
    await whole.template()
    await whole.session("root")
    await whole.sh("root", "echo then > /tmp/file")
    before = whole.machines()
    await whole.fork("point", replicas=0)
    await whole.ready("fork", "point")
    await ask(whole, "root", state="Released", score=0.75)
    await whole.wait("session", "root", "jsonpath={.status.phase}=Released")
    assert len(whole.machines()) == len(before) - 1
    assert (await whole.status("session", "root"))["score"] == 0.75
    code, body = await whole.post("sessions/root/exec", {"command": "true"})
    assert (code, body["code"]) == (410, "session_gone")
    await whole.fork("again", "point", kind="fork")
    await whole.ready("fork", "again")
    await whole.wait("fork", "again", "jsonpath={.status.recorded}=1")
    (child,) = (await whole.status("fork", "again"))["children"]
    await whole.ready("session", child["name"])
    assert await whole.sh(child["name"], "cat /tmp/file") == "then\n"


async def test_a_command_under_way_is_asked_for_by_its_id_in_each_child(whole: Whole) -> None:
    await whole.template()
    await whole.session("root")
    await whole.sh("root", "mkfifo /tmp/begun /tmp/go")
    body: dict[str, object] = {"command": PATIENT, "id": "work", "timeout_seconds": 100}
    running = asyncio.create_task(whole.post("sessions/root/exec", body), name="running")
    assert await whole.sh("root", "cat /tmp/begun") == "begun\n"
    first, second = await whole.forked("split", replicas=2)
    code, execs = await whole.get(f"sessions/{first}/execs")
    assert (code, execs["ids"], [each["state"] for each in execs["execs"]]) == (200, ["work"], ["running"])
    code, refused = await whole.get(f"sessions/{first}/execs/work")
    assert (code, refused["code"]) == (409, "not_ready")

    await whole.sh(first, "echo first > /tmp/go")
    code, ended = await whole.get(f"sessions/{first}/execs/work?wait_seconds=60")
    assert (code, ended["id"], ended["stdout"], ended["exit_code"]) == (200, "work", "first\nafter\n", 5)
    assert not running.done()
    assert (await whole.get(f"sessions/{second}/execs/work"))[0] == 409
    assert (await whole.get(f"sessions/{second}/execs/other"))[0] == 404
    await whole.sh("root", "echo root > /tmp/go")
    code, ended = await running
    assert (code, ended["id"], ended["stdout"]) == (200, "work", "before\nroot\nafter\n")


async def test_each_session_says_what_memory_is_its_own_and_what_it_shares(whole: Whole) -> None:
    await whole.template()
    await whole.session("root")
    writer, sibling = await whole.forked("pair", replicas=2)
    await whole.sh(writer, "head -c 16777216 /dev/urandom > /tmp/written")
    await whole.sh(sibling, "head -c 16384 /dev/urandom > /tmp/written")
    told = [(await whole.get(f"sessions/{name}/memory"))[1] for name in (writer, sibling)]
    assert told[0]["unique_bytes"] > told[1]["unique_bytes"] + (10 << 20)
    assert min(each["shared_bytes"] for each in told) > 16 << 20


async def test_hooks_are_run_around_each_fork_and_one_that_fails_fails_it(whole: Whole) -> None:
    script = 'test ! -e /tmp/broken; echo "$FORKTREE_SESSION $FORKTREE_SEED" >> /tmp/post'
    await whole.template(
        hooks={
            "preFork": {"exec": {"command": ["sh", "-c", "test ! -e /tmp/busy; echo pre >> /tmp/pre"]}},
            "postFork": {"exec": {"command": ["sh", "-ec", script]}, "timeoutSeconds": 30},
        }
    )
    await whole.apply("Session", "root", {"templateRef": {"name": "tiny"}, "seed": "s-7"})
    await whole.ready("session", "root")
    assert await whole.sh("root", "cat /tmp/post") == "root s-7\n", "a root goes on from an instant too"
    (child,) = await whole.forked("split")
    assert await whole.sh(child, "cat /tmp/pre; cut -d' ' -f1 /tmp/post") == f"pre\nroot\n{child}\n"
    await whole.sh("root", "touch /tmp/broken")
    before = whole.machines()
    await whole.fork("broken")
    reason, message = await whole.failed("fork", "broken")
    assert (reason, "the postFork hook failed: exit code 1" in message) == ("HookFailed", True), message
    await whole.machines_are(before)
    assert await whole.sh("root", "cat /tmp/pre") == "pre\npre\n"


async def test_a_server_is_waited_for_and_secrets_reach_the_machines_and_nothing_else(whole: Whole) -> None:
    await whole.kubectl("create", "secret", "generic", "login", f"--from-literal=token={VALUE}")
    await whole.kubectl(
        "create", "rolebinding", "agent-secrets", "--clusterrole=forktree-agent-secrets",
        "--serviceaccount=forktree-system:forktree-agent",
    )  # fmt: skip
    server = (
        "sleep 1; mkdir /tmp/www; echo $TOKEN > /tmp/www/token; exec httpd -f -p 127.0.0.1:80 -h /tmp/www"
    )
    await whole.template(
        command=["sh", "-c", server],
        env=[FROM_SECRET],
        readinessProbe={"httpGet": {"port": 80, "path": "/token"}, "failureThreshold": 100},
    )
    own = {**FROM_SECRET, "name": "OWN"}
    await whole.apply("Session", "root", {"templateRef": {"name": "tiny"}, "env": [own]})
    await whole.ready("session", "root")
    asked = "wget -q -O - http://127.0.0.1/token; echo $OWN"
    assert await whole.sh("root", asked) == f"{VALUE}\n" * 2
    (child,) = await whole.forked("split")
    assert await whole.sh(child, asked) == f"{VALUE}\n" * 2, "what its parent was told holds in it too"

    objects = await whole.kubectl("get", "sessiontemplates,sessions,forks,events", "-o", "yaml")
    assert VALUE not in objects
    kept = [*whole.system.state_dir.rglob("*"), *whole.node.machine_dir.rglob("*")]
    assert whole.system.control_plane is not None
    database = whole.system.control_plane.state_dir / "etcd"  # The Secret itself lives there.
    files = [
        path
        for path in kept
        if path.is_file() and not path.is_symlink() and not path.is_relative_to(database)
    ]
    assert {"session", "logs"} <= {path.parent.name for path in files}, "neither journal nor logs were seen"
    assert [path for path in files if VALUE.encode() in path.read_bytes()] == []
