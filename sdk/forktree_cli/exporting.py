"""`export`: what led to each leaf of a tree, from its root on."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from forktree.wire_trees import ForkChildInfo, ForkInfo
from forktree_cli.asked import Asked, Output, add
from forktree_cli.drawing import Node, Tree
from forktree_cli.naming import SESSION
from forktree_cli.showing import console, dumped, number, print_json, print_names, table


class Leaves(StrEnum):
    ALL = "all"
    SCORED = "scored"
    LIVE = "live"


def add_to(app: typer.Typer) -> None:
    add(app, export)


async def export(
    asked: Asked,
    *,
    session: Annotated[str, SESSION],
    leaves: Annotated[Leaves, typer.Option(help="Which of them.")] = Leaves.ALL,
    below: Annotated[bool, typer.Option(help="From the session down, and not the whole tree.")] = False,
    lines: Annotated[bool, typer.Option("--lines", help="With -o json: each on a line of its own.")] = False,
) -> None:
    """Print what led to each leaf of a session's tree: branches, seeds, commands, scores, parents.

    With `-o json` all of it, else a line each.
    """
    async with asked.client() as client:
        tree = await client.sessions.named(session).tree(below=below)
    found = [trajectory(tree, leaf) for leaf in tree.leaves() if _wanted(leaf, leaves)]
    match asked.output:
        case Output.JSON if lines:
            for each in found:
                print_json(each, line=True)
        case Output.JSON:
            print_json({"root_session_id": tree.root.id, "trajectories": found})
        case Output.NAME:
            print_names(str(each["leaf_session_id"]) for each in found)
        case Output.TABLE:
            rows = [_row(tree, leaf) for leaf in tree.leaves() if _wanted(leaf, leaves)]
            console().print(table(("LEAF", "SCORE", "PATH"), rows))


def _wanted(leaf: Node, leaves: Leaves) -> bool:
    match leaves:
        case Leaves.ALL:
            return True
        case Leaves.SCORED:
            return leaf.score is not None
        case Leaves.LIVE:
            return bool(leaf.live)


def trajectory(tree: Tree, leaf: Node) -> dict[str, object]:
    """What led from the root to `leaf`: a step for each session on the way, the root's first."""
    best = tree.best()
    found: dict[str, object | None] = {
        "leaf_session_id": leaf.id,
        "root_session_id": tree.root.id,
        "template_id": tree.root.info.template_id,
        "baseline_id": leaf.info.baseline_id or tree.root.info.baseline_id,
        "score": leaf.score,
        "rewards": leaf.info.rewards,
        "is_best": leaf is best,
        "steps": [_step(tree, node) for node in tree.path(leaf)],
    }
    return {key: value for key, value in found.items() if value is not None}


_OF_SESSION = {
    "session_id", "parent_session_id", "fork_id", "depth", "phase", "reason", "mode", "level", "node", "seed",
    "score", "rewards", "labels", "vm_generation_id", "baseline_id", "fork_ms",
}  # fmt: skip
_OF_CHILD = {"index", "branch", "argv", "exit_code"}


def _step(tree: Tree, node: Node) -> dict[str, object]:
    """What is known of one session, and of the branch that it is."""
    found = {key: value for key, value in dumped(node.info).items() if key in _OF_SESSION}
    fork, child = _birth(tree, node)
    if fork is not None and fork.source_fork_id is not None:
        found["source_fork_id"] = fork.source_fork_id
    if child is not None:
        found |= {key: value for key, value in dumped(child).items() if key in _OF_CHILD}
    return found


def _birth(tree: Tree, node: Node) -> tuple[ForkInfo | None, ForkChildInfo | None]:
    for fork in tree.forks:
        for child in fork.children:
            if child.session_id == node.id:
                return fork, child
    return None, None


def _row(tree: Tree, leaf: Node) -> tuple[str, str, str]:
    named: list[str] = []
    for node in tree.path(leaf):
        child = _birth(tree, node)[1]
        named.append(child.branch if child is not None and child.branch else node.id)
    return leaf.id, number(leaf.score), " > ".join(named)
