"""What is noted of machines and forks, made from what is known of them."""

from __future__ import annotations

from forktree.models import Fork, Level, Mode, Session, SessionTemplate
from forktree.models.session_template import Hook
from forktree_agent.control.decide_fork import Begin
from forktree_agent.control.owners import child_owner, is_early, owner_of
from forktree_agent.control.records import (
    Followed,
    ForkMade,
    ForkRecord,
    HookRecord,
    HookRecords,
    Limits,
    Lineage,
    PortRecord,
    SessionRecord,
    Start,
)
from forktree_agent.control.seeds import seeds_of
from forktree_agent.control.world import boot_now, wall_now
from forktree_agent.engine.contract import ForkClocks, ForkResult, Machine


def started(machine: Machine, *, fork_ms: float | None) -> Start:
    """What to note of a machine that has just answered."""
    return Start(
        baseline_id=machine.baseline,
        generation=machine.generation,
        mode=Mode(machine.mode),
        level=Level(machine.level),
        fork_ms=fork_ms,
        started_at=wall_now().isoformat(),
    )


def root_begun(session: Session, template: SessionTemplate, trace: Followed | None) -> SessionRecord:
    """A root that is about to get its machine from `template`."""
    limits = template.spec.tree_limits
    return SessionRecord(
        owner=owner_of(session),
        uid=session.metadata.uid,
        namespace=session.metadata.namespace or "",
        name=session.metadata.name,
        lineage=Lineage(
            root=session.metadata.uid,
            parent=None,
            depth=0,
            template_uid=template.metadata.uid,
            hooks=HookRecords(
                pre=_hook(template.spec.hooks.pre_fork), post=_hook(template.spec.hooks.post_fork)
            ),
            ports=tuple(PortRecord(name=each.name, port=each.port) for each in template.spec.ports),
            limits=Limits(
                depth=limits.depth,
                memory_bytes=limits.memory_bytes,
                live=limits.live,
                idle_seconds=limits.idle_seconds,
                tree_ttl_seconds=limits.tree_ttl_seconds,
                exec_seconds=limits.exec_seconds,
                pause_budget_ms=limits.pause_budget_ms,
            ),
        ),
        seen_at=boot_now(),
        trace=trace,
    )


def bound(session: Session, record: ForkRecord, index: int) -> SessionRecord:
    """What to note of a child whose object is there: from here on its machine goes when the object does."""
    made = record.result
    assert made is not None
    return SessionRecord(
        owner=child_owner(record.uid, index),
        uid=session.metadata.uid,
        namespace=session.metadata.namespace or "",
        name=session.metadata.name,
        lineage=record.lineage,
        start=made.children[index],
        total_ms=record.total_ms,
        seen_at=record.seen_at,
        lost=record.lost.get(str(index)),
    )


def fork_begun(fork: Fork, plan: Begin, seen_at: float, trace: Followed | None) -> ForkRecord:
    """A fork whose machines are about to be made. Monotonic seconds, as in its record."""
    early = is_early(fork.metadata.uid)
    return ForkRecord(
        uid=fork.metadata.uid,
        namespace=fork.metadata.namespace or "",
        name=fork.metadata.name,
        above=plan.above.uid,
        above_kind=plan.above.kind.__name__,
        above_name=plan.above.name,
        lineage=plan.lineage,
        baseline_id=plan.baseline_id,
        seen_at=seen_at,
        seeds=seeds_of(fork.spec, plan.seed),
        settled=not early,
        labels=fork.spec.branch(0).labels if early else {},
        parent_seed=plan.seed,
        parent_env=tuple(each.to_json() for each in plan.env),
        trace=trace,
    )


def fork_made(result: ForkResult) -> ForkMade:
    """What the engine made of it."""
    clocks = result.clocks
    return ForkMade(
        point_id=result.point.id,
        point_bytes=result.point.bytes,
        children=tuple(started(each, fork_ms=clocks.fork_ms) for each in result.children),
        pause_ms=clocks.pause_ms,
        fork_ms=clocks.fork_ms,
        ready_ms=clocks.ready_ms,
        began_at=clocks.began_at,
    )


def clocks_of(made: ForkMade) -> ForkClocks:
    """What is still known of an engine's clocks."""
    return ForkClocks(
        pause_ms=made.pause_ms, fork_ms=made.fork_ms, ready_ms=made.ready_ms, began_at=made.began_at
    )


def _hook(hook: Hook | None) -> HookRecord | None:
    if hook is None:
        return None
    return HookRecord(argv=tuple(hook.exec.command), timeout_seconds=float(hook.timeout_seconds))
