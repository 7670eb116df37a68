"""What every command is told beside its own arguments; errors, signals and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from forktree import AsyncClient
from forktree.errors import ForktreeError
from forktree_cli.showing import clean

_WHICH: Final = "By itself that of FORKTREE_NAMESPACE or the kubeconfig."
NAMESPACE: Any = typer.Option("--namespace", "-n", help=_WHICH)
_LONG_NAMESPACE: Any = typer.Option("--namespace", help=_WHICH)
CONTEXT: Any = typer.Option(help="Of the kubeconfig.")
KUBECONFIG: Any = typer.Option(help="File to find the cluster by.")


class Output(StrEnum):
    """How a command says what it found."""

    TABLE = "table"
    JSON = "json"
    NAME = "name"
    """Names only, one a line."""


_OUTPUT: Any = typer.Option("--output", "-o", help="How to print what there is.")


COMMON: Final = ("namespace", "context", "kubeconfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Options that may stand before the command as well as behind it."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of a command beyond its own arguments."""

    common: Common
    output: Output

    @property
    def json(self) -> bool:
        return self.output is Output.JSON

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[AsyncClient]:
        async with client_of(self.common) as client:
            yield client


@asynccontextmanager
async def client_of(common: Common) -> AsyncGenerator[AsyncClient]:
    """Found as the SDK finds it. Raises `BadSettings`."""
    async with AsyncClient(
        namespace=common.namespace, kubeconfig=common.kubeconfig, context=common.context
    ) as client:
        yield client


Work = Callable[..., Coroutine[Any, Any, int | None]]
"""A command: called with an `Asked` and its own arguments, gives its exit code where that is not 0."""


def add(app: typer.Typer, work: Work, name: str | None = None, *, n_is_its_own: bool = False) -> None:
    """Make `work` a command with the options that all have. `n_is_its_own`: there `-n` is a number."""
    own = list(inspect.signature(work, eval_str=True).parameters.values())[1:]

    def run(ctx: typer.Context, **values: Any) -> None:
        common: Common = ctx.obj or Common()
        said = {key: values.pop(key) for key in COMMON}
        common = replace(common, **{key: value for key, value in said.items() if value is not None})
        asked = Asked(common=common, output=values.pop("output"))
        raise typer.Exit(carried_out(lambda: work(asked, **values)))

    keyword = inspect.Parameter.KEYWORD_ONLY
    namespace = _LONG_NAMESPACE if n_is_its_own else NAMESPACE
    parameters = [
        inspect.Parameter("ctx", keyword, annotation=typer.Context),
        *(each.replace(kind=keyword) for each in own),
        inspect.Parameter("output", keyword, default=Output.TABLE, annotation=Annotated[Output, _OUTPUT]),
        inspect.Parameter("namespace", keyword, default=None, annotation=Annotated[str | None, namespace]),
        inspect.Parameter("context", keyword, default=None, annotation=Annotated[str | None, CONTEXT]),
        inspect.Parameter("kubeconfig", keyword, default=None, annotation=Annotated[Path | None, KUBECONFIG]),
    ]
    # Typer reads a function's parameters by either of these.
    setattr(run, "__signature__", inspect.Signature(parameters))  # noqa: B010
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(name or work.__name__, help=inspect.getdoc(work))(run)


def carried_out(work: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """The exit code. What goes wrong is said in one sentence; SIGTERM and SIGHUP end it as Ctrl-C does."""
    try:
        return asyncio.run(_until_told_to_end(work())) or 0
    except _Ended as ended:
        return 128 + ended.signal
    except ForktreeError as err:
        return failed(err.message)
    except OSError as err:
        if err.errno == errno.EPIPE:  # Whoever read this has gone, as `head` does.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return failed(f"{err.filename}: {err.strerror}" if err.filename and err.strerror else str(err))
    except typer.BadParameter:
        raise  # A usage error, of which typer knows what to say.
    except Exception as err:
        if os.environ.get("FORKTREE_DEBUG"):
            raise
        return failed(f"this is a defect of forktree ({err!r}); with FORKTREE_DEBUG=1 it says where")


def failed(sentence: str) -> int:
    """Say what is wrong, and give the exit code for it."""
    typer.echo(f"forktree: {clean(sentence)}", err=True)
    return 1


class _Ended(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


async def _until_told_to_end(work: Coroutine[Any, Any, int | None]) -> int | None:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work, name="command")
    told: list[int] = []

    def end(number: int) -> None:
        told.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if told:
            raise _Ended(told[0]) from None
        raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(number)


def pairs(option: str, values: list[str]) -> dict[str, str]:
    """Of options that are `NAME=VALUE`. Ends the program with a usage error for any other."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{option} takes NAME=VALUE, not {value!r}")
        found[name] = rest
    return found
