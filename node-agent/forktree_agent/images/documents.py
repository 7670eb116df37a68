"""What registries say, as types: manifests, indexes, an image's configuration. Formats of OCI and Docker."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from forktree_agent.images.errors import ImageInvalid, cleaned

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
CONFIG_TYPES = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
LAYER_TYPES = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
)
DOCUMENT_BYTES = 4 << 20
"""What registries take themselves."""
LAYERS_MAX = 128
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ENV_MAX, _ENV_CHARACTERS = 256, 32 << 10
_ENV_NAME = re.compile(r"[\x21-\x3c\x3e-\x7e]{1,128}")
_OURS = "FORKTREE_"

Document = TypeVar("Document")


class Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""
    variant: str = ""


class Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    platform: Platform | None = None


class _Kind(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str = ""


class Index(msgspec.Struct, frozen=True):
    manifests: list[Descriptor]


class Manifest(msgspec.Struct, frozen=True):
    config: Descriptor
    layers: list[Descriptor]


class _Process(msgspec.Struct, frozen=True, rename="pascal"):
    env: list[str] | None = None
    working_dir: str | None = None


class _Config(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""
    config: _Process | None = None


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """What of an image's configuration is taken over."""

    env: dict[str, str]
    working_folder: str


def manifest_for_here(index: bytes) -> Descriptor:
    """The manifest for linux/amd64. Raises `ImageInvalid`."""
    manifests = _decoded(index, Index, "index").manifests
    for each in manifests:
        platform = each.platform
        if platform is not None and (platform.os, platform.architecture) == ("linux", "amd64"):
            return _checked(each, MANIFEST_TYPES, "manifest", DOCUMENT_BYTES)
    raise ImageInvalid("the image is not there for linux/amd64, which the machines are")


def read_manifest(body: bytes) -> Manifest:
    """Raises `ImageInvalid`."""
    manifest = _decoded(body, Manifest, "manifest")
    _checked(manifest.config, CONFIG_TYPES, "configuration", DOCUMENT_BYTES)
    if not 0 < len(manifest.layers) <= LAYERS_MAX:
        raise ImageInvalid(f"the image has {len(manifest.layers)} layers: 1 to {LAYERS_MAX} can be read")
    for each in manifest.layers:
        _checked(each, LAYER_TYPES, "layer", 1 << 40)
    return manifest


def read_runtime(body: bytes) -> Runtime:
    """Raises `ImageInvalid`. Variables that no environment can have, and ours, are left out."""
    config = _decoded(body, _Config, "configuration")
    if config.os not in {"", "linux"} or config.architecture not in {"", "amd64"}:
        raise ImageInvalid("the image is not for linux/amd64, which the machines are")
    process = config.config or _Process()
    env: dict[str, str] = {}
    for text in process.env or ():
        name, _, value = text.partition("=")
        if _ENV_NAME.fullmatch(name) and not name.startswith(_OURS) and "\0" not in value:
            env[name] = value
    if len(env) > _ENV_MAX or sum(len(name) + len(value) for name, value in env.items()) > _ENV_CHARACTERS:
        raise ImageInvalid(
            f"the image's environment is larger than {_ENV_MAX} variables or {_ENV_CHARACTERS >> 10} KiB"
        )
    folder = process.working_dir or "/"
    if not folder.startswith("/") or ".." in folder.split("/") or "\0" in folder or len(folder) > 1024:
        raise ImageInvalid("the image's working folder is no absolute path without ..")
    return Runtime(env=env, working_folder=folder)


def lacks_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is None


def _checked(descriptor: Descriptor, kinds: tuple[str, ...], what: str, largest: int) -> Descriptor:
    if descriptor.media_type not in kinds:
        kind = cleaned(descriptor.media_type) or "none is named"
        raise ImageInvalid(f"the image has a {what} of a kind that cannot be read: {kind}")
    if lacks_digest(descriptor.digest):
        raise ImageInvalid(f"the image has a {what} without a sha256 digest")
    if not 0 <= descriptor.size <= largest:
        raise ImageInvalid(f"the image has a {what} of {descriptor.size} bytes")
    return descriptor


def _decoded(body: bytes, kind: type[Document], what: str) -> Document:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ImageInvalid(f"the registry's {what} is none: {cleaned(str(err))}") from err


def kind_of(content_type: str, body: bytes) -> str:
    """What a document says that it is: inside, or else by its header."""
    return _decoded(body, _Kind, "manifest").media_type or content_type
