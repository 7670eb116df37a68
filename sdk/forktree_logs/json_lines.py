"""One JSON object a line.

Our programs log `forked uid=%s children=%d`: an event, and fields whose names stand in the code and whose
values come beside it. So fields are taken from there, with their own types, and nothing is read back out of a
text that may hold anybody's words. What other libraries log is not of that form, and is one `message`.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

Value = str | int | float | bool | None
More = Callable[[], Mapping[str, str]]
"""What is so of a line beside what it says."""

OWN: Final = frozenset({"time", "level", "logger", "event", "detail", "exception", "trace_id", "span_id"})
"""What a line has by itself. No field may be called so."""
_TEMPLATES: Final = 1024
"""Far more than our programs have. Other libraries make some of theirs as they go."""

_CONVERSION: Final = re.compile(r"%(?:%|[-+ #0]*\d*(?:\.\d+)?[sradifgx])")
_EVENT: Final = re.compile(r"(?:[a-z_]|%s)+")
_FIELD: Final = re.compile(r"([a-z][a-z_]*)=(\S*)")
_DETAIL: Final = "\n%s"
"""What may come last: many lines, as of a stack."""


class JsonLines(logging.Formatter):
    """Makes them."""

    def __init__(self, more: More | None = None) -> None:
        super().__init__()
        self._more = more

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever was logged."""
        line: dict[str, Value] = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            **_said(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if self._more is not None:
            line.update(self._more())
        return json.dumps(line, allow_nan=False, separators=(",", ":"))


def fields_of(template: str) -> tuple[str, tuple[tuple[str, str, int], ...], bool] | None:
    """What a template of ours says: its event; each field's name, template and number of values; and whether
    a detail follows. None for one of another form."""
    has_detail = template.endswith(_DETAIL)
    event, *words = template.removesuffix(_DETAIL).split(" ")
    if _EVENT.fullmatch(event) is None:
        return None
    fields: list[tuple[str, str, int]] = []
    for word in words:
        found = _FIELD.fullmatch(word)
        if found is None or found[1] in OWN:
            return None
        fields.append((found[1], found[2], _values(found[2])))
    return event, tuple(fields), has_detail


_fields_of: Final = lru_cache(_TEMPLATES)(fields_of)


def _said(record: logging.LogRecord) -> dict[str, Value]:
    found = _fields_of(record.msg) if isinstance(record.msg, str) else None
    arguments = record.args if isinstance(record.args, tuple) else None
    if found is not None and record.args is None:
        arguments = ()
    if found is None or arguments is None:
        return {"message": _text(record)}
    event, fields, has_detail = found
    wanted = _values(event) + sum(count for _, _, count in fields) + has_detail
    if wanted != len(arguments):
        return {"message": _text(record)}
    rest = iter(arguments)
    said: dict[str, Value] = {"event": event % tuple(next(rest) for _ in range(_values(event)))}
    for name, template, count in fields:
        values = tuple(next(rest) for _ in range(count))
        said[name] = _value(template, values)
    if has_detail:
        said["detail"] = str(next(rest))
    return said


def _value(template: str, values: tuple[object, ...]) -> Value:
    """A field: the value itself where it is one, as precise as a text has it."""
    if len(values) == 1 and _CONVERSION.fullmatch(template):
        value = values[0]
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(template % value) if template[-1] == "f" and math.isfinite(value) else _number(value)
        return str(value)
    try:
        return template % values
    except (TypeError, ValueError):
        return " ".join(map(str, values))


def _number(value: float) -> float | str:
    """JSON knows neither infinity nor what is no number."""
    return value if math.isfinite(value) else str(value)


def _values(template: str) -> int:
    """How many values it takes."""
    return sum(1 for each in _CONVERSION.findall(template) if each != "%%")


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        return f"{record.msg} {record.args}"


def _rfc3339(seconds: float) -> str:
    at = datetime.fromtimestamp(seconds, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
