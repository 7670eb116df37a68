"""Lines of a log, alike for operator, agent and keeper. Standard library only, for the keeper's sake."""

from __future__ import annotations

from forktree_logs.beginning import FORMATS, begin
from forktree_logs.json_lines import JsonLines

__all__ = ["FORMATS", "JsonLines", "begin"]
