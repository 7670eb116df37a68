"""Amounts of memory as manifests write them: `256Mi`, `1.5Gi`, `500M`, `1073741824`."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Annotated, Final

from pydantic import AfterValidator, Field
from pydantic.config import JsonDict

from forktree.models.schema import cel

_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
# The API server refuses what would not be read here. It cannot use named groups.
_IS_MEMORY: Final = r"self.matches('^[0-9]{1,18}([.][0-9]{1,9})?([kMGT]|[KMGT]i)?$')"
_HINT: Final = "write a number with a unit, like 256Mi or 2Gi"
_PATTERN: Final = re.compile(r"(?P<number>[0-9]{1,18}(\.[0-9]{1,9})?)(?P<unit>[kMGT]|[KMGT]i)?")


def parse_bytes(text: str) -> int:
    """Bytes of a quantity, rounded up to a whole byte. Raises `ValueError` that says what can be read."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no amount of memory: {_HINT}")
    amount = Decimal(match["number"]) * _UNITS[match["unit"] or ""]
    return int(amount.to_integral_value(rounding=ROUND_CEILING))


def format_bytes(count: int) -> str:
    """The shortest exact quantity in binary units: 268435456 becomes `256Mi`."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]}{unit}"
    return str(count)


def memory_between(low: str, high: str) -> JsonDict:
    """CEL for a quantity that must lie between two. One sentence tells both what is read and the bounds."""
    return cel(
        (
            f"{_IS_MEMORY} && quantity(self).compareTo(quantity('{low}')) >= 0"
            f" && quantity(self).compareTo(quantity('{high}')) <= 0",
            f"memory must be from {low} to {high}: {_HINT}",
        )
    )


def _checked(text: str) -> str:
    parse_bytes(text)
    return text


MemoryQuantity = Annotated[
    str,
    AfterValidator(_checked),
    Field(max_length=24, json_schema_extra=cel((_IS_MEMORY, f"this is no amount of memory: {_HINT}"))),
]
"""Kept as written; `parse_bytes` gives its value."""
