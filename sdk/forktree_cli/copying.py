"""`cp`: files and folders, into a session and out of it."""

from __future__ import annotations

import asyncio
import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forktree import AsyncSession
from forktree.errors import Conflict, NotFound
from forktree_cli.asked import Asked, Output, add
from forktree_cli.showing import print_json, print_names


def add_to(app: typer.Typer) -> None:
    add(app, cp)


@dataclass(frozen=True, slots=True)
class _Remote:
    session: str
    path: str


async def cp(
    asked: Asked,
    *,
    source: Annotated[str, typer.Argument(help="A local path, or SESSION:/PATH.")],
    target: Annotated[str, typer.Argument(help="The other of the two.")],
) -> None:
    """Copy a file, or what is in a folder, into a session or out of it.

    A file comes to be the file that is named, or to lie in the folder that is named with a `/` at its end;
    what is in a folder comes to lie in the folder that is named, which is made.
    """
    up, down = _remote(target), _remote(source)
    if (up is None) == (down is None):
        raise typer.BadParameter("one of the two is SESSION:/PATH, and the other one a local path")
    async with asked.client() as client:
        if up is not None:
            where = await _upload(client.sessions.named(up.session), Path(source), up.path)
        else:
            assert down is not None
            where = await _download(client.sessions.named(down.session), down.path, target)
    match asked.output:
        case Output.JSON:
            print_json({"from": source, "to": where if up is None else f"{up.session}:{where}"})
        case Output.NAME:
            print_names([where])
        case Output.TABLE:
            pass


def _remote(said: str) -> _Remote | None:
    """What is in a session. A local path with a colon can be written with a `/` before it."""
    session, colon, path = said.partition(":")
    if not colon or "/" in session or not session:
        return None
    if not path.startswith("/"):
        raise typer.BadParameter(f"a path in a session begins with `/`, as {session}:/{path}")
    return _Remote(session, path)


async def _upload(session: AsyncSession, local: Path, path: str) -> str:
    if path.endswith("/") and not await asyncio.to_thread(local.is_dir):
        path = posixpath.join(path, local.name)
    await session.upload(local, path.rstrip("/") or "/")
    return path


async def _download(session: AsyncSession, path: str, target: str) -> str:
    local = Path(target)
    if await _is_folder(session, path):
        await session.download(path.rstrip("/") + "/", local)
        return str(local)
    if target.endswith("/") or await asyncio.to_thread(local.is_dir):
        await asyncio.to_thread(lambda: local.mkdir(parents=True, exist_ok=True))
        local /= posixpath.basename(path)
    await session.download(path, local)
    return str(local)


async def _is_folder(session: AsyncSession, path: str) -> bool:
    """By what the folder above has under that name. A link is what it leads to."""
    if path.endswith("/"):
        return True
    above, name = posixpath.split(path)
    kind = next((each.type for each in await session.files(above or "/") if each.name == name), None)
    if kind != "symlink":
        return kind == "directory"
    try:
        await session.files(path)
    except (Conflict, NotFound):  # It leads to a file, or nowhere, as the copy is going to say.
        return False
    return True
