"""The image that holds a pod's namespaces. Usually pulled; here it is Debian's busybox, asleep."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from forktree_dev import cache
from forktree_dev.container_images import oci
from forktree_dev.container_images.oci import Layer
from forktree_dev.images import debian
from forktree_dev.real_node.configuration import PAUSE_IMAGE


def pause_image() -> Path:
    """Its archive."""

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            root, package = Path(scratch) / "root", Path(scratch) / "package"
            debian.unpack("busybox-static", package)
            root.mkdir()
            shutil.copy(package / "bin" / "busybox", root / "busybox")
            layer = Layer.packed(root, Path(scratch) / "layer.tar")
            command = ("/busybox", "sleep", "infinity")
            config = oci.Config(user="65535:65535", command=command, environment={}, labels={})
            oci.write(folder / "pause.tar", PAUSE_IMAGE, config, [layer])

    inputs: list[str | Path] = [
        debian.version("busybox-static"),
        PAUSE_IMAGE,
        Path(oci.__file__),
        Path(__file__),
    ]
    return cache.entry("oci", cache.key(inputs), make, announce="packing the pause image") / "pause.tar"
