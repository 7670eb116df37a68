"""Logs of a whole system as JSON: each line is an object, and a fork's lines name the trace it belongs to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from collector import collecting
from e2e.restarted import restarted_with
from e2e.whole import Whole

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_each_line_is_an_object_and_a_forks_lines_name_its_trace(whole: Whole) -> None:
    agent, operator = whole.node.agent, whole.system.operator
    async with collecting() as collector:
        options = (f"--otlp-endpoint={collector.url}", "--log-format=json", "--log-level=debug")
        async with restarted_with(whole.system, (agent, operator), *options) as began:
            await whole.answered()
            await whole.template()
            await whole.session("root")
            url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/root/fork"
            headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            async with whole.http.post(url, json={"replicas": 1}, headers=headers) as answer:
                assert answer.status == 201
            lines: dict[str, list[dict[str, Any]]] = {
                part.name: [
                    json.loads(line) for line in part.log_path.read_bytes()[began[part.name] :].splitlines()
                ]
                for part in (agent, operator)
            }
    for found in lines.values():
        assert found
        for line in found:
            assert {"time", "level", "logger"} <= set(line)
            assert "event" in line or "message" in line
    (forked,) = [each for each in lines[agent.name] if each.get("event") == "forked"]
    assert (forked["children"], forked["trace_id"]) == (1, TRACE)
    assert isinstance(forked["pause_ms"], float)
    (placed,) = [
        each
        for each in lines[operator.name]
        if each.get("event") == "placed" and each["session"].startswith(f"{whole.namespace}/")
    ]
    assert placed["node"] == whole.node.name
    # A start in no caller's trace is not in the fork's.
    (started,) = [each for each in lines[agent.name] if each.get("event") == "started" and "baseline" in each]
    assert started.get("trace_id") != TRACE
