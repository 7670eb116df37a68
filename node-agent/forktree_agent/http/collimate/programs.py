"""What a client asks to be run, as one command of the guest.

Its protocol knows one stream of output, in the order in which it was written, so both go into one pipe there.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forktree_agent.control.identity import SEED_VARIABLE
from forktree_agent.http.collimate.wire import File, SandboxExec

INTERPRETER_VARIABLE: Final = "FORKTREE_INTERPRETER"
"""In a template's `env`: the program that `code` is for."""

_ONE_STREAM: Final = "exec 2>&1\n"
_AFTER_FILES: Final = 'exec 2>&1; /bin/sh -s || exit; exec /bin/sh -c "$1" sh "$2" </dev/null'
"""What writes the files comes as standard input: one argument may have 128 KiB, and files more."""

_SEEDED: Final = (
    f"import os, random, runpy, sys; random.seed(int(os.environ['{SEED_VARIABLE}'], 16)); "
    "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Python's own generator follows the seed, as it would where the kernel's did."""

_RUN_CODE: Final = f"""\
case ${{{INTERPRETER_VARIABLE}:=python3}} in
*python*) "${INTERPRETER_VARIABLE}" -c {shlex.quote(_SEEDED)} "$1" ;;
*) "${INTERPRETER_VARIABLE}" "$1" ;;
esac
code=$?
rm -f "$1"
exit $code"""


@dataclass(frozen=True, slots=True)
class Program:
    """A command of the guest."""

    argv: tuple[str, ...]
    stdin: str


def program(wanted: SandboxExec) -> Program:
    """The command that does all of `wanted`: its files first, and no command where one cannot be written."""
    files, code_file, command = list(wanted.files), "", ":"
    if wanted.command is not None:
        command = wanted.command
    elif wanted.commands is not None:
        command = "\n".join(shlex.join(argv) for argv in wanted.commands)
    elif wanted.code is not None:
        code_file = f"/tmp/forktree-code-{secrets.token_hex(8)}"
        files.append(File(path=code_file, content=wanted.code))
        command = _RUN_CODE
    if not files:
        return Program(("/bin/sh", "-c", _ONE_STREAM + command), "")
    return Program(("/bin/sh", "-c", _AFTER_FILES, "sh", command, code_file), writing(files))


def writing(files: Sequence[File]) -> str:
    """A script that writes `files` and ends with the first that cannot be written."""
    return "".join(_write(file) for file in files)


def _write(file: File) -> str:
    path, end = shlex.quote(file.path), f"END_{secrets.token_hex(16)}"  # Nobody can have written that.
    folder = file.path.rpartition("/")[0]
    made = f"mkdir -p {shlex.quote(folder)} || exit\n" if folder else ""
    content = file.content if file.content.endswith("\n") or not file.content else file.content + "\n"
    return f"{made}cat > {path} <<'{end}' || exit\n{content}{end}\n"
