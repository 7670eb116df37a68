"""Credentials: from a kubeconfig or a pod's account, read anew as they are renewed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forktree.kube.access import AccessError, ClusterAccess


def write_kubeconfig(path: Path, user: dict[str, str], server: str = "http://127.0.0.1:1") -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    path.write_text(json.dumps(config))
    return path


async def test_token_of_a_kubeconfig_is_sent(tmp_path: Path) -> None:
    access = ClusterAccess.from_kubeconfig(write_kubeconfig(tmp_path / "config", {"token": "abc"}))
    assert await access.authorization() == "Bearer abc"
    assert (access.server_url, access.tls) == ("http://127.0.0.1:1", None)


async def test_renewed_token_file_is_read_when_the_old_one_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    config = write_kubeconfig(tmp_path / "config", {"tokenFile": str(token)})
    access = ClusterAccess.from_kubeconfig(config)
    assert await access.authorization() == "Bearer old"
    token.write_text("new")
    assert await access.authorization() == "Bearer old"  # Not read again for every call.
    assert await access.authorization(fresh=True) == "Bearer new"


async def test_user_without_token_sends_none(tmp_path: Path) -> None:
    access = ClusterAccess.from_kubeconfig(write_kubeconfig(tmp_path / "config", {}))
    assert await access.authorization() is None


async def test_https_server_is_verified(tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", {"token": "a"}, "https://127.0.0.1:1/")
    access = ClusterAccess.from_kubeconfig(config)
    assert access.server_url == "https://127.0.0.1:1"
    assert access.tls is not None
    assert access.tls.check_hostname


def test_missing_kubeconfig_is_named(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="nowhere"):
        ClusterAccess.from_kubeconfig(tmp_path / "nowhere")


async def test_kubeconfig_that_went_away_is_told_at_the_next_reading(tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", {"token": "abc"})
    access = ClusterAccess.from_kubeconfig(config)
    config.unlink()
    with pytest.raises(AccessError):
        await access.authorization()


def test_outside_a_pod_there_is_no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(AccessError, match="not inside a pod"):
        ClusterAccess.in_cluster(tmp_path)
