"""`logs`: what the commands of a branch printed, and any command that can still be attached to."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from forktree import AsyncClient
from forktree.errors import BadSettings
from forktree.wire import ChildLog, CommandLog
from forktree_cli.asked import Asked, add
from forktree_cli.naming import SESSION
from forktree_cli.running import follow
from forktree_cli.showing import dumped, print_json


def add_to(app: typer.Typer) -> None:
    add(app, logs)


async def logs(
    asked: Asked,
    *,
    session: Annotated[str, SESSION],
    child: Annotated[
        int | None,
        typer.Option(min=0, help="SESSION is a fork: of this child, also when it is gone."),
    ] = None,
    command: Annotated[
        str | None, typer.Option("--exec", metavar="ID", help="Of this command, until it ends.")
    ] = None,
) -> None:
    """Print what the command of a session's branch wrote, and what its scorer did."""
    if command is not None and child is not None:
        raise typer.BadParameter("--exec is of a session and --child of a fork: give one of the two")
    async with asked.client() as client:
        if command is not None:
            await follow(asked, client.sessions.named(session).attach(command))
            return
        fork_id, index = (session, child) if child is not None else await _born_of(client, session)
        found = await client.forks.log(fork_id, index)
    if asked.json:
        print_json(dumped(found))
    else:
        _print(found)


async def _born_of(client: AsyncClient, name: str) -> tuple[str, int]:
    """The fork that made the session, and which of its children it is."""
    fork_id = (await client.sessions.get(name)).info.fork_id
    if fork_id is None:
        raise BadSettings(f"{name} was not made by a fork, so it has no branch whose command could print")
    for each in (await client.forks.get(fork_id)).facts.children:
        if each.session_id == name:
            return fork_id, each.index
    raise BadSettings(f"the fork {fork_id} does not know {name}: name the fork and --child INDEX")


def _print(log: ChildLog) -> None:
    if log.exec is None and log.score is None:
        typer.echo("forktree: no command was begun in this branch", err=True)
    for what, each in (("command", log.exec), ("scorer", log.score)):
        if each is not None:
            _print_one(what, each)


def _print_one(what: str, log: CommandLog) -> None:
    """Its streams to where they belong; how it ended, on standard error."""
    if log.truncated:
        typer.echo(f"forktree: the beginning of what the {what} printed is not kept", err=True)
    sys.stdout.write(log.stdout)
    sys.stdout.flush()
    sys.stderr.write(log.stderr)
    if not log.ended:
        typer.echo(f"forktree: the {what} still runs; what it prints is shown when it has ended", err=True)
    elif log.timed_out:
        typer.echo(f"forktree: the {what} ran out of time", err=True)
    elif log.exit_code:
        typer.echo(f"forktree: the {what} ended with {log.exit_code}", err=True)
    elif log.message:
        typer.echo(f"forktree: {log.message}", err=True)
