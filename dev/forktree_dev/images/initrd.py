"""The initramfs: our init and the modules it loads. Not packed: unpacking costs an emulated guest more."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from forktree_dev import cache, native
from forktree_dev.images.kernel import Kernel


def initrd(kernel: Kernel) -> Path:
    """The initramfs for `kernel`."""
    init = native.init()

    def make(folder: Path) -> None:
        (folder / "initrd").write_bytes(archive(_entries(init, kernel)))

    inputs: list[str | Path] = [
        init,
        *(module.name for module in kernel.modules),
        *kernel.modules,
        *(module.name for module in kernel.network_modules),
        *kernel.network_modules,
        Path(__file__),
    ]
    return cache.entry("initrd", cache.key(inputs), make, announce="packing the initramfs") / "initrd"


def _entries(init: Path, kernel: Kernel) -> Iterable[tuple[str, int, bytes]]:
    yield "init", stat.S_IFREG | 0o755, init.read_bytes()
    yield from _folder("modules", kernel.modules)
    yield from _folder("modules/network", kernel.network_modules)


def _folder(name: str, modules: Iterable[Path]) -> Iterable[tuple[str, int, bytes]]:
    """Modules, and the order in which they are loaded."""
    modules = list(modules)
    order = "".join(f"{module.name}\n" for module in modules)
    yield name, stat.S_IFDIR | 0o755, b""
    yield f"{name}/order", stat.S_IFREG | 0o644, order.encode()
    for module in modules:
        yield f"{name}/{module.name}", stat.S_IFREG | 0o644, module.read_bytes()


def archive(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """A cpio archive ("newc") of entries (path, mode, content).

    All is root's and of 1970, so equal input gives equal bytes.
    """
    packed = bytearray()
    for number, (path, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        name = path.encode() + b"\0"
        links = 2 if stat.S_ISDIR(mode) else 1
        # inode, mode, owner, group, links, time, size, four device numbers, length of the name, checksum
        fields = (number, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(name), 0)
        packed += b"070701" + b"".join(b"%08x" % field for field in fields) + name
        packed += bytes(-len(packed) % 4)
        packed += content + bytes(-len(content) % 4)
    return bytes(packed)
