"""What the commands of branches printed, kept while their Fork exists: also when the machine is gone.

On tmpfs beside the journal, so it survives the agent and not the node, like all that it speaks of. A write is
a copy in memory of at most `KEPT_BYTES` for each stream, some hundred microseconds, so nothing here waits.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Self

from forktree.errors import ForktreeError
from forktree.models import Reason, Uid
from forktree_agent.control.branch_records import Step

log = logging.getLogger(__name__)

KEPT_BYTES: Final = 512 << 10
"""The last so many of each stream: 1 MiB of a command."""
_UNFINISHED: Final = ".new"


class LogLost(ForktreeError):
    """The output could not be kept: the directory is full, gone or not ours."""

    reason: ClassVar[Reason] = Reason.INTERNAL


@dataclass(frozen=True, slots=True)
class Printed:
    """What one command printed, as far as it is kept."""

    stdout: bytes
    stderr: bytes


class BranchLogs:
    """One file for each command, below a directory for each Fork."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def opened(cls, directory: Path, known: Collection[Uid]) -> Self:
        """The logs in `directory`, made if missing. Removes those of Forks that are not `known` any more."""
        logs = cls(directory)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = {entry.name for entry in directory.iterdir()}
        except OSError as err:
            raise LogLost(f"the logs of branches in {directory} cannot be opened: {err}") from err
        for name in names - set(known):
            logs.remove(Uid(name))
        return logs

    def put(self, fork: Uid, index: int, step: Step, printed: Printed) -> None:
        """Keep what a command printed. It is there when this returns. Raises `LogLost`."""
        path = self._path(fork, index, step)
        unfinished = path.with_name(path.name + _UNFINISHED)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                file.write(len(printed.stdout).to_bytes(8, "little"))
                file.write(printed.stdout)
                file.write(printed.stderr)
            unfinished.rename(path)
        except OSError as err:
            raise LogLost(f"what a branch printed cannot be kept in {path}: {err}") from err

    def get(self, fork: Uid, index: int, step: Step) -> Printed | None:
        """What a command printed; None where nothing was kept. Raises `LogLost`."""
        path = self._path(fork, index, step)
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as err:
            raise LogLost(f"what a branch printed cannot be read from {path}: {err}") from err
        end = 8 + int.from_bytes(content[:8], "little")
        return Printed(content[8:end], content[end:])

    def remove(self, fork: Uid) -> None:
        """Forget all that the branches of a Fork printed. Fine where there is nothing."""
        try:
            shutil.rmtree(self._directory / fork)
        except FileNotFoundError:
            pass
        except OSError as err:  # Memory that is not given back before the next agent starts.
            log.warning("branch_logs_stay fork=%s error=%r", fork, str(err))

    def _path(self, fork: Uid, index: int, step: Step) -> Path:
        return self._directory / fork / f"{index}.{step}"
