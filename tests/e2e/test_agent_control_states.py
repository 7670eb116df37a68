"""What users ask of sessions that are there: to pause, to go, to be judged; and what roots are told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from e2e.control_rig import ControlRig
from forktree.kube.errors import Invalid
from forktree.models import Fork, ForkPhase, ObjectMeta, Reason, Session, SessionPhase, SessionSpec
from forktree.models.session import TemplateRef
from forktree.models.session_template import (
    EnvSource,
    EnvVar,
    ExecAction,
    Hook,
    Hooks,
    SecretKeyRef,
    SessionTemplate,
    SessionTemplateSpec,
)
from forktree_agent.engine.contract import HookFailed
from forktree_dev import provisioning
from forktree_dev.control_plane import ControlPlane

VALUE = "value-that-is-nowhere-else"
FROM_SECRET = EnvVar(
    name="TOKEN", value_from=EnvSource(secret_key_ref=SecretKeyRef(name="login", key="token"))
)


@pytest.fixture
async def rig(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[ControlRig]:
    async with ControlRig.running(control_plane, namespace, tmp_path) as rig:
        yield rig


async def ask(rig: ControlRig, name: str, **spec: object) -> Session:
    """What a user does with `kubectl patch`."""
    return await rig.user.merge_patch(Session, rig.namespace, name, {"spec": spec})


async def is_in(rig: ControlRig, name: str, phase: SessionPhase) -> Session:
    return await rig.until(Session, name, lambda each: each.status.phase is phase)


async def root(rig: ControlRig, name: str, **spec: object) -> Session:
    """A root with more in its spec than a template."""
    fields = {"template_ref": TemplateRef(name="tiny"), "node_name": None, **spec}
    await rig.user.create(
        Session(
            metadata=ObjectMeta(name=name, namespace=rig.namespace),
            spec=SessionSpec(**fields),  # type: ignore[arg-type]
        )
    )
    body = {"spec": {"nodeName": rig.settings.node_name}}
    return await rig.operator.merge_patch(Session, rig.namespace, name, body)


async def with_secret(plane: ControlPlane, namespace: str, *, readable: bool = True) -> None:
    kubectl = plane.kubectl
    await kubectl.run(
        "create", "secret", "generic", "login", f"--from-literal=token={VALUE}", "-n", namespace
    )
    if readable:
        account = f"--serviceaccount={provisioning.SYSTEM_NAMESPACE}:{provisioning.AGENT_ACCOUNT}"
        role = "--clusterrole=forktree-agent-secrets"
        await kubectl.run("create", "rolebinding", "agent-secrets", role, account, "-n", namespace)


async def test_a_session_is_paused_forked_resumed_and_says_so(rig: ControlRig) -> None:
    running = await rig.running_session("root")
    await ask(rig, "root", state="Paused")
    paused = await is_in(rig, "root", SessionPhase.PAUSED)
    assert (paused.status.ready, paused.status.reason) == (False, Reason.PAUSED)
    assert paused.status.vm_generation_id == running.status.vm_generation_id
    assert [machine.paused for machine in rig.host.machines.values()] == [True]

    await rig.restart()
    (child,) = await rig.forked("split", session="root")
    assert child.status.phase is SessionPhase.RUNNING
    assert (await rig.get(Session, "root")).status.phase is SessionPhase.PAUSED

    await ask(rig, "root", state="Running")
    again = await rig.until(Session, "root", lambda each: each.status.ready)
    assert (again.status.phase, again.status.reason, again.status.message) == (
        SessionPhase.RUNNING,
        None,
        None,
    )
    assert not any(machine.paused for machine in rig.host.machines.values())


async def test_a_session_can_be_asked_to_be_paused_before_it_is_started(rig: ControlRig) -> None:
    await root(rig, "early", state="Paused")
    await is_in(rig, "early", SessionPhase.PAUSED)
    assert [machine.paused for machine in rig.host.machines.values()] == [True]


async def test_a_released_session_loses_its_machine_and_keeps_its_place_and_its_instants(
    rig: ControlRig,
) -> None:
    running = await rig.running_session("root")
    (child,) = await rig.forked("split", session="root")
    await ask(rig, "root", state="Released")
    released = await is_in(rig, "root", SessionPhase.RELEASED)
    await rig.machines(1)
    assert (released.status.ready, released.status.reason) == (False, None)
    assert released.status.root == running.metadata.uid
    assert released.status.started_at == running.status.started_at

    (more,) = await rig.forked("more", fork="split")
    assert more.status.depth == child.status.depth
    refused = await rig.fork("late", session="root")
    failed = await rig.until(Fork, refused.metadata.name, lambda each: each.status.phase is ForkPhase.FAILED)
    assert failed.status.reason is Reason.SOURCE_GONE
    with pytest.raises(Invalid, match="final"):
        await ask(rig, "root", state="Running")
    await ask(rig, child.metadata.name, state="Released")
    seen = await rig.until(Fork, "split", lambda each: each.status.children[0].phase is SessionPhase.RELEASED)
    assert seen.status.ready_replicas == 0
    await rig.restart()
    await rig.machines(1)
    assert (await rig.get(Session, "root")).status.phase is SessionPhase.RELEASED


async def test_an_agent_that_dies_between_the_end_of_a_machine_and_saying_so_still_says_released(
    rig: ControlRig,
) -> None:
    await rig.running_session("root")

    alive = False

    def die(step: str) -> None:
        if step == "released" and not alive:
            raise RuntimeError("the agent dies here")

    rig.engine.hook = die
    await ask(rig, "root", state="Released")
    await rig.machines(0)
    alive = True
    await rig.restart()
    assert (await is_in(rig, "root", SessionPhase.RELEASED)).status.reason is None


async def test_a_session_that_is_released_while_its_template_is_made_ready_is_never_started(
    rig: ControlRig,
) -> None:
    rig.engine.go_on.clear()
    await rig.session("hasty")
    await rig.until(Session, "hasty", lambda each: each.status.reason is Reason.BAKING)
    await ask(rig, "hasty", state="Released")
    rig.engine.go_on.set()
    await is_in(rig, "hasty", SessionPhase.RELEASED)
    assert rig.host.orders == []


async def test_a_users_score_shows_at_once_and_also_after_the_end(rig: ControlRig) -> None:
    await rig.running_session("root")
    await ask(rig, "root", score=0.5, rewards={"step-1": 1, "step-2": -0.25})
    scored = await rig.until(Session, "root", lambda each: each.status.score == 0.5)
    assert scored.spec.rewards == {"step-1": 1.0, "step-2": -0.25}
    assert scored.status.ready
    await ask(rig, "root", state="Released")
    released = await is_in(rig, "root", SessionPhase.RELEASED)
    assert released.status.score == 0.5
    await ask(rig, "root", score=2)
    await rig.until(Session, "root", lambda each: each.status.score == 2.0)
    await ask(rig, "root", score=None)
    await rig.until(Session, "root", lambda each: each.status.score is None)


async def test_a_root_is_told_its_seed_its_environment_and_its_secrets(
    rig: ControlRig, control_plane: ControlPlane
) -> None:
    await with_secret(control_plane, rig.namespace)
    env = (EnvVar(name="LEVEL", value="3"), FROM_SECRET, EnvVar(name="FORKTREE_DEPTH", value="a lie"))
    await root(rig, "told", seed="s-7", env=env)
    seen = await rig.until(Session, "told", lambda each: each.status.ready)
    (order,) = rig.host.orders
    told = {name: order.env[name] for name in ("LEVEL", "TOKEN", "FORKTREE_SEED", "FORKTREE_DEPTH")}
    assert told == {"LEVEL": "3", "TOKEN": VALUE, "FORKTREE_SEED": "s-7", "FORKTREE_DEPTH": "0"}
    assert seen.status.seed == "s-7"
    # Nowhere else: neither in the object, nor in what an agent keeps.
    assert VALUE not in seen.model_dump_json()
    kept = [path for path in rig.folder.rglob("*") if path.is_file()]
    assert any(path.parent.name == "session" for path in kept)
    assert [path for path in kept if VALUE in path.read_text(errors="replace")] == []


async def test_a_template_with_a_secret_is_baked_with_it(
    rig: ControlRig, control_plane: ControlPlane
) -> None:
    await with_secret(control_plane, rig.namespace)
    await rig.user.create(
        SessionTemplate(
            metadata=ObjectMeta(name="login", namespace=rig.namespace),
            spec=SessionTemplateSpec(image="builtin:login", env=(EnvVar(name="A", value="a"), FROM_SECRET)),
        )
    )
    await rig.running_session("one", template="login")
    (shape,) = rig.engine.shapes
    assert shape.env == (("A", "a"),)
    assert [(each.name, each.value) for each in shape.secret_env] == [("TOKEN", VALUE)]


@pytest.mark.parametrize(
    ("readable", "made", "sentence"),
    [
        (True, False, "there is no Secret login"),
        (False, True, "bind ClusterRole forktree-agent-secrets"),
    ],
)
async def test_a_secret_that_cannot_be_read_fails_the_session_and_says_what_to_do(
    rig: ControlRig, control_plane: ControlPlane, *, readable: bool, made: bool, sentence: str
) -> None:
    await with_secret(control_plane, rig.namespace, readable=readable)
    if not made:
        await control_plane.kubectl.run("delete", "secret", "login", "-n", rig.namespace)
    await root(rig, "told", env=(FROM_SECRET,))
    failed = await is_in(rig, "told", SessionPhase.FAILED)
    assert failed.status.reason is Reason.SECRET_UNREADABLE
    assert sentence in (failed.status.message or "")


async def test_the_hooks_of_a_template_are_run_in_its_whole_tree_also_when_it_is_deleted(
    rig: ControlRig,
) -> None:
    hook = Hook(exec=ExecAction(command=("sync-up",)), timeout_seconds=7)
    reseed = Hook(exec=ExecAction(command=("reseed", "now")))
    await rig.user.create(
        SessionTemplate(
            metadata=ObjectMeta(name="hooked", namespace=rig.namespace),
            spec=SessionTemplateSpec(image="builtin:hooked", hooks=Hooks(pre_fork=hook, post_fork=reseed)),
        )
    )
    await rig.running_session("root", template="hooked")
    await rig.user.delete(SessionTemplate, rig.namespace, "hooked")
    await rig.restart()
    (child,) = await rig.forked("split", session="root")
    await rig.forked("deeper", session=child.metadata.name)
    await rig.forked("again", fork="split")
    seen = [
        (None if each.pre is None else (each.pre.argv, each.pre.timeout_seconds),
         None if each.post is None else (each.post.argv, each.post.timeout_seconds))
        for each in rig.host.hooks
    ]  # fmt: skip
    assert seen == [((("sync-up",), 7.0), (("reseed", "now"), 10.0))] * 4


async def test_a_failed_hook_fails_the_fork_with_its_sentence(rig: ControlRig) -> None:
    await rig.running_session("root")
    rig.engine.fork_error = HookFailed("the preFork hook failed: exit code 3")
    await rig.fork("split", session="root")
    failed = await rig.until(Fork, "split", lambda each: each.status.phase is ForkPhase.FAILED)
    assert failed.status.reason is Reason.HOOK_FAILED
    assert failed.status.message == "the preFork hook failed: exit code 3"
    await rig.machines(1)
