"""`port-forward`: a server inside a session, at a port of this machine."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Annotated

import typer

from forktree.errors import ClientError
from forktree_cli.asked import Asked, Output, add, failed
from forktree_cli.naming import SESSION
from forktree_cli.showing import print_json, print_names

_PORTS = "Ports of the session that its template declares, by name or number; before it the local one."


def add_to(app: typer.Typer) -> None:
    add(app, port_forward, "port-forward")


async def port_forward(
    asked: Asked,
    *,
    session: Annotated[str, SESSION],
    ports: Annotated[list[str], typer.Argument(metavar="[LOCAL:]REMOTE...", help=_PORTS)],
    address: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
) -> None:
    """Reach servers inside a session at ports of this machine, until Ctrl-C.

    Without LOCAL the local port has the same number, or any where REMOTE is a name. An empty LOCAL, as in
    `:8000`, is any.
    """
    pairs = [_pair(each) for each in ports]
    async with asked.client() as client, AsyncExitStack() as stack:
        where = client.sessions.named(session)
        found: list[dict[str, object]] = []
        for local, remote in pairs:
            at = await stack.enter_async_context(where.forward(remote, local, host=address, told=_told))
            found.append({"address": f"{at.host}:{at.port}", "port": remote})
        match asked.output:
            case Output.JSON:
                print_json(found)
            case Output.NAME:
                print_names([str(each["address"]) for each in found])
            case Output.TABLE:
                for each in found:
                    typer.echo(f"Forwarding from {each['address']} -> {each['port']}")
        await asyncio.Event().wait()


def _told(error: ClientError) -> None:
    failed(str(error))


def _pair(said: str) -> tuple[int, str]:
    """The local port, 0 for any, and the remote one."""
    local, colon, remote = said.rpartition(":")
    if not remote or not remote.isascii():
        raise typer.BadParameter(f"a port is REMOTE or LOCAL:REMOTE, not {said!r}")
    if not colon:
        return (_number(remote) if remote.isdigit() else 0), remote
    return (_number(local) if local else 0), remote


def _number(said: str) -> int:
    if not (said.isascii() and said.isdigit() and 0 <= int(said[:6]) <= 65535):
        raise typer.BadParameter(f"a port is a number up to 65535, not {said!r}")
    return int(said)
