"""What the demo found, for people who read `demo.json` and not the screen."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forktree.models import Fork


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkClocks:
    """One fork. Milliseconds of the agent's clock, each from its own start to its own end."""

    name: str
    depth: int | None
    """Of its children; a root has 0."""
    children: int
    mode: str | None
    pauseMs: float | None
    forkMs: float | None
    readyMs: float | None
    totalMs: float | None

    @classmethod
    def of(cls, fork: Fork) -> ForkClocks:
        status = fork.status
        return cls(
            name=fork.metadata.name,
            depth=status.depth,
            children=status.replicas or 0,  # Of those that are ready, some may be pruned by now.
            mode=status.mode,
            pauseMs=status.pause_ms,
            forkMs=status.fork_ms,
            readyMs=status.ready_ms,
            totalMs=status.total_ms,
        )


@dataclass(slots=True, kw_only=True)
class Report:
    """Filled as the demo goes; says no more than what was seen."""

    forks: list[ForkClocks] = field(default_factory=list[ForkClocks])
    state_equal: bool = False
    """Every child that was looked into went on from its parent's instant, and no parent noticed; and the
    search's winner, a fork of it, and a replay of its actions are alike."""
    replay_seconds: float | None = None
    """From asking for a clean start until the search's winning state was reached by replaying its actions."""
    leftovers: dict[str, int | None] | None = None
    """How many of each kind were found after the end. None: nobody looked."""

    @property
    def nothing_left(self) -> bool:
        return self.leftovers is not None and all(count == 0 for count in self.leftovers.values())

    def write(self, folder: Path) -> None:
        """As `demo.json` in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        body = {
            "forks": [asdict(fork) for fork in self.forks],
            "stateEqual": self.state_equal,
            "replaySeconds": self.replay_seconds,
            "leftovers": self.leftovers,
        }
        (folder / "demo.json").write_text(json.dumps(body, indent=2) + "\n")
