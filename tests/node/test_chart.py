"""The chart's whole life on a clean node, as one story: each step stands on the one before."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from forktree_dev.container_images import BuiltImage
from forktree_dev.kubectl import Kubectl
from forktree_dev.real_node.cluster import RealCluster
from forktree_dev.real_node.helm import NAMESPACE, Helm
from forktree_dev.real_node.playground import values
from node.installed import Steps, User, from_a_pod, in_service, machines, on_node

pytestmark = pytest.mark.asyncio(loop_scope="session")

NEXT = "0.1.0-next"
STATE = "/run/forktree"
COUNTING = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; usleep 100000; done"
ASK = Path(__file__).with_name("seen_from_a_pod.py").read_text()
KEPT = {
    "customresourcedefinition.apiextensions.k8s.io/forknodes.forktree.dev",
    "customresourcedefinition.apiextensions.k8s.io/forks.forktree.dev",
    "customresourcedefinition.apiextensions.k8s.io/sessions.forktree.dev",
    "customresourcedefinition.apiextensions.k8s.io/sessiontemplates.forktree.dev",
}
"""All that an uninstall leaves in the API, beside the namespace and what users wrote."""
CLUSTER_WIDE = (
    "clusterroles,clusterrolebindings,priorityclasses,customresourcedefinitions,"
    "validatingadmissionpolicies,validatingadmissionpolicybindings"
)
IN_NAMESPACE = (
    "all,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,leases,secrets,configmaps"
)
CLUSTERS_OWN = {"serviceaccount/default", "configmap/kube-root-ca.crt"}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def clean_cluster(
    operator_image: BuiltImage, node_image: BuiltImage, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealCluster]:
    """A cluster that has never heard of us, whose node has the images."""
    images = [operator_image.archive, node_image.archive]
    async with RealCluster.running(tmp_path_factory.mktemp("clean"), images) as cluster:
        repository = node_image.reference.rpartition(":")[0]
        await cluster.node.tag_image(node_image.reference, f"{repository}:{NEXT}")
        yield cluster


@pytest.mark.timeout(1200)
async def test_install_fork_prune_upgrade_and_uninstall(
    clean_cluster: RealCluster, operator_image: BuiltImage, tmp_path: Path
) -> None:
    cluster, kubectl, steps = clean_cluster, clean_cluster.kubectl, Steps()
    before = await ours(kubectl)
    assert before == set()
    helm = Helm(cluster.control_plane.kubeconfig, tmp_path)
    chosen = {**values(cgroup=cluster.machines_cgroup), "metrics": {"dashboard": {"enabled": True}}}

    await helm.install(chosen)
    await rolled_out(kubectl)
    steps.say("helm install: operator, keeper and agent are ready")
    await in_service(cluster)
    steps.say("the agent says that its node takes sessions:")
    print(await kubectl.run("get", "forknodes"))
    assert "children run" in await helm.test()
    steps.say("helm test passed")

    async with User.using(cluster, "searching") as user:
        await user.apply("SessionTemplate", "tiny", {"image": "builtin:tiny", "machine": {"memory": "128Mi"}})
        await user.apply("Session", "root", {"templateRef": {"name": "tiny"}})
        await user.wait("session/root", "condition=Ready")
        steps.say("a session is ready")
        await user.sh("root", f"echo planted > /tmp/seed; ({COUNTING}) >/dev/null 2>&1 &")
        await user.apply("Fork", "first", {"source": {"session": {"name": "root"}}, "replicas": 3})
        await user.wait("fork/first", "condition=Ready")
        await user.wait("fork/first", "jsonpath={.status.recorded}=3")
        children = await user.children("first")
        assert [await user.sh(child, "cat /tmp/seed") for child in children] == ["planted"] * 3
        steps.say("three children run, with what their parent had:")
        print(await user.kubectl("get", "sessions,forks"))

        asked = await from_a_pod(kubectl, operator_image, ASK, **await addresses(kubectl, cluster.node.name))
        said = json.loads(asked)
        assert said["agent"]["forktree_machines"] == 4
        assert said["agent"]["forktree_canary_passed"] == 1
        assert said["operator"]["forktree_operator_leader"] == 1
        assert said["operator"]["forktree_operator_placements_total"] >= 1
        assert said["health"] == {"healthz": 200, "readyz": 200}
        assert said["service"] == 200
        steps.say(f"a pod scrapes agent and operator, and reaches the API at its Service: {said}")

        await user.kubectl("delete", "session", children[2])
        await user.wait(f"session/{children[2]}", "delete")
        steps.say("one child is pruned")

        living = ["root", *children[:2]]
        counted = {each: int(await user.sh(each, "cat /tmp/count")) for each in living}
        before_upgrade = machines(cluster)
        asking = Asking(user, living)
        node = {"repository": "localhost/forktree/node", "tag": NEXT}
        upgraded = {**chosen, "images": {**chosen["images"], "node": node}}
        keeper = await pod_of(kubectl, "keeper")
        agent = await pod_of(kubectl, "agent")
        await helm.upgrade(upgraded)
        await rolled_out(kubectl)
        answered, longest = await asking.stop()
        # It is told of a new image too, and waits for somebody who knows that nobody needs its machines.
        assert await pod_of(kubectl, "keeper") == keeper
        assert await pod_of(kubectl, "agent") != agent
        steps.say(
            f"helm upgrade replaced the agent; {answered} commands meanwhile, longest wait {longest:.1f} s"
        )
        # Those that waited for a fork were nobody's, and ended with the agent that had started them.
        assert len(machines(cluster) & before_upgrade) >= len(living)
        now = {each: int(await user.sh(each, "cat /tmp/count")) for each in living}
        assert all(now[each] > counted[each] for each in living), (counted, now)
        steps.say(f"the same machines count on: {counted} before, {now} now")
        await user.apply("Fork", "second", {"source": {"session": {"name": children[0]}}, "replicas": 2})
        await user.wait("fork/second", "condition=Ready")
        (grandchild, _) = await user.children("second")
        assert await user.sh(grandchild, "cat /tmp/seed") == "planted"
        steps.say("the new agent forks a machine that the old one had started")

    await helm.uninstall()
    steps.say("helm uninstall returned")
    await kubectl.run("wait", "pods", "--all", "--for=delete", f"--namespace={NAMESPACE}", "--timeout=60s")
    left = await ours(kubectl)
    steps.say(f"left in the API: {sorted(left)}")
    assert left == KEPT
    assert await objects(kubectl, "sessions,forks,forknodes") == set()
    assert await objects(kubectl, "sessiontemplates") == {"sessiontemplate.forktree.dev/tiny"}
    assert machines(cluster) == set()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/{cluster.machines_cgroup}"))
    # Process 1 is the development node's own.
    processes = on_node(cluster, "ps", "-N", "--pid=1", "-o", "args=").splitlines()
    assert [each for each in processes if "forktree_" in each or "qemu-system" in each] == []
    files = on_node(cluster, "find", STATE).split()
    steps.say(f"left on the node: {files}")
    assert files == [STATE]


async def addresses(kubectl: Kubectl, node: str) -> dict[str, str]:
    """What a pod needs to know that has no names: nothing resolves them in this cluster."""
    pods: dict[str, str] = {}
    for part in ("agent", "operator"):
        found = await kubectl.json("get", await pod_of(kubectl, part), f"--namespace={NAMESPACE}")
        pods[part.upper()] = found["status"]["podIP"]
    service = await kubectl.json("get", "service", "forktree", f"--namespace={NAMESPACE}")
    bundle = (await kubectl.json("get", "forknode", node))["status"]["caBundle"]
    name = f"forktree.{NAMESPACE}.svc"
    return {**pods, "SERVICE": service["spec"]["clusterIP"], "NAME": name, "BUNDLE": bundle}


class Asking:
    """Runs a command in one session after the other, all the time, as a client does that tries again."""

    def __init__(self, user: User, sessions: list[str]) -> None:
        self._user = user
        self._sessions = sessions
        self._stopped = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="asking")

    async def stop(self) -> tuple[int, float]:
        """How many were answered, and the seconds that the slowest took. Raises what one of them raised."""
        self._stopped.set()
        return await self._task

    async def _run(self) -> tuple[int, float]:
        answered, longest = 0, 0.0
        while not self._stopped.is_set():
            session = self._sessions[answered % len(self._sessions)]
            began = time.monotonic()
            assert await self._user.sh_when_it_answers(session, "echo here") == "here"
            answered, longest = answered + 1, max(longest, time.monotonic() - began)
        return answered, longest


async def pod_of(kubectl: Kubectl, component: str) -> str:
    """Name of the one pod of a part."""
    selector = f"--selector=app.kubernetes.io/component={component}"
    fields = "--field-selector=status.phase=Running"
    (name,) = (
        await kubectl.run("get", "pods", f"--namespace={NAMESPACE}", selector, fields, "-o", "name")
    ).split()
    return name


async def rolled_out(kubectl: Kubectl) -> None:
    """Where one pod may be missing, as the agent's of a cluster of one node, helm does not wait for it."""
    await kubectl.run(
        *("rollout", "status", "daemonset/forktree-agent", f"--namespace={NAMESPACE}", "--timeout=240s"),
        timeout_seconds=250,
    )


async def ours(kubectl: Kubectl) -> set[str]:
    """All that an installation makes, wherever it is."""
    wide = (await kubectl.run("get", CLUSTER_WIDE, "-o", "name")).split()
    inside = (await kubectl.run("get", IN_NAMESPACE, f"--namespace={NAMESPACE}", "-o", "name")).split()
    return {each for each in wide if "forktree" in each} | set(inside) - CLUSTERS_OWN


async def objects(kubectl: Kubectl, kinds: str) -> set[str]:
    return set((await kubectl.run("get", kinds, "--all-namespaces", "-o", "name")).split())
