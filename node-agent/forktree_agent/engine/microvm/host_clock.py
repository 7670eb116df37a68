"""How fast this machine's time stamp counter runs: what an emulated guest has to keep time by.

QEMU's emulation hands the host's counter through, at the host's rate. A guest that is told the rate keeps
time by it; without, it counts timer interrupts, and those are lost whenever the host is busy.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import time
from collections.abc import Callable

MEASURED_SECONDS = 0.1
"""Good for one part in ten thousand, seconds a day; every fork sets the guest's clock anew."""
# rdtsc; shl rdx, 32; or rax, rdx; ret
_READ_COUNTER = bytes.fromhex("0f31 48c1e220 4809d0 c3")


def counter_kilohertz() -> int | None:
    """The counter's rate, measured. Blocks for `MEASURED_SECONDS`. None where it cannot be read."""
    if platform.machine() != "x86_64":
        return None
    try:
        with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
            page.write(_READ_COUNTER)
            return _measured(page)
    except (OSError, PermissionError):  # Memory that is writable and executable is forbidden here.
        return None


def _measured(page: mmap.mmap) -> int:
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    read: Callable[[], int] = ctypes.CFUNCTYPE(ctypes.c_uint64)(address)
    first, began_ns = read(), time.monotonic_ns()
    time.sleep(MEASURED_SECONDS)
    last, ended_ns = read(), time.monotonic_ns()
    return round((last - first) * 1_000_000 / (ended_ns - began_ns))
