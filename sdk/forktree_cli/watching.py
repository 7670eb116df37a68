"""`top`: what memory the sessions of the namespace take now, and how full the node is."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from forktree import AsyncClient
from forktree.errors import ClientError
from forktree.wire_trees import NodeInfo, TreeSession
from forktree_cli.asked import Asked, Output, add
from forktree_cli.listing import all_trees
from forktree_cli.showing import clean, console, dumped, number, phase, print_json, print_names, size, table


def add_to(app: typer.Typer) -> None:
    add(app, top)


async def top(
    asked: Asked,
    *,
    once: Annotated[bool, typer.Option("--once", help="Say it once, as where nobody looks.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    most: Annotated[int, typer.Option(min=1, help="Show so many sessions, the largest.")] = 40,
) -> None:
    """Show the sessions that take most memory, and the use of the node, until Ctrl-C."""
    async with asked.client() as client:
        node, sessions = await _seen(client)
        match asked.output:
            case Output.JSON:
                print_json({"node": dumped(node), "sessions": [dumped(each) for each in sessions]})
                return
            case Output.NAME:
                print_names(each.session_id for each in sessions)
                return
            case Output.TABLE:
                pass
        if once or not sys.stdout.isatty():
            console().print(_drawn(node, sessions, most))
            return
        with Live(_drawn(node, sessions, most), console=console(), auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval)
                try:
                    shown = _drawn(*await _seen(client), most)
                except ClientError as err:  # It may be back at the next look.
                    shown = Group(Text(clean(err.message), style="red"))
                live.update(shown, refresh=True)


async def _seen(client: AsyncClient) -> tuple[NodeInfo, list[TreeSession]]:
    """The largest sessions first."""
    node, trees = await asyncio.gather(client.node(), all_trees(client, memory=True))
    sessions = [each.info for tree in trees for each in tree if each.live]
    return node, sorted(sessions, key=lambda each: (-(each.unique_bytes or 0), each.session_id))


def _drawn(node: NodeInfo, sessions: list[TreeSession], most: int) -> Group:
    unique = sum(each.unique_bytes or 0 for each in sessions)
    promised = f"{size(node.reserved_bytes) or '?'} of {size(node.capacity_bytes) or '?'} promised"
    engine = "" if node.engine is None else f", {node.engine} on {node.accelerator or '?'}"
    head = (
        f"{node.node}: {promised}{engine}; {len(sessions)} live here and elsewhere, {size(unique)} their own"
    )
    rows = [
        (each.session_id, phase(each.phase, each.reason), size(each.unique_bytes), size(each.shared_bytes),
         number(each.score), each.node)
        for each in sessions[:most]
    ]  # fmt: skip
    more = [Text(f"and {len(sessions) - most} more")] if len(sessions) > most else []
    columns = ("SESSION", "PHASE", "UNIQUE", "SHARED", "SCORE", "NODE")
    return Group(Text(clean(head), style="bold"), table(columns, rows), *more)
