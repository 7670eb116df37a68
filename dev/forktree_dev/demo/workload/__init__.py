"""What runs inside the demo's machines. These programs are sent there as text and import nothing of ours."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

PROGRAM = (_HERE / "program.py").read_text()
"""The environment itself: started once, when the template is baked, and forked ever after."""

_ASK = (_HERE / "ask.sh").read_text()


def ask(note: str = "") -> list[str]:
    """The command that gets the program's state in a session, after writing `note` into its history."""
    return ["bash", "-c", _ASK, "ask", note]
