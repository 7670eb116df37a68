"""What the API server refuses by itself, and that it says what, where and what to do in one sentence."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from forktree.kube import errors
from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree.models import Fork, Session, SessionTemplate
from forktree.models.base import ApiObject
from forktree_dev.control_plane import ControlPlane

SECRET = {"secretKeyRef": {"name": "login", "key": "token"}}
ONE_VALUE = (
    "a variable must have exactly one of value and valueFrom: give value, if only an empty one, or name a"
    " Secret in valueFrom.secretKeyRef"
)
KINDS: dict[str, type[ApiObject]] = {"SessionTemplate": SessionTemplate, "Session": Session, "Fork": Fork}
TEMPLATE = {"image": "builtin:tiny"}
SESSION = {"templateRef": {"name": "t"}}
FORK = {"source": {"session": {"name": "s"}}}


def manifest(kind: str, spec: dict[str, Any], name: str = "one") -> dict[str, Any]:
    return {
        "apiVersion": "forktree.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }


async def create(client: KubeClient, namespace: str, body: dict[str, Any]) -> None:
    await client.raw("POST", KINDS[body["kind"]].collection_path(namespace), body)


def connected(plane: ControlPlane) -> AbstractAsyncContextManager[KubeClient]:
    return KubeClient.connected(ClusterAccess.from_kubeconfig(plane.kubectl.kubeconfig))


REFUSED = {
    "too many processors": (
        manifest("SessionTemplate", {**TEMPLATE, "machine": {"vcpus": 9}}),
        "spec.machine.vcpus: Invalid value: 9: spec.machine.vcpus in body should be less than or equal to 8",
    ),
    "too little memory": (
        manifest("SessionTemplate", {**TEMPLATE, "machine": {"memory": "64Mi", "overlay": "8Mi"}}),
        'spec.machine.memory: Invalid value: "64Mi": memory must be from 128Mi to 64Gi:'
        " write a number with a unit, like 256Mi or 2Gi",
    ),
    "memory in words": (
        manifest("SessionTemplate", {**TEMPLATE, "machine": {"memory": "lots"}}),
        'spec.machine.memory: Invalid value: "lots": memory must be from 128Mi to 64Gi:'
        " write a number with a unit, like 256Mi or 2Gi",
    ),
    "overlay above memory": (
        manifest("SessionTemplate", {**TEMPLATE, "machine": {"overlay": "1Gi"}}),
        "spec.machine: Invalid value: machine.overlay must be smaller than machine.memory,"
        " which it is part of: lower the one or raise the other",
    ),
    "image without its kind": (
        manifest("SessionTemplate", {"image": "example.org/python:3"}),
        'spec.image: Invalid value: "example.org/python:3": image must be builtin:NAME or'
        " oci:HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]: name an image that the nodes have, like"
        " builtin:python, or one of a registry, like oci:registry.example.com/team/app:1.2",
    ),
    "variable with two values": (
        manifest("Session", {**SESSION, "env": [{"name": "A", "value": "", "valueFrom": SECRET}]}),
        f"spec.env[0]: Invalid value: {ONE_VALUE}",
    ),
    "variable without a value": (
        manifest("SessionTemplate", {**TEMPLATE, "env": [{"name": "A"}]}),
        f"spec.env[0]: Invalid value: {ONE_VALUE}",
    ),
    "port whose name is a number": (
        manifest("SessionTemplate", {**TEMPLATE, "ports": [{"name": "80", "port": 80}]}),
        'spec.ports[0].name: Invalid value: "80": spec.ports[0].name in body should match'
        " '^[a-z]([-a-z0-9]*[a-z0-9])?$'",
    ),
    "probe of two kinds": (
        manifest(
            "SessionTemplate",
            {**TEMPLATE, "readinessProbe": {"exec": {"command": ["true"]}, "httpGet": {"port": 80}}},
        ),
        "spec.readinessProbe: Invalid value: readinessProbe must have at most one of exec and httpGet:"
        " remove one",
    ),
    "path that is two lines": (
        manifest(
            "SessionTemplate", {**TEMPLATE, "readinessProbe": {"httpGet": {"port": 80, "path": "/a\r\nX: y"}}}
        ),
        'spec.readinessProbe.httpGet.path: Invalid value: "/a\\r\\nX: y": path must begin with / and hold'
        " printable ASCII without spaces: percent-encode the rest",
    ),
    "dot in a name": (
        manifest("Session", SESSION, name="a.b"),
        "metadata.name: Invalid value: metadata.name must not contain dots, because it becomes a host name:"
        " use hyphens",
    ),
    "long session name": (
        manifest("Session", SESSION, name="s" * 64),
        "metadata.name: Invalid value: metadata.name must have at most 63 characters: choose a shorter name",
    ),
    "no origin": (
        manifest("Session", {}),
        "spec: Invalid value: spec must have exactly one of templateRef and forkRef:"
        " set templateRef to start a session",
    ),
    "two origins": (
        manifest("Session", {**SESSION, "forkRef": {"name": "f", "uid": "u", "index": 0}}),
        "spec: Invalid value: spec must have exactly one of templateRef and forkRef:"
        " set templateRef to start a session",
    ),
    "two sources": (
        manifest("Fork", {"source": {"session": {"name": "s"}, "fork": {"name": "f"}}}),
        "spec.source: Invalid value: spec.source must have exactly one of session and fork:"
        " name the Session to fork now, or the Fork whose instant to start from",
    ),
    "no source": (
        manifest("Fork", {"source": {}}),
        "spec.source: Invalid value: spec.source must have exactly one of session and fork:"
        " name the Session to fork now, or the Fork whose instant to start from",
    ),
    "257 replicas": (
        manifest("Fork", {**FORK, "replicas": 257}),
        "spec.replicas: Invalid value: 257: replicas must be from 0 to 256: for more children create further"
        " Forks with this one as spec.source.fork",
    ),
    "branches of another number": (
        manifest("Fork", {**FORK, "replicas": 3, "branches": [{"name": "a"}, {"name": "b"}]}),
        "spec: Invalid value: branches must be empty or have exactly one entry for each of the replicas:"
        " set replicas to their number, or leave branches out",
    ),
    "branches without replicas": (
        manifest("Fork", {**FORK, "branches": [{"name": "a"}, {"name": "b"}]}),
        "spec: Invalid value: branches must be empty or have exactly one entry for each of the replicas:"
        " set replicas to their number, or leave branches out",
    ),
    "branches of one name": (
        manifest("Fork", {**FORK, "replicas": 2, "branches": [{"name": "a"}, {"name": "a"}]}),
        "spec.branches: Invalid value: branches must have names of their own: rename those that are alike, or"
        " leave names out",
    ),
    "a label of ours": (
        manifest("Fork", {**FORK, "branches": [{"labels": {"forktree.dev/root": "x"}}]}),
        "spec.branches[0].labels: Invalid value: labels must have names like team or example.org/team, and"
        " none of forktree.dev: rename them",
    ),
    "a label that is none": (
        manifest("Fork", {**FORK, "branches": [{"labels": {"a b": "x"}}]}),
        "spec.branches[0].labels: Invalid value: labels must have names like team or example.org/team, and"
        " none of forktree.dev: rename them",
    ),
    "a seed that nobody has": (
        manifest("Fork", {**FORK, "seed": "7"}),
        "spec: Invalid value: seed is not used by seedMode Fresh: set seedMode to Common or Derived, or leave"
        " seed out",
    ),
    "a reward of no name": (
        manifest("Session", {**SESSION, "rewards": {"": 1}}),
        "spec.rewards: Invalid value: rewards must have names of 1 to 63 characters: rename them",
    ),
    "a reward of a long name": (
        manifest("Session", {**SESSION, "rewards": {"r" * 64: 1}}),
        "spec.rewards: Invalid value: rewards must have names of 1 to 63 characters: rename them",
    ),
    "long fork name": (
        manifest("Fork", FORK, name="f" * 53),
        "metadata.name: Invalid value: metadata.name must have at most 52 characters, as the children's names"
        " are longer by up to 10: choose a shorter name",
    ),
}


@pytest.mark.parametrize(("body", "sentence"), REFUSED.values(), ids=REFUSED)
async def test_wrong_object_is_refused_in_one_sentence(
    control_plane: ControlPlane, namespace: str, body: dict[str, Any], sentence: str
) -> None:
    async with connected(control_plane) as client:
        with pytest.raises(errors.Invalid) as caught:
            await create(client, namespace, body)
    assert caught.value.message.endswith(f'"{body["metadata"]["name"]}" is invalid: {sentence}')


CHANGED = {
    "template": (
        manifest("SessionTemplate", TEMPLATE),
        {"command": ["/bin/true"]},
        "spec: Invalid value: spec of a SessionTemplate cannot be changed: create another under a new name",
    ),
    "ports of a template": (
        manifest("SessionTemplate", TEMPLATE),
        {"ports": [{"name": "web", "port": 80}]},
        "spec: Invalid value: spec of a SessionTemplate cannot be changed: create another under a new name",
    ),
    "network of a template": (
        manifest("SessionTemplate", TEMPLATE),
        {"network": {"egress": "Open"}},
        "spec: Invalid value: spec of a SessionTemplate cannot be changed: create another under a new name",
    ),
    "replicas of a fork": (
        manifest("Fork", FORK),
        {"replicas": 3},
        "spec: Invalid value: spec of a Fork cannot be changed: create another Fork",
    ),
    "template of a session": (
        manifest("Session", SESSION),
        {"templateRef": {"name": "other"}},
        "spec: Invalid value: spec.templateRef cannot be changed: create another Session",
    ),
    "seed of a session": (
        manifest("Session", {**SESSION, "seed": "a"}),
        {"seed": "b"},
        "spec: Invalid value: spec.seed cannot be changed: its machine was told already, create another"
        " Session",
    ),
    "environment of a session": (
        manifest("Session", SESSION),
        {"env": [{"name": "A", "value": "1"}]},
        "spec: Invalid value: spec.env cannot be changed: its machine was told already, create another"
        " Session",
    ),
    "state of a released session": (
        manifest("Session", {**SESSION, "state": "Released"}),
        {"state": "Running"},
        "spec: Invalid value: spec.state Released is final, as the machine is gone: create another Session,"
        " or a Fork from an instant of this one",
    ),
}


@pytest.mark.parametrize(("body", "change", "sentence"), CHANGED.values(), ids=CHANGED)
async def test_change_of_what_is_fixed_is_refused_in_one_sentence(
    control_plane: ControlPlane, namespace: str, body: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    async with connected(control_plane) as client:
        await create(client, namespace, body)
        with pytest.raises(errors.Invalid) as caught:
            await client.merge_patch(KINDS[body["kind"]], namespace, "one", {"spec": change})
    assert caught.value.message.endswith(sentence)


async def test_defaults_are_filled_in(control_plane: ControlPlane, namespace: str) -> None:
    async with connected(control_plane) as client:
        await create(client, namespace, manifest("SessionTemplate", TEMPLATE))
        template = await client.get(SessionTemplate, namespace, "one")
    assert (template.spec.machine.memory, template.spec.machine.overlay) == ("256Mi", "64Mi")
    assert template.spec.tree_limits.depth == 64


async def test_a_fork_with_all_it_can_have_is_accepted_also_with_256_branches(
    control_plane: ControlPlane, namespace: str
) -> None:
    branch = {
        "seed": "s" * 256,
        "env": [{"name": "A", "value": "b"}],
        "exec": {"argv": ["act"], "timeoutSeconds": 5},
        "labels": {"example.org/team": "a.b", "plain": ""},
    }
    whole = {
        "replicas": 256,
        "branches": [{"name": f"b{index}", **branch} for index in range(256)],
        "seed": "7",
        "seedMode": "Derived",
        "score": {"exec": {"argv": ["score"]}},
        "prune": {"keepTop": 3},
        "keepPoint": "Always",
        "timeoutSeconds": 10,
    }
    async with connected(control_plane) as client:
        await create(client, namespace, manifest("Fork", {**FORK, **whole}))
        fork = await client.get(Fork, namespace, "one")
    assert fork.spec.branch(255).name == "b255"
    assert fork.spec.score is not None
    assert fork.spec.score.exec.timeout_seconds == 60
    assert fork.spec.to_json().items() >= {"seedMode": "Derived", "keepPoint": "Always"}.items()


async def test_kinds_are_in_one_category_and_explained(control_plane: ControlPlane, namespace: str) -> None:
    async with connected(control_plane) as client:
        await create(client, namespace, manifest("Fork", FORK))
    listed = await control_plane.kubectl.run("get", "forktree", "-n", namespace, "-o", "name")
    assert "fork.forktree.dev/one" in listed
    explained = await control_plane.kubectl.run("explain", "fork.status.pauseMs")
    assert "Milliseconds from source stopped until it ran again" in " ".join(explained.split())
