"""What image `atari` has beyond Debian's Python."""

from __future__ import annotations

from pathlib import Path
from typing import Final

REQUIREMENTS: Final = Path(__file__).parent / "requirements.txt"
"""The wheels, each with its hash: what is named by the content of this file has always the same content."""
