"""The native parts, built with Cargo: the library inside QEMU and the guest's PID 1.

Run as a module it prints the path of each, a line each: the shim, then init.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from forktree_dev import cache
from forktree_dev.checkout import CHECKOUT

WORKSPACE = CHECKOUT / "node-agent" / "native"

# What the source path is called inside the products: the same sources give the same bytes in every checkout.
_SOURCES_NAME = "/forktree"
_CRATES_NAME = "/crates"


def shim() -> Path:
    """The library that QEMU preloads."""
    command = ("build", "-p", "forktree-shim", "--release", "--locked")
    return _product("shim", command, "libforktree_shim.so")


def init() -> Path:
    """The guest's PID 1, static: the initramfs holds nothing to link it with."""
    # Not `cargo build`: it would link the whole workspace statically, and a shared library cannot be.
    static = ("--", "-C", "target-feature=+crt-static")
    command = ("rustc", "-p", "forktree-init", "--release", "--locked", *static)
    return _product("init", command, "forktree-init")


def _product(member: str, command: Sequence[str], file_name: str) -> Path:
    """Build one member of the workspace, unless its sources are the ones that it was built from before."""
    sources = sorted(path for path in (WORKSPACE / member).rglob("*") if path.is_file())
    workspace = [WORKSPACE / "Cargo.toml", WORKSPACE / "Cargo.lock"]
    compiler = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    names = [str(path.relative_to(WORKSPACE)) for path in sources]
    entry_key = cache.key([compiler, *command, *names, *workspace, *sources, Path(__file__)])
    make = partial(_build, command=command, file_name=file_name)
    folder = cache.entry(
        "native", f"{member}-{entry_key}", make, announce=f"building {file_name} (half a minute)"
    )
    return folder / file_name


def _build(folder: Path, *, command: Sequence[str], file_name: str) -> None:
    # One for each checkout: cargo takes what another has built for its own, if only it is younger.
    target = cache.root() / "target" / hashlib.sha256(f"{CHECKOUT}\n".encode()).hexdigest()
    crates = os.environ.get("CARGO_HOME") or str(Path.home() / ".cargo")
    names = [
        f"--remap-path-prefix={WORKSPACE}={_SOURCES_NAME}",
        f"--remap-path-prefix={crates}={_CRATES_NAME}",
    ]
    env = {**os.environ, "CARGO_TARGET_DIR": str(target), "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(names)}
    subprocess.run(["cargo", "--quiet", *command], check=True, cwd=WORKSPACE, env=env)
    shutil.copy2(target / "release" / file_name, folder / file_name)


if __name__ == "__main__":
    print(shim())
    print(init())
