"""What control must know after a restart: which machine is whose, and how far each fork came.

All of it is in memory and, written through without any `await`, in the journal. A machine's record has the
machine's owner name as its key; it is bound to the uid of a Session object as soon as that is known.
"""

from __future__ import annotations

from typing import Any

import msgspec

from forktree.models import Level, Mode, Uid
from forktree.models.names import child_name
from forktree_agent.control.branch_records import BranchRecord, Verdict
from forktree_agent.control.owners import ChildMachine, child_owner, meaning
from forktree_agent.engine.contract import Command, Hooks, Owner
from forktree_agent.journal import Journal
from forktree_agent.typed_records import load_all, to_journal

SESSION, FORK, BRANCH = "session", "fork", "branch"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the template allows to one tree."""

    depth: int
    memory_bytes: int | None
    live: int | None = None
    idle_seconds: int | None = None
    tree_ttl_seconds: int | None = None
    exec_seconds: int | None = None
    pause_budget_ms: int | None = None


class HookRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A command of the template that takes part in each fork of the tree."""

    argv: tuple[str, ...]
    timeout_seconds: float


class HookRecords(msgspec.Struct, frozen=True, kw_only=True):
    """The template's hooks as they were when the root was started: it may be deleted since."""

    pre: HookRecord | None = None
    post: HookRecord | None = None

    def commands(self) -> Hooks:
        """As an engine takes them."""
        return Hooks(pre=_command(self.pre), post=_command(self.post))


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """The span of a fork or of a root's start, where somebody follows traces."""

    span: str
    """As a `traceparent`."""
    below: str | None
    """That of whoever asked for it; None: its trace is its own."""


class PortRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A server in the guest that callers may reach."""

    name: str
    port: int


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """A session's place in its tree. All children of one fork have the same."""

    root: Uid
    parent: Uid | None
    """The session whose memory it carried on; None for a root."""
    depth: int
    template_uid: Uid
    limits: Limits
    hooks: HookRecords = HookRecords()
    ports: tuple[PortRecord, ...] = ()
    """As they were when the root was started, like all of these."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """How a machine came to be. `fork_ms` is the engine's clock of that name, for its whole fork."""

    baseline_id: str
    generation: str
    mode: Mode
    level: Level
    fork_ms: float | None
    """None where the agent died before it noted it."""
    started_at: str
    """Wall clock, RFC 3339."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A machine and the Session object it is bound to."""

    owner: Owner
    uid: Uid | None
    """The object's uid. None only where the object was refused, and then `ended` is set."""
    namespace: str
    name: str
    lineage: Lineage
    start: Start | None = None
    """None while a root is being started."""
    total_ms: float | None = None
    seen_at: float
    """When this agent or one before it saw the request: monotonic seconds, the same for one boot."""
    lost: str | None = None
    """How the machine ended by itself, in words."""
    network_lost: str | None = None
    """How its way to the outside ended, in words; the machine runs on."""
    expired: str | None = None
    """Why its machine is ended because a clock of its tree ran out, in words. Noted before it is ended."""
    scored: float | None = None
    """What the scorer of its Fork printed for it."""
    ended: bool = False
    """It is over: its object is gone or was refused. It is never started again."""
    trace: Followed | None = None
    """Of a root: its start's span."""


class ForkMade(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine made of it. Clocks as in `ForkClocks`."""

    point_id: str
    point_bytes: int
    children: tuple[Start, ...]
    pause_ms: float | None
    fork_ms: float
    ready_ms: float | None
    """None until all are known to have answered, or not to."""
    began_at: float | None = None
    """What these clocks begin with: monotonic seconds, the same for one boot."""


class ForkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A fork that was begun, and with `result` one whose machines ran and answered."""

    uid: Uid
    namespace: str
    name: str
    above: Uid
    """The object it hangs below: what was forked."""
    above_kind: str
    above_name: str
    lineage: Lineage
    """That of its children."""
    baseline_id: str
    seen_at: float
    """Like that of a session."""
    result: ForkMade | None = None
    total_ms: float | None = None
    lost: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """How machines ended by themselves before their objects were there, by index."""
    seeds: tuple[str, ...] = ()
    """One for each child. Some are random, so they are noted before any machine hears of them."""
    parent_seed: str | None = None
    """That of the session whose instant this is, for forks that start from this one."""
    parent_env: tuple[dict[str, Any], ...] = ()
    """What that session was told, as its object says it: a secret by its name only."""
    verdict: Verdict | None = None
    """Who was found to have lost, once all commands of its branches were done."""
    point_dropped: bool = False
    """No child of it was left, so its instant is not held any more."""
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Its user's for every child, where its object is still to be written."""
    born: Uid | None = None
    """What it was called before its object was written; see `early_uid`. None: its object was first."""
    settled: bool = True
    """Each child has answered its identity, or was ended because it did not."""
    unanswered: tuple[int, ...] = ()
    """Children that ran and did not answer. All or nothing is only what nobody has heard of yet."""
    trace: Followed | None = None
    """Its span: forks of its children point there."""

    def child_name(self, index: int) -> str:
        """The name of a child's Session, whether that is written yet or not."""
        return child_name(self.name, index, self.born or self.uid)


class Records:
    """The journal's records of sessions and forks, by owner name and by uid."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._sessions: dict[Owner, SessionRecord] = {}
        self._forks: dict[Uid, ForkRecord] = {}
        self._branches: dict[Uid, dict[int, BranchRecord]] = {}
        for session in load_all(journal, SESSION, SessionRecord).values():
            self._sessions[session.owner] = session
        for fork in load_all(journal, FORK, ForkRecord).values():
            self._forks[fork.uid] = fork
        for key, branch in load_all(journal, BRANCH, BranchRecord).items():
            if branch.fork in self._forks:
                self._branches.setdefault(branch.fork, {})[branch.index] = branch
            else:  # An agent ended while it forgot the fork.
                journal.remove(BRANCH, key)

    def session(self, owner: Owner) -> SessionRecord | None:
        return self._sessions.get(owner)

    def sessions(self) -> tuple[SessionRecord, ...]:
        return tuple(self._sessions.values())

    def fork(self, uid: Uid) -> ForkRecord | None:
        return self._forks.get(uid)

    def forks(self) -> tuple[ForkRecord, ...]:
        return tuple(self._forks.values())

    def branch(self, fork: Uid, index: int) -> BranchRecord | None:
        return self._branches.get(fork, {}).get(index)

    def put_session(self, record: SessionRecord) -> None:
        """Written when this returns. Raises `JournalError`."""
        self._journal.put(SESSION, _key(record.owner), to_journal(record))
        self._sessions[record.owner] = record

    def put_fork(self, record: ForkRecord) -> None:
        """Written when this returns. Raises `JournalError`."""
        self._journal.put(FORK, record.uid, to_journal(record))
        self._forks[record.uid] = record

    def put_branch(self, record: BranchRecord) -> None:
        """Written when this returns. Raises `JournalError`."""
        self._journal.put(BRANCH, _branch_key(record.fork, record.index), to_journal(record))
        self._branches.setdefault(record.fork, {})[record.index] = record

    def remove_session(self, owner: Owner) -> None:
        self._journal.remove(SESSION, _key(owner))
        self._sessions.pop(owner, None)

    def end_session(self, owner: Owner) -> None:
        """Its object is gone. The record stays while its Fork does: that index is never started again."""
        record = self._sessions.get(owner)
        if record is None:
            return
        match meaning(owner):
            case ChildMachine(fork=fork) if fork in self._forks:
                self.put_session(msgspec.structs.replace(record, ended=True))
            case _:
                self.remove_session(owner)

    def remove_fork(self, uid: Uid) -> None:
        """Forget a fork, and those of its children that are over."""
        fork = self._forks.get(uid)
        if fork is not None and fork.result is not None:
            for index in range(len(fork.result.children)):
                owner = child_owner(uid, index)
                child = self._sessions.get(owner)
                if child is not None and child.ended:
                    self.remove_session(owner)
        self._journal.remove(FORK, uid)
        self._forks.pop(uid, None)
        for index in self._branches.pop(uid, {}):
            self._journal.remove(BRANCH, _branch_key(uid, index))


def _command(hook: HookRecord | None) -> Command | None:
    return None if hook is None else Command(argv=hook.argv, timeout_seconds=hook.timeout_seconds)


def _key(owner: Owner) -> str:
    return owner.replace("/", ".")


def _branch_key(fork: Uid, index: int) -> str:
    return f"{fork}.{index}"
