"""`python -m forktree_dev.restarting [OPTIONS] -- COMMAND …`: runs a program, and again when it ends.

What a kubelet does in a cluster, and nobody else in a playground: an operator, for one, ends when it has lost
its Lease. Told to end, this tells the program and ends with it; if this is killed, the kernel kills that too.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from forktree_dev.parent_death import die_with_us

log = logging.getLogger("restarting")

_STOPS = {signal.SIGTERM, signal.SIGINT}
_BY_SIGNAL = 128


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds, each."""

    settle: float = 10.0
    """A program that ends itself so soon at its first start cannot work: it is not tried again."""
    first_delay: float = 1.0
    """Doubled at each start in a row that does not last."""
    longest_delay: float = 60.0
    lasts: float = 300.0
    """After so long a run, the next delay is the first again."""


def restarting(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` again and again."""
    return [sys.executable, "-m", "forktree_dev.restarting", "--", *argv]


def run(argv: Sequence[str], patience: Patience) -> int:
    """The exit code of the program's last run: told to end, or unable to begin."""
    # Blocked, they wait until they are asked for: none is missed, whenever it comes.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS | {signal.SIGCHLD})
    delay, is_first = patience.first_delay, True
    while True:
        began = time.monotonic()
        told, code = _run_once(argv)
        ran = time.monotonic() - began
        if told:
            return code
        if is_first and ran < patience.settle and code < _BY_SIGNAL:
            log.error("cannot_start code=%d ran_seconds=%.1f", code, ran)
            return code or 1
        if ran >= patience.lasts:
            delay = patience.first_delay
        log.warning("ended code=%d ran_seconds=%.1f restart_in_seconds=%g", code, ran, delay)
        if signal.sigtimedwait(_STOPS, delay) is not None:
            return code
        delay, is_first = min(delay * 2, patience.longest_delay), False


def _run_once(argv: Sequence[str]) -> tuple[bool, int]:
    """Whether it was told to end, and its exit code: 128 + signal where one ended it."""
    command = die_with_us(argv, sent="KILL")
    pid = os.posix_spawnp(command[0], command, os.environ, setsigmask=())
    told = False
    while True:
        if signal.sigwait(_STOPS | {signal.SIGCHLD}) is not signal.SIGCHLD:
            told = True
            os.kill(pid, signal.SIGTERM)
            continue
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            code = os.waitstatus_to_exitcode(status)
            return told, code if code >= 0 else _BY_SIGNAL - code


def main() -> int:
    parser = argparse.ArgumentParser(prog="forktree_dev.restarting", description=__doc__)
    parser.add_argument("--settle-seconds", type=float, default=Patience.settle)
    parser.add_argument("--delay-seconds", type=float, default=Patience.first_delay)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    return run(options.command, Patience(settle=options.settle_seconds, first_delay=options.delay_seconds))


if __name__ == "__main__":
    sys.exit(main())
