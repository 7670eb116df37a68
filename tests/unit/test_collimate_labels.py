"""What callers label sandboxes with comes back as it was, and nonsense that others wrote there does not."""

from __future__ import annotations

import pytest

from forktree.models import Fork, ForkSpec, ObjectMeta, Session, SessionSpec, Uid
from forktree.models.fork import ForkSource, SourceRef
from forktree.models.session import ForkRef, TemplateRef
from forktree_agent.http.collimate.labels import (
    CHILDREN_ANNOTATION,
    NONE,
    SANDBOX_ANNOTATION,
    Labels,
    found,
    of_children,
    of_sandbox,
)


def root(annotations: dict[str, str]) -> Session:
    return Session(
        metadata=ObjectMeta(name="a", annotations=annotations),
        spec=SessionSpec(template_ref=TemplateRef(name="t")),
    )


def fork(annotations: dict[str, str]) -> Fork:
    source = ForkSource(session=SourceRef(name="a"))
    metadata = ObjectMeta(name="f", uid=Uid("f-1"), annotations=annotations)
    return Fork(metadata=metadata, spec=ForkSpec(source=source))


def child(index: int, fork_uid: str = "f-1") -> Session:
    reference = ForkRef(name="f", uid=fork_uid, index=index)
    return Session(metadata=ObjectMeta(name="c"), spec=SessionSpec(fork_ref=reference))


@pytest.mark.parametrize("label", [None, "", "Grün & 'quoted'\n" * 50])
def test_any_text_comes_back(label: str | None) -> None:
    labels = {"a key / of anything": "…"}
    assert found(root(of_sandbox(label, labels)), None) == Labels(label, labels)
    assert found(root(of_sandbox(label, {})), None) == Labels(label)


def test_a_child_has_its_own() -> None:
    made = fork(of_children(["first", "second"]))
    assert [found(child(index), made).label for index in (0, 1, 2)] == ["first", "second", None]
    assert found(child(0, "f-2"), made) == NONE
    assert of_children(None) == of_children([]) == {}


@pytest.mark.parametrize("written", ["", "{", "[]", '{"label": 5}', '{"labels": ["a"]}', "null", "[1]"])
def test_nonsense_is_no_label(written: str) -> None:
    assert found(root({SANDBOX_ANNOTATION: written}), None) == NONE
    assert found(child(0), fork({CHILDREN_ANNOTATION: written})) == NONE
