"""Archives of layers, read as streams: first what they say goes into the tree, then content is copied.

Everything in an archive was written by a stranger. What is read is counted, and more than the image may have
ends with one sentence; so does what no image has a use for.
"""

from __future__ import annotations

import gzip
import io
import math
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, Self, cast

from backports import zstd

from forktree_agent.images.unpacking.tree import File, Folder, Pipe, Refused, Symlink, Tree, shown

PIECE_BYTES = 1 << 20
_HEADER_BYTES = 1 << 20
"""Of a name or of attributes that an archive has in an entry of their own."""
_HEADER_KINDS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_WINDOW_LOG_MAX = 27
"""128 MiB, what `zstd` itself takes without being told to take more."""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BROKEN = (tarfile.TarError, EOFError, zlib.error, zstd.ZstdError)
_ID_MAX = (1 << 32) - 2
_TIME_MAX = 1 << 40
_WHITEOUT, _OPAQUE = b".wh.", b".wh..wh..opq"


@dataclass(slots=True)
class Allowance:
    """What all layers of an image may come to together, in each reading."""

    bytes: int
    entries: int
    read_bytes: int = field(default=0, init=False)
    read_entries: int = field(default=0, init=False)

    def take(self, count: int) -> None:
        self.read_bytes += count
        self.expect(0)

    def expect(self, count: int) -> None:
        """So many more bytes are said to come."""
        if self.read_bytes + count > self.bytes:
            raise Refused(f"the image unpacks to more than the {self.bytes} bytes that it may have")

    def take_entry(self) -> None:
        self.read_entries += 1
        if self.read_entries > self.entries:
            raise Refused(f"the image has more than {self.entries} entries")


class _Member(tarfile.TarInfo):
    """An entry whose header is checked before anything is done with it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0 or (member.type in _HEADER_KINDS and member.size > _HEADER_BYTES):
            raise Refused(f"an archive has a header of {member.size} bytes")
        return member

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            member = super().fromtarfile(tarfile)
        except _HEADER_ERROR as err:
            if type(err).__name__ in {"EOFHeaderError", "EmptyHeaderError"}:
                raise  # The end of an archive, with or without its mark.
            # After the first entry it would be taken for the end as well.
            raise Refused(f"an archive is broken: {err}") from err
        if member.size < 0:
            raise Refused(f"an archive has an entry of {member.size} bytes")
        return member


_HEADER_ERROR = tarfile.HeaderError


class _Counted(io.RawIOBase):
    """A stream of which no more is read than is allowed."""

    def __init__(self, stream: IO[bytes], allowance: Allowance) -> None:
        self._stream = stream
        self._allowance = allowance

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(PIECE_BYTES if size < 0 else min(size, PIECE_BYTES))
        self._allowance.take(len(data))
        return data


def read_layers(layers: Sequence[int], tree: Tree, allowance: Allowance) -> None:
    """The first reading: enter what the archives in these descriptors say, lowest first. Raises `Refused`."""
    for layer, descriptor in enumerate(layers):
        with _archive(descriptor, allowance) as archive:
            for index, member in _members(archive, allowance):
                _enter(tree, member, layer, index)


def copy_files(
    layers: Sequence[int], files: Sequence[File], writer: Callable[[File], Callable[[bytes], None]],
    allowance: Allowance,
) -> None:  # fmt: skip
    """The second: hand every file's content to its writer. Raises `Refused`."""
    wanted: dict[int, dict[int, File]] = {}
    for each in files:
        if each.member >= 0 and each.size:
            wanted.setdefault(each.layer, {})[each.member] = each
    for layer, descriptor in enumerate(layers):
        if layer not in wanted:
            continue
        with _archive(descriptor, allowance) as archive:
            _copy(archive, wanted[layer], writer, allowance)


def _copy(
    archive: tarfile.TarFile,
    wanted: Mapping[int, File],
    writer: Callable[[File], Callable[[bytes], None]],
    allowance: Allowance,
) -> None:
    last = max(wanted)
    for index, member in _members(archive, allowance):
        node = wanted.get(index)
        if node is not None:
            write, left = writer(node), node.size
            content = archive.extractfile(member)
            while left and content is not None:
                piece = content.read(min(left, PIECE_BYTES))
                if not piece:
                    break
                write(piece)
                left -= len(piece)
            if left:
                raise Refused("an archive ends in the middle of a file")
        if index >= last:
            return


@contextmanager
def _archive(descriptor: int, allowance: Allowance) -> Generator[tarfile.TarFile]:
    """A layer's archive, from its beginning. What is wrong with it comes out as `Refused`."""
    try:
        with open(descriptor, "rb", closefd=False) as compressed:
            compressed.seek(0)
            stream = _Counted(_expanded(compressed), allowance)
            with tarfile.open(
                fileobj=cast("IO[bytes]", stream),
                mode="r|",
                tarinfo=_Member,
                encoding="utf-8",
                errors="surrogateescape",
            ) as archive:
                yield archive
    except (*_BROKEN, OSError, ValueError, OverflowError) as err:
        raise Refused(f"a layer cannot be read: {err}") from err
    except RecursionError:
        raise Refused("an archive has headers of headers without end") from None
    except MemoryError:
        raise Refused("the image wants more memory to be unpacked than it may have") from None


def _expanded(compressed: IO[bytes]) -> IO[bytes]:
    """By what it begins with: media types are not always right."""
    magic = compressed.read(4)
    compressed.seek(0)
    if magic.startswith(_GZIP):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=compressed, mode="rb"))
    if magic == _ZSTD:
        options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX}
        return cast(
            "IO[bytes]", zstd.ZstdFile(cast("io.BufferedReader", compressed), mode="rb", options=options)
        )
    return compressed


def _members(archive: tarfile.TarFile, allowance: Allowance) -> Iterator[tuple[int, tarfile.TarInfo]]:
    index = 0
    while (member := archive.next()) is not None:
        allowance.take_entry()
        # Before it is passed over: `tarfile` would go on for as long as that says, also behind the end.
        allowance.expect(member.size)
        yield index, member
        index += 1
        cast("Any", archive).members = []  # It would keep them all.


def _enter(tree: Tree, member: tarfile.TarInfo, layer: int, index: int) -> None:
    path = _bytes(member.name)
    folder, _, name = path.rstrip(b"/").rpartition(b"/")
    if name == _OPAQUE:
        tree.make_opaque(folder, layer)
    elif name.startswith(_WHITEOUT):
        hidden = name.removeprefix(_WHITEOUT)
        if hidden.startswith(_WHITEOUT) or hidden in {b"", b".", b".."}:
            return  # Marks of a storage driver's own.
        tree.hide(folder + b"/" + hidden, layer)
    elif member.issparse():
        raise Refused(f"{shown(path)} is a sparse file, which images are not read with")
    elif member.islnk():
        tree.link(path, _bytes(member.linkname), layer)
    else:
        _enter_new(tree, path, member, layer, index)


def _enter_new(tree: Tree, path: bytes, member: tarfile.TarInfo, layer: int, index: int) -> None:
    mode, mtime = member.mode & 0o7777, _time(member.mtime)
    uid, gid = _owner(path, member.uid), _owner(path, member.gid)
    if member.isdir():
        tree.put(path, Folder(mode=mode, uid=uid, gid=gid, mtime=mtime, layer=layer))
    elif member.issym():
        target = _bytes(member.linkname)
        if not 0 < len(target) < 4096 or b"\0" in target:
            raise Refused(f"symbolic link {shown(path)} has no target that a link can have")
        tree.put(path, Symlink(mode=0o777, uid=uid, gid=gid, mtime=mtime, layer=layer, target=target))
    elif member.isfifo():
        tree.put(path, Pipe(mode=mode, uid=uid, gid=gid, mtime=mtime, layer=layer))
    elif member.isreg():
        size = member.size
        tree.put(path, File(mode=mode, uid=uid, gid=gid, mtime=mtime, layer=layer, size=size, member=index))
    elif not member.isdev():
        raise Refused(f"{shown(path)} is of kind {member.type!r}, which images do not have")


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _owner(path: bytes, number: int) -> int:
    if not 0 <= number <= _ID_MAX:
        raise Refused(f"{shown(path)} belongs to {number}, which is no id")
    return number


def _time(seconds: float) -> int:
    return int(min(max(seconds, 0), _TIME_MAX)) if math.isfinite(seconds) else 0
