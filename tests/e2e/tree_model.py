"""What a tree should be after forks and prunes: as small as can be, so that whoever reads it believes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from forktree.models import Uid
from forktree.models.names import child_name
from forktree_agent.control.owners import child_owner, point_owner, root_owner
from forktree_agent.engine.contract import Owner


@dataclass(eq=False, kw_only=True)
class SessionNode:
    """A session whose machine runs."""

    name: str
    uid: Uid | None
    """None for a child until its object was seen."""
    owner: Owner
    root: Uid
    parent: Uid | None
    depth: int
    above: ForkNode | None = None
    forks: list[ForkNode] = field(default_factory=list["ForkNode"])


@dataclass(eq=False, kw_only=True)
class ForkNode:
    """A fork whose children all ran once."""

    name: str
    uid: Uid
    root: Uid
    parent: Uid
    """The session whose memory its children carried on."""
    above_uid: Uid
    depth: int
    replicas: int
    always: bool
    """Its instant is held as long as its object is there."""
    above: SessionNode | ForkNode | None
    origin: ForkNode | None = None
    """The fork whose instant it started from; None: it has its own."""
    children: list[SessionNode] = field(default_factory=list[SessionNode])
    forks: list[ForkNode] = field(default_factory=list["ForkNode"])

    def lives_on_it(self) -> bool:
        """Whether any child of its instant is left, of its own or of a fork that started from it."""
        return bool(self.children) or any(each.lives_on_it() for each in self.forks)

    @property
    def held(self) -> bool:
        """Whether its own instant can be forked."""
        return self.origin is None and (self.always or self.replicas == 0 or self.lives_on_it())


Node = SessionNode | ForkNode


class Model:
    """All objects of one namespace by what hangs below what."""

    def __init__(self) -> None:
        self.tops: list[Node] = []
        """Roots, and what was left alive when something above it was deleted."""

    def root(self, name: str, uid: Uid) -> SessionNode:
        node = SessionNode(name=name, uid=uid, owner=root_owner(uid), root=uid, parent=None, depth=0)
        self.tops.append(node)
        return node

    def fork(self, source: Node, name: str, uid: Uid, replicas: int, *, always: bool) -> ForkNode:
        """All children are there, each with its place."""
        if isinstance(source, SessionNode):
            parent, depth = source.uid, source.depth + 1
        else:
            parent, depth = source.parent, source.depth
        assert parent is not None
        assert source.uid is not None
        made = ForkNode(
            name=name, uid=uid, root=source.root, parent=parent, above_uid=source.uid, depth=depth,
            replicas=replicas, always=always, above=source,
            origin=source if isinstance(source, ForkNode) else None,
        )  # fmt: skip
        source.forks.append(made)
        made.children = [
            SessionNode(
                name=child_name(name, index, uid), uid=None, owner=child_owner(uid, index),
                root=source.root, parent=parent, depth=depth, above=made,
            )
            for index in range(replicas)
        ]  # fmt: skip
        return made

    def prune(self, node: Node, *, orphan: bool) -> None:
        """The node is deleted: all below it goes with it, or lives on by itself."""
        if node.above is None:
            self.tops.remove(node)
        elif isinstance(node, ForkNode):
            node.above.forks.remove(node)
        else:
            node.above.children.remove(node)
        node.above = None
        if orphan:
            for each in below(node):
                each.above = None
                self.tops.append(each)

    def nodes(self) -> Iterator[Node]:
        for top in self.tops:
            yield from subtree(top)

    def sessions(self) -> dict[str, SessionNode]:
        return {node.name: node for node in self.nodes() if isinstance(node, SessionNode)}

    def forks(self) -> dict[str, ForkNode]:
        return {node.name: node for node in self.nodes() if isinstance(node, ForkNode)}

    def machines(self) -> dict[Owner, Uid]:
        """Whose machines run, and in which tree."""
        return {each.owner: each.root for each in self.sessions().values()}

    def points(self) -> set[Owner]:
        """Which instants are held."""
        return {point_owner(each.uid) for each in self.forks().values() if each.held}


def below(node: Node) -> list[Node]:
    """What hangs directly below."""
    return [*node.forks, *(node.children if isinstance(node, ForkNode) else [])]


def subtree(node: Node) -> Iterator[Node]:
    """The node and all below it, top down."""
    yield node
    for each in below(node):
        yield from subtree(each)
