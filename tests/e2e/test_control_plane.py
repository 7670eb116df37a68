"""The development control plane does what our parts rely on, as a real cluster would."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from forktree_dev import provisioning
from forktree_dev.control_plane import ControlPlane
from forktree_dev.kubectl import Kubectl, KubectlFailed

NODE_CLAIM = "authentication.kubernetes.io/node-name"


def unique(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(4)}"


async def config_map(
    plane: ControlPlane, namespace: str, name: str, owner: dict[str, Any] | None
) -> dict[str, Any]:
    references: list[dict[str, Any]] = []
    if owner:
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "controller": True, "blockOwnerDeletion": True}
        references = [{**reference, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}]
    metadata = {"name": name, "namespace": namespace, "ownerReferences": references}
    await plane.kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    made: dict[str, Any] = await plane.kubectl.json("get", "configmap", name, "-n", namespace)
    return made


async def token_review(plane: ControlPlane, token: str) -> dict[str, Any]:
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": [provisioning.AUDIENCE]},
    }
    answer = await plane.kubectl.run("create", "-f", "-", "-o", "json", stdin=json.dumps(review))
    status: dict[str, Any] = json.loads(answer)["status"]
    return status


async def test_deleting_the_top_of_a_chain_of_owners_collects_everything_below(
    control_plane: ControlPlane, namespace: str
) -> None:
    owner = None
    for name in ("root", "child", "grandchild"):
        owner = await config_map(control_plane, namespace, name, owner)
    await control_plane.kubectl.run("delete", "configmap", "root", "-n", namespace)
    await control_plane.kubectl.run(
        "wait", "configmap/grandchild", "-n", namespace, "--for=delete", "--timeout=20s"
    )


async def test_an_agents_token_names_its_node_in_every_request(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    node = unique("node")
    await provisioning.create_node(control_plane.kubectl, node)
    kubeconfig = tmp_path / "agent.kubeconfig"
    await provisioning.write_agent_kubeconfig(control_plane.kubectl, node, kubeconfig)
    agent = Kubectl(control_plane.kubectl.program, kubeconfig)
    user = (await agent.json("auth", "whoami"))["status"]["userInfo"]
    assert user["username"] == "system:serviceaccount:forktree-system:forktree-agent"
    assert user["extra"][NODE_CLAIM] == [node]
    await control_plane.kubectl.run("delete", "node", node)


async def test_the_operators_token_names_no_node(control_plane: ControlPlane, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "operator.kubeconfig"
    await provisioning.write_operator_kubeconfig(control_plane.kubectl, kubeconfig)
    user = (await Kubectl(control_plane.kubectl.program, kubeconfig).json("auth", "whoami"))["status"][
        "userInfo"
    ]
    assert user["username"] == "system:serviceaccount:forktree-system:forktree-operator"
    assert NODE_CLAIM not in user["extra"]


async def test_a_component_may_not_do_what_no_role_grants_it(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "operator.kubeconfig"
    await provisioning.write_operator_kubeconfig(control_plane.kubectl, kubeconfig)
    operator = Kubectl(control_plane.kubectl.program, kubeconfig)
    with pytest.raises(KubectlFailed, match="Forbidden"):
        await operator.run("get", "secrets", "--all-namespaces")


async def test_a_node_reports_the_boot_it_runs_in(control_plane: ControlPlane) -> None:
    node = unique("node")
    for boot in ("00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"):
        await provisioning.create_node(control_plane.kubectl, node, boot=boot)
        seen = await control_plane.kubectl.json("get", "node", node)
        assert seen["status"]["nodeInfo"]["bootID"] == boot
    await control_plane.kubectl.run("delete", "node", node)


async def test_a_users_token_is_good_for_agents_only_and_other_tokens_are_not(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    await control_plane.kubectl.run("create", "serviceaccount", "player", "-n", namespace)
    token = await provisioning.user_token(control_plane.kubectl, "player", namespace=namespace)
    review = await token_review(control_plane, token)
    assert review["authenticated"]
    assert review["user"]["username"] == f"system:serviceaccount:{namespace}:player"
    ca = await control_plane.kubectl.json("config", "view", "--raw", "--minify")
    pem = base64.b64decode(ca["clusters"][0]["cluster"]["certificate-authority-data"])
    kubeconfig = tmp_path / "player.kubeconfig"
    provisioning.write_kubeconfig(kubeconfig, provisioning.Cluster(server=control_plane.url, ca=pem), token)
    with pytest.raises(KubectlFailed, match=r"Unauthorized|logged in"):
        await Kubectl(control_plane.kubectl.program, kubeconfig).run("get", "configmaps")

    default_token = (await control_plane.kubectl.run("create", "token", "player", "-n", namespace)).strip()
    for wrong in (default_token, control_plane.token):
        assert not (await token_review(control_plane, wrong)).get("authenticated")


async def test_two_control_planes_run_side_by_side(control_plane: ControlPlane, tmp_path: Path) -> None:
    name = unique("node")
    async with ControlPlane.running(tmp_path / "other") as other:
        await provisioning.create_node(other.kubectl, name)
        with pytest.raises(KubectlFailed, match="NotFound"):
            await control_plane.kubectl.run("get", "node", name)
        pids = [service.pid for service in (other.etcd, other.api_server, other.controller_manager)]
        assert all(pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_a_control_plane_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path)
    (tmp_path / "etcd").write_text("not a folder")
    async with asyncio.timeout(60):
        with pytest.raises(Exception, match="etcd exited with code 1"):
            await plane.start()
        assert plane.api_server.pid is not None
        await plane.stop()
    assert plane.api_server.pid is None


async def test_an_api_server_that_was_killed_comes_back_with_everything(tmp_path: Path) -> None:
    async with ControlPlane.running(tmp_path) as plane:
        await config_map(plane, "default", "kept", None)
        await plane.api_server.kill()
        plane.api_server.start()
        await plane.ready(deadline=asyncio.get_running_loop().time() + 60)
        assert await plane.kubectl.json("get", "configmap", "kept", "-n", "default")
