"""What an agent must know after its own death: small records on tmpfs, one file each.

A record is written before the thing it names exists and removed after the thing is gone, so a restarted
agent finds at least what there is. The directory lives in memory: it survives the agent but not the node,
like the machines it speaks of. No write is forced to a disk, and none takes more than some microseconds,
so all methods are synchronous and may stand where an `await` may not.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self, TypeAlias, cast

from forktree.errors import ForktreeError
from forktree.models.reasons import Reason

log = logging.getLogger(__name__)

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Record: TypeAlias = "dict[str, Json]"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}", re.ASCII)
_RECORD_SUFFIX = ".json"
_UNFINISHED_SUFFIX = ".new"
_DAMAGED_SUFFIX = ".damaged"


class JournalError(ForktreeError):
    """A record could not be written, read or removed: the directory is full, gone or not ours.

    What was to be written down first was not begun.
    """

    reason: ClassVar[Reason] = Reason.INTERNAL


class Journal:
    """Records by kind and key. Kinds and keys are 1 to 200 of [A-Za-z0-9_.-].

    A write is a rename, so a reader finds the old record or the new one and never a half.
    """

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._directory = directory
        self._boot_id = boot_id

    @classmethod
    def opened(cls, directory: Path, boot_id: str) -> Self:
        """The journal in `directory`, made if missing. Drops what another boot or a broken write left.

        The caller holds the state directory's lock: two agents must not share a journal.
        """
        journal = cls(directory, boot_id)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for leftover in directory.glob(f"*/*{_UNFINISHED_SUFFIX}"):
                leftover.unlink(missing_ok=True)
            for kind in sorted(entry.name for entry in directory.iterdir() if entry.is_dir()):
                journal.load(kind)  # Removes records of another boot as it meets them.
        except OSError as err:
            raise JournalError(f"journal {directory} cannot be opened: {err}") from err
        return journal

    def put(self, kind: str, key: str, record: Mapping[str, Json]) -> None:
        """Write `record`, replacing the one that was there. It is there when this returns.

        Raises `JournalError`; the old record is then still there.
        """
        path = self._path(kind, key)
        unfinished = path.with_name(path.name + _UNFINISHED_SUFFIX)
        text = json.dumps({"boot": self._boot_id, "record": record}, separators=(",", ":"))
        try:
            try:
                unfinished.write_text(text, encoding="utf-8")
            except FileNotFoundError:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                unfinished.write_text(text, encoding="utf-8")
            unfinished.rename(path)
        except OSError as err:
            with suppress(OSError):  # What was written of it takes room where there is none.
                unfinished.unlink(missing_ok=True)
            raise JournalError(
                f"the node's journal cannot be written: record {kind}/{key}: {err.strerror}: free space in "
                "the state directory"
            ) from err

    def get(self, kind: str, key: str) -> Record | None:
        """The record, or None where there is none."""
        return self._read(self._path(kind, key))

    def remove(self, kind: str, key: str) -> None:
        """Forget a record. Fine where there is none. Raises `JournalError`."""
        try:
            self._path(kind, key).unlink(missing_ok=True)
        except NotADirectoryError:
            pass
        except OSError as err:
            raise JournalError(f"record {kind}/{key} cannot be removed: {err}") from err

    def put_aside(self, kind: str, key: str, why: str) -> None:
        """Have a record that says nothing to its reader lie where a person finds it and no agent does."""
        _put_aside(self._path(kind, key), why)

    def load(self, kind: str) -> dict[str, Record]:
        """All records of a kind by key, in the order of the keys."""
        folder = self._path(kind, "any").parent
        try:
            names = sorted(os.listdir(folder))  # noqa: PTH208 (a missing folder must be an error here)
        except FileNotFoundError:
            return {}
        found: dict[str, Record] = {}
        for name in names:
            if name.endswith(_RECORD_SUFFIX):
                record = self._read(folder / name)
                if record is not None:
                    found[name.removesuffix(_RECORD_SUFFIX)] = record
        return found

    def _path(self, kind: str, key: str) -> Path:
        for name in (kind, key):
            if _NAME.fullmatch(name) is None or name in {".", ".."}:
                raise ValueError(f"{name!r} is no name of a journal record")
        return self._directory / kind / (key + _RECORD_SUFFIX)

    def _read(self, path: Path) -> Record | None:
        """The record in a file. One of another boot is removed, one that makes no sense is put aside."""
        try:
            envelope: object = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as err:
            raise JournalError(f"record {path} cannot be read: {err}") from err
        except (ValueError, RecursionError) as err:  # Neither JSON nor even text, or nested without end.
            _put_aside(path, str(err))
            return None
        if not isinstance(envelope, dict):
            _put_aside(path, "not an object")
            return None
        fields = cast("dict[str, object]", envelope)
        record = fields.get("record")
        if not isinstance(record, dict) or not isinstance(fields.get("boot"), str):
            _put_aside(path, "not a record")
            return None
        if fields["boot"] != self._boot_id:
            path.unlink(missing_ok=True)
            log.info("record_of_another_boot path=%s", path)
            return None
        return cast("Record", record)


def _put_aside(path: Path, why: str) -> None:
    """Keep a damaged record for a person to look at, where no agent will meet it again."""
    log.warning("record_damaged path=%s why=%r", path, why)
    try:
        path.rename(path.with_name(path.name + _DAMAGED_SUFFIX))
    except OSError as err:
        log.warning("record_not_put_aside path=%s error=%r", path, str(err))
