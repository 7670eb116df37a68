"""Where this checkout is: development runs from it, never from an installed copy."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
