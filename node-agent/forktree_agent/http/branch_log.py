"""What a child's branch printed, also when its machine is gone: kept with the Fork by the node's agent."""

from __future__ import annotations

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import Fork
from forktree.wire import ChildLog, CommandLog
from forktree_agent.control.branch_reports import BranchReports, CommandReport
from forktree_agent.http.errors import Code, Refusal


async def find(client: KubeClient, namespace: str, fork_id: str) -> Fork:
    """The Fork, once it is with a node. Raises `Refusal`."""
    try:
        fork = await client.get(Fork, namespace, fork_id)
    except NotFound as err:
        raise Refusal(Code.NOT_FOUND, f"there is no fork {fork_id} in the namespace {namespace}") from err
    if fork.status.node is None:
        raise Refusal(Code.NOT_READY, f"fork {fork_id} is not with a node yet")
    return fork


async def read(reports: BranchReports, fork: Fork, index: int) -> ChildLog:
    """What came of one child's commands so far. Raises `Refusal`, and `LogLost`."""
    name = fork.metadata.name
    if index >= fork.spec.replicas:
        raise Refusal(Code.NOT_FOUND, f"fork {name} has {fork.spec.replicas} children, so none is {index}")
    if reports.children(fork) is None:
        code = Code.NOT_FOUND if fork.status.phase.terminal else Code.NOT_READY
        raise Refusal(code, f"nothing is known here of what children of fork {name} printed")
    report = await reports.of(fork, index)
    return ChildLog(
        fork_id=name,
        index=index,
        branch=fork.spec.branch(index).name,
        exec=_command(report.exec),
        score=_command(report.score),
        printed_score=report.number,
    )


def _command(report: CommandReport | None) -> CommandLog | None:
    if report is None:
        return None
    record, printed = report.record, report.printed
    return CommandLog(
        ended=record.ended,
        exit_code=record.exit_code,
        timed_out=record.timed_out,
        truncated=record.truncated,
        reason=record.reason,
        message=record.message,
        stdout="" if printed is None else printed.stdout.decode(errors="replace"),
        stderr="" if printed is None else printed.stderr.decode(errors="replace"),
    )
