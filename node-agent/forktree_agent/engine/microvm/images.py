"""The guest directory: kernel, initial file system and root images, and what they hash to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from forktree_agent.engine.contract import BaselineId, ImageNotFound, Shape

BUILTIN = "builtin:"
MANIFEST = "manifest.json"


class ImageEntry(msgspec.Struct, frozen=True):
    file: str
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    kernel_sha256: str
    initrd_sha256: str
    images: dict[str, ImageEntry]


@dataclass(frozen=True, slots=True)
class GuestDirectory:
    """Read once at start; the files are opened by each machine that needs them."""

    path: Path
    manifest: Manifest

    @classmethod
    def read(cls, path: Path) -> GuestDirectory:
        """Raises `ImageNotFound` when there is no usable manifest."""
        try:
            return cls(path, msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest))
        except (OSError, msgspec.MsgspecError) as err:
            raise ImageNotFound(
                f"{path} is no guest directory: {err}; build one with the image builder"
            ) from err

    @property
    def kernel(self) -> Path:
        return self.path / "vmlinux"

    @property
    def initrd(self) -> Path:
        return self.path / "initrd"

    def image(self, reference: str) -> Path:
        return self.path / self._entry(reference).file

    def digest(self, reference: str) -> str:
        return self._entry(reference).sha256

    def _entry(self, reference: str) -> ImageEntry:
        name = reference.removeprefix(BUILTIN)
        entry = self.manifest.images.get(name) if reference.startswith(BUILTIN) else None
        if entry is None:
            known = ", ".join(f"{BUILTIN}{each}" for each in sorted(self.manifest.images)) or "none"
            raise ImageNotFound(f"image {reference} is not on this node; it has {known}")
        return entry


def shape_digest(shape: Shape, accelerator: str) -> str:
    """What is asked for, as one name: equal shapes share one baseline."""
    return _digest({"shape": _plain(shape), "accelerator": accelerator})


def baseline_id(
    shape: Shape, image_digest: str, guest: GuestDirectory, *, vmm: dict[str, str], pins: dict[str, str]
) -> BaselineId:
    """SHA-256 over all that makes two starts comparable: what was asked for, and what it met on this node."""
    return BaselineId(
        _digest(
            {
                "shape": _plain(shape),
                "image": image_digest,
                "kernel": guest.manifest.kernel_sha256,
                "initrd": guest.manifest.initrd_sha256,
                "vmm": vmm,
                "pins": pins,
            }
        )
    )


def _plain(shape: Shape) -> Any:
    """All of it but the values of secrets: a hash that is published would let a short one be guessed.

    What came later than others and is not given does not count, so that the names of before go on.
    """
    plain = msgspec.to_builtins(shape)
    del plain["disk"]
    if shape.disk is not None:
        plain["image"] = shape.disk.digest  # By whatever name it was found.
    if shape.working_folder == "/":
        del plain["working_folder"]
    plain["secret_env"] = [[each.name, each.version] for each in shape.secret_env]
    return plain


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
