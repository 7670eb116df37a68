"""What the HTTP API may know and do: this node's sessions, their machines, and waiting for status.

It reads what the agent holds anyway, so an answer costs the API server nothing and is as new as the watch.
Objects of other nodes are not known here; for those, ask the API server.
"""

from __future__ import annotations

from collections.abc import Callable

from forktree.models import Session, Uid
from forktree_agent.control.activity import Activity
from forktree_agent.control.branch_reports import BranchReports
from forktree_agent.control.objects import Store
from forktree_agent.control.owners import owner_of
from forktree_agent.control.records import Records
from forktree_agent.engine.contract import Command, Engine, ExecResult, Machine, MachineGone


class Facade:
    """Control as seen from the HTTP API. All methods that do not wait answer from memory."""

    def __init__(
        self,
        node_name: str,
        engine: Engine,
        sessions: Store[Session],
        records: Records,
        *,
        activity: Activity,
        branches: BranchReports,
    ) -> None:
        self.node_name = node_name
        self.branches = branches
        self._activity = activity
        self._engine = engine
        self._sessions = sessions
        self._records = records

    def session(self, namespace: str, name: str) -> Session | None:
        """The session of that name on this node, as last seen. None: not here, or not seen yet."""
        return self._sessions.named(namespace, name)

    def machine(self, session: Session) -> Machine | None:
        """The machine that runs for `session` and answered its identity message, if there is one."""
        owner = owner_of(session)
        record = self._records.session(owner)
        if record is None or record.uid != session.metadata.uid or record.ended or record.expired:
            return None
        return next((each for each in self._engine.machines() if each.owner == owner), None)

    async def exec(self, session: Session, command: Command, *, deadline: float) -> ExecResult:
        """Run a command in `session` to its end; `deadline` is loop time.

        Raises what `Engine.exec` raises: `MachineGone`, `CommandRefused`, `DeadlineExceeded`.
        """
        with self._activity.during(session.metadata.uid):
            return await self._engine.exec(self._there(session).id, command, deadline=deadline)

    def execs(self, session: Session) -> tuple[str, ...]:
        """Ids of the commands that `attach` knows in `session`. Raises `MachineGone`."""
        return self._engine.execs(self._there(session).id)

    async def attach(self, session: Session, exec_id: str, *, deadline: float) -> ExecResult:
        """The end of a command that another call began, or that ran at the session's fork.

        Raises what `Engine.attach` raises.
        """
        with self._activity.during(session.metadata.uid):
            return await self._engine.attach(self._there(session).id, exec_id, deadline=deadline)

    def exec_seconds(self, session: Session) -> int | None:
        """The longest time-out that its template lets a command have; None: as long as the API allows."""
        record = self._records.session(owner_of(session))
        return None if record is None else record.lineage.limits.exec_seconds

    def _there(self, session: Session) -> Machine:
        machine = self.machine(session)
        if machine is None:
            raise MachineGone(f"session {session.metadata.name} has no running machine on this node")
        return machine

    async def session_when(self, uid: Uid, there: Callable[[Session], bool], *, deadline: float) -> Session:
        """The session as soon as `there` holds for it and it is on this node.

        Raises `ObjectGone` once it is deleted, and `TimeoutError` at `deadline` (loop time).
        """
        return await self._sessions.when(uid, there, deadline=deadline)
