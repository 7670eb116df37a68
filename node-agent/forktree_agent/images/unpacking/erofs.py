"""A tree written as an EROFS image: uncompressed, so that its size and every place in it are known ahead.

An image is one block with the superblock, then all inodes, then what does not fit beside them. The inode of a
file with a short end has that end behind it, in the same block (`FLAT_INLINE`); all else is in whole blocks.
Extended attributes are not kept. The format is that of fs/erofs/erofs_fs.h in Linux; what is used here has
been in it since 5.4.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass

from forktree_agent.images.unpacking.tree import File, Folder, Node, Refused, Symlink, Tree

BLOCK = 4096
_SLOT = 32
"""What a number of an inode counts."""
_INODE_BYTES = 64
_INLINE_BYTES = 2048
"""The longest end that is put behind its inode. A longer one would leave more unused than a block does."""
_BLOCKS_MAX = 1 << 32
_MAGIC = 0xE0F5E1E2
_SUPERBLOCK_AT = 1024
_META_BLOCK = 1
_FIRST_NUMBER = 2
"""The root's. Number 0 would be taken for an entry that was deleted."""
_SUPERBLOCK = struct.Struct("<IIIBBHQQIIII16s16sI44x")
_INODE = struct.Struct("<HHHHQIIIIQIII12x")
_ENTRY = struct.Struct("<QHBx")
_EXTENDED_PLAIN, _EXTENDED_INLINE = 0b001, 0b101
_REGULAR, _FOLDER, _PIPE, _SYMLINK = 1, 2, 5, 7
"""Kinds of entries of folders."""
_NO_BLOCK = 0xFFFFFFFF


@dataclass(slots=True)
class _Place:
    """Where a node is."""

    number: int
    size: int
    tail: int
    """Bytes behind the inode; 0: none."""
    block: int = _NO_BLOCK
    parent: int = 0


class Layout:
    """Where everything goes. Made of a finished tree, which must not change any more."""

    def __init__(self, tree: Tree) -> None:
        self._places: dict[int, _Place] = {}
        self._nodes: list[Node] = []
        self._end = _META_BLOCK * BLOCK + _FIRST_NUMBER * _SLOT
        self._walk(tree.root)
        self.files: tuple[File, ...] = tuple(each for each in self._nodes if isinstance(each, File))
        block = -(-self._end // BLOCK)
        for node in self._nodes:
            place = self._places[id(node)]
            blocks = -(-(place.size - place.tail) // BLOCK)
            if blocks:
                place.block = block
                block += blocks
        if block >= _BLOCKS_MAX:
            raise Refused("the image is larger than 16 TiB")
        self._blocks = block
        self._root = tree.root

    @property
    def size_bytes(self) -> int:
        return self._blocks * BLOCK

    def _walk(self, root: Folder) -> None:
        """Give every node its number, each folder before what it has."""
        ahead: list[tuple[Node, int]] = [(root, 0)]
        while ahead:
            node, parent = ahead.pop()
            if id(node) in self._places:
                continue  # Another name of a file.
            place = self._placed(node)
            place.parent = parent or place.number
            self._places[id(node)] = place
            self._nodes.append(node)
            if isinstance(node, Folder):
                # Sorted, so that equal trees give equal images.
                names = sorted(node.children, reverse=True)
                ahead.extend((node.children[name], place.number) for name in names)

    def _placed(self, node: Node) -> _Place:
        size = _size(node)
        tail = size % BLOCK
        if tail > _INLINE_BYTES:
            tail = 0
        if tail and self._end % BLOCK + _INODE_BYTES + tail > BLOCK:
            self._end += -self._end % BLOCK
        number = (self._end - _META_BLOCK * BLOCK) // _SLOT
        # Every inode begins where one of 64 bytes cannot cross the end of a block.
        self._end += -(-(_INODE_BYTES + tail) // _INODE_BYTES) * _INODE_BYTES
        return _Place(number, size, tail)

    def write_frame(self, out: int) -> None:
        """Everything but the content of files that archives have."""
        os.ftruncate(out, self.size_bytes)
        superblock = _SUPERBLOCK.pack(
            _MAGIC, 0, 0, BLOCK.bit_length() - 1, 0, self._places[id(self._root)].number, len(self._nodes),
            0, 0, self._blocks, _META_BLOCK, 0, bytes(16), bytes(16), 0,
        )  # fmt: skip
        _write(out, superblock, _SUPERBLOCK_AT)
        for index, node in enumerate(self._nodes):
            self._write_inode(out, node, index + 1)
            match node:
                case Folder():
                    self.writer(out, node)(self._entries(node))
                case Symlink():
                    self.writer(out, node)(node.target)
                case File() if node.member < 0:
                    self.writer(out, node)(node.content)
                case _:
                    pass

    def writer(self, out: int, node: Node) -> Callable[[bytes], None]:
        """Takes a node's content, piece by piece."""
        place = self._places[id(node)]
        whole = place.size - place.tail
        written = 0

        def write(piece: bytes) -> None:
            nonlocal written
            first = piece[: max(whole - written, 0)]
            if first:
                _write(out, first, place.block * BLOCK + written)
            if len(piece) > len(first):
                end = written + len(first) - whole
                _write(out, piece[len(first) :], self._offset(place) + _INODE_BYTES + end)
            written += len(piece)

        return write

    @staticmethod
    def _offset(place: _Place) -> int:
        return _META_BLOCK * BLOCK + place.number * _SLOT

    def _write_inode(self, out: int, node: Node, serial: int) -> None:
        place = self._places[id(node)]
        kind, names = _kind(node)
        inode = _INODE.pack(
            _EXTENDED_INLINE if place.tail else _EXTENDED_PLAIN, 0, kind | node.mode, 0, place.size,
            place.block, serial, node.uid, node.gid, node.mtime, 0, names, 0,
        )  # fmt: skip
        _write(out, inode, self._offset(place))

    def _entries(self, folder: Folder) -> bytes:
        """A folder's content: blocks of entries, each with the names of its own behind them."""
        place = self._places[id(folder)]
        numbers = {b".": (place.number, _FOLDER), b"..": (place.parent, _FOLDER)}
        for name, node in folder.children.items():
            numbers[name] = (self._places[id(node)].number, _entry_kind(node))
        blocks = [
            _entry_block([(name, *numbers[name]) for name in names]) for names in _split(folder.children)
        ]
        return b"".join(block.ljust(BLOCK, b"\0") for block in blocks[:-1]) + blocks[-1]


def _split(children: dict[bytes, Node]) -> list[list[bytes]]:
    """The names of a folder, in order, those of one block each together."""
    split: list[list[bytes]] = [[]]
    used = 0
    for name in sorted([b".", b"..", *children]):
        needed = _ENTRY.size + len(name)
        if used + needed > BLOCK:
            split.append([])
            used = 0
        split[-1].append(name)
        used += needed
    return split


def _entry_block(entries: list[tuple[bytes, int, int]]) -> bytes:
    at = len(entries) * _ENTRY.size
    packed: list[bytes] = []
    for name, number, kind in entries:
        packed.append(_ENTRY.pack(number, at, kind))
        at += len(name)
    return b"".join([*packed, *(name for name, _, _ in entries)])


def _size(node: Node) -> int:
    match node:
        case File():
            return node.size
        case Symlink():
            return len(node.target)
        case Folder():
            split = _split(node.children)
            return (len(split) - 1) * BLOCK + sum(_ENTRY.size + len(name) for name in split[-1])
        case _:
            return 0


def _kind(node: Node) -> tuple[int, int]:
    """Its kind as a mode has it, and how many names it has."""
    match node:
        case File():
            return stat.S_IFREG, node.names
        case Folder():
            return stat.S_IFDIR, 2 + sum(isinstance(each, Folder) for each in node.children.values())
        case Symlink():
            return stat.S_IFLNK, 1
        case _:
            return stat.S_IFIFO, 1


def _entry_kind(node: Node) -> int:
    match node:
        case File():
            return _REGULAR
        case Folder():
            return _FOLDER
        case Symlink():
            return _SYMLINK
        case _:
            return _PIPE


def _write(out: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    try:
        while view:
            count = os.pwrite(out, view, at)
            view, at = view[count:], at + count
    except OSError as err:
        raise Refused(f"the image cannot be written to this node's disk: {err.strerror}") from err
