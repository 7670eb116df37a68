"""`exec`: a command in a session, its streams as they come, its exit code passed on."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated

import typer

from forktree import AsyncExec, AsyncSession, Ended
from forktree.errors import ClientError, NotFound, Refused
from forktree_cli.asked import Asked, Output, add, pairs
from forktree_cli.naming import ENV, SESSION
from forktree_cli.showing import clean, console, print_json, print_names, table

TIMED_OUT = 124
"""As `timeout` has it: a guest's exit codes go up to 255, and there is none for this."""
_PIECE_BYTES = 1 << 16


def add_to(app: typer.Typer) -> None:
    add(app, run, "exec")


async def run(
    asked: Asked,
    *,
    session: Annotated[str, SESSION],
    argv: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input on.")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="On a terminal of its own; needs -i.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it running; print its id.")] = False,
    attach: Annotated[str | None, typer.Option(metavar="ID", help="Follow a command that runs.")] = None,
    kill: Annotated[str | None, typer.Option(metavar="ID", help="End a command.")] = None,
    commands: Annotated[bool, typer.Option("--list", help="Name the commands to attach to.")] = False,
    env: Annotated[list[str] | None, ENV] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", help="The folder to run it in.")] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.001, max=3600, help="Seconds until it is killed, for an exit code of 124."),
    ] = 3600.0,
) -> int | None:
    """Run a command in a session, with its exit code for ours.

    Ctrl-C kills it, unless it was only attached to. A connection that breaks is replaced and nothing is lost.
    """
    _one_thing(argv=bool(argv), tty=tty, detach=detach, attach=attach, kill=kill, commands=commands)
    async with asked.client() as client:
        where = client.sessions.named(session)
        if commands:
            await _list(asked, where)
            return None
        if kill is not None:
            await where.attach(kill).kill()
            print_json({"id": kill, "killed": True}) if asked.json else print_names([f"{kill} killed"])
            return None
        if attach is not None:
            return await follow(asked, where.attach(attach))
        if tty:
            from forktree_cli.terminal import interact  # noqa: PLC0415  # Its imports take a third of a second.

            return await interact(await client.reach(), session, argv or [])
        exec_id = f"cli-{secrets.token_hex(8)}"
        try:
            begun = await where.start(
                argv or [],
                env=pairs("--env", env or []),
                cwd=cwd,
                timeout=timeout,
                stdin_open=stdin,
                exec_id=exec_id,
            )
            if detach:
                print_json({"id": exec_id, "detached": True}) if asked.json else print_names([exec_id])
                return None
            async with _fed(begun, stdin):
                return await follow(asked, begun)
        except (asyncio.CancelledError, BrokenPipeError):  # Nobody waits for it, or reads it, any more.
            await _end(where.attach(exec_id))
            raise


async def _end(command: AsyncExec) -> None:
    """Kill it, if it had begun."""
    try:
        await command.kill()
    except NotFound:
        return
    except ClientError as err:
        typer.echo(f"forktree: command {command.id} may run on: {clean(err.message)}", err=True)


def _one_thing(
    *, argv: bool, tty: bool, detach: bool, attach: str | None, kill: str | None, commands: bool
) -> None:
    """Ends the program with a usage error where several things are asked for, or none."""
    others = sum([attach is not None, kill is not None, commands])
    if others + (argv or tty) != 1:
        raise typer.BadParameter("give a command behind `--`, or one of --attach, --kill and --list")
    if tty and detach:
        raise typer.BadParameter("a command on a terminal cannot be detached: leave out -t or --detach")
    if detach and others:
        raise typer.BadParameter("--detach is for a command that begins: give one behind `--`")


async def follow(asked: Asked, command: AsyncExec) -> int:
    """Its output as it comes, to where it belongs, or all of it as JSON in the end. Gives our exit code."""
    kept = {"stdout": bytearray(), "stderr": bytearray()}
    ways = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    async with aclosing(command.stream()) as events:
        async for event in events:
            if isinstance(event, Ended):
                if asked.json:
                    print_json(
                        {
                            "id": command.id,
                            "exit_code": event.exit_code,
                            "timed_out": event.timed_out,
                            "truncated": event.truncated,
                            **{name: data.decode(errors="replace") for name, data in kept.items()},
                        }
                    )
                return _exit_code(event)
            if event.missing:
                typer.echo(f"forktree: {event.missing} bytes of {event.stream} are kept no more", err=True)
            if asked.json:
                kept[event.stream] += event.data
            else:
                ways[event.stream].write(event.data)
                ways[event.stream].flush()
    raise AssertionError("a stream ends by saying how the command did, or raises")


def _exit_code(ended: Ended) -> int:
    if ended.timed_out:
        typer.echo("forktree: the command ran out of time and was killed", err=True)
        return TIMED_OUT
    return ended.exit_code & 0xFF


async def _list(asked: Asked, session: AsyncSession) -> None:
    ids = await session.execs()
    match asked.output:
        case Output.JSON:
            print_json([{"id": each} for each in ids])
        case Output.NAME:
            print_names(ids)
        case Output.TABLE:
            console().print(table(("COMMAND",), [(each,) for each in ids]) if ids else "No command is known.")


@asynccontextmanager
async def _fed(command: AsyncExec, wanted: bool) -> AsyncGenerator[None]:
    """In the block, what comes on standard input goes to the command."""
    if not wanted:
        yield
        return
    task = asyncio.create_task(_feed(command), name="standard-input")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _feed(command: AsyncExec) -> None:
    try:
        async with aclosing(_standard_input()) as pieces:
            async for piece in pieces:
                await command.write(piece, close=not piece)
    except Refused:
        return  # It has ended, or reads no more: its end says the rest.


async def _standard_input() -> AsyncGenerator[bytes]:
    """Piece by piece; an empty one is the end. A thread reads: files cannot be waited for by a loop."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)

    def read() -> None:
        try:
            while True:
                piece = os.read(0, _PIECE_BYTES)
                asyncio.run_coroutine_threadsafe(pieces.put(piece), loop).result()
                if not piece:
                    return
        except (OSError, RuntimeError):
            return  # Nothing is open there, or the loop is gone.

    # Nothing can interrupt it where it waits for a person to type: it must not keep the program.
    threading.Thread(target=read, name="standard-input", daemon=True).start()
    while True:
        piece = await pieces.get()
        yield piece
        if not piece:
            return
