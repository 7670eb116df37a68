"""`create`, `fork`, `rollback` and `prune`: how trees come and go."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from forktree import AsyncFork, Branch, ForkOptions
from forktree_cli.asked import Asked, Output, add, pairs
from forktree_cli.naming import ENV, LABEL, SESSION, SESSIONS, TEMPLATE
from forktree_cli.showing import console, dumped, number, print_json, print_names, table


def add_to(app: typer.Typer) -> None:
    add(app, create)
    add(app, fork, n_is_its_own=True)
    add(app, rollback)
    add(app, prune)


async def create(
    asked: Asked,
    *,
    template: Annotated[str, TEMPLATE],
    name: Annotated[str | None, typer.Option(help="Where there is one of that name, it is that one.")] = None,
    label: Annotated[list[str] | None, LABEL] = None,
    seed: Annotated[str | None, typer.Option(help="FORKTREE_SEED in its environment.")] = None,
    env: Annotated[list[str] | None, ENV] = None,
) -> None:
    """Make a session of a template, and print its name once it runs."""
    labels, variables = pairs("--label", label or []), pairs("--env", env or [])
    async with asked.client() as client:
        made = await client.sessions.create(
            template, name=name, labels=labels or None, seed=seed, env=variables or None
        )
    if asked.json:
        print_json(dumped(made.info))
    else:
        print_names([made.id])


async def fork(
    asked: Asked,
    *,
    session: Annotated[str, SESSION],
    n: Annotated[int | None, typer.Option("-n", min=0, help="How many children.")] = None,
    branch: Annotated[
        list[str] | None,
        typer.Option("--branch", "-b", help="NAME=COMMAND: a child of that name that runs it. Repeatable."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="A fork of that name that is there is meant.")] = None,
    label: Annotated[list[str] | None, LABEL] = None,
    seed: Annotated[str | None, typer.Option(help="What the seeds of the children follow from.")] = None,
    seed_mode: Annotated[
        Literal["Fresh", "Common", "Derived"] | None, typer.Option(help="How they follow.")
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(help="Run in each child: the number on its last line is its score."),
    ] = None,
    keep_top: Annotated[int | None, typer.Option(min=1, help="Delete all but so many, the best.")] = None,
    keep_point: Annotated[bool, typer.Option(help="Hold the instant though no child be left.")] = False,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds for each of these commands.")] = 60,
    wait: Annotated[
        bool, typer.Option("--wait", help="Come back when all commands are done, scored and pruned.")
    ] = False,
) -> None:
    """Fork a session, and print its children once they run."""
    branches = [
        Branch(name=each, command=command or None, timeout=timeout)
        for each, command in pairs("--branch", branch or []).items()
    ]
    options: ForkOptions = {"complete": wait}
    if branches:
        options["branches"] = branches
    if name is not None:
        options["name"] = name
    if label:
        options["labels"] = pairs("--label", label)
    if seed is not None:
        options["seed"] = seed
    if seed_mode is not None:
        options["seed_mode"] = seed_mode
    if score is not None:
        options["score"], options["score_timeout"] = score, timeout
    if keep_top is not None:
        options["keep_top"] = keep_top
    if keep_point:
        options["keep_point"] = True
    async with asked.client() as client:
        made = await client.sessions.named(session).fork(n, **options)
    show_fork(asked, made)


async def rollback(
    asked: Asked,
    *,
    session: Annotated[str, SESSION],
    checkpoint: Annotated[str, typer.Argument(help="Its name.")],
    release: Annotated[bool, typer.Option("--release", help="End the session's own machine then.")] = False,
) -> None:
    """Go on from a checkpoint: print the name of a new session that starts there."""
    async with asked.client() as client:
        made = await client.sessions.named(session).rollback(checkpoint, release=release)
    if asked.json:
        print_json(dumped(made.info))
    else:
        print_names([made.id])


async def prune(asked: Asked, sessions: Annotated[list[str], SESSIONS]) -> None:
    """Delete sessions and all below them."""
    async with asked.client() as client:
        # What is not there is deleted already: but a name that was mistyped is to be told.
        found = [await client.sessions.get(each) for each in dict.fromkeys(sessions)]
        await client.prune(found)
    names = [each.id for each in found]
    match asked.output:
        case Output.JSON:
            print_json([{"session_id": each, "deleted": True} for each in names])
        case Output.NAME:
            print_names(names)
        case Output.TABLE:
            print_names(f"{each} deleted" for each in names)


def show_fork(asked: Asked, made: AsyncFork) -> None:
    facts = made.facts
    match asked.output:
        case Output.JSON:
            print_json(dumped(facts))
        case Output.NAME:
            print_names(each.id for each in made)
        case Output.TABLE:
            rows = [
                (each.session_id + (" ★" if each.session_id == facts.best_session_id else ""), each.branch,
                 None if each.exit_code is None else str(each.exit_code), number(each.score), each.reason)
                for each in facts.children
            ]  # fmt: skip
            console().print(table(("SESSION", "BRANCH", "EXIT", "SCORE", "WHY"), rows))
