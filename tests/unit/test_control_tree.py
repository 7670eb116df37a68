"""The table that says what goes with a deleted object."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forktree.models import Fork, OwnerReference, Session, Uid
from forktree_agent.control.tree import Place, Tree, owner_place
from unit.control_facts import child, fork, root


def at(name: str) -> Place:
    kind = Fork if name.startswith("f") else Session
    return Place(kind=kind, namespace="ns", name=name, uid=Uid(name))


def family() -> Tree:
    """root ← f1 ← (a, b); a ← f2 ← c."""
    tree = Tree()
    tree.place(at("root"), None, now=0)
    for name, above in (("f1", "root"), ("a", "f1"), ("b", "f1"), ("f2", "a"), ("c", "f2")):
        tree.place(at(name), at(above), now=0)
    return tree


def ended(tree: Tree, name: str, *, orphaning: bool = False) -> set[str]:
    return {node.place.name for node in tree.end(Uid(name), orphaning=orphaning, now=1)}


def test_what_is_below_goes_along_and_what_is_above_stays() -> None:
    tree = family()
    assert ended(tree, "a") == {"a", "f2", "c"}
    assert not tree.doomed(Uid("root"))
    assert not tree.doomed(Uid("b"))
    assert tree.doomed(Uid("c"))


def test_an_event_that_comes_twice_changes_nothing() -> None:
    tree = family()
    assert ended(tree, "root") == {"root", "f1", "a", "b", "f2", "c"}
    assert ended(tree, "root") == set()
    assert ended(tree, "a") == set()


def test_dependents_of_an_orphaning_deletion_live_on() -> None:
    tree = family()
    assert ended(tree, "f1", orphaning=True) == {"f1"}
    assert not tree.doomed(Uid("a"))
    # An old version of a child still names the owner: the two watches are not ordered.
    assert tree.place(at("a"), at("f1"), now=2) == ()
    assert not tree.doomed(Uid("a"))
    assert ended(tree, "a") == {"a", "f2", "c"}


def test_what_appears_below_a_deleted_object_is_doomed_at_once() -> None:
    tree = family()
    ended(tree, "b")
    assert [node.place.name for node in tree.place(at("f3"), at("b"), now=2)] == ["f3"]
    tree.drop(Uid("b"))
    assert [node.place.name for node in tree.place(at("f4"), at("b"), now=2)] == ["f4"]


def test_an_object_that_moves_below_a_deleted_one_takes_its_own_along() -> None:
    tree = Tree()
    tree.place(at("root"), None, now=0)
    tree.place(at("f1"), None, now=0)
    tree.place(at("a"), at("f1"), now=0)
    ended(tree, "root")
    assert {node.place.name for node in tree.place(at("f1"), at("root"), now=2)} == {"f1", "a"}


def test_an_owner_that_was_never_seen_is_known_by_what_hangs_below_it() -> None:
    tree = Tree()
    tree.place(at("a"), at("f1"), now=0)
    node = tree.get(Uid("f1"))
    assert node is not None
    assert node.place == at("f1")
    assert ended(tree, "f1") == {"f1", "a"}


def test_a_deleted_object_does_not_come_back() -> None:
    tree = family()
    ended(tree, "c")
    tree.drop(Uid("c"))
    assert tree.place(at("c"), at("f2"), now=2) == ()
    assert tree.get(Uid("c")) is None
    assert tree.below(Uid("f2")) == ()


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=30), st.integers(0, 7))
def test_rings_and_moves_never_hang_and_doom_only_what_is_below(
    links: list[tuple[int, int]], gone: int
) -> None:
    tree = Tree()
    above: dict[int, int] = {}
    for low, high in links:
        tree.place(at(f"s{low}"), at(f"s{high}"), now=0)
        above[low] = high
    doomed = {int(node.place.name[1:]) for node in tree.end(Uid(f"s{gone}"), orphaning=False, now=1)}

    def reaches(start: int) -> bool:
        seen: set[int] = set()
        at_node = start
        while at_node != gone and at_node in above and at_node not in seen:
            seen.add(at_node)
            at_node = above[at_node]
        return at_node == gone

    known = {each for link in links for each in link}
    assert doomed == {each for each in known if reaches(each)}


def test_only_our_own_references_place_an_object() -> None:
    job = OwnerReference(api_version="batch/v1", kind="Job", name="j", uid=Uid("j"), controller=True)
    assert owner_place(fork(owners=(job,))) is None
    ours = owner_place(fork(owners=(job, root().owner_reference())))
    assert ours is not None
    assert (ours.kind, ours.uid) == (Session, root().metadata.uid)
    hanging = owner_place(child())
    assert hanging is not None
    assert hanging.kind is Fork
    claimed = root().metadata.model_copy(update={"owner_references": (fork().owner_reference(),)})
    assert owner_place(root().model_copy(update={"metadata": claimed})) is None
