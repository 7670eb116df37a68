"""Where the client looks for an agent and a token, and what it says when there is none."""

from __future__ import annotations

import base64
import json
import socket
from pathlib import Path

import pytest

from forktree import AsyncClient, errors
from forktree._async.connecting import _own_account  # pyright: ignore[reportPrivateUsage]
from forktree._settings import Settings, trust
from unit.agent_server import SOON, ScriptedAgent
from unit.api_server import ScriptedServer, listing, says


def test_what_is_given_wins_over_the_environment() -> None:
    environment = {
        "FORKTREE_URL": "https://env:1/",
        "FORKTREE_TOKEN": "env",
        "FORKTREE_CA": "/ca",
        "FORKTREE_NAMESPACE": "lab",
    }
    found = Settings.gathered(environment=environment)
    assert (found.url, found.token, found.ca, found.namespace) == ("https://env:1", "env", "/ca", "lab")
    assert not found.needs_cluster
    given = Settings.gathered(url="https://given:1", token="given", environment=environment)
    assert (given.url, given.token, given.ca) == ("https://given:1", "given", "/ca")


def test_a_token_wins_over_a_file_of_one_and_either_does() -> None:
    both = {"FORKTREE_URL": "https://a", "FORKTREE_TOKEN": "t", "FORKTREE_TOKEN_FILE": "/t"}
    assert Settings.gathered(environment=both).token_file is None
    del both["FORKTREE_TOKEN"]
    assert Settings.gathered(environment=both).token_file == Path("/t")
    assert not Settings.gathered(environment=both).needs_cluster
    del both["FORKTREE_TOKEN_FILE"]
    assert Settings.gathered(environment=both).needs_cluster


@pytest.mark.parametrize(
    "url",
    ["http://a:1", "a:7443", "https://", "https://a/v1", "https://u:p@a", "https://a:port", "https://[a"],
)
def test_an_address_that_cannot_be_one_is_told_with_one_that_can(url: str) -> None:
    with pytest.raises(errors.BadSettings, match="https://HOST:7443"):
        AsyncClient(url, token="t")


def test_a_namespace_that_cannot_be_one_is_told() -> None:
    with pytest.raises(errors.BadSettings, match="DNS label"):
        AsyncClient("https://a", token="t", namespace="../x")


def test_certificates_that_are_none_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for ca in (tmp_path / "empty", tmp_path / "missing", "-----BEGIN CERTIFICATE-----\nx"):
        with pytest.raises(errors.BadSettings, match="FORKTREE_CA"):
            trust(ca)


async def test_without_a_word_about_a_cluster_the_client_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORKTREE_URL", "FORKTREE_TOKEN", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    async with AsyncClient(kubeconfig=tmp_path / "none") as client:
        with pytest.raises(errors.NoAgent, match="set FORKTREE_URL"):
            await client.health()


def test_a_service_account_is_known_by_its_token() -> None:
    def token(**claims: str) -> str:
        return f"Bearer h.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.s"

    assert _own_account(token(sub="system:serviceaccount:lab:trainer")) == ("lab", "trainer")
    for other in ("", "Bearer x", "Bearer a.b.c", token(sub="alice"), token(), token(sub="a:b:c:d:e")):
        assert _own_account(other) is None


async def test_an_agent_that_does_not_answer_is_looked_for_anew(tmp_path: Path) -> None:
    """The cluster names a dead agent first, and the living one when it is asked again."""
    async with ScriptedAgent.running(tmp_path / "tls") as agent, ScriptedServer.running() as cluster:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))  # Bound and not listening: whoever connects is refused.
            ca = agent.ca.read_text()
            dead = {"ready": True, "endpoint": f"https://127.0.0.1:{held.getsockname()[1]}", "caBundle": ca}
            alive = {**dead, "endpoint": agent.url}
            unready = {**alive, "ready": False}
            granted = {"status": {"token": "granted"}, "spec": {"expirationSeconds": 600}}
            cluster.script += [listing(1, {"status": dead}, {"status": unready}), says(granted)]
            cluster.script += [listing(2, {"status": alive})]
            agent.script += [says([])]
            kubeconfig = tmp_path / "kubeconfig"
            kubeconfig.write_text(_KUBECONFIG.format(url=cluster.url))
            async with AsyncClient(kubeconfig=kubeconfig, retries=SOON) as client:
                assert await client.sessions.list() == []
    assert [each.path for each in cluster.seen] == [
        "/apis/forktree.dev/v1alpha1/forknodes",
        "/api/v1/namespaces/lab/serviceaccounts/default/token",
        "/apis/forktree.dev/v1alpha1/forknodes",
    ]
    assert [(each.path, each.token) for each in agent.seen] == [("/ns/lab/v1/sessions", "granted")]


_KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{{name: c, context: {{cluster: c, user: u, namespace: lab}}}}]
clusters: [{{name: c, cluster: {{server: {url}}}}}]
users: [{{name: u, user: {{token: t}}}}]
"""
