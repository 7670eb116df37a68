"""Records of the journal as values of a type, for whoever keeps its own kinds there."""

from __future__ import annotations

from typing import TypeVar, cast

import msgspec

from forktree_agent.journal import Journal, Record

RecordType = TypeVar("RecordType", bound=msgspec.Struct)


def to_journal(record: msgspec.Struct) -> Record:
    return cast("Record", msgspec.to_builtins(record))  # A struct becomes an object.


def load_all(journal: Journal, kind: str, record_type: type[RecordType]) -> dict[str, RecordType]:
    """Records of one kind by key. One that does not fit its type is put aside, and what it named is lost."""
    found: dict[str, RecordType] = {}
    for key, value in journal.load(kind).items():
        record = _fitting(journal, kind, key, value, record_type)
        if record is not None:
            found[key] = record
    return found


def load_one(journal: Journal, kind: str, key: str, record_type: type[RecordType]) -> RecordType | None:
    """The record, or None where there is none that fits its type."""
    value = journal.get(kind, key)
    return None if value is None else _fitting(journal, kind, key, value, record_type)


def _fitting(
    journal: Journal, kind: str, key: str, value: Record, record_type: type[RecordType]
) -> RecordType | None:
    try:
        return msgspec.convert(value, record_type)
    except (msgspec.ValidationError, RecursionError) as err:  # Damaged, or of another version of the agent.
        journal.put_aside(kind, key, str(err))
        return None
