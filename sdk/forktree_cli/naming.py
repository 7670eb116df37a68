"""Arguments and options that several commands have, and what a shell completes names to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import typer

from forktree import AsyncClient
from forktree.errors import ForktreeError
from forktree_cli.asked import COMMON, Common, client_of

_SECONDS = 3.0
"""A shell that waits for completions waits for its user."""


def _session_names(ctx: typer.Context, incomplete: str) -> list[str]:
    async def names(client: AsyncClient) -> list[str]:
        return [each.id for each in await client.sessions.list()]

    return _completed(ctx, names, incomplete)


def _template_names(ctx: typer.Context, incomplete: str) -> list[str]:
    async def names(client: AsyncClient) -> list[str]:
        return [each.template_id for each in await client.templates.list()]

    return _completed(ctx, names, incomplete)


def _completed(
    ctx: typer.Context, names: Callable[[AsyncClient], Awaitable[list[str]]], incomplete: str
) -> list[str]:
    above = ctx.find_root().params
    common = Common(**{key: ctx.params.get(key) or above.get(key) for key in COMMON})

    async def asked() -> list[str]:
        async with asyncio.timeout(_SECONDS), client_of(common) as client:
            return await names(client)

    try:
        return [name for name in asyncio.run(asked()) if name.startswith(incomplete)]
    except (ForktreeError, OSError, TimeoutError):
        return []  # A shell has no place for a sentence.


SESSION: Any = typer.Argument(autocompletion=_session_names, help="Its name.")
SESSIONS: Any = typer.Argument(autocompletion=_session_names, help="Their names.")
MAYBE_SESSIONS: Any = typer.Argument(autocompletion=_session_names, help="Their names; by itself all.")
TEMPLATE: Any = typer.Argument(autocompletion=_template_names, help="Its name.")
ENV: Any = typer.Option("--env", "-e", help="NAME=VALUE in its environment. Repeatable.")
LABEL: Any = typer.Option("--label", "-l", help="NAME=VALUE. Repeatable.")
