"""Commands of a real guest that print a lot, many at once: what is kept of them together has a bound."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from component.guest_machine import booted
from forktree_agent.commons import Commons
from forktree_agent.engine.contract import ExecResult

MIB = 1 << 20
WHOLE = 8 * MIB
PRINTED = 3 * MIB


@dataclass
class Shared:
    """Room as requests have it."""

    commons: Commons
    holder: str

    def claim(self, count: int) -> int:
        return self.commons.take(count, {self.holder: 1.0})


def kept(results: list[ExecResult]) -> int:
    return sum(len(each.stdout) + len(each.stderr) for each in results)


async def test_what_many_print_at_once_is_cut_where_there_is_no_room(tmp_path: Path) -> None:
    commons = Commons(WHOLE)
    loud, quiet = Shared(commons, "loud"), Shared(commons, "quiet")
    script = f"head -c {PRINTED} /dev/zero | tr '\\0' x; echo end >&2"
    async with booted(tmp_path) as guest:
        many = await asyncio.gather(
            *(guest.exec("sh", "-c", script, limit=16 * MIB, room=loud) for _ in range(5))
        )
        few = await guest.exec("echo", "heard", room=quiet)
    assert kept(many) == commons.held_by("loud") <= WHOLE // 2
    assert kept(many) > WHOLE // 4  # They had what there was.
    assert all(set(each.stdout) <= {ord("x")} for each in many)
    assert all(each.exit_code == 0 for each in many)
    # Cut is what says so, and nothing else does.
    assert [each.truncated for each in many] == [kept([each]) < PRINTED + 4 for each in many]
    assert any(each.truncated for each in many)
    assert (few.stdout, few.truncated) == (b"heard\n", False)
