"""Strings of the API with their bounds. The API server needs a bound on all that a CEL rule looks at."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StringConstraints

OBJECT_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
"""As Kubernetes names objects. Nothing else may become part of a path: `..` would lead elsewhere."""
ObjectName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=OBJECT_NAME_PATTERN)]
"""The name of another object in the same namespace."""
ObjectUid = Annotated[str, StringConstraints(min_length=1, max_length=64)]
EnvName = Annotated[str, StringConstraints(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
EnvValue = Annotated[str, StringConstraints(max_length=4096)]
Seed = Annotated[str, StringConstraints(max_length=256)]
"""What a program seeds its random generator from. Any text; it is handed on as it is."""
Argument = Annotated[str, StringConstraints(max_length=16384)]
Argv = Annotated[tuple[Argument, ...], Field(max_length=256)]
DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
PORT_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""It begins with a letter, so that no name is a number."""
PortName = Annotated[str, StringConstraints(max_length=15, pattern=PORT_NAME_PATTERN)]
BranchName = Annotated[str, StringConstraints(max_length=63, pattern=DNS_LABEL_PATTERN)]
LabelValue = Annotated[
    str, StringConstraints(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
]

_OBJECT_NAME = re.compile(OBJECT_NAME_PATTERN.removeprefix("^").removesuffix("$"))
_LABEL = re.compile(DNS_LABEL_PATTERN.removeprefix("^").removesuffix("$"))


def is_object_name(text: str) -> bool:
    """Whether an object can be called so. What comes from a user is asked this before it joins a path."""
    return len(text) <= 253 and _OBJECT_NAME.fullmatch(text) is not None


def is_dns_label(text: str, longest: int = 63) -> bool:
    """Whether it is a DNS label of at most `longest` characters, as namespaces and our objects are named."""
    return len(text) <= longest and _LABEL.fullmatch(text) is not None
