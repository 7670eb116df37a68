"""The searches of `examples/argo`, carried out by Argo's own controller and executor on a real node."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import pytest_asyncio
import yaml

from forktree_dev.checkout import CHECKOUT
from forktree_dev.container_images import BuiltImage
from forktree_dev.images.gym.environment import Environment, Refused
from forktree_dev.parent_death import die_with_us
from forktree_dev.real_node import argo
from forktree_dev.real_node.argo import Pace
from forktree_dev.real_node.cluster import RealCluster
from forktree_dev.real_node.helm import Helm
from forktree_dev.real_node.playground import values
from node.installed import SECONDS, User, in_service, machines
from node.workflows import Workflows

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]

EXAMPLES = CHECKOUT / "examples" / "argo"
BLOCKS = re.findall(r"```sh\n(.*?)```", (EXAMPLES / "README.md").read_text(), re.DOTALL)
ACTIONS = {"down": "1", "right": "2", "up": "3"}
QUICK = Pace(look="1s", requeue="1s")
"""What the page about Argo recommends."""


@dataclass
class Searcher:
    """A user of a cluster with forktree and Argo, in a namespace that has the examples."""

    cluster: RealCluster
    user: User
    workflows: Workflows
    machines_before: set[str]

    async def applies_again(self, made: str) -> None:
        """Does once more what a step has done, which must be allowed and change nothing."""
        before = await self._metadata(made)
        manifest = before["annotations"]["kubectl.kubernetes.io/last-applied-configuration"]
        account = f"--as=system:serviceaccount:{self.user.namespace}:forktree-search"
        await self.cluster.kubectl.run("apply", account, "-f", "-", stdin=manifest)
        after = await self._metadata(made)
        assert (after["uid"], after["generation"]) == (before["uid"], before["generation"])
        assert after["ownerReferences"] == before["ownerReferences"]

    async def _metadata(self, what: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.user.kubectl("get", what, "-o", "json"))["metadata"]
        return found

    async def is_rid_of(self, workflow: str) -> None:
        """Deletes it, and waits until nothing of it is left: objects, pods and machines."""
        await self.workflows.delete(workflow)
        for kind in ("sessions,forks", "pods"):
            await self.user.wait(kind, "delete", "--all")
        deadline = asyncio.get_running_loop().time() + SECONDS
        while machines(self.cluster) != self.machines_before:
            assert asyncio.get_running_loop().time() < deadline, machines(self.cluster)
            await asyncio.sleep(0.2)  # Processes of somebody else: they can only be looked at.


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def searcher(
    operator_image: BuiltImage, node_image: BuiltImage, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Searcher]:
    folder = tmp_path_factory.mktemp("argo")
    images = [operator_image.archive, node_image.archive, argo.executor_image()]
    async with RealCluster.running(folder, images) as cluster:
        await Helm(cluster.control_plane.kubeconfig, folder / "helm").install(
            values(cgroup=cluster.machines_cgroup)
        )
        await in_service(cluster)
        await argo.install(cluster)
        async with User.using(cluster, "searches") as user:
            for file in sorted(EXAMPLES.glob("*.yaml")):
                await user.kubectl("apply", "-f", str(file))
            yield Searcher(cluster, user, Workflows(cluster.kubectl, user.namespace), machines(cluster))


@pytest.mark.parametrize("pace", [Pace(), QUICK], ids=["as-argo-comes", "quick"])
async def test_the_best_of_four_plans_is_kept(searcher: Searcher, tmp_path: Path, pace: Pace) -> None:
    plans = branches("fan-out.yaml", "plans")
    scores = {name: score(actions) for name, actions in plans.items()}
    print(f"played here: {scores}")
    async with argo.controller(searcher.cluster, tmp_path, pace):
        done = await searcher.workflows.run("fan-out")
    print(f"with {pace}:", *done.timings(), sep="\n")
    assert done.status["phase"] == "Succeeded", done.status
    best = max(scores, key=lambda name: scores[name])
    found = done.outputs
    assert (found["plan"], float(found["score"])) == (best, scores[best])

    # It is the only child left, has played that plan, and got its label.
    children = await searcher.user.kubectl("get", "sessions", "-o", "name")
    assert set(names(children)) == {done.name, found["best"]}
    marked = await searcher.user.kubectl("get", "sessions", "--selector=example.org/search=won", "-o", "name")
    assert names(marked) == [found["best"]]
    assert f'"actions": [{", ".join(plans[best])}]' in await searcher.user.sh(found["best"], "gym-ask state")

    # A step whose pod was lost would do the same again, as the same account.
    for made in (f"session/{done.name}", f"fork/{done.name}-plans"):
        await searcher.applies_again(made)
    await searcher.is_rid_of(done.name)


async def test_level_by_level_the_search_finds_the_goal(searcher: Searcher, tmp_path: Path) -> None:
    assert branches("beam-search.yaml", "fork") == {name: [action] for name, action in ACTIONS.items()}
    path = greedy(levels=8, enough=1.0)
    async with argo.controller(searcher.cluster, tmp_path, QUICK):
        done = await searcher.workflows.run("beam-search")
    print(f"with {QUICK}:", *done.timings(), sep="\n")
    assert done.status["phase"] == "Succeeded", done.status
    found = done.outputs
    assert (found["path"].split(), float(found["score"])) == (path, 1.0)
    taken = ", ".join(ACTIONS[name] for name in path)
    assert f'"actions": [{taken}]' in await searcher.user.sh(found["best"], "gym-ask state")
    # One winner is left of each level, and the root.
    assert len(names(await searcher.user.kubectl("get", "sessions", "-o", "name"))) == len(path) + 1
    await searcher.is_rid_of(done.name)


async def test_a_search_ends_where_its_depth_does(searcher: Searcher, tmp_path: Path) -> None:
    async with argo.controller(searcher.cluster, tmp_path, QUICK):
        done = await searcher.workflows.run("beam-search", {"depth": "2", "keep": "2"})
    assert done.status["phase"] == "Succeeded", done.status
    path = greedy(levels=2, enough=1.0)
    assert done.outputs["path"].split() == path
    assert float(done.outputs["score"]) == score([ACTIONS[name] for name in path])
    # The runners-up live beside the winners.
    assert len(names(await searcher.user.kubectl("get", "sessions", "-o", "name"))) == 2 * len(path) + 1
    await searcher.is_rid_of(done.name)


async def test_a_tree_can_end_with_its_search(searcher: Searcher, tmp_path: Path) -> None:
    async with argo.controller(searcher.cluster, tmp_path, QUICK):
        done = await searcher.workflows.run("beam-search", {"depth": "1"}, on_exit="forget")
    assert done.status["phase"] == "Succeeded", done.status
    assert done.outputs["path"].split() == greedy(levels=1, enough=1.0)
    await searcher.user.wait("sessions,forks", "delete", "--all")
    await searcher.is_rid_of(done.name)


async def test_a_fork_that_fails_fails_the_workflow_and_says_why(searcher: Searcher, tmp_path: Path) -> None:
    shallow: dict[str, object] = {
        "image": "builtin:tiny",
        "machine": {"memory": "128Mi"},
        "treeLimits": {"depth": 0},
    }
    await searcher.user.apply("SessionTemplate", "shallow", shallow)
    async with argo.controller(searcher.cluster, tmp_path, QUICK):
        done = await searcher.workflows.run("fan-out", {"template": "shallow"})
    assert done.status["phase"] == "Failed"
    root, plans = done.steps()
    assert (root["phase"], plans["phase"]) == ("Succeeded", "Failed")
    (fork,) = done.forks.values()
    print(f"the step says: {plans['message']}")
    assert fork["status"]["reason"] == "DepthLimit"
    assert f"DepthLimit: {fork['status']['message']}" in plans["message"]
    await searcher.is_rid_of(done.name)


async def test_every_block_of_the_page_does_what_it_says(searcher: Searcher, tmp_path: Path) -> None:
    search, look, remove = BLOCKS
    kubectl = searcher.cluster.kubectl
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(kubectl.kubeconfig.read_text())
    path = f"{kubectl.program.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": path}

    async def typed(script: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *die_with_us(["bash", "-ec", script]),
            cwd=EXAMPLES,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
        return out.decode()

    await typed(f"kubectl config set-context --current --namespace={searcher.user.namespace}")
    async with argo.controller(searcher.cluster, tmp_path, QUICK):
        await typed(search)
    shown = await typed(look)
    print(shown)
    assert shown.startswith("Succeeded best=beam-6-")
    assert f"score=1 path={' '.join(greedy(levels=6, enough=1.0))}\n" in shown
    assert "fork.forktree.dev/beam-6 " in shown
    await typed(remove)
    await searcher.user.wait("sessions,forks,pods", "delete", "--all")
    left = await searcher.user.kubectl("get", "sessiontemplates,workflowtemplates,roles", "-o", "name")
    assert {"lake", "fan-out", "beam-search", "forktree-search"} & set(names(left)) == set()


def branches(file: str, template: str) -> dict[str, list[str]]:
    """The actions of each branch of the Fork that a template of an example makes."""
    templates = yaml.safe_load((EXAMPLES / file).read_text())["spec"]["templates"]
    (found,) = [each for each in templates if each["name"] == template]
    manifest: Any = yaml.safe_load(re.sub(r"{{.*?}}", "1", found["resource"]["manifest"]))
    argv = {each["name"]: each["exec"]["argv"] for each in manifest["spec"]["branches"]}
    assert all(words[:2] == ["gym-ask", "step"] for words in argv.values())
    return {name: words[2:] for name, words in argv.items()}


def score(actions: Sequence[str]) -> float:
    """What the environment of the machines makes of these actions, played here. Refused ones count least."""
    lake = Environment("FrozenLake-v1", gymnasium.make("FrozenLake-v1", is_slippery=False), 7)
    try:
        lake.answer(["step", *actions])
    except Refused:
        return float("-inf")
    return lake.score()


def greedy(*, levels: int, enough: float) -> list[str]:
    """The way that always goes on with the best of the three; of equals the first."""
    path: list[str] = []
    while len(path) < levels:
        scored: Mapping[str, float] = {
            name: score([ACTIONS[each] for each in [*path, name]]) for name in ACTIONS
        }
        path.append(max(scored, key=lambda name: scored[name]))
        if scored[path[-1]] >= enough:
            break
    return path


def names(listed: str) -> list[str]:
    return [line.partition("/")[2] for line in listed.split()]
