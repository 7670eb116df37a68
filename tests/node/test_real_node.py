"""The development node runs pods as any node does, and leaves the machine that it is on as it was."""

from __future__ import annotations

import json
import secrets
import subprocess
from pathlib import Path

import pytest

from forktree_dev.container_images import BuiltImage
from forktree_dev.kubectl import Kubectl, KubectlFailed
from forktree_dev.processes import running_recorded
from forktree_dev.real_node import cluster as clusters
from forktree_dev.real_node.cluster import RealCluster
from leftovers import Traces, left_behind

# A cluster comes up in ten seconds, and in a minute where others are at work.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
ASK_WHO_I_AM = f"""
import json, os, ssl, urllib.request
url = "https://" + os.environ["KUBERNETES_SERVICE_HOST"] + "/apis/authentication.k8s.io/v1/selfsubjectreviews"
headers = {{"Authorization": "Bearer " + open("{ACCOUNT}/token").read(), "Content-Type": "application/json"}}
body = json.dumps({{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}}).encode()
trust = ssl.create_default_context(cafile="{ACCOUNT}/ca.crt")
print(urllib.request.urlopen(urllib.request.Request(url, body, headers), context=trust).read().decode())
"""
MACHINE_WIDE = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")


async def pod(kubectl: Kubectl, image: BuiltImage, script: str, **spec: object) -> str:
    """The name of a pod that is Ready, as a user without rights on the node would write it."""
    name = f"test-{secrets.token_hex(3)}"
    container = {
        "name": "test",
        "image": image.reference,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", script],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    metadata = {"name": name}
    whole = {"containers": [container], "terminationGracePeriodSeconds": 1, **spec}
    await kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole})
    await kubectl.run("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=60s", timeout_seconds=70)
    return name


async def test_a_pod_speaks_to_the_api_server_as_its_account_on_its_node(
    real_cluster: RealCluster, operator_image: BuiltImage
) -> None:
    kubectl = real_cluster.kubectl
    name = await pod(kubectl, operator_image, "import time; time.sleep(600)")
    answer = json.loads(await kubectl.run("exec", name, "--", "python3", "-c", ASK_WHO_I_AM))
    user = answer["status"]["userInfo"]
    assert user["username"] == "system:serviceaccount:default:default"
    # What the admission policies build on: a pod's token says on which node it is.
    assert user["extra"]["authentication.kubernetes.io/node-name"] == [real_cluster.node.name]
    await kubectl.run("delete", "pod", name)


async def test_this_machine_reaches_a_pod_and_its_log(
    real_cluster: RealCluster, operator_image: BuiltImage
) -> None:
    kubectl = real_cluster.kubectl
    name = await pod(
        kubectl, operator_image, "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8080)"
    )
    address = (await kubectl.json("get", "pod", name))["status"]["podIP"]
    await kubectl.run("exec", name, "--", "python3", "-c", _WAIT_FOR_PORT)
    seen = subprocess.run(
        ["curl", "-sS", f"http://{address}:8080/etc/hostname"], check=True, capture_output=True, text=True
    )
    assert seen.stdout.strip() == name
    assert "GET /etc/hostname" in await kubectl.run("logs", name)
    await kubectl.run("delete", "pod", name)


async def test_a_cluster_that_ends_leaves_nothing(operator_image: BuiltImage, tmp_path: Path) -> None:
    before, tunables = Traces.now(), machine_wide()
    async with RealCluster.running(tmp_path, [operator_image.archive]) as second:
        # Beside the one that other tests use: two of them do not meet.
        name = await pod(second.kubectl, operator_image, "import time; time.sleep(600)")
        with pytest.raises(KubectlFailed, match="not found"):
            await second.kubectl.run("get", "pod", f"{name}-of-another")
        assert len(running_recorded(tmp_path)) == clusters.PARTS
        assert machine_wide() == tunables
    left = left_behind(before, [str(tmp_path), second.name])
    assert left.lines() == []
    assert running_recorded(tmp_path) == []
    assert links() & {second.wire_name} == set()
    assert not (tmp_path / "node" / "root").exists()


def machine_wide() -> dict[str, str]:
    """Settings of the whole machine that a kubelet would change."""
    return {name: Path("/proc/sys", name).read_text() for name in MACHINE_WIDE}


def links() -> set[str]:
    shown = subprocess.run(["ip", "-json", "link"], check=True, capture_output=True, text=True).stdout
    return {each["ifname"] for each in json.loads(shown)}


_WAIT_FOR_PORT = """
import socket, time
for _ in range(300):
    try:
        socket.create_connection(("127.0.0.1", 8080), 1).close()
        break
    except OSError:
        time.sleep(0.1)
else:
    raise SystemExit("nobody listens")
"""
