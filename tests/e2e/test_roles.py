"""What viewers, searchers and admins may, with real accounts, in their own namespace and in another's.

Every route of the HTTP API, every verb of the API server; and what none of them may, whatever they forge.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import pytest
import pytest_asyncio

from e2e.accounts import may
from e2e.http_stage import SECONDS, Stage
from e2e.test_http_tokens import BODIES
from forktree.kube import errors
from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree.models import Fork, ObjectMeta, Session, SessionTemplate
from forktree.models.base import OwnerReference
from forktree.models.fork import ForkSource, ForkSpec, SourceRef
from forktree.models.names import BORN_ANNOTATION, BORN_ON_ANNOTATION, FORK_LABEL, ROOT_LABEL
from forktree.models.session import ForkRef, SessionSpec, TemplateRef
from forktree.models.session_template import EnvSource, EnvVar, SecretKeyRef, SessionTemplateSpec
from forktree_agent.http.collimate.gateway import GATEWAY
from forktree_agent.http.routes import ROUTES
from forktree_agent.http.table import Route
from forktree_dev import provisioning

VIEWER, SEARCHER, ADMIN = ROLES = ("forktree-viewer", "forktree-searcher", "forktree-admin")
"""Each with all of the one before."""

LEAST: Final[Mapping[str, str]] = {
    "GET /sessions": VIEWER,
    "GET /sessions/{session_id}": VIEWER,
    "GET /sessions/{session_id}/memory": VIEWER,
    "GET /sessions/{session_id}/tree": VIEWER,
    "GET /sessions/{session_id}/checkpoints": VIEWER,
    "GET /forks": VIEWER,
    "GET /forks/{fork_id}": VIEWER,
    "GET /forks/{fork_id}/children/{index}/log": VIEWER,
    "GET /templates": VIEWER,
    "GET /templates/{template_id}": VIEWER,
    "GET /node": VIEWER,
    "POST /sessions": SEARCHER,
    "DELETE /sessions/{session_id}": SEARCHER,
    "POST /sessions/{session_id}/exec": SEARCHER,
    "GET /sessions/{session_id}/execs": SEARCHER,
    "GET /sessions/{session_id}/execs/{exec_id}": SEARCHER,
    "DELETE /sessions/{session_id}/execs/{exec_id}": SEARCHER,
    "POST /sessions/{session_id}/execs/{exec_id}/stdin": SEARCHER,
    "GET /sessions/{session_id}/terminal": SEARCHER,
    "GET /sessions/{session_id}/files": SEARCHER,
    "PUT /sessions/{session_id}/files": SEARCHER,
    "DELETE /sessions/{session_id}/files": SEARCHER,
    "GET /sessions/{session_id}/files/list": SEARCHER,
    "GET /sessions/{session_id}/tar": SEARCHER,
    "PUT /sessions/{session_id}/tar": SEARCHER,
    "POST /sessions/{session_id}/fork": SEARCHER,
    "POST /forks/{fork_id}/fork": SEARCHER,
    "DELETE /forks/{fork_id}": SEARCHER,
    "POST /sessions/{session_id}/score": SEARCHER,
    "POST /sessions/{session_id}/pause": SEARCHER,
    "POST /sessions/{session_id}/resume": SEARCHER,
    "POST /sessions/{session_id}/release": SEARCHER,
    "POST /sessions/{session_id}/heartbeat": SEARCHER,
    "POST /sessions/{session_id}/checkpoints": SEARCHER,
    "DELETE /sessions/{session_id}/checkpoints/{checkpoint}": SEARCHER,
    "POST /sessions/{session_id}/rollback": SEARCHER,
    "POST /batch/score": SEARCHER,
    "POST /batch/prune": SEARCHER,
    "POST /batch/exec": SEARCHER,
    # What programs of another protocol ask for.
    "GET /images": VIEWER,
    "GET /sandboxes": VIEWER,
    "GET /sandboxes/{session_id}": VIEWER,
    "POST /sandboxes/{session_id}/connect-url": VIEWER,
    "GET /usage": VIEWER,
    "POST /sandboxes": SEARCHER,
    "DELETE /sandboxes/{session_id}": SEARCHER,
    "POST /sandboxes/{session_id}/exec": SEARCHER,
    "POST /sandboxes/{session_id}/fork": SEARCHER,
    "POST /sandboxes/{session_id}/suspend": SEARCHER,
    "POST /sandboxes/{session_id}/resume": SEARCHER,
    "POST /templates": ADMIN,
    "DELETE /templates/{template_id}": ADMIN,
    "POST /templates/{template_id}/expect": ADMIN,
    "POST /templates/{template_id}/release": ADMIN,
}
"""The least role that may ask for it."""

OBJECTS: Final[Mapping[str, Mapping[str, str]]] = {
    VIEWER: {
        "sessions": "get list watch",
        "forks": "get list watch",
        "sessiontemplates": "get list watch",
        "forknodes": "get list watch",
        "forks/log": "get",
    },
    SEARCHER: {
        "sessions": "create update patch delete deletecollection",
        "forks": "create update patch delete deletecollection",
        "sessions/exec": "create get",
        "sessions/files": "create get delete",
        "sessions/fork": "create",
        "sessions/proxy": "create get",
    },
    ADMIN: {"sessiontemplates": "create update patch delete deletecollection"},
}
"""What each may beyond those before it, in the words of the API server."""

VERBS: Final = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
RESOURCES: Final = (
    *("sessions", "forks", "sessiontemplates", "forknodes"),
    *("sessions/status", "forks/status", "sessiontemplates/status", "forknodes/status"),
    *("sessions/finalizers", "forks/finalizers"),
    *("sessions/exec", "sessions/files", "sessions/fork", "sessions/proxy", "forks/log"),
)


def key(route: Route) -> str:
    return f"{route.method} {route.path}"


EVERY: Final[Mapping[str, Route]] = {
    **{key(route): route for route in GATEWAY.routes},
    **{key(route): route for route in ROUTES},
}

LEAST_OF_PORTS: Final = SEARCHER
"""For what servers inside answer, whatever the method."""

OTHERS: Final[Mapping[str, object]] = {
    "POST /sandboxes": {"template": "none"},
    "POST /sandboxes/{session_id}/connect-url": {"port": 80},
    "POST /sandboxes/{session_id}/exec": {"command": "true"},
    "POST /sandboxes/{session_id}/fork": {"count": 1},
    "POST /templates": {"name": "mine", "image": "registry.example.org/x"},
    "POST /templates/{template_id}/expect": {"width": 1},
    "POST /sessions": {"template_id": "none"},
}
"""Bodies of routes that have none among those of the native API, or another one here."""

NAMES: Final = {
    "session_id": "nobody",
    "fork_id": "no-fork",
    "template_id": "none",
    "checkpoint": "good",
    "index": "0",
    "exec_id": "e",
    "port": "80",
    "path": "x",
}
"""Of what is not there: who may ask is told so, and nothing is changed for who comes next."""


@dataclass(frozen=True, kw_only=True)
class Person:
    """One account, as the API server and as an agent know it."""

    role: str
    kube: KubeClient
    token: str

    def may(self, least: str) -> bool:
        return ROLES.index(self.role) >= ROLES.index(least)


@dataclass(frozen=True, kw_only=True)
class People:
    stage: Stage
    of: Mapping[str, Person]
    other: str
    """A namespace that is none of theirs."""

    @property
    def namespace(self) -> str:
        return self.stage.namespace

    def path(self, plural: str, namespace: str | None = None) -> str:
        return f"/apis/forktree.dev/v1alpha1/namespaces/{namespace or self.namespace}/{plural}"

    async def ask(self, route: Route, token: str, namespace: str) -> tuple[int, dict[str, Any]]:
        body = OTHERS.get(key(route), BODIES.get(route.path)) if route.method == "POST" else None
        data = None if route.body is None else json.dumps(body or {}).encode()
        needs_path = route.query is not None and "path" in route.query.model_fields
        url = f"{self.stage.url}/ns/{namespace}/v1{route.path.format(**NAMES)}"
        headers = {"Authorization": f"Bearer {token}"}
        async with self.stage.client.request(
            route.method, url + ("?path=/tmp/x" if needs_path else ""), data=data, headers=headers
        ) as answer:
            if route.method == "HEAD":
                return answer.status, {"code": "forbidden"} if answer.status == HTTPStatus.FORBIDDEN else {}
            found: Any = await answer.json()
            return answer.status, {"listed": found} if isinstance(found, list) else found


def accounts_of(namespace: str, other: str) -> dict[str, object]:
    """One account of each role that is bound in `namespace`, and a second namespace."""
    group = "rbac.authorization.k8s.io"
    items: list[object] = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other}}]
    for role in ROLES:
        metadata = {"name": role, "namespace": namespace}
        items.append({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        items.append(
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": metadata,
                "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
                "subjects": [{"kind": "ServiceAccount", **metadata}],
            }
        )
    return {"apiVersion": "v1", "kind": "List", "items": items}


async def token_of(stage: Stage, account: str, *audiences: str) -> str:
    """A token of an account of the stage's namespace; without an audience: for the API server itself."""
    path = f"/api/v1/namespaces/{stage.namespace}/serviceaccounts/{account}/token"
    kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
    answer = await stage.admin.raw("POST", path, {**kind, "spec": {"audiences": audiences}})
    return str(json.loads(answer)["status"]["token"])


@pytest_asyncio.fixture
async def people(stage: Stage) -> AsyncIterator[People]:
    """One of each role, bound in the stage's namespace; beside it a namespace of others."""
    kubectl, other = stage.plane.kubectl, f"{stage.namespace}-next"
    await kubectl.apply(accounts_of(stage.namespace, other))
    reach = ClusterAccess.from_kubeconfig(kubectl.kubeconfig)
    found: dict[str, Person] = {}
    async with AsyncExitStack() as stack:
        for role in ROLES:
            own = functools.partial(str, await token_of(stage, role))
            access = ClusterAccess(reach.server_url, reach.tls, own)
            kube = await stack.enter_async_context(KubeClient.connected(access))
            found[role] = Person(role=role, kube=kube, token=await token_of(stage, role, "forktree.dev"))
        async with asyncio.timeout(
            SECONDS
        ):  # The authorizer sees a binding milliseconds after it was written.
            for person in found.values():
                while not await may(person.kube, stage.namespace, "list", "sessions"):
                    pass
        yield People(stage=stage, of=found, other=other)
    await stage.admin.raw("DELETE", f"/api/v1/namespaces/{other}")


def least(name: str) -> str:
    return LEAST_OF_PORTS if "/ports/" in name else LEAST[name]


def test_every_route_says_here_who_may_ask_for_it() -> None:
    assert set(LEAST) == {name for name in EVERY if "/ports/" not in name}


async def test_each_role_is_answered_what_it_may_ask_and_refused_the_rest(people: People) -> None:
    wrong: list[str] = []
    for person in people.of.values():
        for name, route in EVERY.items():
            status, body = await people.ask(route, person.token, people.namespace)
            codes = {each["code"] for each in body["results"]} if "results" in body else {body.get("code")}
            refused = "forbidden" in codes
            if refused == person.may(least(name)) or status == 401 or status >= 500:
                wrong.append(f"{person.role}: {name}: {status} {codes}")
    assert wrong == []


async def test_no_role_is_answered_anything_of_another_namespace(people: People) -> None:
    wrong: list[str] = []
    for person in people.of.values():
        for name, route in EVERY.items():
            _, body = await people.ask(route, person.token, people.other)
            codes = {each["code"] for each in body["results"]} if "results" in body else {body.get("code")}
            if codes != {"forbidden"}:
                wrong.append(f"{person.role}: {name}: {body}")
    assert wrong == []


def manifest(**spec: object) -> dict[str, object]:
    """A Fork as somebody writes it by hand."""
    return {
        "apiVersion": "forktree.dev/v1alpha1",
        "kind": "Fork",
        "metadata": {"name": "by-hand"},
        "spec": {"source": {"session": {"name": "root"}}, **spec},
    }


async def test_a_fork_with_commands_takes_the_right_to_run_them(people: People) -> None:
    """Of who has nothing else: forking alone is no way to a shell."""
    stage, kubectl = people.stage, people.stage.plane.kubectl
    resources = "sessions.forktree.dev/fork,forks.forktree.dev"
    account = f"--serviceaccount={stage.namespace}:forker"
    for words in (
        ("role", "forker", "--verb=create", f"--resource={resources}"),
        ("serviceaccount", "forker"),
        ("rolebinding", "forker", "--role=forker", account),
    ):
        await kubectl.run("create", *words, "-n", stage.namespace)
    token = await token_of(stage, "forker", "forktree.dev")
    async with asyncio.timeout(SECONDS):
        while (await stage.ask("POST", "/sessions/nobody/fork", {"replicas": 1}, token=token))[0] == 403:
            pass
    for path in ("/sessions/nobody/fork", "/forks/no-fork/fork"):
        plain, _ = await stage.ask("POST", path, {"replicas": 1}, token=token)
        assert plain == 404
        for told in (
            {"branches": [{"exec": {"command": "id"}}]},
            {"replicas": 1, "score": {"command": "echo 1"}},
        ):
            status, body = await stage.ask("POST", path, told, token=token)
            assert (status, body["code"]) == (403, "forbidden"), (path, told)
            assert "may not create sessions/exec of forktree.dev" in body["message"]
    reach = ClusterAccess.from_kubeconfig(kubectl.kubeconfig)
    own = functools.partial(str, await token_of(stage, "forker"))
    command: dict[str, object] = {"exec": {"argv": ["id"]}}
    async with KubeClient.connected(ClusterAccess(reach.server_url, reach.tls, own)) as forker:
        await forker.raw("POST", people.path("forks"), manifest(), query={"dryRun": "All"})
        for spec in ({"branches": [command]}, {"score": command}):
            with pytest.raises(
                errors.Forbidden, match="only by who may create sessions/exec in this namespace"
            ):
                await forker.raw("POST", people.path("forks"), manifest(**spec), query={"dryRun": "All"})
            searcher = people.of[SEARCHER].kube
            await searcher.raw("POST", people.path("forks"), manifest(**spec), query={"dryRun": "All"})


async def test_the_api_server_lets_each_role_do_what_it_says_and_nothing_more(people: People) -> None:
    for person in people.of.values():
        expected = {
            (verb, resource)
            for role in ROLES
            if person.may(role)
            for resource, verbs in OBJECTS[role].items()
            for verb in verbs.split()
        }
        for namespace, wanted in ((people.namespace, expected), (people.other, set[tuple[str, str]]())):
            found = {
                (verb, resource)
                for resource in RESOURCES
                for verb in VERBS
                if await may(person.kube, namespace, verb, resource)
            }
            assert found == wanted, (person.role, namespace)


async def test_the_clusters_own_roles_grow_by_them(people: People) -> None:
    """Who may edit a namespace may do what an admin of ours may; who may view it, what a viewer may."""

    async def of_ours(role: str) -> set[str]:
        rules = (await people.stage.plane.kubectl.json("get", "clusterrole", role))["rules"]
        return {
            f"{verb} {resource}"
            for rule in rules
            if rule.get("apiGroups") == ["forktree.dev"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    viewer, searcher, admin = [await of_ours(role) for role in ROLES]
    assert viewer < searcher < admin
    async with asyncio.timeout(SECONDS):  # A controller makes them grow.
        while await of_ours("view") != viewer or await of_ours("admin") != admin:
            pass
    assert await of_ours("edit") == admin


async def test_nodes_are_seen_with_kubectl_by_who_is_bound_for_the_whole_cluster(people: People) -> None:
    person, kubectl = people.of[VIEWER], people.stage.plane.kubectl
    nodes = "/apis/forktree.dev/v1alpha1/forknodes"
    with pytest.raises(errors.NoRight):
        await person.kube.raw("GET", nodes)
    account = f"--serviceaccount={people.namespace}:{VIEWER}"
    await kubectl.run(
        "create", "clusterrolebinding", people.namespace, "--clusterrole=forktree-node-viewer", account
    )
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                assert json.loads(await person.kube.raw("GET", nodes))["kind"] == "ForkNodeList"
                break
            except errors.NoRight:
                continue
    await kubectl.run("delete", "clusterrolebinding", people.namespace)


# What is forged ------------------------------------------------------------------------------------------


def fork(namespace: str, name: str = "mine", **metadata: object) -> Fork:
    told = {"name": name, "namespace": namespace} | metadata
    source = ForkSource(session=SourceRef(name="root"))
    return Fork(metadata=ObjectMeta.model_validate(told), spec=ForkSpec(source=source))


def root(namespace: str, name: str = "root", *, env: tuple[EnvVar, ...] = (), **metadata: object) -> Session:
    told = {"name": name, "namespace": namespace} | metadata
    spec = SessionSpec(template_ref=TemplateRef(name="basic"), env=env)
    return Session(metadata=ObjectMeta.model_validate(told), spec=spec)


def loose(above: Session | Fork) -> OwnerReference:
    """`above` as an owner that anybody may name: to block its deletion takes a right on its finalizers."""
    return above.owner_reference().model_copy(update={"block_owner_deletion": False})


@pytest.fixture(params=[SEARCHER, ADMIN])
def person(people: People, request: pytest.FixtureRequest) -> Person:
    return people.of[request.param]


async def test_a_searcher_makes_no_template_and_no_quota(people: People) -> None:
    searcher = people.of[SEARCHER].kube
    metadata = ObjectMeta(name="mine", namespace=people.namespace)
    template = SessionTemplate(metadata=metadata, spec=SessionTemplateSpec(image="builtin:tiny"))
    with pytest.raises(errors.NoRight, match='cannot create resource "sessiontemplates"'):
        await searcher.create(template)
    for person in people.of.values():
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "mine"}, "spec": {}}
        with pytest.raises(errors.NoRight, match='cannot create resource "resourcequotas"'):
            await person.kube.raw("POST", f"/api/v1/namespaces/{people.namespace}/resourcequotas", quota)
    await people.of[ADMIN].kube.create(template)


async def test_nobody_writes_a_status_or_says_where_anything_runs(people: People, person: Person) -> None:
    await person.kube.create(root(people.namespace))
    await person.kube.create(fork(people.namespace))
    runs = {"status": {"phase": "Running", "ready": True, "node": "n"}}
    for kind, name in ((Session, "root"), (Fork, "mine")):
        with pytest.raises(errors.NoRight, match="cannot patch resource"):
            await person.kube.merge_patch(kind, people.namespace, name, runs, subresource="status")
    # Beside the subresource: what stands in an object's status then is not kept.
    await person.kube.merge_patch(Session, people.namespace, "root", runs)
    assert (await people.stage.admin.get(Session, people.namespace, "root")).status.node is None
    with pytest.raises(errors.Forbidden, match=r"spec\.nodeName is set only by"):
        await person.kube.merge_patch(Session, people.namespace, "root", {"spec": {"nodeName": "n"}})


async def test_nobody_makes_a_child_or_a_fork_that_claims_to_be_born(people: People, person: Person) -> None:
    theirs = await person.kube.create(fork(people.namespace))
    reference = ForkRef(name="mine", uid=theirs.metadata.uid, index=0)
    owner = loose(theirs)
    metadata = ObjectMeta(name="child", namespace=people.namespace, owner_references=(owner,))
    with pytest.raises(errors.Forbidden, match=r"spec\.forkRef is set only by the agent"):
        await person.kube.create(Session(metadata=metadata, spec=SessionSpec(fork_ref=reference)))
    for told in ({BORN_ANNOTATION: "early-1"}, {BORN_ON_ANNOTATION: "n"}):
        with pytest.raises(errors.Forbidden, match="set only by the agent that makes a Fork"):
            await person.kube.create(fork(people.namespace, "born", annotations=told))
    owned = {"metadata": {"ownerReferences": [owner.to_json()]}}
    await person.kube.create(fork(people.namespace, "other"))
    with pytest.raises(errors.Forbidden, match="of a Fork or a child Session are its place in the tree"):
        await person.kube.merge_patch(Fork, people.namespace, "other", owned)


async def test_a_secret_is_named_by_nobody_who_may_not_read_it(people: People, person: Person) -> None:
    source = EnvSource(secret_key_ref=SecretKeyRef(name="login", key="token"))
    with pytest.raises(errors.Forbidden, match="only by who may get the Secrets"):
        await person.kube.create(root(people.namespace, env=(EnvVar(name="A", value_from=source),)))


async def test_labels_of_ours_make_nothing_part_of_a_tree_elsewhere(people: People, person: Person) -> None:
    """A root's uid is no secret. Whoever has seen it puts it on a session and a fork of their own."""
    stage, kubectl = people.stage, people.stage.plane.kubectl
    await kubectl.run("create", "serviceaccount", "owner", "-n", people.other)
    binding = (
        "create",
        "rolebinding",
        "owner",
        "--clusterrole=edit",
        f"--serviceaccount={people.other}:owner",
    )
    await kubectl.run(*binding, "-n", people.other)
    theirs = await stage.admin.create(root(people.other, "theirs"))
    labels = {ROOT_LABEL: theirs.metadata.uid, FORK_LABEL: "theirs-fork"}
    await person.kube.create(root(people.namespace, "mine", labels=labels))
    await person.kube.create(fork(people.namespace, labels=labels))
    owner = await provisioning.user_token(kubectl, "owner", namespace=people.other)
    async with asyncio.timeout(SECONDS):
        while True:
            status, tree = await people.ask(EVERY["GET /sessions"], owner, people.other)
            if status == 200:
                break
    url = f"{stage.url}/ns/{people.other}/v1/sessions/theirs/tree"
    async with stage.client.get(url, headers={"Authorization": f"Bearer {owner}"}) as answer:
        tree = await answer.json()
    assert [each["session_id"] for each in tree["sessions"]] == ["theirs"]
    assert tree["forks"] == []


async def test_an_owner_in_another_namespace_costs_only_who_names_it(people: People, person: Person) -> None:
    """The garbage collector takes such an owner for one that is gone."""
    stage = people.stage
    theirs = await stage.admin.create(root(people.other, "theirs"))
    owner = loose(theirs)
    await person.kube.create(root(people.namespace, "mine", owner_references=(owner,)))
    await person.kube.create(fork(people.namespace, "hung", owner_references=(owner,)))
    async with asyncio.timeout(SECONDS):
        while await stage.exists(Session, "mine") or await stage.exists(Fork, "hung"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert (await stage.admin.get(Session, people.other, "theirs")).metadata.uid == theirs.metadata.uid


async def test_a_source_has_no_namespace_that_could_be_named(people: People, person: Person) -> None:
    source = {"session": {"name": "theirs", "namespace": people.other}}
    body, path = manifest(source=source), people.path("forks")
    with pytest.raises(errors.KubeError, match=r'unknown field "spec\.source\.session\.namespace"'):
        await person.kube.raw("POST", path, body, query={"fieldValidation": "Strict"})
    made = json.loads(await person.kube.raw("POST", path, body))
    assert made["spec"]["source"] == {"session": {"name": "theirs"}}


async def test_nobody_gives_a_role_away_that_reaches_further(people: People, person: Person) -> None:
    with pytest.raises(errors.NoRight):
        body = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "more"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"},
            "subjects": [{"kind": "ServiceAccount", "name": person.role, "namespace": people.namespace}],
        }
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{people.namespace}/rolebindings"
        await person.kube.raw("POST", path, body)
