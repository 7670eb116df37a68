"""A tree of sessions in lines: guides, phases, scores, bytes, and which is best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from forktree import AsyncSession, AsyncTree, TreeNode
from forktree.wire_trees import ForkChildInfo, ForkInfo
from forktree_cli.showing import Cell, age, clean, number, phase, size, table

Tree = AsyncTree[AsyncSession]
Node = TreeNode[AsyncSession]

COLUMNS = ("SESSION", "PHASE", "SCORE", "UNIQUE", "SHARED", "BRANCH", "EXIT", "AGE")


@dataclass(frozen=True, slots=True)
class _Line:
    """A session or a checkpoint, and what stands before it."""

    guide: str
    what: Node | ForkInfo


def drawn(tree: Tree) -> Group:
    """The whole tree, and a line on what it comes to."""
    children = {child.session_id: child for fork in tree.forks for child in fork.children}
    best = tree.best()
    rows = [_row(line, children, best) for line in _lines(tree)]
    return Group(table(COLUMNS, rows), Text(_summary(tree, best), style="bright_black"))


def _lines(tree: Tree) -> Iterator[_Line]:
    """Each session before what is below it, its checkpoints first."""
    checkpoints: dict[str, list[ForkInfo]] = {}
    for fork in tree.forks:
        if fork.checkpoint is not None and fork.point_available:
            checkpoints.setdefault(fork.parent_session_id or "", []).append(fork)
    waiting: list[tuple[Node | ForkInfo, str, str]] = [(tree.root, "", "")]
    while waiting:
        what, before, below = waiting.pop()
        yield _Line(before, what)
        if isinstance(what, ForkInfo):
            continue
        under: list[Node | ForkInfo] = [*checkpoints.get(what.id, []), *what.children]
        for each in reversed(under):
            last = each is under[-1]
            waiting.append((each, below + ("└── " if last else "├── "), below + ("    " if last else "│   ")))


def _row(line: _Line, children: dict[str, ForkChildInfo], best: Node | None) -> list[Cell]:
    what, guide = line.what, Text(line.guide, style="bright_black")
    if isinstance(what, ForkInfo):
        name = guide.append(f"◆ {clean(what.checkpoint or '')}", style="cyan")
        return [name, Text("checkpoint", style="cyan"), None, size(what.point_bytes), None, None, None,
                age(what.age_secs)]  # fmt: skip
    info, child = what.info, children.get(what.id)
    style = "default" if what.live else "bright_black"
    if what is best:
        style = "bold green"
    name = guide.append(clean(what.id) + (" ★" if what is best else ""), style=style)
    exit_code = None if child is None or child.exit_code is None else str(child.exit_code)
    return [
        name,
        phase(info.phase, info.reason),
        number(info.score),
        size(info.unique_bytes),
        size(info.shared_bytes),
        None if child is None else child.branch,
        exit_code,
        age(info.age_secs),
    ]


def _summary(tree: Tree, best: Node | None) -> str:
    totals = tree.totals
    said = [f"{totals.sessions} {'session' if totals.sessions == 1 else 'sessions'}", f"{totals.live} live"]
    if totals.point_bytes:
        said.append(f"instants hold {size(totals.point_bytes)}")
    if best is not None:
        said.append(f"best {clean(best.id)} with {number(best.score)}")
    return ", ".join(said)
