"""Archives of any kind, in this process: whatever is in them, they are read or refused."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as some

from forktree_agent.images.unpacking.erofs import Layout
from forktree_agent.images.unpacking.layers import Allowance, copy_files, read_layers
from forktree_agent.images.unpacking.tree import File, Folder, Refused, Tree
from unit.image_registry import Entry, archive, folder, hard_link, link

NAMES = some.sampled_from(
    ["a", "b", "a/b", "a/b/c", "b/a", "../a", "/b", ".wh.a", "a/.wh.b", "a/.wh..wh..opq", "."]
)


def of_size(name: str, size: int) -> Entry:
    return Entry(name=name, content=bytes(size))


ENTRIES = some.one_of(
    some.builds(of_size, NAMES, some.integers(0, 9000)),
    some.builds(folder, NAMES, some.integers(0, 0o7777)),
    some.builds(link, NAMES, some.sampled_from(["a", "/", "..", "a/b", "/b/a", "../../b"])),
    some.builds(hard_link, NAMES, NAMES),
)


def unpacked(*layers: bytes) -> tuple[Tree, bytes]:
    """The tree, and the image of it. Raises `Refused`."""
    with tempfile.TemporaryDirectory() as name:
        descriptors: list[int] = []
        try:
            for number, layer in enumerate(layers):
                path = Path(name) / f"{number}"
                path.write_bytes(layer)
                descriptors.append(os.open(path, os.O_RDONLY))
            tree = Tree()
            read_layers(descriptors, tree, Allowance(bytes=8 << 20, entries=1000))
            layout = Layout(tree)
            out = os.open(Path(name) / "out", os.O_RDWR | os.O_CREAT)
            descriptors.append(out)
            layout.write_frame(out)
            allowance = Allowance(bytes=8 << 20, entries=1000)
            copy_files(descriptors[:-1], layout.files, lambda file: layout.writer(out, file), allowance)
            return tree, (Path(name) / "out").read_bytes()
        finally:
            for each in descriptors:
                os.close(each)


def names_of(folder: Folder) -> int:
    """How many entries are files, each counted as often as it has names."""
    below = [names_of(each) if isinstance(each, Folder) else 0 for each in folder.children.values()]
    return sum(below) + sum(isinstance(each, File) for each in folder.children.values())


@settings(deadline=None)
@given(some.lists(some.lists(ENTRIES, max_size=8), min_size=1, max_size=3))
def test_any_entries_give_a_whole_image_or_one_sentence(layers: list[list[Entry]]) -> None:
    try:
        tree, image = unpacked(*(archive(*entries) for entries in layers))
    except Refused as refused:
        assert str(refused).isprintable()
        return
    files = {id(each): each for each in Layout(tree).files}.values()
    # Whatever was hidden and replaced: each file counts the names that lead to it.
    assert sum(each.names for each in files) == names_of(tree.root)
    assert len(image) % 4096 == 0 and image[1024:1028] == b"\xe2\xe1\xf5\xe0"


@settings(deadline=None, max_examples=200)
@given(some.binary(max_size=2048), some.sampled_from([0, 257, 512, 700]), some.booleans())
def test_bytes_of_any_kind_are_read_or_refused(noise: bytes, at: int, over: bool) -> None:
    whole = archive(Entry(name="a", content=b"content"), folder("b"), Entry(name="n" * 200), link("c", "a"))
    broken = whole[:at] + noise + whole[at + (len(noise) if over else 0) :]
    try:
        unpacked(broken)
    except Refused as refused:
        assert "\n" not in str(refused)


def test_equal_layers_give_equal_images() -> None:
    layer = archive(Entry(name="b"), Entry(name="a", content=b"x" * 5000), folder("c"))
    assert unpacked(layer)[1] == unpacked(layer)[1]
