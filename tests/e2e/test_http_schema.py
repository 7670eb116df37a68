"""What the OpenAPI document says is what the server does: schemathesis asks all that this allows, and more.

A real API server and the agent's own rights; machines are scripted, and the test plays the agent that brings
each object to where its caller waits for it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The library types its cases in part only.

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from schemathesis.core.result import Ok

from e2e.http_stage import NODE, Stage
from forktree.kube.errors import KubeError
from forktree.kube.watching import Changed, Listed, watch
from forktree.models import Fork, Session
from forktree_agent.http import openapi
from forktree_agent.http.routes import OPEN, ROUTES

EXAMPLES = 8
"""For each route and kind of data: some thirty routes, a second each."""

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
THERE = {
    "session_id": "here",
    "fork_id": "held",
    "template_id": "basic",
    "checkpoint": "good",
    "index": "0",
    "exec_id": "e",
}
"""What there is; the paths of half of all cases name these."""

STANDS = {"Running": "Running", "Paused": "Paused", "Released": "Released"}


@schemathesis.serializer("application/x-tar")
def as_it_is(_: object, value: object) -> bytes:
    """The document says of a tar no more than that it is one."""
    return value if isinstance(value, bytes) else str(value).encode()


@asynccontextmanager
async def played(stage: Stage) -> AsyncGenerator[None]:
    """Inside the block each session becomes what it is asked to be, and each fork complete."""
    async with asyncio.TaskGroup() as tasks:
        playing = [
            tasks.create_task(play(stage, kind), name=f"play-{kind.__name__}") for kind in (Session, Fork)
        ]
        yield
        for task in playing:
            task.cancel()


async def play(stage: Stage, kind: type[Session] | type[Fork]) -> None:
    async with aclosing(watch(stage.admin, kind, namespace=stage.namespace)) as events:
        async for event in events:
            match event:
                case Listed(objects=objects):
                    for each in objects:
                        await bring(stage, each)
                case Changed(obj=each):
                    await bring(stage, each)
                case _:
                    pass


async def bring(stage: Stage, item: Session | Fork) -> None:
    """As an agent would, to where its caller waits for it."""
    status: dict[str, object]
    if isinstance(item, Session):
        status = {"phase": STANDS[item.spec.state], "ready": True, "node": NODE}
    else:
        status = {"phase": "Complete", "ready": True, "node": NODE, "recorded": item.spec.replicas}
    if item.status.phase != status["phase"]:
        with suppress(KubeError):  # Deleted meanwhile.
            await stage.admin.merge_patch(
                type(item), stage.namespace, item.metadata.name, {"status": status}, subresource="status"
            )


@pytest.mark.timeout(500)
@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_the_server_keeps_to_its_document(stage: Stage, mode: GenerationMode, tmp_path: Path) -> None:
    await stage.session_here("here")
    trust = tmp_path / "ca.pem"
    trust.write_text(stage.ca_bundle)
    async with played(stage):
        forked = {"replicas": 1, "name": "held"}
        assert (await stage.ask("POST", "/sessions/here/fork", forked))[0] == 201
        await asyncio.to_thread(ask_all, f"{stage.url}/ns/{stage.namespace}/v1", stage.token, trust, mode)


def ask_all(url: str, token: str, trust: Path, mode: GenerationMode) -> None:
    """Every route that a token is needed for, in a thread beside the server's loop."""
    document = openapi.document(ROUTES, OPEN)
    for each in OPEN:
        del document["paths"][each.path]
    schema = schemathesis.openapi.from_dict(document)
    headers = {"Authorization": f"Bearer {token}"}
    broken: list[str] = []
    operations = [each.ok() for each in schema.get_all_operations() if isinstance(each, Ok)]
    assert len(operations) == len(ROUTES)
    for operation in sorted(operations, key=ends_something):
        strategy = operation.as_strategy(generation_mode=mode)

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            verbosity=Verbosity.quiet,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        )
        @given(case=strategy, known=st.booleans())
        def ask(case: Any, known: bool) -> None:
            if known:
                case.path_parameters |= {name: THERE[name] for name in case.path_parameters if name in THERE}
            if (case.query or {}).get("watch") not in {None, "false", "0"}:
                case.query.pop("watch")  # That answer has no end.
            response = case.call(base_url=url, headers=headers, verify=str(trust), timeout=60)
            case.validate_response(response, checks=CHECKS)

        try:
            ask()
        except Exception as err:  # All routes are asked before any is complained of.
            # With what is inside: of an answer that came once and not again, only that says what it was.
            broken.append(f"{operation.label}: {''.join(traceback.format_exception(err))}")
    assert not broken, "\n\n".join(broken)


def ends_something(operation: Any) -> bool:
    """What is there is asked for last what ends it."""
    return bool(operation.method == "delete" or operation.path.endswith(("/release", "/prune")))


def mean_what_is_there(case: Any) -> None:
    case.path_parameters |= {name: THERE[name] for name in case.path_parameters if name in THERE}
    if isinstance(case.body, dict):
        if "template_id" in case.body:
            case.body["template_id"] = THERE["template_id"]
        if case.body.get("argv") is not None:
            case.body.pop("command", None)  # That only one may be given no schema says.
