"""Debian's kernel for virtual machines, as QEMU's microvm boots it, and the modules that a guest needs."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from forktree_dev import cache
from forktree_dev.images import debian

MODULES = (
    "drivers/virtio/virtio_ring.ko",
    "drivers/virtio/virtio.ko",
    "drivers/virtio/virtio_mmio.ko",
    "drivers/char/virtio_console.ko",
    "drivers/block/virtio_blk.ko",
    "lib/libcrc32c.ko",
    "fs/netfs/netfs.ko",
    "fs/erofs/erofs.ko",
    "fs/overlayfs/overlay.ko",
    "net/ipv4/inet_diag.ko",
    "net/ipv4/tcp_diag.ko",
    "net/ipv4/udp_diag.ko",
)
"""In the order of loading: each needs only those before it."""

NETWORK_MODULES = (
    "net/core/failover.ko",
    "drivers/net/net_failover.ko",
    "drivers/net/virtio_net.ko",
)
"""The same, of machines that have a way to the outside."""

_LZ4_LEGACY_MAGIC = b"\x02\x21\x4c\x18"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and its modules, in order."""

    version: str
    vmlinux: Path
    modules: tuple[Path, ...]
    network_modules: tuple[Path, ...]


def kernel() -> Kernel:
    """The current one of Debian's stable release."""
    package = debian.kernel_package()
    release = package.removeprefix("linux-image-")
    inputs: list[str | Path] = [package, debian.version(package), *MODULES, *NETWORK_MODULES, Path(__file__)]
    announce = f"fetching kernel {release} (half a minute)"
    folder = cache.entry("kernel", f"{release}-{cache.key(inputs)}", _fetch, announce=announce)
    modules, network_modules = (
        tuple(folder / Path(module).name for module in names) for names in (MODULES, NETWORK_MODULES)
    )
    return Kernel(f"{release} ({debian.version(package)})", folder / "vmlinux", modules, network_modules)


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        package = Path(scratch) / "package"
        debian.unpack(debian.kernel_package(), package)
        (image,) = (package / "boot").glob("vmlinuz-*")
        (modules,) = (package / "lib" / "modules").iterdir()
        for module in (*MODULES, *NETWORK_MODULES):
            shutil.copyfile(modules / "kernel" / module, folder / Path(module).name)
        _unpack_vmlinux(image.read_bytes(), folder / "vmlinux")


def _unpack_vmlinux(image: bytes, target: Path) -> None:
    """Take the ELF kernel out of a bzImage, so that no emulated guest spends its first second on that."""
    # Documentation/x86/boot.rst: setup_sects at 0x1f1; payload_offset and payload_length at 0x248, counted
    # from the end of the setup sectors. The payload ends with its unpacked size, which is no part of the LZ4
    # stream.
    setup_sectors = image[0x1F1]
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if not payload.startswith(_LZ4_LEGACY_MAGIC):
        raise ValueError("the kernel is not packed with LZ4, as Debian's was when this was written")
    (unpacked_bytes,) = struct.unpack("<I", payload[-4:])
    with target.open("wb") as output:
        subprocess.run(["lz4", "-d", "-q"], check=True, input=payload[:-4], stdout=output)
    if target.stat().st_size != unpacked_bytes:
        raise ValueError(f"unpacked {target.stat().st_size} bytes of kernel, expected {unpacked_bytes}")
