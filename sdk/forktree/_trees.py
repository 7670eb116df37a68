"""A tree of sessions as it was at an instant, to look at and to search through."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from forktree.errors import NoSuchSession
from forktree.models.reasons import SessionPhase
from forktree.wire_trees import ForkInfo, TreeInfo, TreeSession, TreeTotals

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree as RichTree

S = TypeVar("S")
"""`forktree.Session` or `forktree.AsyncSession`."""

_DEAD = frozenset({SessionPhase.RELEASED, SessionPhase.FAILED})


@dataclass(eq=False, slots=True, kw_only=True)
class TreeNode(Generic[S]):
    """One session of a tree."""

    session: S
    info: TreeSession
    parent: TreeNode[S] | None = None
    children: list[TreeNode[S]] = field(default_factory=list["TreeNode[S]"])

    @property
    def id(self) -> str:
        return self.info.session_id

    @property
    def score(self) -> float | None:
        return self.info.score

    @property
    def live(self) -> bool:
        """It has a machine."""
        return self.info.phase not in _DEAD

    def below(self) -> Iterator[TreeNode[S]]:
        """Itself and all below it, each before those below it."""
        waiting: list[TreeNode[S]] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def __repr__(self) -> str:
        return f"<node {_line(self)}>"


class TreeOf(Generic[S]):
    """All sessions of a tree, or of a part of one."""

    def __init__(self, info: TreeInfo, sessions: Sequence[S]) -> None:
        """`sessions`: handles of those of `info`, in its order."""
        self.totals: TreeTotals = info.totals
        self.forks: tuple[ForkInfo, ...] = info.forks
        self._nodes = {
            each.session_id: TreeNode(session=session, info=each)
            for each, session in zip(info.sessions, sessions, strict=True)
        }
        if info.root_session_id not in self._nodes:
            raise NoSuchSession(
                f"the tree of {info.root_session_id} has gone", code=NoSuchSession.code, status=404
            )
        self.root = self._nodes[info.root_session_id]
        for node in self._nodes.values():
            if node is not self.root:
                # One whose parent was deleted alone is shown right below the root.
                node.parent = self._nodes.get(node.info.parent_session_id or "", self.root)
                node.parent.children.append(node)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[TreeNode[S]]:
        """Each before those below it."""
        return self.root.below()

    def __getitem__(self, session_id: str) -> TreeNode[S]:
        """Raises `KeyError`."""
        return self._nodes[session_id]

    def best(self, *, live: bool = False) -> TreeNode[S] | None:
        """The one with the highest score; `live`: of those with a machine. None where none has a score."""
        scored = [node for node in self if node.score is not None and (node.live or not live)]
        return max(scored, key=_score, default=None)

    def leaves(self) -> list[TreeNode[S]]:
        """Those without children."""
        return [node for node in self if not node.children]

    def path(self, node: TreeNode[S] | str) -> list[TreeNode[S]]:
        """From the root to `node`, both included. Raises `KeyError` for a name that is not in the tree."""
        at: TreeNode[S] | None = self._nodes[node] if isinstance(node, str) else node
        path: list[TreeNode[S]] = []
        while at is not None:
            path.append(at)
            at = at.parent
        return path[::-1]

    def __str__(self) -> str:
        """Lines that need no colours."""
        lines = [_line(self.root)]
        waiting = [(child, "", child is self.root.children[-1]) for child in reversed(self.root.children)]
        while waiting:
            node, indent, last = waiting.pop()
            lines.append(f"{indent}{'└── ' if last else '├── '}{_line(node)}")
            below = indent + ("    " if last else "│   ")
            waiting += [(child, below, child is node.children[-1]) for child in reversed(node.children)]
        return "\n".join(lines)

    def render(self) -> RichTree:
        """For `rich.print`: green the better the score, grey what has no machine, a star for the best.

        Needs `rich`.
        """
        from rich.tree import Tree as RichTree  # noqa: PLC0415

        best = self.best()
        top = RichTree(self._label(self.root, best), guide_style="bright_black")
        waiting = [(self.root, top)]
        while waiting:
            node, branch = waiting.pop()
            waiting += [(child, branch.add(self._label(child, best))) for child in node.children]
        return top

    def __rich__(self) -> RichTree:
        return self.render()

    def _repr_html_(self) -> str:
        """As notebooks show it."""
        parts = ['<div class="forktree" style="font-family: monospace; line-height: 1.5">']
        best = self.best()
        for node in self:
            depth = len(self.path(node)) - 1
            colour = "#999" if not node.live else _hue(self._share(node))
            star = " ★" if node is best else ""
            parts.append(
                f'<div style="padding-left: {2 * depth}em; color: {colour}">'
                f"{html.escape(_line(node))}{star}</div>"
            )
        return "\n".join([*parts, "</div>"])

    def _label(self, node: TreeNode[S], best: TreeNode[S] | None) -> Text:
        from rich.text import Text  # noqa: PLC0415

        share = self._share(node)
        colour = (
            "bright_black" if not node.live else "default" if share is None else _COLOURS[round(share * 4)]
        )
        return Text(_line(node) + (" ★" if node is best else ""), style=colour)

    def _share(self, node: TreeNode[S]) -> float | None:
        """Its score, from 0 for the worst in the tree to 1 for the best."""
        scores = [each.score for each in self._nodes.values() if each.score is not None]
        if node.score is None:
            return None
        span = max(scores) - min(scores)
        return (node.score - min(scores)) / span if span > 0 else 1.0


_COLOURS = ("red", "dark_orange", "yellow", "green", "bright_green")


def _score(node: TreeNode[S]) -> float:
    return -math.inf if node.score is None else node.score


def _hue(share: float | None) -> str:
    return "inherit" if share is None else f"hsl({round(120 * share)}, 70%, 35%)"


def _line(node: TreeNode[S]) -> str:
    info = node.info
    parts = [node.id]
    if info.score is not None:
        parts.append(f"score {info.score:.4g}")
    if info.phase is not SessionPhase.RUNNING:
        parts.append(info.phase if info.reason is None else f"{info.phase} ({info.reason})")
    if info.unique_bytes is not None:
        parts.append(f"{info.unique_bytes / (1 << 20):.1f} MiB")
    return "  ".join(parts)
