"""Puts the operator together and runs it while it leads."""

from __future__ import annotations

import asyncio
import logging
import signal
from importlib.metadata import version

from forktree.kube.access import AccessError, ClusterAccess
from forktree.kube.client import KubeClient
from forktree.kube.errors import KubeError
from forktree.kube.events import Announcer
from forktree.metrics.api_writes import counting_writes
from forktree.metrics.serving import serving_metrics
from forktree.plain_http import CannotListen
from forktree.tracing.exporting import CannotTrace, exporting
from forktree_operator.assigning import Assigning
from forktree_operator.decide.routing import Patience
from forktree_operator.handlers import Handlers
from forktree_operator.health import Health, serving_health
from forktree_operator.leadership import Leadership, LeadershipLost
from forktree_operator.lifesigns import Lifesigns
from forktree_operator.metrics import Metrics
from forktree_operator.nodes import Nodes
from forktree_operator.settings import Settings
from forktree_operator.sweep import Sweep
from forktree_operator.templates import Templates
from forktree_operator.traces import Traces
from forktree_operator.watching import WatchingStopped, watch_events

log = logging.getLogger(__name__)

REPORTER = "forktree.dev/operator"
"""Who says what operators say in Events."""


async def run(settings: Settings) -> int:
    """Lead, work, and stop on SIGTERM or SIGINT. Returns the exit code; 1 means: start it again."""
    stop = asyncio.Event()
    _stop_on_signals(stop)
    failures: list[Exception] = []
    try:
        await _elect(settings, stop)
    except* (AccessError, CannotListen, CannotTrace, KubeError, LeadershipLost, WatchingStopped) as group:
        failures.extend(_leaves(group))
    for failure in failures:
        log.error("stopped error=%s", failure)
    if not failures:
        log.info("stopped")
    return 1 if failures else 0


async def _elect(settings: Settings, stop: asyncio.Event) -> None:
    access = ClusterAccess.discovered(settings.kubeconfig)
    metrics, health = Metrics(), Health()
    observe = counting_writes(metrics.instruments)
    async with (
        exporting(settings.otlp_endpoint, "forktree-operator", version=version("forktree")) as tracer,
        KubeClient.connected(access, user_agent="forktree-operator", observe=observe) as client,
        serving_metrics(settings.metrics_listen, metrics.instruments),
        serving_health(settings.health_listen, health),
    ):
        leadership = Leadership(
            client,
            namespace=settings.namespace,
            identity=settings.identity,
            lease_seconds=settings.lease_seconds,
            health=health,
        )
        try:
            if await leadership.acquire(stop):
                with metrics.leading():
                    async with asyncio.TaskGroup() as tasks:
                        keeping = tasks.create_task(leadership.keep(), name="leadership")
                        await _lead(
                            settings,
                            access,
                            client,
                            stop,
                            metrics=metrics,
                            health=health,
                            traces=Traces(tracer),
                        )
                        keeping.cancel()
        finally:
            await leadership.release()


async def _lead(
    settings: Settings,
    access: ClusterAccess,
    client: KubeClient,
    stop: asyncio.Event,
    *,
    metrics: Metrics,
    health: Health,
    traces: Traces,
) -> None:
    """Work until `stop`. Raises in a group what made it stop before."""
    templates, lifesigns = Templates(client), Lifesigns()
    nodes = Nodes(lifesigns)
    patience = Patience(source_exists_seconds=settings.source_exists_seconds)
    announcer = Announcer(client, reporter=REPORTER, instance=settings.identity)
    assigning = Assigning(
        client,
        templates,
        nodes,
        lifesigns,
        patience=patience,
        requests_in_flight=settings.requests_in_flight,
        metrics=metrics,
        traces=traces,
        announcer=announcer,
    )
    sweep = Sweep(
        client, nodes, lifesigns, assigning, settings, announcer=announcer, metrics=metrics, health=health
    )
    await sweep.look()  # So that the first session is not told that there is no node.
    registry = Handlers(access, templates, nodes, assigning, sweep).registry()
    async with asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(sweep.follow_leases(), name="agent-leases"),
            tasks.create_task(sweep.run(), name="sweep"),
            tasks.create_task(announcer.run(), name="announcer"),
        ]
        loop = asyncio.get_running_loop()
        unwatched = metrics.instruments.before_each_scrape(
            lambda: metrics.nodes_are(nodes.states(loop.time()))
        )
        try:
            await watch_events(registry, stop, lambda: _stop_on_signals(stop))
        finally:
            unwatched()
        for task in others:
            task.cancel()


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)


def _leaves(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    """The exceptions in a group of groups, in order."""
    leaves: list[Exception] = []
    for each in group.exceptions:
        leaves += _leaves(each) if isinstance(each, BaseExceptionGroup) else [each]
    return leaves
