"""What the chart makes of its values, and which values it refuses. Needs helm and no cluster."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from forktree_dev import crds
from forktree_dev.checkout import CHECKOUT
from forktree_dev.real_node.helm import CHART, Helm, HelmFailed

MANIFESTS = CHART / "files" / "manifests"
ELSEWHERE = "machines"
"""Another namespace than the usual one."""


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    return Helm(tmp_path / "no-kubeconfig", tmp_path)


async def rendered(helm: Helm, **values: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """All objects by kind and name."""
    text = await helm.run(
        *("template", "forktree", str(CHART), f"--namespace={ELSEWHERE}", "--values=-"),
        stdin=json.dumps(values),
    )
    return by_name(text)


def by_name(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    objects = [each for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def container(workload: dict[str, Any]) -> dict[str, Any]:
    only: dict[str, Any]
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return only


async def test_rights_and_policies_are_those_of_development_in_the_releases_namespace(helm: Helm) -> None:
    made = await rendered(helm)
    for file in sorted(MANIFESTS.glob("*.yaml")):
        for key, wanted in by_name(file.read_text().replace("forktree-system", ELSEWHERE)).items():
            if key[0] == "Namespace":
                continue
            found = {**made[key], "metadata": {**made[key]["metadata"]}}
            labels = found["metadata"].pop("labels")
            assert labels.items() >= wanted["metadata"].pop("labels", {}).items()
            assert found == wanted, key
    assert "forktree-system" not in json.dumps([*made.values()])


async def test_definitions_are_the_generated_ones_and_are_kept(helm: Helm) -> None:
    made = await rendered(helm)
    for model in crds.KINDS:
        (key, wanted), *_ = by_name(crds.render(model)).items()
        assert made[key]["spec"] == wanted["spec"]
        assert made[key]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    without = await rendered(helm, crds={"install": False})
    assert not [key for key in without if key[0] == "CustomResourceDefinition"]


async def test_a_keeper_requests_what_its_agent_may_promise(helm: Helm) -> None:
    made = await rendered(helm, node={"memory": "48Gi"})
    keeper = container(made["DaemonSet", "forktree-keeper"])
    assert keeper["resources"]["requests"]["memory"] == "48Gi"
    assert "--memory-limit=48Gi" in container(made["DaemonSet", "forktree-agent"])["args"]


async def test_only_agents_and_keepers_are_privileged_and_keepers_have_no_token(helm: Helm) -> None:
    made = await rendered(helm)
    pods = [
        (key, each["spec"]["template"]["spec"] if key[0] != "Pod" else each["spec"])
        for key, each in made.items()
        if key[0] in {"DaemonSet", "Deployment", "Job", "Pod"}
    ]
    privileged = {
        key[1]
        for key, spec in pods
        for each in spec["containers"]
        if each["securityContext"].get("privileged")
    }
    assert privileged == {"forktree-agent", "forktree-keeper"}
    for key, spec in pods:
        for each in spec["containers"]:
            assert each["securityContext"]["readOnlyRootFilesystem"] is True, key
            assert "requests" in each.get("resources", {}) or key[1] == "forktree-clear", key
    keeper = made["DaemonSet", "forktree-keeper"]["spec"]
    assert keeper["template"]["spec"]["automountServiceAccountToken"] is False
    assert keeper["updateStrategy"] == {"type": "OnDelete"}
    assert container(made["Deployment", "forktree-operator"])["securityContext"]["runAsNonRoot"] is True


async def test_an_agent_can_be_reached_at_its_node_or_at_its_pod(helm: Helm) -> None:
    for host_port, field in ((True, "status.hostIP"), (False, "status.podIP")):
        made = await rendered(helm, agent={"hostPort": host_port})
        agent = container(made["DaemonSet", "forktree-agent"])
        address = next(each for each in agent["env"] if each["name"] == "ADDRESS")
        assert address["valueFrom"]["fieldRef"]["fieldPath"] == field
        assert ("hostPort" in agent["ports"][0]) is host_port


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"node": {"memory": "a lot"}}, "memory"),
        ({"node": {"cgroup": "../kubepods"}}, "cgroup"),
        ({"node": {"stateDirectory": "run"}}, "stateDirectory"),
        ({"agent": {"port": 70000}}, "port"),
        ({"operator": {"replicas": 0}}, "replicas"),
        ({"images": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"agnet": {}}, "agnet"),
    ],
)
async def test_a_wrong_value_is_refused_by_its_name(helm: Helm, values: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmFailed, match=named):
        await rendered(helm, **values)


def test_the_chart_has_the_projects_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert (chart["version"], chart["appVersion"]) == (project["version"], project["version"])
