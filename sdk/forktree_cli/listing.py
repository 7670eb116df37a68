"""`get`, `templates` and `tree`: what there is."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.live import Live
from rich.text import Text

from forktree import AsyncClient, AsyncSession
from forktree_cli.asked import Asked, Output, add, pairs
from forktree_cli.drawing import Tree, drawn
from forktree_cli.naming import MAYBE_SESSIONS, SESSION
from forktree_cli.showing import age, console, dumped, number, phase, print_json, print_names, table

AT_ONCE = 16
"""Questions under way at the same time."""


def add_to(app: typer.Typer) -> None:
    add(app, get)
    add(app, templates)
    add(app, tree)


async def get(
    asked: Asked,
    *,
    sessions: Annotated[list[str] | None, MAYBE_SESSIONS] = None,
    template: Annotated[str | None, typer.Option(help="Only those of this template.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="NAME=VALUE: only those with this label.")] = None,
) -> None:
    """List sessions."""
    labels = pairs("--label", label or [])
    if sessions and (template or labels):
        raise typer.BadParameter("--template and --label choose from all sessions: name none then")
    async with asked.client() as client:
        if sessions:
            found = [await client.sessions.get(each) for each in sessions]
        else:
            found = await client.sessions.list(template=template, labels=labels)
    show_sessions(asked, found, whole=sessions is not None and len(sessions) == 1)


def show_sessions(asked: Asked, sessions: Sequence[AsyncSession], *, whole: bool = False) -> None:
    """`whole`: it is one by its name, and in JSON no list."""
    match asked.output:
        case Output.JSON:
            found = [dumped(each.info) for each in sessions]
            print_json(found[0] if whole else found)
        case Output.NAME:
            print_names(each.id for each in sessions)
        case Output.TABLE:
            columns = ("SESSION", "TEMPLATE", "PHASE", "SCORE", "PARENT", "DEPTH", "NODE", "AGE")
            infos = [each.info for each in sessions]
            rows = [
                (each.session_id, each.template_id, phase(each.phase, each.reason), number(each.score),
                 each.parent_session_id, str(each.depth or 0), each.node, age(each.age_secs))
                for each in infos
            ]  # fmt: skip
            console().print(table(columns, rows) if rows else "There are no sessions.")


async def templates(asked: Asked) -> None:
    """List what sessions can be made of, and where it is ready."""
    async with asked.client() as client:
        found = await client.templates.list()
    match asked.output:
        case Output.JSON:
            print_json([dumped(each) for each in found])
        case Output.NAME:
            print_names(each.template_id for each in found)
        case Output.TABLE:
            columns = ("TEMPLATE", "IMAGE", "READY NODES", "STANDBY", "WHY NOT")
            rows = [
                (each.template_id, each.image, f"{each.ready_nodes}/{len(each.nodes)}", str(each.standby),
                 "; ".join(f"{at.node}: {at.message}" for at in each.nodes if at.message) or None)
                for each in found
            ]  # fmt: skip
            console().print(table(columns, rows) if rows else "There are no templates.")


async def tree(
    asked: Asked,
    *,
    session: Annotated[str | None, SESSION] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on as it grows, until Ctrl-C.")] = False,
    below: Annotated[bool, typer.Option(help="From the session down, and not the whole tree.")] = False,
    memory: Annotated[bool, typer.Option(help="Say what memory each takes.")] = True,
) -> None:
    """Draw the tree that a session is in; without a name all trees."""
    if watch and session is None:
        raise typer.BadParameter("--watch needs the name of a session")
    async with asked.client() as client:
        if session is None:
            show_trees(asked, await all_trees(client, memory=memory))
            return
        first = await client.sessions.named(session).tree(below=below, memory=memory)
        if watch:
            await _follow(asked, first)
        else:
            show_trees(asked, [first], whole=True)


def show_trees(asked: Asked, trees: Sequence[Tree], *, whole: bool = False) -> None:
    match asked.output:
        case Output.JSON:
            found = [tree_json(each) for each in trees]
            print_json(found[0] if whole else found)
        case Output.NAME:
            print_names(node.id for each in trees for node in each)
        case Output.TABLE:
            shown = console()
            for at, each in enumerate(trees):
                shown.print(*([""] if at else []), drawn(each), sep="\n")
            if not trees:
                shown.print("There are no sessions.")


async def all_trees(client: AsyncClient, *, memory: bool) -> list[Tree]:
    """Those of all roots of the namespace, by their names."""
    roots = sorted(
        (each for each in await client.sessions.list() if each.parent_id is None), key=lambda each: each.id
    )
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(root: AsyncSession) -> Tree:
        async with gate:
            return await root.tree(memory=memory)

    found = await asyncio.gather(*(one(root) for root in roots))
    # One whose parent is gone may be asked for beside its own root.
    return list({each.root.id: each for each in found}.values())


def tree_json(tree: Tree) -> dict[str, object]:
    best = tree.best()
    found: dict[str, object] = {
        "root_session_id": tree.root.id,
        "sessions": [dumped(node.info) for node in tree],
        "forks": [dumped(fork) for fork in tree.forks],
        "totals": dumped(tree.totals),
    }
    return found | ({} if best is None else {"best_session_id": best.id, "best_score": best.score})


async def _follow(asked: Asked, first: Tree) -> None:
    """Every state of the tree: redrawn in place on a terminal, else one after another."""
    if asked.output is not Output.TABLE or not sys.stdout.isatty():
        async for each in first.watch():
            match asked.output:
                case Output.JSON:
                    print_json(tree_json(each), line=True)
                case _:
                    show_trees(asked, [each])
        return
    with Live(drawn(first), console=console(), auto_refresh=False) as live:
        async for each in first.watch():
            live.update(drawn(each), refresh=True)
        live.update(Text(f"The tree of {first.root.id} is gone."), refresh=True)
