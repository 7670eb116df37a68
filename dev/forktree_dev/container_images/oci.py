"""Images in the layout of the Open Container Initiative, in one tar file. Equal content gives equal bytes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_EPOCH = 1_767_225_600
"""What the time of every file is, seconds since 1970."""
_CREATED = "2026-01-01T00:00:00Z"
"""The same."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A tar file of files that come to lie over the layers below."""

    path: Path
    sha256: str

    @classmethod
    def packed(cls, root: Path, path: Path) -> Layer:
        """All that is under `root`, owned by root, written to `path`."""
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
            _add_folder(archive, root, "")
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> Layer:
        with path.open("rb") as content:
            return cls(path, hashlib.file_digest(content, "sha256").hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a runtime needs to know beside the files."""

    user: str
    command: Sequence[str]
    environment: Mapping[str, str]
    labels: Mapping[str, str]


def write(path: Path, reference: str, config: Config, layers: Sequence[Layer]) -> None:
    """Write the image named `reference` to `path`. Layers are not compressed: an import is a copy."""
    described = [_descriptor("layer.v1.tar", layer.sha256, layer.path.stat().st_size) for layer in layers]
    configuration = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": _CREATED,
            "config": {
                "User": config.user,
                "Entrypoint": list(config.command),
                "Env": [f"{name}={value}" for name, value in config.environment.items()],
                "Labels": dict(config.labels),
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.sha256}" for layer in layers]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("config.v1+json", _sha256(configuration), len(configuration)),
            "layers": described,
        }
    )
    names = {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
    }
    index = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [
                {
                    **_descriptor("manifest.v1+json", _sha256(manifest), len(manifest)),
                    "annotations": names,
                    "platform": {"architecture": "amd64", "os": "linux"},
                }
            ],
        }
    )
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        _add_bytes(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add_bytes(archive, "index.json", index)
        for blob in (configuration, manifest):
            _add_bytes(archive, f"blobs/sha256/{_sha256(blob)}", blob)
        for layer in {layer.sha256: layer for layer in layers}.values():
            _add_file(archive, layer.path, f"blobs/sha256/{layer.sha256}", mode=0o644)


def _add_folder(archive: tarfile.TarFile, folder: Path, name: str) -> None:
    for entry in sorted(os.scandir(folder), key=lambda each: each.name):
        path, inside = Path(entry.path), f"{name}{entry.name}"
        status = entry.stat(follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode) & 0o1777  # Nobody becomes another user in there.
        if entry.is_symlink():
            link = _info(inside, 0o777, tarfile.SYMTYPE)
            link.linkname = str(path.readlink())
            archive.addfile(link)
        elif entry.is_dir():
            archive.addfile(_info(inside, mode, tarfile.DIRTYPE))
            _add_folder(archive, path, f"{inside}/")
        elif entry.is_file():
            _add_file(archive, path, inside, mode=mode)
        else:
            raise ValueError(f"{path} is neither a file, a folder nor a link")


def _add_file(archive: tarfile.TarFile, path: Path, name: str, *, mode: int) -> None:
    info = _info(name, mode, tarfile.REGTYPE)
    info.size = path.stat().st_size
    with path.open("rb") as content:
        archive.addfile(info, content)


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = _info(name, 0o644, tarfile.REGTYPE)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _info(name: str, mode: int, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode, info.type, info.mtime = mode, kind, _EPOCH
    return info  # Owner and group are root's where nothing else is said.


def _descriptor(kind: str, sha256: str, size: int) -> dict[str, Any]:
    media_type = f"application/vnd.oci.image.{kind}"
    return {"mediaType": media_type, "digest": f"sha256:{sha256}", "size": size}


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
