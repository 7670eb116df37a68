"""What image `gym` has beyond Debian's Python. The programs run in guests, and import nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent

REQUIREMENTS: Final = _HERE / "requirements.txt"
"""The wheels, each with its hash: what is named by the content of this file has always the same content."""

PROGRAMS: Final = {"gym-environment": _HERE / "environment.py", "gym-ask": _HERE / "ask.sh"}
"""Commands in the guest, and where they stand in this checkout."""
