"""Names that tell which node made a fork."""

from __future__ import annotations

from forktree.models import Uid
from forktree.models.names import FORK_NAME_MAX, child_name
from forktree.models.texts import is_dns_label
from forktree_agent.control.owners import early_uid
from forktree_agent.http.naming import any_name, tag_in, tag_of


def test_a_child_of_a_fork_without_a_name_tells_its_node() -> None:
    name = any_name("node-1")
    assert is_dns_label(name, FORK_NAME_MAX)
    assert name != any_name("node-1")
    assert tag_in(child_name(name, 255, early_uid())) == tag_of("node-1") != tag_of("node-2")


def test_other_names_tell_nothing() -> None:
    for name in ("root", "f-1", any_name("node-1"), child_name("mine", 0, Uid("0f9aaf44"))):
        assert tag_in(name) is None
