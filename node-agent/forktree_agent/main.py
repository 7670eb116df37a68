"""The agent as a program: its parts in the order in which they need each other, until it is told to stop.

Leaving is always safe, also by `kill -9`: machines are the keeper's, and what they are is in the journal.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from forktree.errors import ForktreeError
from forktree.kube.access import AccessError, ClusterAccess
from forktree.kube.client import KubeClient
from forktree.metrics.api_writes import counting_writes
from forktree.metrics.serving import serving_metrics
from forktree.tracing.exporting import exporting
from forktree.tracing.spans import Attribute, Tracer
from forktree_agent.control.control import Control
from forktree_agent.control.facade import Facade
from forktree_agent.control.node_status import AgentLease, NodeFacts, NodeReport
from forktree_agent.control.world import loop_now, wall_now
from forktree_agent.engine.contract import Engine
from forktree_agent.engine.microvm.engine import MicroVmEngine
from forktree_agent.engine.microvm.settings import Egress, EngineSettings
from forktree_agent.engine.null.engine import NullEngine
from forktree_agent.http.collimate import daemon
from forktree_agent.http.connections import listening_at, listening_on
from forktree_agent.http.proxying import Proxy
from forktree_agent.http.routes import Api
from forktree_agent.http.server import Door, Listener, serving
from forktree_agent.images.pulling import Images, ImageSettings
from forktree_agent.images.registry import BadAuthorities
from forktree_agent.images.store import ImageFolderUnusable
from forktree_agent.journal import Journal
from forktree_agent.keeper_client import Keeper, KeeperError, KeeperGone, StaleEpoch
from forktree_agent.metrics import Metrics
from forktree_agent.settings import Settings

log = logging.getLogger(__name__)

KEEPER_SOCKET = "keeper.sock"
LOCK = "agent.lock"
JOURNAL = "journal"
TLS = "tls"

KEEPER_RETRY_SECONDS = 0.1
MACHINE_UIDS = 4095
"""Of the 4096 that an agent has; the last is for reading images."""


class CannotStart(Exception):
    """The agent cannot do its work here, and one sentence says why."""


EXPECTED = (
    CannotStart,
    AccessError,
    ForktreeError,
    ImageFolderUnusable,
    BadAuthorities,
    KeeperError,
    KeeperGone,
    StaleEpoch,
)
"""What ends an agent without being its defect: said in a line, not as a traceback."""


async def run(settings: Settings) -> int:
    """Serve this node until SIGTERM or SIGINT. Returns the exit code; not 0 means: start it again."""
    known: list[str] = []
    try:
        with locked(settings.state_directory / LOCK):
            await _serve(settings)
    except* EXPECTED as failures:
        known = _sentences(failures)
    for sentence in known:
        log.error("agent_failed error=%s", sentence)
    return 1 if known else 0


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold this state directory: one node, one agent. Ends with the process, however that ends."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise CannotStart(f"the state directory cannot be used: {err}") from err
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            raise CannotStart(f"another agent holds {path}") from err
        yield
    finally:
        os.close(descriptor)


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stop.set)
    access = await asyncio.to_thread(ClusterAccess.discovered, settings.kubeconfig)  # Reads some files.
    metrics = Metrics()
    observe = counting_writes(metrics.instruments)
    async with (
        exporting(
            settings.otlp_endpoint,
            "forktree-agent",
            version=version("forktree"),
            about={Attribute.NODE: settings.node_name},
        ) as tracer,
        KubeClient.connected(
            access, user_agent=f"forktree-agent/{version('forktree')}", observe=observe
        ) as client,
        serving_metrics(settings.metrics_listen, metrics.instruments),
        metrics.watching_the_loop(),
        _keeper(settings) as keeper,
        asyncio.TaskGroup() as tasks,
    ):
        # Alive from here on: taking over many machines, or a first canary, takes longer than a Lease lasts.
        lease = tasks.create_task(AgentLease(settings, client).run(), name="lease")
        working = tasks.create_task(_work(settings, client, keeper, metrics, tracer), name="work")
        stopping = tasks.create_task(stop.wait(), name="stop")
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        log.info("stopping")
        for task in (stopping, working, lease):
            task.cancel()


@asynccontextmanager
async def _keeper(settings: Settings) -> AsyncGenerator[Keeper]:
    """The keeper, which may be starting beside us."""
    path = settings.state_directory / KEEPER_SOCKET
    deadline = loop_now() + settings.connect_seconds
    async with AsyncExitStack() as stack:
        while True:
            try:
                keeper = await stack.enter_async_context(Keeper.connected(path, deadline=deadline))
                break
            except (KeeperGone, TimeoutError) as err:
                if loop_now() > deadline:
                    raise CannotStart(f"no keeper answers at {path}: {err}") from err
            await asyncio.sleep(KEEPER_RETRY_SECONDS)
        log.info("keeper_connected epoch=%d boot_id=%s", keeper.epoch, keeper.boot_id)
        yield keeper


async def _work(
    settings: Settings, client: KubeClient, keeper: Keeper, metrics: Metrics, tracer: Tracer | None
) -> None:
    journal = Journal.opened(settings.state_directory / JOURNAL, keeper.boot_id)
    async with _engine(settings, keeper, journal) as engine:
        adoption = await engine.adopt(deadline=loop_now() + settings.adopt_seconds)
        log.info(
            "adopted machines=%d points=%d baselines=%d",
            len(adoption.machines), len(adoption.points), len(adoption.baselines),
        )  # fmt: skip
        capability = await engine.probe(deadline=loop_now() + settings.probe_seconds)
        log.info(
            "probed passed=%s accelerator=%s reason=%s",
            capability.passed, capability.accelerator, capability.reason,
        )  # fmt: skip
        probed_at = wall_now()
        metrics.probed(passed=capability.passed)
        # Before anything is decided: what is written of sessions says where they are reached.
        listening = await listening_on(settings.listen_host, settings.listen_port)
        settings = replace(settings, advertise_url=settings.advertise_url or _address(settings, listening))
        async with (
            _images(settings, engine) as images,
            Control.running(
                settings,
                client=client,
                engine=engine,
                journal=journal,
                adoption=adoption,
                metrics=metrics,
                tracer=tracer,
                images=images,
            ) as control,
            Proxy.running(client, settings.node_name) as proxy,
            serving(
                listener(settings, listening),
                Api(client, control.facade, proxy),
                metrics.answered,
                _doors(settings, client, control.facade),
                tracer,
            ) as served,
        ):
            facts = NodeFacts(
                capability=capability,
                probed_at=probed_at,
                boot_id=keeper.boot_id,
                version=version("forktree"),
                endpoint=settings.advertise_url,
                ca_bundle=served.ca_bundle,
            )
            # Last: from here on the node is given work.
            await NodeReport(settings, client, engine, facts, control.world.use_changed).run()


@asynccontextmanager
async def _engine(settings: Settings, keeper: Keeper, journal: Journal) -> AsyncGenerator[Engine]:
    """What branches machines here, or pretends to."""
    if settings.engine == "null":
        log.warning("no_machines engine=%s", NullEngine.NAME)
        yield NullEngine(journal, capacity_bytes=settings.memory_limit_bytes)
    else:
        async with MicroVmEngine.running(
            _engine_settings(settings), keeper=keeper, journal=journal
        ) as engine:
            yield engine


@asynccontextmanager
async def _images(settings: Settings, engine: Engine) -> AsyncGenerator[Images | None]:
    """Images of registries. None where no folder is given for them."""
    if settings.image_directory is None:
        yield None
        return
    what = ImageSettings(
        folder=settings.image_directory,
        space_bytes=settings.image_space_bytes,
        unpack_uid=settings.uid_base + MACHINE_UIDS,
        named=settings.registries,
        only_named=settings.only_named_registries,
        authorities=settings.registry_authorities,
    )
    user_agent = f"forktree-agent/{version('forktree')}"
    async with Images.running(what, user_agent=user_agent, free_image=engine.free_image) as images:
        yield images


def _engine_settings(settings: Settings) -> EngineSettings:
    return EngineSettings(
        guest_directory=settings.guest_directory,
        shim_library=settings.shim_library,
        memory_limit_bytes=settings.memory_limit_bytes,
        accelerator=settings.accelerator,
        write_tracking=settings.write_tracking,
        uid_base=settings.uid_base,
        egress=Egress(allow=settings.egress_allow, deny=settings.egress_deny) if settings.egress else None,
        uid_count=MACHINE_UIDS,
    )


def listener(settings: Settings, bound: socket.socket | None = None) -> Listener:
    """Where the API is served, and under which names. `bound`: what listens there already."""
    advertised = urlsplit(settings.advertise_url).hostname
    names = {
        *(settings.listen_host, settings.node_name, *settings.tls_names),
        *([advertised] if advertised else []),
    }
    return Listener(
        host=settings.listen_host,
        port=settings.listen_port,
        names=tuple(sorted(names)),
        tls_directory=settings.state_directory / TLS,
        certificate=settings.tls_certificate,
        key=settings.tls_key,
        bound=bound,
    )


def _doors(settings: Settings, client: KubeClient, facade: Facade) -> list[Door]:
    """The sockets of namespaces. Raises `CannotStart`."""
    doors: list[Door] = []
    for namespace, path in settings.namespace_sockets:
        try:
            listening = listening_at(path)
        except OSError as err:
            for door in doors:
                door.listening.close()
            sentence = f"the socket of namespace {namespace} cannot be opened at {path}: {err}"
            raise CannotStart(sentence) from err
        doors.append(Door(listening, daemon.on_socket(client, facade, namespace)))
        log.info("namespace_serving namespace=%s path=%s", namespace, path)
    return doors


def _address(settings: Settings, listening: socket.socket) -> str:
    return f"https://{settings.listen_host}:{listening.getsockname()[1]}"


def _sentences(failure: BaseException) -> list[str]:
    """What each of the errors in a group says."""
    if isinstance(failure, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", failure)
        return [line for each in group.exceptions for line in _sentences(each)]
    return [f"{type(failure).__name__}: {failure}"]
