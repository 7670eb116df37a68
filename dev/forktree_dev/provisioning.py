"""What a cluster must hold before our parts can run in it. Works with any kubeconfig that may do this.

Definitions, roles and policies come from `crds/` and the chart. Without a kubelet, a node and its
agent's identity are made here: a Node object, and a service-account token bound to it, which is how the
API server knows which node an agent speaks for.
"""

from __future__ import annotations

import base64
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forktree_dev.checkout import CHECKOUT
from forktree_dev.kubectl import Kubectl
from forktree_dev.processes import boot_id

SYSTEM_NAMESPACE = "forktree-system"
OPERATOR_ACCOUNT = "forktree-operator"
AGENT_ACCOUNT = "forktree-agent"
AUDIENCE = "forktree.dev"
"""Whom a token must be meant for, to be taken by an agent's HTTP API."""

_DEFINITIONS = CHECKOUT / "crds"
_MANIFESTS = CHECKOUT / "charts" / "forktree" / "files" / "manifests"
_TOKEN_LIFE = "24h"  # Nobody renews it: longer than any development session.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How to reach an API server and know that it is the right one."""

    server: str
    ca: bytes
    """PEM; empty: the system's own authorities."""


async def install(kubectl: Kubectl) -> None:
    """Definitions, roles and policies; returns when the API server serves our types. Safe to repeat."""
    await define(kubectl, _DEFINITIONS)
    await kubectl.apply(_MANIFESTS)
    # Established is not yet served: a list is refused for a moment, which kubectl sits out.
    definitions = await kubectl.json("get", "-f", str(_DEFINITIONS))
    types = ",".join(each["metadata"]["name"] for each in definitions["items"])
    await kubectl.run("get", types, "--all-namespaces")


async def define(kubectl: Kubectl, definitions: Path) -> None:
    """Returns when the API server has taken the definitions of types in a folder. Safe to repeat."""
    await kubectl.apply(definitions)
    # For a moment a definition has no conditions at all, and that one of them is awaited is then an error.
    for condition in ("jsonpath={.status.conditions[0].type}", "condition=Established"):
        await kubectl.run("wait", f"--for={condition}", "--timeout=50s", "-f", str(definitions))


async def create_node(kubectl: Kubectl, name: str, *, boot: str | None = None) -> None:
    """A Node that looks as if this machine's kubelet had registered it. Safe to repeat.

    `boot` is the boot id it reports, by default this machine's; another one is how a reboot looks.
    """
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
    }
    await kubectl.apply(node)
    system = platform.uname()
    info = {
        "bootID": boot or boot_id(),
        "machineID": "",
        "systemUUID": "",
        "kernelVersion": system.release,
        "osImage": "",
        "containerRuntimeVersion": "",
        "kubeletVersion": "",
        "kubeProxyVersion": "",
        "operatingSystem": "linux",
        "architecture": "amd64",
    }
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Development",
        "message": "no kubelet watches this node",
    }
    patch = {"status": {"nodeInfo": info, "conditions": [ready]}}
    await kubectl.run(
        "patch", "node", name, "--subresource=status", "--type=merge", "--patch", json.dumps(patch)
    )


async def write_agent_kubeconfig(kubectl: Kubectl, node: str, path: Path) -> None:
    """The agent's identity on `node`: its token ends with the Node object, and names it in every request."""
    bound = ("--bound-object-kind=Node", f"--bound-object-name={node}")
    write_kubeconfig(path, await _cluster(kubectl), await _token(kubectl, AGENT_ACCOUNT, *bound))


async def write_operator_kubeconfig(kubectl: Kubectl, path: Path) -> None:
    write_kubeconfig(path, await _cluster(kubectl), await _token(kubectl, OPERATOR_ACCOUNT))


async def write_account_kubeconfig(kubectl: Kubectl, account: str, path: Path, *, namespace: str) -> None:
    """A kubeconfig of a service account, whose commands are about its own namespace."""
    token = await _token(kubectl, account, namespace=namespace)
    write_kubeconfig(path, await _cluster(kubectl), token, namespace=namespace)


async def user_token(kubectl: Kubectl, account: str, *, namespace: str = "default") -> str:
    """A token with which `account` may speak to an agent's HTTP API, and to nobody else."""
    return await _token(kubectl, account, f"--audience={AUDIENCE}", namespace=namespace)


def write_kubeconfig(path: Path, cluster: Cluster, token: str, *, namespace: str = "default") -> None:
    """A kubeconfig with all in one file, readable by its owner only."""
    name = "forktree-dev"
    reach: dict[str, str] = {"server": cluster.server}
    if cluster.ca:
        reach["certificate-authority-data"] = base64.b64encode(cluster.ca).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": reach}],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}],
        "current-context": name,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(config, indent=2))
    draft.rename(path)


async def _token(kubectl: Kubectl, account: str, *options: str, namespace: str = SYSTEM_NAMESPACE) -> str:
    create = ("create", "token", account, f"--namespace={namespace}", f"--duration={_TOKEN_LIFE}")
    return (await kubectl.run(*create, *options)).strip()


async def _cluster(kubectl: Kubectl) -> Cluster:
    config: dict[str, Any] = await kubectl.json("config", "view", "--minify", "--raw", "--flatten")
    reach = config["clusters"][0]["cluster"]
    return Cluster(server=reach["server"], ca=base64.b64decode(reach.get("certificate-authority-data", "")))
