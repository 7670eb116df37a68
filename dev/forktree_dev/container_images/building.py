"""From a recipe to an archive with its bill of materials. Kept in the cache by the hash of what went in."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as installed_version
from pathlib import Path

from forktree_dev import cache, images, native
from forktree_dev.container_images import debian_files, oci, python_files, sbom
from forktree_dev.container_images.debian_files import DebianPackage
from forktree_dev.container_images.guest_packages import guest_packages
from forktree_dev.container_images.oci import Layer
from forktree_dev.container_images.recipes import (
    BASE,
    ENVIRONMENT,
    GUEST_FOLDER,
    PACKAGES_FOLDER,
    SBOM_FILE,
    SHIM_LIBRARY,
    Recipe,
)

REPOSITORY = "localhost/forktree"
"""Where images are until somebody pushes them to a registry of their own."""
_SOURCES = [
    Path(__file__).with_name(f"{name}.py")
    for name in ("building", "debian_files", "oci", "python_files", "recipes")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
    """An image in the cache."""

    reference: str
    """Repository and tag, as manifests name it."""
    archive: Path
    """For `ctr images import`, `docker load`, `skopeo copy oci-archive:…`."""
    sbom: Path


def build(recipe: Recipe) -> BuiltImage:
    """The image, made where it is missing: a minute, most of it Debian's packages."""
    version = installed_version("forktree")
    reference = f"{REPOSITORY}/{recipe.name}:{version}"
    base = _debian_layer(BASE)
    layers = [base.layer]
    packages = list(base.packages)
    if recipe.debian:
        more = _debian_layer(recipe.debian, without=base.packages)
        layers.append(more.layer)
        packages += more.packages
    layers += _python_layers(base.layer)
    if recipe.guests:
        layers.append(_guest_layer(recipe.guests))
        packages = _with(packages, guest_packages(recipe.guests))
    bill = sbom.render(recipe, version, packages, python_files.locked())

    def make(folder: Path) -> None:
        (folder / "sbom.spdx.json").write_text(bill)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            inside = Path(scratch) / "root" / SBOM_FILE.lstrip("/")
            inside.parent.mkdir(parents=True)
            inside.write_text(bill)
            last = Layer.packed(Path(scratch) / "root", Path(scratch) / "sbom.tar")
            config = oci.Config(
                user=f"{recipe.user}:{recipe.user}",
                command=recipe.command,
                environment={**ENVIRONMENT, **recipe.environment},
                labels={
                    "org.opencontainers.image.title": f"forktree-{recipe.name}",
                    "org.opencontainers.image.description": recipe.says,
                    "org.opencontainers.image.version": version,
                    "org.opencontainers.image.licenses": "Apache-2.0",
                },
            )
            oci.write(folder / f"{recipe.name}.tar", reference, config, [*layers, last])

    inputs: list[str | Path] = [repr(recipe), reference, bill, *(layer.sha256 for layer in layers), *_SOURCES]
    folder = cache.entry("oci", cache.key(inputs), make, announce=f"packing image {recipe.name}")
    return BuiltImage(
        reference=reference, archive=folder / f"{recipe.name}.tar", sbom=folder / "sbom.spdx.json"
    )


def _with(packages: Sequence[DebianPackage], more: Sequence[DebianPackage]) -> list[DebianPackage]:
    """Both, each package once: of two that are the same, the one whose archive is known."""
    known = {(each.name, each.version, each.architecture) for each in packages}
    return [*packages, *(each for each in more if (each.name, each.version, each.architecture) not in known)]


@dataclass(frozen=True, slots=True)
class _DebianLayer:
    layer: Layer
    packages: tuple[DebianPackage, ...]


def _debian_layer(names: Sequence[str], *, without: Sequence[DebianPackage] = ()) -> _DebianLayer:
    """What `names` need beside what is there already."""
    packages = tuple(each for each in debian_files.closure((*BASE, *names)) if each not in without)

    def fill(root: Path) -> None:
        debian_files.lay_out(packages, root)
        if not without:
            debian_files.add_accounts(root)
            python_files.compile_modules(root, "/usr/lib/python3.11")

    inputs: list[str | Path] = [*(f"{each.wanted} {each.sha256}" for each in packages), *_SOURCES]
    announce = f"fetching Debian packages for {', '.join(names)} (a minute)"
    return _DebianLayer(_layer("debian", inputs, fill, announce), packages)


def _python_layers(base: Layer) -> list[Layer]:
    """What we need, and over it our own. The same for all images: what one does not need is small."""
    layouts = {"python": python_files.lay_out_locked, "wheel": python_files.lay_out_wheel}
    sources = {"python": python_files.REQUIREMENTS, "wheel": python_files.wheel()}
    announce = "installing the images' Python packages (a minute)"
    return [
        _layer(name, [sources[name], base.sha256, *_SOURCES], partial(_fill_modules, base, lay_out), announce)
        for name, lay_out in layouts.items()
    ]


def _fill_modules(base: Layer, lay_out: Callable[[Path], None], root: Path) -> None:
    modules = PACKAGES_FOLDER.lstrip("/")
    with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
        # Modules are compiled by the image's own Python.
        subprocess.run(["tar", "--extract", f"--file={base.path}", f"--directory={scratch}"], check=True)
        lay_out(Path(scratch) / modules)
        python_files.compile_modules(Path(scratch), PACKAGES_FOLDER)
        (root / modules).parent.mkdir(parents=True)
        (Path(scratch) / modules).rename(root / modules)


def _guest_layer(names: Sequence[str]) -> Layer:
    guests, shim = images.guest_directory(names), native.shim()

    def fill(root: Path) -> None:
        # The links in it lead to the cache; an image holds the files.
        shutil.copytree(guests, root / GUEST_FOLDER.lstrip("/"))
        library = root / SHIM_LIBRARY.lstrip("/")
        library.parent.mkdir(parents=True)
        shutil.copyfile(shim, library)

    inputs: list[str | Path] = [guests / "manifest.json", shim, *_SOURCES]
    return _layer("guests", inputs, fill, "packing kernel, init and root file systems")


def _layer(name: str, inputs: Sequence[str | Path], fill: Callable[[Path], None], announce: str) -> Layer:
    make = partial(_pack, fill=fill)
    folder = cache.entry("oci-layers", f"{name}-{cache.key(inputs)}", make, announce=announce)
    return Layer(folder / "layer.tar", (folder / "sha256").read_text())


def _pack(folder: Path, *, fill: Callable[[Path], None]) -> None:
    root = folder / "root"
    root.mkdir()
    fill(root)
    layer = Layer.packed(root, folder / "layer.tar")
    (folder / "sha256").write_text(layer.sha256)
    subprocess.run(["rm", "-rf", str(root)], check=True)
