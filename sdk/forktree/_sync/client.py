# Generated from sdk/forktree/_async/client.py by `make generate`; change that file.
"""The client: one way to the server, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from forktree._following import Following
from forktree._results import Command, ExecResult
from forktree._retrying import Retries
from forktree._settings import Reach, Settings
from forktree._sync.batches import exec_many, prune_many, score_many
from forktree._sync.connecting import Connection
from forktree._sync.session import Session
from forktree._sync.sessions import Forks, Sessions, Templates
from forktree._sync.transport import Call, Transport
from forktree.wire import Health
from forktree.wire_trees import NodeInfo


class Client:
    """Sessions and forks of one namespace. May be used by many at once, and is closed at the end of a `with`
    block.

    Where the agent is, and the token for it, come from the arguments, else from FORKTREE_URL, FORKTREE_CA,
    FORKTREE_TOKEN (or FORKTREE_TOKEN_FILE) and FORKTREE_NAMESPACE, else from the cluster of the kubeconfig or
    of the pod: the address from a ForkNode, the token by a TokenRequest for `service_account`. That is found
    out with the first call. Every call raises `forktree.errors.ClientError` and has a deadline.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca: Path | str | None = None,
        namespace: str | None = None,
        kubeconfig: Path | str | None = None,
        context: str | None = None,
        service_account: str | None = None,
        retries: Retries | None = None,
        traceparent: str | None = None,
    ) -> None:
        """`ca`: file or PEM text of the certificates to verify the agent by. `traceparent`: the span that all
        requests belong to; None: the current one where the program uses OpenTelemetry. Raises `BadSettings`.
        """
        settings = Settings.gathered(
            url=url,
            token=token,
            ca=ca,
            namespace=namespace,
            kubeconfig=kubeconfig,
            context=context,
            service_account=service_account,
        )
        self._connection = Connection(settings)
        self._transport = Transport(self._connection, retries or Retries(), Following(traceparent))
        self.sessions = Sessions(self._transport)
        self.forks = Forks(self._transport)
        self.templates = Templates(self._transport)

    def score(self, scores: Mapping[Session, float]) -> None:
        """Set the scores of many sessions. Raises `BatchFailed` when some could not be set."""
        score_many(self._transport, scores)

    def prune(self, sessions: Iterable[Session]) -> None:
        """Delete many sessions, and all below them. What is gone is deleted already. Raises `BatchFailed`."""
        prune_many(self._transport, sessions)

    def exec_each(
        self,
        sessions: Iterable[Session],
        command: Command | Callable[[Session], Command],
        *,
        timeout: float = 30.0,
        check: bool = False,
    ) -> list[ExecResult]:
        """Run `command` in each session, or what it gives for the session; all at once.

        The results are in the order of the sessions. Raises `BatchFailed` where one could not be run in some,
        and `CommandFailed` where `check` is set and one did not end with 0.
        """
        pairs = [(session, command(session) if callable(command) else command) for session in sessions]
        return exec_many(self._transport, pairs, timeout=timeout, check=check)

    def node(self) -> NodeInfo:
        """What the node can do whose agent answers, and why not more."""
        return self._transport.ask(Call(method="GET", path="/node"), NodeInfo)

    def health(self) -> Health:
        """That there is an agent, and which version it is of."""
        return self._transport.ask(Call(method="GET", path="/v1/health", seconds=10.0), Health)

    def reach(self) -> Reach:
        """Where requests go and what goes with them. Finds that out, and asks the agent nothing."""
        return self._transport.reach()

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
