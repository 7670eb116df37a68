"""Files of a session: read, written, removed, listed, and whole folders as tar."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Final
from urllib.parse import urlencode

from aiohttp import web

from forktree.models import Session
from forktree.wire_files import (
    MODE_HEADER,
    FileList,
    FileQuery,
    FileRemoved,
    FileRemoveQuery,
    FileWriteQuery,
    FileWritten,
    TarUnpacked,
)
from forktree_agent.http import bodies, executing, locating, streaming, transferring
from forktree_agent.http.allowing import while_allowed
from forktree_agent.http.requests import REQUEST_ID
from forktree_agent.http.streaming import Pieces
from forktree_agent.http.table import Asked, Raw, Right, Route
from forktree_agent.http.transferring import Readable, Received, Tool, Unpacked, Written, octal

BYTES: Final = Raw("application/octet-stream")
TAR: Final = Raw("application/x-tar")


async def _read(asked: Asked) -> web.StreamResponse:
    query = asked.query(FileQuery)
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        return await _relay(asked, node, "files", {"path": query.path})
    async with _tool(asked, session, start_by, "read", query.path) as tool:
        found = await tool.told(Readable)
        headers = {"Content-Type": BYTES.content_type, MODE_HEADER: octal(found.mode)}
        if found.bytes is not None:
            headers["Content-Length"] = str(found.bytes)

        async def tell(pieces: Pieces) -> None:
            left = found.bytes
            async with while_allowed(asked.still_may):
                async for data in tool.content():
                    if left is not None:
                        left -= len(data)
                        if left < 0:
                            raise ConnectionError("the session's file tool sent more than it said")
                    await pieces.send(data)
            if left:
                raise ConnectionError("the session's file tool sent less than it said")

        return await streaming.pieces(asked.request, tell, headers)


async def _write(asked: Asked) -> web.StreamResponse:
    query, received = asked.query(FileWriteQuery), Received(asked.request)
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        wanted = {"path": query.path} | ({"mode": query.mode} if query.mode else {})
        return await _relay(asked, node, "files", wanted, received)
    tool_for_it = _tool(asked, session, start_by, "write", query.path, query.mode)
    async with while_allowed(asked.still_may), tool_for_it as tool:
        await tool.take(received.pieces())
        await tool.told(Written)
    return await bodies.answer(FileWritten(path=query.path, bytes=received.bytes, sha256=received.sha256))


async def _remove(asked: Asked) -> web.StreamResponse:
    query = asked.query(FileRemoveQuery)
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        wanted = {"path": query.path, "recursive": str(int(query.recursive))}
        return await _relay(asked, node, "files", wanted)
    depth = "all" if query.recursive else "one"
    async with _tool(asked, session, start_by, "remove", query.path, depth) as tool:
        await tool.told(bool)
    return await bodies.answer(FileRemoved(path=query.path))


async def _list(asked: Asked) -> web.StreamResponse:
    query = asked.query(FileQuery)
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        return await _relay(asked, node, "files/list", {"path": query.path})
    async with _tool(asked, session, start_by, "list", query.path) as tool:
        entries = await transferring.listed(tool)
    body = FileList(path=query.path, entries=entries)
    return await bodies.answer(body, about_bytes=100 * len(entries))


async def _pack(asked: Asked) -> web.StreamResponse:
    query = asked.query(FileQuery)
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        return await _relay(asked, node, "tar", {"path": query.path})
    async with _tool(asked, session, start_by, "pack", query.path) as tool:
        await tool.told(bool)

        async def tell(pieces: Pieces) -> None:
            async with while_allowed(asked.still_may):
                async for data in tool.content():
                    await pieces.send(data)

        return await streaming.pieces(asked.request, tell, {"Content-Type": TAR.content_type})


async def _unpack(asked: Asked) -> web.StreamResponse:
    query, received = asked.query(FileQuery), Received(asked.request)
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        return await _relay(asked, node, "tar", {"path": query.path}, received)
    tool_for_it = _tool(asked, session, start_by, "unpack", query.path)
    async with while_allowed(asked.still_may), tool_for_it as tool:
        await tool.take(received.pieces())
        unpacked = await tool.told(Unpacked)
    body = TarUnpacked(path=query.path, entries=unpacked.entries, bytes=received.bytes)
    return await bodies.answer(body)


def _tool(asked: Asked, session: Session, start_by: float, *argv: str) -> AbstractAsyncContextManager[Tool]:
    request_id = asked.request[REQUEST_ID]
    return transferring.tool(asked.facade, session, *argv, start_by=start_by, request_id=request_id)


async def _relay(
    asked: Asked,
    node: str,
    what: str,
    query: Mapping[str, str],
    received: Received | None = None,
) -> web.StreamResponse:
    """The answer of the session's own node. Where something is sent, it comes when all of that has gone."""
    seconds = transferring.BEGIN_SECONDS if received is None else transferring.TRANSFER_SECONDS
    return await asked.relay(
        node,
        f"{what}?{urlencode(query)}",
        begin_by=asyncio.get_running_loop().time() + executing.START_SECONDS + seconds,
        body=None if received is None else received.pieces(),
    )


ROUTES: Final = (
    Route(
        method="GET",
        path="/sessions/{session_id}/files",
        summary="A file's content, its permissions in `X-Forktree-Mode`",
        handler=_read,
        rights=(Right("get", "sessions/files"),),
        query=FileQuery,
        answers={HTTPStatus.OK: (BYTES,)},
    ),
    Route(
        method="PUT",
        path="/sessions/{session_id}/files",
        summary="Write a file: all of it, or nothing",
        handler=_write,
        rights=(Right("create", "sessions/files"),),
        query=FileWriteQuery,
        body=BYTES,
        answers={HTTPStatus.OK: (FileWritten,)},
    ),
    Route(
        method="DELETE",
        path="/sessions/{session_id}/files",
        summary="Remove a file or a folder",
        handler=_remove,
        rights=(Right("delete", "sessions/files"),),
        query=FileRemoveQuery,
        answers={HTTPStatus.OK: (FileRemoved,)},
    ),
    Route(
        method="GET",
        path="/sessions/{session_id}/files/list",
        summary="What a folder holds",
        handler=_list,
        rights=(Right("get", "sessions/files"),),
        query=FileQuery,
        answers={HTTPStatus.OK: (FileList,)},
    ),
    Route(
        method="GET",
        path="/sessions/{session_id}/tar",
        summary="A folder with all it holds, or one file, as a tar archive",
        handler=_pack,
        rights=(Right("get", "sessions/files"),),
        query=FileQuery,
        answers={HTTPStatus.OK: (TAR,)},
    ),
    Route(
        method="PUT",
        path="/sessions/{session_id}/tar",
        summary="Unpack a tar archive into a folder",
        handler=_unpack,
        rights=(Right("create", "sessions/files"),),
        query=FileQuery,
        body=TAR,
        answers={HTTPStatus.OK: (TarUnpacked,)},
    ),
)
