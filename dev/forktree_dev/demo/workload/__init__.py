"""What runs inside the demo's machines. These programs are sent there as text and import nothing of ours."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

PROGRAM = (_HERE / "program.py").read_text()
"""The environment itself: started once, when the template is baked, and forked ever after."""

ASK = (_HERE / "ask.py").read_text()
"""Run by a session's commands to talk to the program."""
