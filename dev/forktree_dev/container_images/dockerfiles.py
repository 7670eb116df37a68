"""The same images as plain Dockerfiles, written from the same list: `docker/*.Dockerfile`.

They are for people who have Docker and want to build by themselves. What is installed is what the archives
hold, by Debian's and Python's own installers, and so somewhat more of it.
"""

from __future__ import annotations

import json
import re

from forktree_dev.checkout import CHECKOUT
from forktree_dev.container_images.recipes import (
    BASE,
    ENVIRONMENT,
    GUEST_FOLDER,
    PACKAGES_FOLDER,
    RECIPES,
    SHIM_LIBRARY,
    Recipe,
)

FOLDER = CHECKOUT / "docker"

_REQUIREMENTS = "dev/forktree_dev/container_images/requirements.txt"
_SETUP = CHECKOUT / "dev" / "setup.sh"
_NOT_FOR_IMAGES = ("qemu-system-x86", "passt", "nftables", "iproute2", "curl")
_RUST = ("cargo-web", "rustc-web")
"""Debian 12's own cargo can read the crates' index through git only."""


def files() -> dict[str, str]:
    """Name of each file in `docker/`, and its text."""
    return {f"{recipe.name}.Dockerfile": render(recipe) for recipe in RECIPES}


def stale() -> list[str]:
    """Names of files that are not as they would be written, missing and surplus ones too."""
    known = {path.name: path.read_text() for path in FOLDER.glob("*.Dockerfile")}
    wanted = files()
    return sorted(name for name in known.keys() | wanted.keys() if known.get(name) != wanted.get(name))


def render(recipe: Recipe) -> str:
    """One Dockerfile. Built from the root of the checkout: `docker build -f docker/NAME.Dockerfile .`."""
    lines = [
        "# Generated from dev/forktree_dev/container_images/recipes.py by `make generate`; change that file.",
        f"# docker build -f docker/{recipe.name}.Dockerfile -t forktree/{recipe.name} .",
        *(_guests(recipe) if recipe.guests else []),
        *_wheel(),
        "",
        "FROM debian:bookworm-slim",
        _install((*BASE, *recipe.debian)),
        *(f"ENV {name}={value}" for name, value in {**ENVIRONMENT, **recipe.environment}.items()),
        f"COPY --from=modules {PACKAGES_FOLDER} {PACKAGES_FOLDER}",
    ]
    if recipe.guests:
        lines += [
            f"COPY --from=guests {GUEST_FOLDER} {GUEST_FOLDER}",
            f"COPY --from=guests {SHIM_LIBRARY} {SHIM_LIBRARY}",
        ]
    lines += [f"USER {recipe.user}:{recipe.user}", f"ENTRYPOINT {json.dumps(list(recipe.command))}"]
    return "\n".join([*lines, ""])


def _wheel() -> list[str]:
    target = f"--no-cache-dir --no-deps --target={PACKAGES_FOLDER}"
    return [
        "",
        "FROM debian:bookworm-slim AS modules",
        _install(("python3", "python3-pip")),
        "COPY . /src",
        f"RUN pip install {target} --require-hashes -r /src/{_REQUIREMENTS} \\",
        f" && pip install {target} /src",
    ]


def _guests(recipe: Recipe) -> list[str]:
    names = " ".join(f"--name={name}" for name in recipe.guests)
    return [
        "",
        "# Root file systems are made by chroot and mmdebstrap: needs a builder that runs as root.",
        "FROM debian:bookworm AS guests",
        _install((*_setup_packages(), *_RUST, "python3")),
        "COPY . /src",
        "WORKDIR /src/dev",
        f"RUN mkdir -p {GUEST_FOLDER} {SHIM_LIBRARY.rpartition('/')[0]} \\",
        f' && cp -rL "$(python3 -m forktree_dev.images {names} | tail -n 1)/." {GUEST_FOLDER} \\',
        f' && cp "$(python3 -m forktree_dev.native | head -n 1)" {SHIM_LIBRARY}',
    ]


def _setup_packages() -> list[str]:
    """What this checkout's own set-up installs to make images."""
    listed = re.search(r"^packages=\(\n(.*?)^\)", _SETUP.read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    words = [word for line in listed[1].splitlines() for word in line.partition("#")[0].split()]
    return [word for word in words if word not in _NOT_FOR_IMAGES]


def _install(packages: tuple[str, ...]) -> str:
    named = " ".join(sorted({*packages}))
    return (
        "RUN apt-get update \\\n"
        f" && apt-get install --yes --no-install-recommends {named} \\\n"
        " && rm -rf /var/lib/apt/lists/*"
    )
