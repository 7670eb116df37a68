"""`score`, `checkpoint`, `checkpoints`, `pause`, `resume` and `release`: what becomes of one session."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from forktree import AsyncSession
from forktree_cli.asked import Asked, Output, add, pairs
from forktree_cli.listing import show_sessions
from forktree_cli.naming import SESSION
from forktree_cli.showing import age, console, dumped, print_json, print_names, size, table


def add_to(app: typer.Typer) -> None:
    for each in (score, checkpoint, checkpoints, pause, resume, release):
        add(app, each)


async def score(
    asked: Asked,
    *,
    session: Annotated[str, SESSION],
    value: Annotated[float | None, typer.Argument(metavar="SCORE", help="Higher is better.")] = None,
    reward: Annotated[
        list[str] | None, typer.Option("--reward", "-r", help="NAME=NUMBER: a further number.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take the score back.")] = False,
) -> None:
    """Set what a session counts for."""
    rewards = {name: _number(text) for name, text in pairs("--reward", reward or []).items()}
    if clear == (value is not None) and not (rewards and not clear):
        raise typer.BadParameter("give a score, --reward, or --clear")
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"a score is a finite number, not {value}")
    async with asked.client() as client:
        found = client.sessions.named(session)
        if clear or value is not None:
            await found.score(value, **rewards)
        else:
            await found.score(**rewards)
    _say(asked, found, "scored")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"--reward takes NAME=NUMBER, and {text!r} is no finite number")
    return value


async def checkpoint(
    asked: Asked,
    *,
    session: Annotated[str, SESSION],
    name: Annotated[str, typer.Argument(help="What to call this instant.")],
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="Delete the oldest beyond so many that nothing was forked from.")
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Let the one of that name go, and all that was started from it.")
    ] = False,
) -> None:
    """Keep this instant of a session under a name, to go back to by `rollback`."""
    async with asked.client() as client:
        found = client.sessions.named(session)
        if delete:
            await found.delete_checkpoint(name)
            said: dict[str, object] = {"checkpoint": name, "deleted": True}
        else:
            said = dumped(await found.checkpoint(name, keep_last=keep_last))
    match asked.output:
        case Output.JSON:
            print_json(said)
        case Output.NAME:
            print_names([name])
        case Output.TABLE:
            print_names([f"{name} deleted" if delete else f"{name} kept"])


async def checkpoints(asked: Asked, session: Annotated[str, SESSION]) -> None:
    """List the checkpoints of a session, the oldest first."""
    async with asked.client() as client:
        found = await client.sessions.named(session).checkpoints()
    match asked.output:
        case Output.JSON:
            print_json([dumped(each) for each in found])
        case Output.NAME:
            print_names(each.checkpoint for each in found)
        case Output.TABLE:
            columns = ("CHECKPOINT", "FORK", "BYTES", "AVAILABLE", "AGE")
            rows = [
                (each.checkpoint, each.fork_id, size(each.point_bytes), "yes" if each.available else "no",
                 age(each.created_secs_ago))
                for each in found
            ]  # fmt: skip
            console().print(table(columns, rows) if rows else "There are no checkpoints.")


async def pause(asked: Asked, session: Annotated[str, SESSION]) -> None:
    """Let a session stand still: it keeps its memory, and can be forked."""
    async with asked.client() as client:
        _say(asked, await client.sessions.named(session).pause(), "paused")


async def resume(asked: Asked, session: Annotated[str, SESSION]) -> None:
    """Let a paused session go on."""
    async with asked.client() as client:
        _say(asked, await client.sessions.named(session).resume(), "resumed")


async def release(asked: Asked, session: Annotated[str, SESSION]) -> None:
    """End a session's machine for good. Its place in the tree and its checkpoints stay."""
    async with asked.client() as client:
        _say(asked, await client.sessions.named(session).release(), "released")


def _say(asked: Asked, session: AsyncSession, done: str) -> None:
    if asked.output is Output.TABLE:
        print_names([f"{session.id} {done}"])
    else:
        show_sessions(asked, [session], whole=True)
