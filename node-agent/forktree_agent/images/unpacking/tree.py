"""What the layers of an image come to: a tree of nodes in memory, on which no archive can play a trick.

Nothing here touches a file system. A path is followed in this tree alone, links and `..` in their targets
included, so there is no outside that it could lead to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NAME_BYTES = 255
PATH_BYTES = 4095
DEPTH = 256
"""Folders in folders. More than any image has, and little enough to walk."""
LINKS_FOLLOWED = 40
"""In one path, as the kernel counts them."""


class Refused(Exception):
    """An image cannot be taken as it is, and one sentence says why."""


@dataclass(slots=True, kw_only=True)
class Node:
    """What all have in common. Owners are the guest's, mode without the kind."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    layer: int = 0
    """The last that said something of it: a later one hides it, its own does not."""


@dataclass(slots=True, kw_only=True)
class Folder(Node):
    children: dict[bytes, Node] = field(default_factory=dict[bytes, Node])


@dataclass(slots=True, kw_only=True)
class File(Node):
    size: int
    member: int = -1
    """Which entry of its layer's archive has the content; -1: it is `content`."""
    content: bytes = b""
    names: int = 1
    """How many entries of the tree it is."""


@dataclass(slots=True, kw_only=True)
class Symlink(Node):
    target: bytes


@dataclass(slots=True, kw_only=True)
class Pipe(Node):
    """A named one. Devices are not taken over: a guest makes its own."""


class Tree:
    """Starts as an empty root folder."""

    def __init__(self) -> None:
        self.root = Folder(mode=0o755)

    def put(self, path: bytes, node: Node) -> None:
        """Enter a node. A folder joins a folder that is there; all else takes the place of what is there."""
        folder, name = self._place(path, node.layer)
        if name is None:
            if not isinstance(node, Folder):
                raise Refused("an archive has something for its root that is no folder")
            _take_over(self.root, node)
            return
        there = folder.children.get(name)
        if isinstance(there, Folder) and isinstance(node, Folder):
            _take_over(there, node)
            return
        _remove(folder, name)
        folder.children[name] = node

    def link(self, path: bytes, target: bytes, layer: int) -> None:
        """Enter another name of a node that is there."""
        folder, name = self._place(target, layer)
        node = None if name is None else folder.children.get(name)
        if node is None or isinstance(node, Folder):
            raise Refused(f"hard link {shown(path)} leads to {shown(target)}, which is no file of the image")
        folder, name = self._place(path, layer)
        if name is None:
            raise Refused("an archive has a hard link for its root")
        if folder.children.get(name) is node:
            return
        _remove(folder, name)
        folder.children[name] = node
        if isinstance(node, File):
            node.names += 1

    def hide(self, path: bytes, layer: int) -> None:
        """A whiteout: what layers below `layer` have at `path` is gone."""
        folder, name = self._place(path, layer)
        if name is None or name not in folder.children:
            return
        node = folder.children[name]
        if isinstance(node, Folder):
            _hide_below(node, layer)
            gone = node.layer < layer and not node.children
        else:
            gone = node.layer < layer
        if gone:
            _remove(folder, name)

    def make_opaque(self, path: bytes, layer: int) -> None:
        """What layers below `layer` have in the folder at `path` is gone; the folder is there."""
        folder, name = self._place(path, layer)
        if name is not None:
            found = folder.children.get(name)
            if not isinstance(found, Folder):
                return
            folder = found
        _hide_below(folder, layer)

    def find(self, path: bytes) -> Node | None:
        """What a path of folders leads to, without following links and without making anything."""
        node: Node = self.root
        for name in _names(path):
            if not isinstance(node, Folder) or name not in node.children:
                return None
            node = node.children[name]
        return node

    def resolved(self, path: bytes) -> Node | None:
        """What a path leads a program to."""
        try:
            return self._follow(_names(path), make=None)[-1]
        except Refused:
            return None

    def _place(self, path: bytes, layer: int) -> tuple[Folder, bytes | None]:
        """The folder that a path's last name is in, made if need be. No name: the path is the root."""
        if len(path) > PATH_BYTES:
            raise Refused(f"path {shown(path)} is longer than {PATH_BYTES} bytes")
        names = _names(path)
        if not names:
            return self.root, None
        if b".." in names:
            raise Refused(f"path {shown(path)} leads upwards")
        return self._follow(names[:-1], make=layer)[-1], names[-1]

    def _follow(self, names: list[bytes], *, make: int | None) -> list[Folder]:
        """The folders along a path from the root on, links followed, in `make`'s layer made where missing."""
        stack, ahead, links = [self.root], names[::-1], 0
        while ahead:
            name = ahead.pop()
            if name == b"..":
                stack = stack[:-1] or stack  # Above the root is the root.
                continue
            node = stack[-1].children.get(name)
            if node is None and make is not None:
                node = stack[-1].children[name] = Folder(mode=0o755, layer=make)
            if isinstance(node, Symlink):
                links += 1
                if links > LINKS_FOLLOWED:
                    raise Refused(f"path {shown(b'/'.join(names))} follows more than {LINKS_FOLLOWED} links")
                if node.target.startswith(b"/"):
                    stack = [self.root]
                ahead.extend(reversed(_names(node.target)))
                continue
            if not isinstance(node, Folder):
                whole = shown(b"/".join(names))
                raise Refused(f"path {whole} goes through {shown(name)}, which is no folder")
            stack.append(node)
            if len(stack) > DEPTH:
                raise Refused(f"folders are more than {DEPTH} deep")
        return stack


def _remove(folder: Folder, name: bytes) -> None:
    ahead = [node for node in [folder.children.pop(name, None)] if node is not None]
    while ahead:
        node = ahead.pop()
        if isinstance(node, Folder):
            ahead.extend(node.children.values())
        elif isinstance(node, File):
            node.names -= 1


def shown(path: bytes) -> str:
    """A name of theirs for a sentence of ours."""
    text = ascii(path[:100].decode(errors="replace"))
    return text if len(path) <= 100 else f"{text}..."


def _names(path: bytes) -> list[bytes]:
    names = [name for name in path.split(b"/") if name not in {b"", b"."}]
    for name in names:
        if len(name) > NAME_BYTES or b"\0" in name:
            raise Refused(f"name {shown(name)} is longer than {NAME_BYTES} bytes or holds a NUL character")
    return names


def _take_over(there: Folder, node: Node) -> None:
    there.mode, there.uid, there.gid, there.mtime = node.mode, node.uid, node.gid, node.mtime
    there.layer = node.layer


def _hide_below(folder: Folder, layer: int) -> None:
    """Take away what is older than `layer`, and keep what a folder of it has of `layer`'s own."""
    for name, node in list(folder.children.items()):
        if isinstance(node, Folder):
            _hide_below(node, layer)
            if node.layer < layer and not node.children:
                _remove(folder, name)
        elif node.layer < layer:
            _remove(folder, name)
