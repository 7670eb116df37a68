"""Commands that the kernel ends when the process that started them is gone."""

from __future__ import annotations

import os
from collections.abc import Sequence


def die_with_us(argv: Sequence[str], *, sent: str = "TERM") -> list[str]:
    """The same command, sent a signal by the kernel when we are gone, also after a SIGKILL of ours.

    Ours means this process: whoever else starts it finds that nothing runs. The kernel says nothing to one
    that asks for the signal when we are gone already, so it looks whether we are before it begins.
    """
    begins = 'test "$PPID" = "$0" && exec "$@"'
    return ["setpriv", "--pdeathsig", sent, "--", "/bin/sh", "-c", begins, str(os.getpid()), *argv]
