# Generated from sdk/forktree/_async/files.py by `make generate`; change that file.
"""Files of a session: read, written, and whole folders carried in and out as tar streams."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pydantic

from forktree._flavours import blocking
from forktree._results import FileEntry
from forktree._sync.handle import Handle
from forktree._sync.transport import Call
from forktree.errors import NotFound, UnexpectedAnswer

TRANSFER_SECONDS = 1800.0
"""For a file or folder of any size: 1 GiB is the most that an agent carries."""
SILENCE_SECONDS = 120.0
"""Without a byte; then the transfer is over. A guest may take long to put away what it has got."""
PIECE_BYTES = 1 << 20


class _Folder(pydantic.BaseModel):
    entries: list[FileEntry]


class Files(Handle):
    """What can be done with a session's files. Paths in it are absolute."""

    def read(self, path: str) -> bytes:
        """The whole file. Raises `NotFound`. For large ones there is `download`."""
        return self._transport.raw(self._file("GET", path))

    def write(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        """Make the file what `data` is, all at once: who reads it sees the old one or the new one.

        Folders above it are made. `mode`: its permissions; None: as before, or 0o644 for a new one.
        """
        content = data.encode() if isinstance(data, str) else data
        self._transport.send(self._file("PUT", path, mode=mode), lambda: _whole(content))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Delete the file, or the folder: an empty one, unless `recursive`. Where none is, that is done."""
        query = {"path": path} | ({"recursive": "1"} if recursive else {})
        try:
            self._transport.raw(self._transfer("DELETE", "files", query))
        except NotFound as err:
            if err.code != NotFound.code:
                raise

    def files(self, path: str) -> list[FileEntry]:
        """What is in the folder. Raises `NotFound`."""
        call = Call(method="GET", path=f"{self._path}/files/list", query={"path": path})
        return (self._transport.ask(call, _Folder)).entries

    def upload(self, local: Path | str, remote: str) -> None:
        """Carry a file to the path `remote`, or a folder with all that is in it into the folder `remote`."""
        source = Path(local)
        if not blocking(source.is_dir):
            mode = (blocking(source.stat)).st_mode & 0o777
            call = self._file("PUT", remote, mode=mode)
            self._transport.send(call, lambda: _of_file(lambda: source.open("rb")))
            return
        with tempfile.TemporaryFile() as packed:
            blocking(lambda: _pack(source, packed))
            call = self._transfer("PUT", "tar", {"path": remote})
            self._transport.send(call, lambda: _of_file(lambda: _again(packed)))

    def download(self, remote: str, local: Path | str) -> None:
        """Carry a file out to the path `local`, or with a `/` at the end of `remote` a folder's content into
        the folder `local`, which is made.

        What is there is replaced once all has come. Nothing of a session is trusted: what a folder holds
        comes to lie below `local` and nowhere else, without owners, devices and links that point out of it.
        """
        target = Path(local)
        if remote.endswith("/"):
            with tempfile.TemporaryFile() as packed:
                call = self._transfer("GET", "tar", {"path": remote.rstrip("/") or "/"})
                self._fetch(call, packed)
                try:
                    blocking(lambda: _unpack(packed, target))
                except tarfile.TarError as err:
                    sentence = f"the folder {remote.rstrip('/')} of {self.id} cannot be unpacked: {err}"
                    raise UnexpectedAnswer(sentence) from err
            return
        with ExitStack() as stack:
            partial = stack.enter_context(tempfile.NamedTemporaryFile(dir=target.parent, delete=False))
            stack.callback(lambda: Path(partial.name).unlink(missing_ok=True))
            self._fetch(self._file("GET", remote), partial.file)
            partial.close()
            blocking(lambda: Path(partial.name).replace(target))

    def _fetch(self, call: Call, into: IO[bytes]) -> None:
        """The whole answer in `into`, from its beginning also where it takes several attempts."""

        def begin() -> None:
            into.seek(0)
            into.truncate()

        self._transport.receive(call, begin, into.write, silence_seconds=SILENCE_SECONDS)
        into.flush()

    def _file(self, method: str, path: str, *, mode: int | None = None) -> Call:
        query = {"path": path} if mode is None else {"path": path, "mode": f"{mode:04o}"}
        return self._transfer(method, "files", query)

    def _transfer(self, method: str, what: str, query: dict[str, str]) -> Call:
        return Call(
            method=method,
            path=f"{self._path}/{what}",
            query=query,
            seconds=TRANSFER_SECONDS,
            attempt_seconds=TRANSFER_SECONDS,
            silence_seconds=SILENCE_SECONDS,
        )


def _whole(data: bytes) -> Generator[bytes]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _of_file(opened: Callable[[], IO[bytes]]) -> Generator[bytes]:
    with opened() as file:
        while piece := blocking(lambda: file.read(PIECE_BYTES)):
            yield piece


def _again(file: IO[bytes]) -> IO[bytes]:
    """The same file from its beginning, as one that may be closed."""
    again = os.fdopen(os.dup(file.fileno()), "rb")
    again.seek(0)
    return again


def _pack(folder: Path, into: IO[bytes]) -> None:
    with tarfile.open(fileobj=into, mode="w|") as tar:
        for each in sorted(folder.iterdir()):
            tar.add(each, arcname=each.name)
    into.flush()


def _unpack(packed: IO[bytes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    packed.seek(0)
    with tarfile.open(fileobj=packed, mode="r|") as tar:
        tar.extractall(folder, filter="data")
