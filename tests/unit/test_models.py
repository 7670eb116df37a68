"""The API's objects: what is read, what is written, what cannot be made."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from forktree import models
from forktree.errors import ForktreeError
from forktree.models import Fork, ForkNode, ForkPhase, ObjectMeta, Reason, Session, SessionTemplate, Uid
from forktree.models.base import ApiModel, ApiObject
from forktree.models.fork import ForkSource, ForkSpec, ForkStatus, SourceRef
from forktree.models.schema import Resource
from forktree.models.session import SessionSpec, SessionStatus, TemplateRef

META = {"name": "one", "namespace": "default", "uid": "u-1", "resourceVersion": "7"}


def as_answered(**parts: object) -> bytes:
    return json.dumps({"metadata": META, **parts}).encode()


def test_unknown_keys_are_ignored_so_that_an_older_reader_goes_on() -> None:
    read = Session.model_validate_json(
        as_answered(spec={"templateRef": {"name": "t"}, "later": 1}, status={"alsoLater": {}}, extra=[])
    )
    assert read.spec.template_ref == TemplateRef(name="t")


def test_object_without_status_is_pending() -> None:
    read = Fork.model_validate_json(as_answered(spec={"source": {"session": {"name": "s"}}}))
    assert (read.status.phase, read.status.ready, read.spec.replicas) == (ForkPhase.PENDING, False, 1)


def test_abbreviations_are_written_as_the_design_has_them() -> None:
    status = ForkStatus(parent_uid=Uid("p"), fork_point_id="x", baseline_id="b")
    assert {"parentUID", "forkPointID", "baselineId"} <= status.to_json().keys()
    assert {"templateUID", "vmGenerationID"} <= SessionStatus().to_merge_patch().keys()
    assert "bootID" in models.ForkNodeStatus(boot_id="b").to_json()


def test_merge_patch_clears_what_is_not_set_and_json_leaves_it_out() -> None:
    status = SessionStatus(reason=None, message="all is well")
    assert status.to_merge_patch()["reason"] is None
    assert "reason" not in status.to_json()
    assert status.to_merge_patch().keys() == {
        field.alias for field in SessionStatus.model_fields.values() if field.alias
    }


def test_manifest_has_what_creates_the_object_and_no_status() -> None:
    session = Session(
        metadata=ObjectMeta(name="s", namespace="n", labels={"a": "b"}),
        spec=SessionSpec(template_ref=TemplateRef(name="t")),
        status=SessionStatus(ready=True),
    )
    assert session.manifest() == {
        "apiVersion": "forktree.dev/v1alpha1",
        "kind": "Session",
        "metadata": {"name": "s", "namespace": "n", "labels": {"a": "b"}},
        "spec": {"templateRef": {"name": "t"}, "env": [], "state": "Running", "rewards": {}},
    }


def test_owner_reference_binds_by_uid_controls_and_blocks() -> None:
    fork = Fork.model_validate_json(as_answered(spec={"source": {"session": {"name": "s"}}}))
    assert fork.owner_reference().to_json() == {
        "apiVersion": "forktree.dev/v1alpha1",
        "kind": "Fork",
        "name": "one",
        "uid": "u-1",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    owned = ObjectMeta(name="c", owner_references=(fork.owner_reference(),))
    assert owned.controller == fork.owner_reference()


@pytest.mark.parametrize(
    "spec",
    [{}, {"templateRef": {"name": "t"}, "forkRef": {"name": "f", "uid": "u", "index": 0}}],
)
def test_session_has_exactly_one_origin(spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="exactly one of templateRef and forkRef"):
        SessionSpec.model_validate(spec)


def test_fork_has_exactly_one_source() -> None:
    with pytest.raises(ValidationError, match="exactly one source"):
        ForkSource()
    with pytest.raises(ValidationError, match="exactly one source"):
        ForkSource(session=SourceRef(name="s"), fork=SourceRef(name="f"))


@pytest.mark.parametrize("replicas", [-1, 257])
def test_replicas_are_bounded(replicas: int) -> None:
    with pytest.raises(ValidationError, match=r"256|greater than or equal to 0"):
        ForkSpec(source=ForkSource(session=SourceRef(name="s")), replicas=replicas)


def test_wrong_value_is_named_by_its_path_in_manifests() -> None:
    spec = {"image": "builtin:tiny", "readinessProbe": {"periodSeconds": 0}}
    with pytest.raises(ValidationError) as caught:
        SessionTemplate.model_validate_json(as_answered(spec=spec))
    assert caught.value.errors()[0]["loc"] == ("spec", "readinessProbe", "periodSeconds")


def test_objects_are_frozen() -> None:
    status = SessionStatus()
    with pytest.raises(ValidationError, match="frozen"):
        status.ready = True  # pyright: ignore[reportAttributeAccessIssue]


def test_deletion_and_orphaning_are_told_by_metadata() -> None:
    gone = ObjectMeta.model_validate(
        {**META, "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["orphan"]}
    )
    assert gone.deleting
    assert gone.orphaning
    assert not ObjectMeta(name="a").deleting


class Node(ApiObject):
    """One of Kubernetes' own kinds."""

    resource = Resource(kind="Node", plural="nodes", short_names=(), namespaced=False, columns=())
    api_version: str = "v1"


def test_cluster_scoped_and_namespaced_paths() -> None:
    assert ForkNode.object_path(None, "n1") == "/apis/forktree.dev/v1alpha1/forknodes/n1"
    assert Session.object_path("a", "s") == "/apis/forktree.dev/v1alpha1/namespaces/a/sessions/s"
    assert Node.collection_path(None) == "/api/v1/nodes"
    assert Session.collection_path(None) == "/apis/forktree.dev/v1alpha1/sessions"
    with pytest.raises(ValueError, match="lives in a namespace"):
        Session.object_path(None, "s")


def every_model(base: type[BaseModel] = ApiModel) -> list[type[BaseModel]]:
    below = (each for child in base.__subclasses__() for each in every_model(child))
    return [each for each in (base, *below) if each.__module__.startswith("forktree.models.")]


@pytest.mark.parametrize("model", every_model(), ids=lambda model: model.__name__)
def test_every_field_says_what_it_is(model: type[BaseModel]) -> None:
    """These texts are what `kubectl explain` shows."""
    if issubclass(model, (models.ObjectMeta, models.OwnerReference, models.ApiObject)):
        return  # Kubernetes' own fields.
    assert [name for name, field in model.model_fields.items() if not field.description] == []
    assert inspect.getdoc(model)


def test_errors_carry_a_reason_and_their_sentence() -> None:
    class Refused(ForktreeError):
        """For the test."""

        reason, retryable = Reason.AT_CAPACITY, True

    error = Refused("the node is full")
    assert (str(error), error.message, error.reason, error.retryable) == (
        "the node is full",
        "the node is full",
        "AtCapacity",
        True,
    )
