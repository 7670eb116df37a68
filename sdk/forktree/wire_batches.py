"""The HTTP API's bodies for many at once: each is done alone, and one that fails fails alone."""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, FiniteFloat, model_validator

from forktree.wire import Answer, Exec, ExecFinished, Request, SessionInfo

BATCH_MAX: Final = 256


class BatchScore(Request):
    """`POST …/batch/score`."""

    scores: dict[str, FiniteFloat] = Field(min_length=1, max_length=BATCH_MAX)
    """The number of each session, by its id."""


class BatchPrune(Request):
    """`POST …/batch/prune`: each of them and all below it."""

    session_ids: tuple[str, ...] = Field(default=(), max_length=BATCH_MAX)
    fork_ids: tuple[str, ...] = Field(default=(), max_length=BATCH_MAX)

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.session_ids and not self.fork_ids:
            raise ValueError("give `session_ids` or `fork_ids`")
        return self


class BatchExec(Request):
    """`POST …/batch/exec`: one command in many sessions, or one for each."""

    session_ids: tuple[str, ...] = Field(default=(), max_length=BATCH_MAX)
    """Where to run `exec`."""
    exec: Exec | None = None
    execs: dict[str, Exec] = Field(default_factory=dict[str, Exec], max_length=BATCH_MAX)
    """What to run, by the id of the session."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if bool(self.execs) == (self.exec is not None) or bool(self.session_ids) != (self.exec is not None):
            raise ValueError("give either `session_ids` and `exec`, or `execs`")
        if len(set(self.session_ids)) != len(self.session_ids):
            raise ValueError("`session_ids` names a session twice")
        commands = self.execs.values() if self.exec is None else (self.exec,)
        if any(each.detach or each.stream for each in commands):
            raise ValueError("a batch waits for its commands: none can have `detach` or `stream`")
        return self

    def by_session(self) -> dict[str, Exec]:
        """What is run where, in the order in which it was asked for."""
        return self.execs if self.exec is None else dict.fromkeys(self.session_ids, self.exec)


class BatchResult(Answer):
    """What became of one."""

    session_id: str | None = None
    fork_id: str | None = None
    ok: bool
    exec: ExecFinished | None = None
    deleted: bool | None = None
    session: SessionInfo | None = None
    error: str | None = None
    """Why not, in a sentence."""
    code: str | None = None
    """Why not, as the code of an error of its own."""


class BatchDone(Answer):
    """Of each, in the order in which they were asked for."""

    results: tuple[BatchResult, ...]
