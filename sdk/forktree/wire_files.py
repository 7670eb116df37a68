"""Bodies and queries around files in a session. Files themselves travel as they are, and folders as tar."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from forktree.wire import Answer, Query

MAX_TRANSFER_BYTES = 1 << 30
"""Of one file or archive, either way."""

MODE_HEADER = "X-Forktree-Mode"
"""Of an answer that is a file: its permissions, octal."""


def _path(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("must be an absolute path: begin it with /")
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    return value


FilePath = Annotated[str, Field(max_length=4096), AfterValidator(_path)]


class FileQuery(Query):
    path: FilePath
    """Absolute, in the session. Links are followed."""


class FileWriteQuery(Query):
    path: FilePath
    """Absolute, in the session. Folders above it are made; through a link, what that leads to is written."""
    mode: str = Field(default="", pattern="^(|[0-7]{3,4})$")
    """Its permissions, octal; unset: as before, or 0644 for a new file."""


class FileRemoveQuery(Query):
    path: FilePath
    """Absolute, in the session. A link is removed itself."""
    recursive: bool = False
    """A folder with all it holds; else only an empty one."""


class FileWritten(Answer):
    """The file has its new content, all of it."""

    path: str
    bytes: int
    sha256: str
    """Of what was received."""


class FileRemoved(Answer):
    path: str
    removed: Literal[True] = True


class FileEntry(Answer):
    name: str
    type: str
    """`file`, `directory`, `symlink`, `fifo`, `socket` or `device`."""
    bytes: int
    mode: str
    """Permissions, octal."""
    mtime: int
    """Last change of its content, in seconds since 1970."""


class FileList(Answer):
    """What a folder holds, in order of names."""

    path: str
    entries: tuple[FileEntry, ...]


class TarUnpacked(Answer):
    """All of the archive is in the folder."""

    path: str
    entries: int
    bytes: int
    """Of the archive."""
