"""Variables whose values are in Secrets: what is read, what is refused, and that no value gets out."""

from __future__ import annotations

import base64
import dataclasses
import traceback
from collections.abc import AsyncIterator

import pytest

from component.node import TINY
from forktree.kube.errors import Unavailable, Unreadable
from forktree.models.session_template import EnvSource, EnvVar, SecretKeyRef
from forktree_agent.control.environment import (
    VALUE_BYTES_MAX,
    SecretUnreadable,
    resolved,
    secret_variables,
)
from forktree_agent.engine.contract import SecretVariable
from forktree_agent.engine.microvm.images import shape_digest
from unit.api_server import Answer, ScriptedServer, refuses, says

VALUE = "s3cr3t-value"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer.running() as running:
        yield running


def plain(name: str, value: str) -> EnvVar:
    return EnvVar(name=name, value=value)


def secret(name: str, key: str = "token", of: str = "login") -> EnvVar:
    # Not validated: the model refuses the names that these tests ask for, and the agent must do so too.
    reference = SecretKeyRef.model_construct(name=of, key=key)
    return EnvVar(name=name, value_from=EnvSource(secret_key_ref=reference))


def holds(version: int = 7, **entries: bytes) -> Answer:
    data = {key: base64.b64encode(value).decode() for key, value in entries.items()}
    return says({"metadata": {"uid": "u1", "resourceVersion": str(version)}, "data": data})


async def test_each_secret_is_read_once_and_plain_values_need_none(server: ScriptedServer) -> None:
    server.script.append(holds(token=VALUE.encode(), other=b"two"))
    async with server.client() as client:
        assert await resolved(client, "ns", [plain("A", ""), plain("B", "b")]) == {"A": "", "B": "b"}
        env = [plain("A", "a"), secret("T"), secret("O", "other"), secret("AGAIN")]
        assert await resolved(client, "ns", env) == {"A": "a", "T": VALUE, "O": "two", "AGAIN": VALUE}
    assert [each.path for each in server.seen] == ["/api/v1/namespaces/ns/secrets/login"]


@pytest.mark.parametrize(
    ("answer", "variable", "sentence"),
    [
        (refuses(404), secret("T"), "there is no Secret login in namespace ns"),
        (refuses(403), secret("T"), "to let it, bind ClusterRole forktree-agent-secrets"),
        (holds(token=b"x"), secret("T", "key"), "Secret login has no entry key"),
        (says({"metadata": {"uid": "u", "resourceVersion": "1"}}), secret("T"), "has no entry token"),
        (holds(token=b"\xff\xfe"), secret("T"), "is not text"),
        (holds(token=b"a\0b"), secret("T"), "holds a NUL character"),
        (holds(token=b"x" * (VALUE_BYTES_MAX + 1)), secret("T"), "more than 64 KiB"),
    ],
)
async def test_what_cannot_be_a_variable_is_refused_in_a_sentence(
    server: ScriptedServer, answer: Answer, variable: EnvVar, sentence: str
) -> None:
    server.script.append(answer)
    async with server.client() as client:
        with pytest.raises(SecretUnreadable, match=sentence):
            await resolved(client, "ns", [variable])


async def test_a_name_that_would_be_another_path_is_never_asked_for(server: ScriptedServer) -> None:
    async with server.client() as client:
        for name in ("../configmaps/x", "a/b", "a?b", "A", "..", "%2e"):
            with pytest.raises(SecretUnreadable, match="no Secret can have that name"):
                await resolved(client, "ns", [secret("T", of=name)])
    assert server.seen == []


async def test_a_server_that_is_away_is_another_thing_than_a_missing_secret(server: ScriptedServer) -> None:
    server.script.append(refuses(503))
    async with server.client() as client:
        with pytest.raises(Unavailable):
            await resolved(client, "ns", [secret("T")])


async def test_no_error_and_no_text_of_ours_holds_a_value(server: ScriptedServer) -> None:
    server.script += [
        says({"metadata": {"uid": "u", "resourceVersion": "1"}, "data": {"token": [VALUE]}}),
        says({"metadata": {"uid": "u", "resourceVersion": "1"}, "data": {"token": VALUE}}),
        holds(token=VALUE.encode()),
    ]
    async with server.client() as client:
        for expected in (Unreadable, SecretUnreadable):
            with pytest.raises(expected) as raised:
                await resolved(client, "ns", [secret("T")])
            assert VALUE not in "".join(traceback.format_exception(raised.value))
        (variable,) = await secret_variables(client, "ns", [secret("T")])
    assert variable.value == VALUE
    assert VALUE not in repr(variable)


def test_a_baseline_depends_on_the_version_of_a_secret_and_not_on_its_value() -> None:
    def digest(value: str, version: str) -> str:
        variable = SecretVariable(name="T", value=value, version=version)
        return shape_digest(dataclasses.replace(TINY, secret_env=(variable,)), "tcg")

    assert digest("one", "u/1/token") == digest("two", "u/1/token")
    assert digest("one", "u/1/token") != digest("one", "u/2/token")
