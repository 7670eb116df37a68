"""Who may write what: what roles and admission policies let through, and what they refuse in which words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from e2e.accounts import NODES, Accounts, may
from forktree.kube import errors
from forktree.kube.client import KubeClient
from forktree.kube.watching import Changed, Deleted, Listed, watch
from forktree.models import Fork, ForkNode, ObjectMeta, Session, SessionTemplate, Uid
from forktree.models.base import OwnerReference
from forktree.models.fork import Branch, BranchExec, ForkSource, ForkSpec, SourceRef
from forktree.models.names import BORN_ANNOTATION, BORN_ON_ANNOTATION, HEARTBEAT_LABEL
from forktree.models.session import ForkRef, SessionSpec, TemplateRef
from forktree.models.session_template import EnvSource, EnvVar, SecretKeyRef, SessionTemplateSpec
from forktree_dev.control_plane import ControlPlane

MERGE_PATCH = "application/merge-patch+json"
HERE, THERE = NODES
PLACED_BY = r"spec\.nodeName is set only by the forktree operator, or by the agent of that node"
FORKED_BY = r"spec\.forkRef is set only by the agent of the node that forks: to fork a session, create a Fork"
STATUS_BY = r"the status of a Session or Fork is written only by the agent of its node"
TREE_BY = r"ownerReferences of a Fork or a child Session .* changed only by the agent of its node"


pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def everybody(
    control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Accounts]:
    async with Accounts.connected(control_plane, tmp_path_factory.mktemp("accounts")) as connected:
        yield connected


@pytest_asyncio.fixture(loop_scope="session")
async def accounts(everybody: Accounts, namespace: str) -> Accounts:
    return await everybody.at_home_in(namespace)


def root(accounts: Accounts, node: str | None = None) -> Session:
    return Session(
        metadata=ObjectMeta(name="root", namespace=accounts.namespace),
        spec=SessionSpec(template_ref=TemplateRef(name="t"), node_name=node),
    )


def loosely(owner: OwnerReference) -> OwnerReference:
    """Whom nobody has to wait for: only who may set an owner's finalizers may block its deletion."""
    return owner.model_copy(update={"block_owner_deletion": False})


def child(fork: Fork, node: str | None = HERE, *, owner: OwnerReference | None = None) -> Session:
    owners = (owner or fork.owner_reference(),)
    return Session(
        metadata=ObjectMeta(name="child", namespace=fork.metadata.namespace, owner_references=owners),
        spec=SessionSpec(
            fork_ref=ForkRef(name=fork.metadata.name, uid=fork.metadata.uid, index=0), node_name=node
        ),
    )


async def forked(accounts: Accounts) -> tuple[Session, Fork]:
    """A placed root and a routed Fork of it, made by those who make them."""
    made = await accounts.user.create(root(accounts))
    await place(accounts.operator, made, HERE)
    await accounts.user.create(
        Fork(
            metadata=ObjectMeta(name="fork", namespace=accounts.namespace),
            spec=ForkSpec(source=ForkSource(session=SourceRef(name="root"))),
        )
    )
    routed = {"status": {"node": HERE}}
    return made, await accounts.operator.merge_patch(
        Fork, accounts.namespace, "fork", routed, subresource="status"
    )


async def place(client: KubeClient, session: Session, node: str) -> Session:
    patch = {"spec": {"nodeName": node}}
    return await client.merge_patch(Session, session.metadata.namespace, session.metadata.name, patch)


async def adopt(client: KubeClient, fork: Fork, owner: OwnerReference) -> Fork:
    patch = {"metadata": {"ownerReferences": [owner.to_json()]}}
    return await client.merge_patch(Fork, fork.metadata.namespace, fork.metadata.name, patch)


async def test_user_makes_a_root_and_the_operator_places_it_once(accounts: Accounts) -> None:
    made = await accounts.user.create(root(accounts))
    with pytest.raises(errors.Forbidden, match=PLACED_BY):
        await place(accounts.user, made, HERE)
    assert (await place(accounts.operator, made, HERE)).spec.node_name == HERE
    with pytest.raises(errors.Invalid, match=r"spec\.nodeName cannot be changed once set"):
        await place(accounts.operator, made, THERE)


async def test_user_cannot_choose_the_node_of_a_root(accounts: Accounts) -> None:
    with pytest.raises(errors.Forbidden, match=PLACED_BY):
        await accounts.user.create(root(accounts, HERE))


async def test_agent_places_a_root_on_its_own_node_only(accounts: Accounts) -> None:
    with pytest.raises(errors.Forbidden, match=PLACED_BY):
        await accounts.agent.create(root(accounts, THERE))
    with pytest.raises(errors.Forbidden, match=PLACED_BY):
        await accounts.nameless_agent.create(root(accounts, HERE))
    await accounts.agent.create(root(accounts, HERE))


async def test_only_the_agent_of_the_node_makes_children(accounts: Accounts) -> None:
    _, fork = await forked(accounts)
    for client in (
        accounts.user,
        accounts.admin,
        accounts.other_agent,
        accounts.nameless_agent,
    ):
        with pytest.raises(errors.Forbidden, match=FORKED_BY):
            await client.create(child(fork, owner=loosely(fork.owner_reference())))
    with pytest.raises(errors.Forbidden, match=FORKED_BY):
        await accounts.agent.create(child(fork, node=None))
    await accounts.agent.create(child(fork))


async def test_operator_makes_nothing(accounts: Accounts) -> None:
    with pytest.raises(errors.Forbidden, match="cannot create resource"):
        await accounts.operator.create(root(accounts))


async def test_only_the_agent_of_the_node_hangs_a_fork_into_its_tree(accounts: Accounts) -> None:
    above, fork = await forked(accounts)
    for client in (accounts.user, accounts.admin, accounts.other_agent, accounts.nameless_agent):
        with pytest.raises(errors.Forbidden, match=TREE_BY):
            await adopt(client, fork, loosely(above.owner_reference()))
    adopted = await adopt(accounts.agent, fork, above.owner_reference())
    assert adopted.metadata.controller == above.owner_reference()


async def test_user_may_change_the_rest_of_a_child_but_not_its_place(accounts: Accounts) -> None:
    _, fork = await forked(accounts)
    await accounts.agent.create(child(fork))
    labelled = {"metadata": {"labels": {"mine": "yes"}}}
    await accounts.user.merge_patch(Session, accounts.namespace, "child", labelled)
    with pytest.raises(errors.Forbidden, match=TREE_BY):
        loose = {"metadata": {"ownerReferences": None}}
        await accounts.user.merge_patch(Session, accounts.namespace, "child", loose)


async def test_user_cannot_write_status(accounts: Accounts) -> None:
    await accounts.user.create(root(accounts))
    with pytest.raises(errors.Forbidden, match="cannot patch resource"):
        running = {"status": {"phase": "Running"}}
        await accounts.user.merge_patch(Session, accounts.namespace, "root", running, subresource="status")


async def test_only_the_agent_of_the_node_says_what_runs_there(accounts: Accounts) -> None:
    _, fork = await forked(accounts)
    await accounts.agent.create(child(fork))
    said = {"status": {"message": "runs"}}
    for kind, name in ((Session, "root"), (Session, "child"), (Fork, "fork")):
        for client in (accounts.other_agent, accounts.nameless_agent):
            with pytest.raises(errors.Forbidden, match=STATUS_BY):
                await client.merge_patch(kind, accounts.namespace, name, said, subresource="status")
        await accounts.agent.merge_patch(kind, accounts.namespace, name, said, subresource="status")


async def test_no_agent_says_where_a_fork_is(accounts: Accounts) -> None:
    """Who could would be sent the tokens of those who ask for its branches' logs."""
    await forked(accounts)
    for client, node in ((accounts.other_agent, THERE), (accounts.agent, THERE), (accounts.agent, None)):
        with pytest.raises(errors.Forbidden, match=STATUS_BY):
            taken = {"status": {"node": node}}
            await client.merge_patch(Fork, accounts.namespace, "fork", taken, subresource="status")
    await accounts.user.create(
        Fork(
            metadata=ObjectMeta(name="unrouted", namespace=accounts.namespace),
            spec=ForkSpec(source=ForkSource(session=SourceRef(name="root"))),
        )
    )
    with pytest.raises(errors.Forbidden, match=STATUS_BY):
        routed = {"status": {"node": HERE}}
        await accounts.agent.merge_patch(Fork, accounts.namespace, "unrouted", routed, subresource="status")


def born(accounts: Accounts, name: str = "born", node: str = HERE) -> Fork:
    """A Fork as the agent writes it whose machines were there first."""
    annotations = {BORN_ANNOTATION: "early-1", BORN_ON_ANNOTATION: node}
    return Fork(
        metadata=ObjectMeta(name=name, namespace=accounts.namespace, annotations=annotations),
        spec=ForkSpec(source=ForkSource(session=SourceRef(name="root"))),
    )


async def test_only_an_agent_says_that_a_fork_was_made_on_its_node_before_its_object(
    accounts: Accounts,
) -> None:
    for client in (accounts.user, accounts.admin, accounts.other_agent, accounts.nameless_agent):
        with pytest.raises(errors.Forbidden, match="set only by the agent that makes a Fork for machines"):
            await client.create(born(accounts))
    made = await accounts.agent.create(born(accounts))
    for client, where in (
        (accounts.agent, THERE),
        (accounts.other_agent, THERE),
        (accounts.other_agent, HERE),
        (accounts.nameless_agent, HERE),
    ):
        node = {"status": {"node": where}}
        with pytest.raises(errors.Forbidden, match=r"status\.node of a Fork only"):
            await client.merge_patch(Fork, accounts.namespace, "born", node, subresource="status")
    for told in ({BORN_ON_ANNOTATION: THERE}, {BORN_ANNOTATION: None}, {BORN_ANNOTATION: "early-2"}):
        for client in (accounts.user, accounts.agent, accounts.admin):
            with pytest.raises(errors.Forbidden, match="never changed"):
                await client.merge_patch(
                    Fork, accounts.namespace, "born", {"metadata": {"annotations": told}}
                )
    other = {"metadata": {"annotations": {"example.org/mine": "yes"}}}
    await accounts.user.merge_patch(Fork, accounts.namespace, "born", other)
    here = {"status": {"node": HERE}}
    routed = await accounts.agent.merge_patch(Fork, accounts.namespace, "born", here, subresource="status")
    assert (routed.metadata.uid, routed.status.node) == (made.metadata.uid, HERE)


async def test_orphaning_a_fork_leaves_its_child_as_a_root(accounts: Accounts) -> None:
    """The garbage collector removes the reference; without its exemption the deletion would hang."""
    _, fork = await forked(accounts)
    await accounts.agent.create(child(fork))
    # The collector learns of objects in their order: once it has removed this one, it knows the child too.
    absent = loosely(fork.owner_reference()).model_copy(update={"uid": Uid("none"), "controller": False})
    stray = root(accounts)
    metadata = stray.metadata.model_copy(update={"name": "stray", "owner_references": (absent,)})
    await accounts.user.create(stray.model_copy(update={"metadata": metadata}))
    async with asyncio.timeout(20):
        await until_gone(accounts.admin, Session, accounts.namespace, "stray")
        await accounts.user.delete(Fork, accounts.namespace, "fork", propagation="Orphan")
        await until_gone(accounts.admin, Fork, accounts.namespace, "fork")
    left = await accounts.admin.get(Session, accounts.namespace, "child")
    assert left.metadata.owner_references == ()


async def test_deleting_a_root_collects_the_tree(accounts: Accounts) -> None:
    above, fork = await forked(accounts)
    await adopt(accounts.agent, fork, above.owner_reference())
    await accounts.agent.create(child(fork))
    async with asyncio.timeout(20):
        await accounts.user.delete(Session, accounts.namespace, "root")
        await until_gone(accounts.admin, Session, accounts.namespace, "child")


async def until_gone(
    client: KubeClient, model: type[Fork] | type[Session], namespace: str, name: str
) -> None:
    async for event in watch(client, model, namespace=namespace, field_selector=f"metadata.name={name}"):
        match event:
            case Listed(objects=()) | Deleted():
                return
            case _:
                pass


async def test_placing_a_session_moves_it_between_the_views_of_operator_and_agent(accounts: Accounts) -> None:
    made = await accounts.user.create(root(accounts))

    async def first_after_list(
        client: KubeClient, selector: str, listed: asyncio.Event
    ) -> Changed[Session] | Deleted[Session]:
        events = watch(client, Session, namespace=accounts.namespace, field_selector=selector)
        async for event in events:
            if isinstance(event, Listed):
                listed.set()
            else:
                return event
        raise AssertionError("a watch never ends by itself")

    ready = (asyncio.Event(), asyncio.Event())
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        unplaced = tasks.create_task(first_after_list(accounts.operator, "spec.nodeName=", ready[0]))
        placed = tasks.create_task(first_after_list(accounts.agent, f"spec.nodeName={HERE}", ready[1]))
        for each in ready:
            await each.wait()
        await place(accounts.operator, made, HERE)
    left, came = unplaced.result(), placed.result()
    assert isinstance(left, Deleted)
    assert isinstance(came, Changed)
    assert came.obj.spec.node_name == HERE


async def test_each_agent_writes_its_own_entry_of_a_template_and_nobody_anothers(accounts: Accounts) -> None:
    template = SessionTemplate(
        metadata=ObjectMeta(name="t", namespace=accounts.namespace),
        spec=SessionTemplateSpec(image="builtin:tiny"),
    )
    await accounts.user.create(template)

    async def write(client: KubeClient, node: str, phase: str) -> None:
        status = {"status": {"nodes": [{"node": node, "phase": phase}]}}
        await client.apply(
            SessionTemplate,
            accounts.namespace,
            "t",
            status,
            manager=f"agent-{node}",
            subresource="status",
            force=True,
        )

    await write(accounts.agent, HERE, "Baking")
    await write(accounts.other_agent, THERE, "Failed")
    await write(accounts.agent, HERE, "Ready")
    refused = "only that node's agent may write it"
    with pytest.raises(errors.Forbidden, match=refused):
        await write(accounts.other_agent, HERE, "Failed")
    for client in (accounts.agent, accounts.admin):
        with pytest.raises(errors.Forbidden, match=refused):
            wiped = {"status": {"nodes": [{"node": HERE, "phase": "Ready"}]}}
            await client.merge_patch(SessionTemplate, accounts.namespace, "t", wiped, subresource="status")
    kept = (await accounts.admin.get(SessionTemplate, accounts.namespace, "t")).status
    assert {entry.node: entry.phase.value for entry in kept.nodes} == {HERE: "Ready", THERE: "Failed"}


async def test_agent_describes_its_own_node_only(accounts: Accounts) -> None:
    await accounts.agent.apply(ForkNode, None, HERE, {}, manager="agent")
    ready = {"status": {"ready": True}}
    await accounts.agent.apply(ForkNode, None, HERE, ready, manager="agent", subresource="status")
    with pytest.raises(errors.Forbidden, match="only by the agent of the node that it is named after"):
        await accounts.agent.apply(ForkNode, None, THERE, {}, manager="agent")
    await accounts.admin.delete(ForkNode, None, HERE)


async def test_deletion_with_another_uid_is_a_conflict(accounts: Accounts) -> None:
    await accounts.user.create(root(accounts))
    with pytest.raises(errors.Conflict):
        await accounts.user.delete(Session, accounts.namespace, "root", uid=Uid("another"))


async def test_editors_may_exec_fork_and_use_files_and_others_may_not(accounts: Accounts) -> None:
    for verb in ("get", "delete"):
        assert await may(accounts.user, accounts.namespace, verb, "sessions/files")
    for verb in ("get", "create"):
        assert await may(accounts.user, accounts.namespace, verb, "sessions/proxy")
    for resource in ("sessions/exec", "sessions/files", "sessions/fork", "sessions/proxy"):
        assert await may(accounts.user, accounts.namespace, "create", resource)
        assert not await may(accounts.user, "kube-system", "create", resource)
        assert not await may(accounts.operator, accounts.namespace, "create", resource)


def with_secret(
    name: str, accounts: Accounts, *, named: bool
) -> tuple[Session | SessionTemplate | Fork, ...]:
    """One object of each kind that can tell a machine its environment."""
    source = EnvSource(secret_key_ref=SecretKeyRef(name="login", key="token"))
    env = (EnvVar(name="A", value_from=source) if named else EnvVar(name="A", value="a"),)
    metadata = ObjectMeta(name=name, namespace=accounts.namespace)
    of = ForkSource(session=SourceRef(name="s"))
    return (
        Session(metadata=metadata, spec=SessionSpec(template_ref=TemplateRef(name="t"), env=env)),
        Fork(metadata=metadata, spec=ForkSpec(source=of, replicas=1, branches=(Branch(env=env),))),
        SessionTemplate(metadata=metadata, spec=SessionTemplateSpec(image="builtin:tiny", env=env)),
    )


async def test_a_fork_is_told_no_more_than_leaves_room_for_its_status(accounts: Accounts) -> None:
    def told(words: int) -> Fork:
        branch = Branch(exec=BranchExec(argv=("x" * 16,) * words), labels={"team": "a"}, seed="12345678")
        return Fork(
            metadata=ObjectMeta(name=f"told-{words}", namespace=accounts.namespace),
            spec=ForkSpec(
                source=ForkSource(session=SourceRef(name="root")), replicas=256, branches=(branch,) * 256
            ),
        )

    await accounts.user.create(told(31))
    with pytest.raises(errors.Invalid, match="may have 131072 characters together"):
        await accounts.user.create(told(32))


async def test_a_secret_is_named_only_by_who_may_read_it(accounts: Accounts) -> None:
    for each in with_secret("named", accounts, named=True):
        await accounts.user.create(each)  # Whoever may edit a namespace may read its Secrets.
    session, fork, _ = with_secret("plain", accounts, named=False)
    for each in (session, fork):
        await accounts.agent.create(each)
    session, fork, _ = with_secret("other", accounts, named=True)
    for each in (session, fork):  # It may create both everywhere, and read Secrets nowhere.
        with pytest.raises(errors.Forbidden, match="may be used only by who may get the Secrets"):
            await accounts.agent.create(each)
    pulls = SessionTemplate(
        metadata=ObjectMeta(name="pulls", namespace=accounts.namespace),
        spec=SessionTemplateSpec(image="oci:registry.example.com/app", image_pull_secret="login"),
    )
    with pytest.raises(errors.Forbidden, match="imagePullSecret may be used only by who may get the Secrets"):
        await accounts.agent.create(pulls)
    await accounts.user.create(pulls)


async def test_agents_write_no_leases_but_heartbeats(accounts: Accounts) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{accounts.namespace}/leases"
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    beat = {"labels": {HEARTBEAT_LABEL: "true"}}
    await accounts.user.raw("POST", path, {**lease, "metadata": {"name": "leader"}})
    renewed = {"spec": {"holderIdentity": "me"}}
    with pytest.raises(errors.Forbidden, match="an agent writes only Leases that have the label"):
        await accounts.agent.raw("POST", path, {**lease, "metadata": {"name": "another"}})
    for patch in (renewed, {**renewed, "metadata": beat}):
        with pytest.raises(errors.Forbidden, match="an agent writes only Leases that have the label"):
            await accounts.agent.raw("PATCH", f"{path}/leader", patch, content_type=MERGE_PATCH)
    await accounts.agent.raw("POST", path, {**lease, "metadata": {"name": "beat", **beat}})
    await accounts.agent.raw("PATCH", f"{path}/beat", renewed, content_type=MERGE_PATCH)
    with pytest.raises(errors.Forbidden, match="an agent writes only Leases that have the label"):
        taken = {"metadata": {"labels": {HEARTBEAT_LABEL: None}}}
        await accounts.agent.raw("PATCH", f"{path}/beat", taken, content_type=MERGE_PATCH)
