"""Having the kernel note what a machine writes, so that its next fork copies what is new and no more.

With it a machine's layers are a chain of differences, each to the dump before. Dumps have marks: a shim makes
a difference only to the mark that the machine's record names, and copies everything where it is another. So a
layer that was lost, with an agent or on the way to its record, costs one full copy and never a wrong child.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from forktree_agent.engine.microvm.shim import ShimError

if TYPE_CHECKING:
    from typing import Literal

    from forktree_agent.engine.microvm.shim import ShimClient

DEVICE = "/dev/userfaultfd"
"""The system call of this name is refused to the users that machines run as. Root may open the device, and
whoever is handed it may use it."""
NO_MARK = 0
"""Of a machine that was not dumped yet, and of dumps where nothing is tracked."""
MAX_MARK = (1 << 63) - 1


def new_mark() -> int:
    """Unlike any other: an agent that died may have used marks that no record tells of."""
    return 1 + secrets.randbelow(MAX_MARK)


async def track(shim: ShimClient, wanted: Literal["auto", "pagemap"], *, deadline: float) -> str | None:
    """Have a machine's writes noted from here on. Returns why they are not, None where they are."""
    if wanted == "pagemap":
        return "it was not asked for"
    try:
        device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as err:
        return f"{DEVICE} cannot be opened ({err.strerror})"
    try:
        await shim.track(device, deadline=deadline)
    except ShimError as err:
        return f"this kernel cannot ({err})"
    finally:
        os.close(device)
    return None
