"""What is in each image. Everything else in this package is made from this list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

USER = 65532
"""Who runs in an image that needs no rights on its machine: nobody else's id on most systems."""

GUEST_FOLDER = "/usr/share/forktree/guest"
SHIM_LIBRARY = "/usr/lib/forktree/libforktree_shim.so"
PACKAGES_FOLDER = "/usr/lib/forktree/python"
"""Our wheel and what it needs, apart from Debian's own."""
SBOM_FILE = "/usr/share/forktree/sbom.spdx.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One image."""

    name: str
    says: str
    """What it is, in one line."""
    debian: Sequence[str] = ()
    """Packages beside `BASE`; what they depend on comes with them, what they recommend does not."""
    extras: Sequence[str]
    """Of our own wheel."""
    guests: Sequence[str] = ()
    """Root file systems for machines, by name. Kernel, init and shim come with any of them."""
    user: int = USER
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


BASE: Sequence[str] = ("base-files", "python3")

UNUSED: Sequence[str] = (
    "adduser",
    "debconf",
    "dpkg",
    "ipxe-qemu",
    "iso-codes",
    "libasound2-data",
    "libpam-modules",
    "libpam-modules-bin",
    "libsemanage-common",
    "libsemanage2",
    "libsepol2",
    "mawk",
    "passwd",
    "readline-common",
    "tar",
)
"""Dependencies that only installing needs, or programs that nobody starts here: none of our programs opens a
file of theirs."""

OPERATOR = Recipe(
    name="operator",
    says="forktree's operator: places sessions, routes forks",
    extras=("operator", "tracing"),
    command=("python3", "-m", "forktree_operator"),
)

NODE = Recipe(
    name="node",
    says="forktree's agent and keeper, with the machines' QEMU, passt, kernel and root file systems",
    debian=("qemu-system-x86", "passt", "nftables"),
    extras=("agent", "tracing"),
    guests=("tiny", "python", "gym"),
    user=0,  # Starts processes under other user ids, in control groups and namespaces.
    command=("python3", "-m", "forktree_agent"),
)

RECIPES: Sequence[Recipe] = (OPERATOR, NODE)

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": PACKAGES_FOLDER,
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}
