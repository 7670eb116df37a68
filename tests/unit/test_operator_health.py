"""What an operator says of itself to the kubelet."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from forktree_operator import health
from forktree_operator.health import Health, serving_health


async def asked(of: Health) -> dict[str, tuple[int, str]]:
    found: dict[str, tuple[int, str]] = {}
    async with (
        serving_health(("127.0.0.1", 0), of) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        for path in ("/healthz", "/readyz", "/metrics"):
            async with http.get(path) as answer:
                found[path] = answer.status, await answer.text()
    return found


async def test_one_that_was_not_told_yet_who_leads_lives_and_is_not_ready() -> None:
    found = await asked(Health())
    assert found["/healthz"] == (200, "ok\n")
    assert found["/readyz"] == (503, "the API server has not said who leads\n")
    assert found["/metrics"][0] == 404


async def test_one_that_knows_is_ready_and_rounds_may_be_far_apart() -> None:
    told = Health()
    told.knows_leader = True
    with told.round():
        pass
    assert {status for status, _ in (await asked(told)).values()} == {200, 404}


async def test_a_round_that_stands_still_is_a_reason_to_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "STILL_SECONDS", 0.0)
    told = Health()
    told.knows_leader = True
    with told.round():
        await asyncio.sleep(0.001)
        found = await asked(told)
    for path in ("/healthz", "/readyz"):
        status, said = found[path]
        assert status == 503
        assert said.startswith("the sweep has stood still for ")


async def test_each_step_of_a_round_counts_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Health()
    now = [1000.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    with told.round():
        for _ in range(5):
            now[0] += health.STILL_SECONDS
            assert told.trouble() is None
            told.progressed()
        now[0] += health.STILL_SECONDS + 1
        assert told.trouble() is not None
    assert told.trouble() is None
