"""What runs inside the machines that are measured. Sent there as text, these import nothing of ours."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

WORKER = (_HERE / "worker.py").read_text()
"""Dirties as much memory as it is told, and works in steps whose latency it keeps. Image `python`."""

GAME = (_HERE / "game.py").read_text()
"""One Gymnasium environment with a reset, and steps that take as long as it is told. Image `gym`."""

_ASK = (_HERE / "ask.sh").read_text()


def ask(*words: str) -> tuple[str, ...]:
    """The command that asks the program of a machine, and prints its answer."""
    return ("bash", "-c", _ASK, "ask", *words)
