"""What a process gives away before it reads what a stranger wrote: all but the descriptors that it was given.

Afterwards it has a user id of its own, no privileges and no way to any, an empty file system that it cannot
write to, no network, no shared memory with anybody, and as much memory, time and disk as it is allowed. It
cannot start a process. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWNET = 0x20000, 0x4000000, 0x8000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_EMPTY = "/proc"
"""A folder that every system has, and whose content this process needs no more."""
_NICE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    uid: int
    """Nobody else's on this machine."""
    memory_bytes: int
    cpu_seconds: int
    file_bytes: int
    """The largest file that can be written."""


def enter(limits: Limits, *, parent: int) -> None:
    """Raises `OSError` where the system does not let it; then nothing may be read."""
    # Should memory run out, this process goes and no machine.
    Path("/proc/self/oom_score_adj").write_text("1000")
    os.nice(_NICE)
    _libc("unshare", _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWNET)
    _libc("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _libc("mount", b"none", _EMPTY.encode(), b"tmpfs", flags, b"size=4k,nr_inodes=2,mode=555")
    os.chroot(_EMPTY)
    os.chdir("/")
    os.setgroups([])
    os.setresgid(limits.uid, limits.uid, limits.uid)
    os.setresuid(limits.uid, limits.uid, limits.uid)
    _libc("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for what, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    # The first of these says why it ends it.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    # Last: a change of the user id forgets it.
    _libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise ProcessLookupError("its parent is gone")


def _libc(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    given = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    if getattr(libc, name)(*given) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
