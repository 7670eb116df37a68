"""What takes long to make is made once, kept outside the checkout, and named by the hash of its inputs.

An entry is a folder that appears complete or not at all: it is made under another name and renamed. A lock
per entry keeps two builders from doing the same work; the one that waited finds the entry made.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path


def root() -> Path:
    """The cache folder: `$XDG_CACHE_HOME/forktree`, by default `~/.cache/forktree`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "forktree"


def key(inputs: Iterable[str | bytes | Path]) -> str:
    """16 hex digits over `inputs`, in order. A `Path` stands for the file's content, not for its name."""
    digest = hashlib.sha256()
    for each in inputs:
        content = each.read_bytes() if isinstance(each, Path) else each
        raw = content.encode() if isinstance(content, str) else content
        digest.update(len(raw).to_bytes(8, "big"))  # So that moving a boundary changes the key.
        digest.update(raw)
    return digest.hexdigest()[:16]


def entry(kind: str, entry_key: str, make: Callable[[Path], None], *, announce: str) -> Path:
    """The folder of an entry, made by `make` where it is missing.

    `make` gets an empty folder to fill. If it raises, nothing is kept. `announce` goes to standard error
    before it runs: one line that says what is made and how long that may take.
    """
    place = root() / kind / entry_key
    if place.is_dir():
        return place
    with locked(f"{kind}-{entry_key}"):
        if place.is_dir():
            return place
        print(announce, file=sys.stderr, flush=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{entry_key}-", dir=place.parent))
        try:
            make(draft)
            draft.chmod(0o755)
            draft.rename(place)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return place


@contextmanager
def locked(name: str) -> Generator[None, None, None]:
    """Only one process on this machine is inside, per `name`. No deadline: builds take minutes."""
    locks = root() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Freed by the kernel when we end, however we end.
        yield
