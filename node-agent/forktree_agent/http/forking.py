"""Forking a session: at once, with its objects to follow; or by a Fork object that is waited for.

The second is for whoever asks for it, and for what the first cannot do: a session that this node does not
know yet, or that does not run yet, and more forks at once than the API server keeps up with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from forktree.kube.client import KubeClient
from forktree.kube.errors import AlreadyExists, NotFound
from forktree.models import Fork, ForkPhase, ForkSpec, ObjectMeta, Reason, Session
from forktree.models.fork import (
    Branch,
    BranchExec,
    ForkSource,
    KeepPoint,
    Prune,
    Scorer,
    SeedMode,
    SourceRef,
)
from forktree.models.session_template import EnvVar
from forktree.wire import BranchCommand, ForkedChild, ForkSession, SessionForked
from forktree_agent.control.early import Forked, NameTaken, Refused
from forktree_agent.control.facade import Facade
from forktree_agent.control.records import ForkRecord
from forktree_agent.http.describing import root_of, template_name
from forktree_agent.http.describing_forks import parent_of
from forktree_agent.http.discarding import discard
from forktree_agent.http.errors import Code, Refusal, refusal_for
from forktree_agent.http.locating import no_such_session, recorded
from forktree_agent.http.naming import FOR_CALLERS, any_name
from forktree_agent.http.trace_context import annotated
from forktree_agent.http.waiting import Vanished, until

ALL_RUN = {ForkPhase.RUNNING, ForkPhase.COMPLETE}

WAIT_SECONDS = 110.0
"""Existing clients give up on a fork after 120 s; they should hear why first."""

Answered = tuple[SessionForked, HTTPStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked for."""

    namespace: str
    source: SourceName
    body: ForkSession
    name: str | None
    """None: any."""
    called: str
    """The fork in a sentence: `fork a`."""
    seen: float
    """When the request was, in monotonic seconds."""
    complete: bool = False
    """Answer only when commands are done, scored and pruned."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Those of the Fork itself."""
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])
    """The same, where its object is written first."""

    @property
    def deadline(self) -> float:
        return self.seen + WAIT_SECONDS


@dataclass(frozen=True, slots=True)
class SourceName:
    """What is forked."""

    kind: type[Session] | type[Fork]
    name: str


async def fork(client: KubeClient, facade: Facade, wanted: Wanted, *, at_once: bool) -> Answered:
    """Fork a session that is this node's, or nobody's yet: at once where that is wanted and can be, else by
    an object. Raises `Refusal`."""
    known = facade.session(wanted.namespace, wanted.source.name)
    answered = None
    if known is not None:
        known = await recorded(facade, known, deadline=wanted.deadline)
        answered = await fork_at_once(facade, known, wanted) if at_once else None
    return answered or await fork_by_object(client, facade, wanted)


async def fork_at_once(facade: Facade, parent: Session, wanted: Wanted) -> Answered | None:
    """Children that all run, without a word to the API server: 201, or 200 where an earlier call made them.

    None where only an object can do it. A caller that goes away does not stop it. Raises `Refusal`.
    """
    name, replicas = wanted.name or any_name(facade.node_name), wanted.body.count
    outcome = await facade.early.fork(
        parent,
        name,
        replicas,
        wanted.body.labels if replicas else {},
        seen_at=wanted.seen,
        deadline=wanted.deadline,
    )
    match outcome:
        case None:
            return None
        case NameTaken():
            raise _taken(wanted)
        case Refused(reason=reason, message=message):
            raise refusal_for(reason, message, f"fork {name}")
        case Forked(record=record, made=made):
            total_ms = (time.monotonic() - wanted.seen) * 1000
            answer = _early_answer(record, parent, facade.template_name(parent), total_ms)
            return answer, HTTPStatus.CREATED if made else HTTPStatus.OK


async def fork_by_object(client: KubeClient, facade: Facade, wanted: Wanted) -> Answered:
    """Children that all run and have their objects: 201 if this call made the Fork object, 200 if an earlier
    call of that name did.

    A fork that fails or finds no room leaves no object. A caller that goes away does not stop it.
    """
    source = await _source(client, facade, wanted)
    fork, made = await fork_object(client, facade, source, wanted)
    parent = source.metadata.name if isinstance(source, Session) else await parent_of(client, source)
    template = await _template(client, facade, source)
    total_ms = (time.monotonic() - wanted.seen) * 1000
    answer = _answer(fork, parent, template, total_ms, complete=wanted.complete)
    return answer, HTTPStatus.CREATED if made else HTTPStatus.OK


async def fork_object(
    client: KubeClient, facade: Facade, source: Session | Fork, wanted: Wanted
) -> tuple[Fork, bool]:
    """The Fork once it is as far as the caller would wait for, and whether this call made it.

    As `fork_by_object`. Raises `Refusal`.
    """
    fork, made = await _object(client, facade.node_name, source, wanted)
    refused = False
    try:
        settled = _complete if wanted.complete else _settled
        fork = await until(client, fork, settled, deadline=wanted.deadline)
        if fork.status.phase not in ALL_RUN:
            refused = True
            raise _refused(fork)
    except Vanished as err:
        raise Refusal(Code.SESSION_GONE, f"fork {fork.metadata.name} was deleted as it started") from err
    except TimeoutError as err:
        sentence = f"fork {fork.metadata.name} is not complete after {WAIT_SECONDS:g} seconds"
        raise Refusal(Code.DEADLINE_EXCEEDED, sentence) from err
    finally:
        if made and refused:
            await discard(client, fork)
    return fork, made


def spec_of(body: ForkSession, source: ForkSource) -> ForkSpec:
    """What the Fork says for what was asked."""
    mode = body.seed_mode or (SeedMode.FRESH if body.seed is None else SeedMode.DERIVED)
    return ForkSpec(
        source=source,
        replicas=body.count,
        branches=_branches(body),
        seed=body.seed,
        seed_mode=mode,
        score=None if body.score is None else Scorer(exec=_command(body.score)),
        prune=None if body.keep_top is None else Prune(keep_top=body.keep_top),
        keep_point=KeepPoint.ALWAYS if body.keep_point else KeepPoint.WHILE_CHILDREN,
        **({} if body.timeout_seconds is None else {"timeout_seconds": body.timeout_seconds}),
    )


def _branches(body: ForkSession) -> tuple[Branch, ...]:
    if not body.branches:
        return (Branch(labels=body.labels),) * body.count if body.labels else ()
    return tuple(
        Branch(
            name=each.name,
            seed=each.seed,
            env=variables(each.env),
            exec=None if each.exec is None else _command(each.exec),
            labels=body.labels | each.labels,
        )
        for each in body.branches
    )


def _command(command: BranchCommand) -> BranchExec:
    return BranchExec(argv=command.arguments(), timeout_seconds=command.timeout_seconds)


def variables(env: Mapping[str, str]) -> tuple[EnvVar, ...]:
    """As an object has them."""
    return tuple(EnvVar(name=name, value=text) for name, text in env.items())


async def written(facade: Facade, namespace: str, name: str, *, deadline: float) -> None:
    """Until the object is there of a fork of that name that was made at once, if there is one."""
    try:
        async with asyncio.timeout_at(deadline):
            await facade.early.recorded(namespace, name)
    except TimeoutError as err:
        sentence = f"the API server has not taken the object of fork {name} yet"
        raise Refusal(Code.DEADLINE_EXCEEDED, sentence) from err


async def _source(client: KubeClient, facade: Facade, wanted: Wanted) -> Session | Fork:
    if wanted.name is not None:
        await written(facade, wanted.namespace, wanted.name, deadline=wanted.deadline)
    namespace, name = wanted.namespace, wanted.source.name
    try:
        source = await client.get(wanted.source.kind, namespace, name)
    except NotFound as err:
        if wanted.source.kind is Session:
            raise no_such_session(name, namespace) from err
        raise Refusal(Code.NOT_FOUND, f"there is no fork {name} in the namespace {namespace}") from err
    if isinstance(source, Session) and (source.status.phase.terminal or source.metadata.deleting):
        raise Refusal(Code.SESSION_GONE, f"session {name} no longer runs")
    return source


async def _template(client: KubeClient, facade: Facade, source: Session | Fork) -> str:
    """Its name; empty where what says it is gone."""
    if isinstance(source, Session):
        return await template_name(client, facade, source)
    root = await root_of(client, facade, source)
    return "" if root is None else await template_name(client, facade, root)


async def _object(client: KubeClient, node: str, source: Session | Fork, asked: Wanted) -> tuple[Fork, bool]:
    """The fork's object, and whether this call made it."""
    metadata = source.metadata
    reference = SourceRef(name=metadata.name, uid=metadata.uid)
    starts = ForkSource(session=reference) if isinstance(source, Session) else ForkSource(fork=reference)
    wanted = Fork(
        metadata=ObjectMeta(
            name=asked.name or any_name(node),
            namespace=metadata.namespace,
            labels=dict(asked.labels),
            annotations=annotated(asked.annotations),
        ),
        spec=spec_of(asked.body, starts),
    )
    try:
        return await client.create(wanted, manager=FOR_CALLERS), True
    except AlreadyExists as err:
        try:
            present = await client.get(Fork, metadata.namespace, wanted.metadata.name)
        except NotFound:
            raise Refusal(Code.CONFLICT, f"the {asked.called} is being deleted; ask again") from err
        if not _same(present, wanted):
            raise _taken(asked) from err
        return present, False


def _taken(wanted: Wanted) -> Refusal:
    sentence = f"a {wanted.called} exists already, of another source or with other replicas or branches"
    return Refusal(Code.CONFLICT, sentence)


def _same(present: Fork, wanted: Fork) -> bool:
    """A fork made by kubectl may name its source without the uid; `parentUID` then says which it was."""
    theirs = present.spec.source.session or present.spec.source.fork
    ours = wanted.spec.source.session or wanted.spec.source.fork
    kinds = (present.spec.source.session is None, wanted.spec.source.session is None)
    if theirs is None or ours is None or theirs.name != ours.name or kinds[0] != kinds[1]:
        return False
    return (theirs.uid or present.status.parent_uid) in (ours.uid, None) and (
        present.spec.model_copy(update={"source": wanted.spec.source}) == wanted.spec
    )


def _settled(fork: Fork) -> bool:
    """Failed, without room, or running with every child's object made: only then can a caller use each."""
    status = fork.status
    if fork.metadata.deleting or status.phase is ForkPhase.FAILED:
        return True
    if status.phase in ALL_RUN:
        return (status.recorded or 0) >= fork.spec.replicas
    return status.reason is Reason.AT_CAPACITY


def _complete(fork: Fork) -> bool:
    running = fork.status.phase is ForkPhase.RUNNING
    return not running and _settled(fork)


def _refused(fork: Fork) -> Refusal:
    if fork.metadata.deleting:
        return Refusal(Code.SESSION_GONE, f"fork {fork.metadata.name} is being deleted")
    return refusal_for(fork.status.reason, fork.status.message, f"fork {fork.metadata.name}")


def _early_answer(record: ForkRecord, parent: Session, template: str, total_ms: float) -> SessionForked:
    made = record.result
    assert made is not None
    children = tuple(
        ForkedChild(session_id=record.child_name(index), index=index, mode=child.mode, level=child.level)
        for index, child in enumerate(made.children)
    )
    return SessionForked(
        session_id=children[0].session_id if children else None,
        parent_session_id=parent.metadata.name,
        template_id=template,
        fork_id=record.name,
        recorded=False,
        fork_time_ms=round(made.fork_ms, 3),
        total_time_ms=round(total_ms, 3),
        pause_time_ms=None if made.pause_ms is None else round(made.pause_ms, 3),
        ready_time_ms=None if made.ready_ms is None else round(made.ready_ms, 3),
        children=children,
    )


def _answer(
    fork: Fork, parent: str | None, template: str, total_ms: float, *, complete: bool
) -> SessionForked:
    status = fork.status
    children = tuple(
        ForkedChild(
            session_id=child.name,
            index=child.index,
            mode=child.mode,
            level=child.level,
            branch=child.branch,
            seed=child.seed,
            exit_code=child.exit_code if complete else None,
            score=child.score if complete else None,
            reason=child.reason if complete else None,
        )
        for child in sorted(status.children, key=lambda child: child.index)
    )
    return SessionForked(
        session_id=children[0].session_id if children else None,
        parent_session_id=parent,
        template_id=template,
        fork_time_ms=status.fork_ms,
        total_time_ms=round(total_ms, 3),
        fork_id=fork.metadata.name,
        recorded=True,
        pause_time_ms=status.pause_ms,
        ready_time_ms=status.ready_ms,
        children=children,
        best_session_id=status.best if complete else None,
        best_score=status.best_score if complete else None,
    )
