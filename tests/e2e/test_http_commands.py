"""Commands and forks over HTTP, in real machines: what a caller's deadline or departure does inside them."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from e2e.whole import SECONDS, Whole

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def whole(whole: Whole) -> Whole:
    """With a small template."""
    await whole.template()
    return whole


async def test_a_session_is_opened_forked_and_pruned_over_http_alone(whole: Whole) -> None:
    status, opened = await whole.post("sessions", {"template_id": "tiny", "name": "trunk"})
    assert status == 201, opened
    assert opened["fork_time_ms"] > 0
    assert (await whole.post("sessions", {"template_id": "tiny", "name": "trunk"}))[0] == 200
    await whole.sh("trunk", "echo from the trunk > /tmp/file")

    wanted: dict[str, object] = {"replicas": 2, "name": "twice"}
    status, forked = await whole.post("sessions/trunk/fork?record=wait", wanted)
    assert status == 201, forked
    assert forked["recorded"] is True
    assert forked["fork_id"] == "twice"
    assert 0 < forked["pause_time_ms"] <= forked["ready_time_ms"] <= forked["total_time_ms"]
    children = [child["session_id"] for child in forked["children"]]
    # Usable with no word in between, each with its own name and the trunk's past.
    said = await asyncio.gather(*(whole.sh(child, "hostname; cat /tmp/file") for child in children))
    assert said == [f"{child}\nfrom the trunk\n" for child in children]

    url = f"{whole.system.url}/ns/{whole.namespace}/v1/sessions"
    async with whole.http.get(f"{url}/{children[1]}") as answer:
        info = await answer.json()
    assert (info["parent_session_id"], info["template_id"], info["depth"]) == ("trunk", "tiny", 1)
    async with whole.http.get(url) as answer:
        listed = {each["session_id"]: each.get("parent_session_id") for each in await answer.json()}
    assert listed == {"trunk": None, children[0]: "trunk", children[1]: "trunk"}
    machines = whole.machines()
    async with whole.http.delete(f"{url}/trunk") as answer:
        assert await answer.json() == {"deleted": True, "session_id": "trunk"}
    await whole.gone("session", "trunk", *children)
    await whole.machines_are(whole.machines() - machines)


async def test_a_caller_that_goes_away_ends_its_command_in_the_guest(whole: Whole) -> None:
    await whole.session("work")
    asking = asyncio.create_task(
        whole.sh("work", "echo $$ > /tmp/pid; while :; do date +%N > /tmp/beat; sleep 0.05; done"), name="ask"
    )
    await whole.sh("work", "until [ -s /tmp/beat ]; do sleep 0.05; done")
    asking.cancel()
    # The command's process is gone from the guest: no signal reaches it any more.
    await whole.sh("work", "while kill -0 $(cat /tmp/pid) 2>/dev/null; do sleep 0.05; done")


async def test_a_command_beyond_its_time_is_killed_and_its_output_kept(whole: Whole) -> None:
    await whole.session("work")
    body: dict[str, object] = {"command": "echo $$ > /tmp/pid; echo so far; sleep 600", "timeout_seconds": 2}
    async with asyncio.timeout(SECONDS):
        status, result = await whole.post("sessions/work/exec", body)
    assert (status, result["exit_code"], result["timed_out"]) == (200, -1, True)
    assert result["stdout"] == "so far\n"
    await whole.sh("work", "while kill -0 $(cat /tmp/pid) 2>/dev/null; do sleep 0.05; done")


async def test_a_command_gets_what_was_sent_with_it(whole: Whole) -> None:
    await whole.session("work")
    sent: dict[str, object] = {
        "argv": ["sh", "-c", 'pwd; echo "$WORD"; cat'],
        "env": {"WORD": "a b"},
        "cwd": "/var",
        "stdin": "é\n",
    }
    status, result = await whole.post("sessions/work/exec", sent)
    assert (status, result["stdout"], result["exit_code"]) == (200, "/var\na b\né\n", 0)
    wrongs: list[dict[str, object]] = [
        {"argv": ["/no/such/program"]},
        {"command": "true", "cwd": "/no/such/folder"},
    ]
    for wrong in wrongs:
        status, refused = await whole.post("sessions/work/exec", wrong)
        assert (status, refused["code"]) == (400, "bad_request"), refused
        assert "/no/such/" in refused["message"]
