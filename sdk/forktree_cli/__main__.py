"""The program. Every command is added here; what it does stands in a module of its own subject."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from forktree_cli import (
    branching,
    copying,
    diagnosing,
    exporting,
    forwarding,
    listing,
    printed,
    running,
    states,
    watching,
)
from forktree_cli.asked import CONTEXT, KUBECONFIG, NAMESPACE, Common

_ABOUT = """Fork live environments, score the branches, keep the best.

Where the agent is comes from FORKTREE_URL, FORKTREE_CA and FORKTREE_TOKEN, else from the kubeconfig;
`forktree doctor` says what of that holds."""


def made() -> typer.Typer:
    """The whole program, to be run."""
    app = typer.Typer(
        help=_ABOUT,
        no_args_is_help=True,
        rich_markup_mode=None,  # Errors and help as plain text: they are also read by programs.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    for part in (
        listing,
        branching,
        running,
        copying,
        forwarding,
        printed,
        states,
        watching,
        exporting,
        diagnosing,
    ):
        part.add_to(app)
    return app


def _common(
    ctx: typer.Context,
    namespace: Annotated[str | None, NAMESPACE] = None,
    context: Annotated[str | None, CONTEXT] = None,
    kubeconfig: Annotated[Path | None, KUBECONFIG] = None,
) -> None:
    ctx.obj = Common(namespace=namespace, context=context, kubeconfig=kubeconfig)


def main() -> None:
    """Entry of both scripts."""
    called = Path(sys.argv[0]).name
    made()(prog_name="kubectl forktree" if called.startswith("kubectl-") else "forktree")


if __name__ == "__main__":
    main()
