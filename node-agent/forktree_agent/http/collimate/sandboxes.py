"""What both surfaces are asked to do with sessions, done by the parts that do it for the native API."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from aiohttp import web

from forktree.errors import ForktreeError
from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import Session
from forktree.wire import CreateSession, Exec, ForkSession, SessionCreated, SessionForked
from forktree_agent.control.facade import Facade
from forktree_agent.control.identity import SEED_VARIABLE
from forktree_agent.http import executing, forking, locating, outputs
from forktree_agent.http.collimate.programs import program
from forktree_agent.http.collimate.wire import Egress, ExecAnswer, OneShot, SandboxExec
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.executing import Finished
from forktree_agent.http.holding import Held
from forktree_agent.http.opening import open_session

log = logging.getLogger(__name__)

_SEED = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request, by whichever surface it came."""

    client: KubeClient
    facade: Facade
    namespace: str
    request_id: str
    seen: float
    """When it was, in monotonic seconds."""
    held: Held
    """What it holds of our memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended; `output` stands in the answer for its `stdout`."""

    body: ExecAnswer
    output: tuple[bytes, ...]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        pieces = outputs.encoded(self.body, {"stdout": self.output})
        return await outputs.answer(request, pieces, about_bytes=sum(map(len, self.output)))


class Elsewhere(Exception):
    """Another node's agent is to be asked the same, which may take until `end_by` (loop time)."""

    def __init__(self, node: str, end_by: float) -> None:
        super().__init__(node)
        self.node = node
        self.end_by = end_by


async def opened(
    visit: Visit, template: str, *, annotations: Mapping[str, str] | None = None, here: bool = False
) -> SessionCreated:
    """A new session that runs; with `here`, on this node. Raises `Refusal`."""
    body, _ = await open_session(
        visit.client,
        visit.namespace,
        CreateSession(template_id=template),
        seen=visit.seen,
        annotations=annotations,
        node=visit.facade.node_name if here else None,
        unless_full=True,
    )
    return body


async def executed(visit: Visit, session_id: str, wanted: SandboxExec) -> Ended:
    """How the command ended; it is killed where its caller goes first. Raises `Refusal` and `Elsewhere`."""
    seed = seed_of(wanted)
    start_by = asyncio.get_running_loop().time() + executing.START_SECONDS
    session = await locating.find_placed(
        visit.client, visit.facade, visit.namespace, session_id, deadline=start_by
    )
    if node := locating.other_node(visit.facade, session):
        raise Elsewhere(node, start_by + wanted.timeout_seconds + executing.MARGIN_SECONDS)
    todo = program(wanted)
    command = Exec(
        argv=todo.argv, stdin=todo.stdin, env={SEED_VARIABLE: seed}, timeout_seconds=wanted.timeout_seconds
    )
    finished = await executing.execute(
        visit.facade,
        session,
        command,
        start_by=start_by,
        request_id=visit.request_id,
        room=visit.held.room(session_id),
    )
    return _ended(finished, wanted, seed, visit.seen)


async def executed_once(visit: Visit, wanted: OneShot) -> Ended:
    """The same in a session of its own on this node, of which nothing is left. Raises `Refusal`."""
    refuse_network(wanted.egress)
    seed_of(wanted)  # Before anything is made.
    created = await opened(visit, wanted.template_id, here=True)
    try:
        ended = await executed(visit, created.session_id, wanted)
    finally:
        leaving = _leave(visit, created.session_id)
        await asyncio.shield(asyncio.create_task(leaving, name=f"leave-{created.session_id}"))
    told = {"fork_time_ms": created.fork_time_ms or 0.0}
    return replace(ended, body=ended.body.model_copy(update=told))


async def forked(
    visit: Visit, session_id: str, count: int, *, annotations: Mapping[str, str] | None = None
) -> SessionForked:
    """`count` children that all run, or none. Raises `Refusal` and `Elsewhere`.

    With `annotations` for the Fork that makes them, its object is written first: they must not be lost.
    """
    wanted = forking.Wanted(
        namespace=visit.namespace,
        source=forking.SourceName(Session, session_id),
        body=ForkSession(replicas=count),
        name=None,
        called="fork",
        seen=visit.seen,
        annotations=annotations or {},
    )
    parent = await locating.find(visit.client, visit.facade, visit.namespace, session_id)
    if node := locating.other_node(visit.facade, parent):
        raise Elsewhere(node, wanted.deadline)
    body, _ = await forking.fork(visit.client, visit.facade, wanted, at_once=not annotations)
    return body


def seed_of(wanted: SandboxExec) -> str:
    """The seed that was given, or a random one. Raises `Refusal`."""
    if wanted.seed is None:
        return secrets.token_hex(32)
    if not _SEED.fullmatch(wanted.seed):
        raise Refusal(Code.INVALID_SEED, "`seed` must be 64 hexadecimal digits: 32 bytes")
    return wanted.seed


def refuse_network(egress: Egress | None) -> None:
    """Raises `Refusal` for a policy of the caller's own: a template decides what its sessions reach."""
    if egress is not None and egress.get("mode") != "none":
        sentence = (
            "what a session reaches is its template's to say, so `egress` can only have the mode `none`:"
            " leave it out"
        )
        raise Refusal(Code.BAD_REQUEST, sentence)


def _ended(finished: Finished, wanted: SandboxExec, seed: str, seen: float) -> Ended:
    result = finished.result
    output = tuple(each for each in (result.stdout, result.stderr) if each)
    if result.timed_out:
        last = f"timeout after {wanted.timeout_seconds:g}s\n".encode()
        output += (last if not output or output[-1].endswith(b"\n") else b"\n" + last,)
    body = ExecAnswer(
        id=finished.id,
        stdout="",
        exit_code=result.exit_code,
        exec_time_ms=finished.exec_time_ms,
        total_time_ms=round((time.monotonic() - seen) * 1000, 3),
        seed=seed,
        timed_out=result.timed_out,
        truncated=result.truncated,
    )
    return Ended(body=body, output=output)


async def _leave(visit: Visit, session_id: str) -> None:
    """Delete a session that nobody knows of but us. What cannot be deleted stays visible as an object."""
    try:
        await visit.client.delete(Session, visit.namespace, session_id)
    except NotFound:
        pass
    except ForktreeError as err:
        log.warning(
            "discard_failed kind=Session namespace=%s name=%s error=%s", visit.namespace, session_id, err
        )
