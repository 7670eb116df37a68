"""What the HTTP API may know and do: this node's sessions, their machines, and waiting for status.

It reads what the agent holds anyway, so an answer costs the API server nothing and is as new as the watch.
Objects of other nodes are not known here; for those, ask the API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from forktree.models import (
    ObjectMeta,
    Session,
    SessionPhase,
    SessionSpec,
    SessionStatus,
    SessionTemplate,
    Uid,
)
from forktree.models.session import ForkRef
from forktree_agent.control.activity import Activity
from forktree_agent.control.branch_reports import BranchReports
from forktree_agent.control.early import Outcome
from forktree_agent.control.endpoints import endpoint_of
from forktree_agent.control.newborns import Newborn, Newborns
from forktree_agent.control.objects import Store
from forktree_agent.control.owners import child_owner, owner_of
from forktree_agent.control.records import ForkRecord, PortRecord, Records
from forktree_agent.engine.contract import (
    Command,
    Engine,
    ExecReader,
    ExecResult,
    ExecState,
    Machine,
    MachineGone,
    MemoryUse,
    Owner,
    TerminalSize,
)


class Forking(Protocol):
    """Forks whose objects follow."""

    async def fork(
        self,
        parent: Session,
        name: str,
        replicas: int,
        labels: Mapping[str, str],
        *,
        seen_at: float,
        deadline: float,
    ) -> Outcome | None: ...

    async def recorded(self, namespace: str, name: str) -> None: ...

    async def recorded_below(self, above: Uid) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What this node holds of sessions and forks."""

    sessions: Store[Session]
    templates: Store[SessionTemplate]
    records: Records
    newborns: Newborns


class Facade:
    """Control as seen from the HTTP API. All methods that do not wait answer from memory."""

    def __init__(
        self,
        node_name: str,
        engine: Engine,
        known: Known,
        early: Forking,
        *,
        activity: Activity,
        branches: BranchReports,
        origin: str = "",
    ) -> None:
        """`origin`: where this agent's API is reached; empty: that is not told."""
        self.node_name = node_name
        self._origin = origin
        self.branches = branches
        self.early = early
        self._activity = activity
        self._engine = engine
        self._known = known

    def session(self, namespace: str, name: str) -> Session | None:
        """The session of that name on this node, as last seen. None: not here, or not seen yet.

        Of a child that runs and has no object yet it is what that will say, but for its uid, which is empty.
        """
        seen = self._known.sessions.named(namespace, name)
        if seen is not None:
            return seen
        newborn = self._known.newborns.find(namespace, name)
        record = None if newborn is None else self._known.records.fork(newborn.fork)
        return None if newborn is None or record is None else self._described(record, newborn)

    def session_of(self, uid: Uid) -> Session | None:
        """The session of that uid on this node, as last seen."""
        return self._known.sessions.get(uid)

    def why_gone(self, namespace: str, name: str) -> str | None:
        """Why a child of that name is not here any more, which came to nothing before it had an object."""
        return self._known.newborns.why_gone(namespace, name)

    async def recorded(self, session: Session, *, deadline: float) -> Session | None:
        """The session as its object has it, once that is there; at once for all but those just forked.

        None: it came to nothing; `why_gone` says why. Raises `TimeoutError` at `deadline` (loop time).
        """
        if session.metadata.uid:
            return session
        namespace, name = session.metadata.namespace or "", session.metadata.name
        newborn = self._known.newborns.find(namespace, name)
        if newborn is not None:
            async with asyncio.timeout_at(deadline):
                await newborn.over.wait()
        return self._known.sessions.named(namespace, name)

    def template_name(self, session: Session) -> str:
        """The name of a session's template; its uid where a template of that uid exists no longer."""
        if session.spec.template_ref is not None:
            return session.spec.template_ref.name
        uid = session.status.template_uid or Uid("")
        template = self._known.templates.get(uid)
        return uid if template is None else template.metadata.name

    def parent_name(self, session: Session) -> str | None:
        """The session that a child was forked from, where it has no object yet that leads there."""
        fork = self._fork_of(session)
        return None if fork is None else fork.above_name

    def machine(self, session: Session) -> Machine | None:
        """The machine that runs for `session`, if there is one."""
        owner = self._owner(session)
        if owner is None:
            return None
        return self._engine.machine_of(owner)

    async def heard(self, session: Session, *, deadline: float) -> None:
        """Until its machine has answered its identity. Raises `MachineGone`, `DeadlineExceeded`."""
        await self._engine.answered(self._there(session).id, deadline=deadline)

    async def exec(self, session: Session, command: Command, *, deadline: float) -> ExecResult:
        """Run a command in `session` to its end; `deadline` is loop time.

        Raises what `Engine.exec` raises: `MachineGone`, `CommandRefused`, `DeadlineExceeded`.
        """
        self._activity.began_command(session.metadata.uid)
        with self._activity.during(session.metadata.uid):
            return await self._engine.exec(self._there(session).id, command, deadline=deadline)

    async def begin(self, session: Session, command: Command, *, deadline: float) -> str:
        """Start a command that is tied to nobody, and return its id. Raises what `Engine.begin` raises."""
        self._activity.began_command(session.metadata.uid)
        with self._activity.during(session.metadata.uid):
            return await self._engine.begin(self._there(session).id, command, deadline=deadline)

    @asynccontextmanager
    async def streaming(
        self, session: Session, command: Command, *, deadline: float
    ) -> AsyncGenerator[ExecReader]:
        """Start a command that is tied to nobody, and read it. Raises what `Engine.streaming` raises."""
        self._activity.began_command(session.metadata.uid)
        with self._activity.during(session.metadata.uid):
            begun = self._engine.streaming(self._there(session).id, command, deadline=deadline)
            async with begun as reader:
                yield reader

    @asynccontextmanager
    async def reading(
        self, session: Session, exec_id: str, *, stdout_offset: int, stderr_offset: int, deadline: float
    ) -> AsyncGenerator[ExecReader]:
        """Read a command that another call began. Raises what `Engine.reading` raises."""
        with self._activity.during(session.metadata.uid):
            found = self._engine.reading(
                self._there(session).id,
                exec_id,
                stdout_offset=stdout_offset,
                stderr_offset=stderr_offset,
                deadline=deadline,
            )
            async with found as reader:
                yield reader

    async def write(self, session: Session, exec_id: str, data: bytes, *, end: bool, deadline: float) -> None:
        """Give a command input. Raises what `Engine.write` raises."""
        with self._activity.during(session.metadata.uid):
            machine = self._there(session).id
            await self._engine.write(machine, exec_id, data, end=end, deadline=deadline)

    async def resize(self, session: Session, exec_id: str, size: TerminalSize) -> None:
        """A command's terminal has another size. Raises what `Engine.resize` raises."""
        await self._engine.resize(self._there(session).id, exec_id, size)

    async def kill(self, session: Session, exec_id: str, *, deadline: float) -> bool:
        """Kill a command; False if it had ended. Raises what `Engine.kill` raises."""
        return await self._engine.kill_exec(self._there(session).id, exec_id, deadline=deadline)

    def exec_count(self, session: Session) -> int:
        """How many commands this agent was asked to run in `session`."""
        return self._activity.commands(session.metadata.uid)

    def idle_seconds(self, session: Session) -> float | None:
        """Since when nothing was done in `session`. None: nothing was since this agent started."""
        return self._activity.idle_seconds(session.metadata.uid)

    async def execs(self, session: Session, *, deadline: float) -> tuple[ExecState, ...]:
        """The commands that can be asked for in `session`. Raises `MachineGone`, `DeadlineExceeded`."""
        return await self._engine.execs_told(self._there(session).id, deadline=deadline)

    async def attach(self, session: Session, exec_id: str, *, deadline: float) -> ExecResult:
        """The end of a command that another call began, or that ran at the session's fork.

        Raises what `Engine.attach` raises.
        """
        with self._activity.during(session.metadata.uid):
            return await self._engine.attach(self._there(session).id, exec_id, deadline=deadline)

    async def memory(self, session: Session, *, deadline: float) -> MemoryUse:
        """What memory `session` takes now; being asked is no activity. Raises what `Engine.memory` raises."""
        return await self._engine.memory(self._there(session).id, deadline=deadline)

    def exec_seconds(self, session: Session) -> int | None:
        """The longest time-out that its template lets a command have; None: as long as the API allows."""
        record = self._known.records.session(owner_of(session))
        if record is not None:
            return record.lineage.limits.exec_seconds
        fork = self._fork_of(session)
        return None if fork is None else fork.lineage.limits.exec_seconds

    def ports(self, session: Session) -> tuple[PortRecord, ...]:
        """The ports that may be reached in it: what its template declares."""
        known = self._known.records.session(owner_of(session)) or self._fork_of(session)
        if known is not None:
            return known.lineage.ports
        template = self._known.templates.get(session.status.template_uid or Uid(""))
        declared = () if template is None else template.spec.ports
        return tuple(PortRecord(name=each.name, port=each.port) for each in declared)

    def _owner(self, session: Session) -> Owner | None:
        """What the machine of `session` is called, where that is to be used."""
        owner = owner_of(session)
        record = self._known.records.session(owner)
        if record is not None:
            over = record.uid != session.metadata.uid or record.ended or record.expired is not None
            return None if over and session.metadata.uid else owner
        newborn = self._newborn(session)
        return None if newborn is None else child_owner(newborn.fork, newborn.index)

    def _newborn(self, session: Session) -> Newborn | None:
        return self._known.newborns.find(session.metadata.namespace or "", session.metadata.name)

    def _fork_of(self, session: Session) -> ForkRecord | None:
        newborn = self._newborn(session)
        return None if newborn is None else self._known.records.fork(newborn.fork)

    def _there(self, session: Session) -> Machine:
        machine = self.machine(session)
        if machine is not None:
            return machine
        name, newborn, fork = session.metadata.name, self._newborn(session), self._fork_of(session)
        lost = None if fork is None or newborn is None else fork.lost.get(str(newborn.index))
        raise MachineGone(
            f"session {name} has no running machine on this node"
            if lost is None
            else f"session {name}: {lost}"
        )

    def _described(self, record: ForkRecord, newborn: Newborn) -> Session:
        """What the object of a child will say."""
        index = newborn.index
        start = None if record.result is None else record.result.children[index]
        return Session(
            metadata=ObjectMeta(name=record.child_name(index), namespace=record.namespace),
            spec=SessionSpec(
                fork_ref=ForkRef(name=record.name, uid=record.uid, index=index),
                node_name=self.node_name,
                seed=record.seeds[index] if record.seeds else None,
            ),
            status=SessionStatus(
                phase=SessionPhase.RUNNING,
                node=self.node_name,
                endpoint=endpoint_of(
                    self._origin, record.namespace, record.child_name(index), record.lineage.ports
                ),
                root=record.lineage.root,
                parent=record.lineage.parent,
                depth=record.lineage.depth,
                template_uid=record.lineage.template_uid,
                mode=None if start is None else start.mode,
                level=None if start is None else start.level,
            ),
        )

    async def session_when(self, uid: Uid, there: Callable[[Session], bool], *, deadline: float) -> Session:
        """The session as soon as `there` holds for it and it is on this node.

        Raises `ObjectGone` once it is deleted, and `TimeoutError` at `deadline` (loop time).
        """
        return await self._known.sessions.when(uid, there, deadline=deadline)
