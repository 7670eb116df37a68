"""Control as one component: watches, workers, sweep and node report, running together until left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from forktree.kube.client import KubeClient
from forktree.kube.events import Announcer
from forktree.models import Fork, Session
from forktree.tracing.spans import Tracer
from forktree_agent.control.activity import Activity
from forktree_agent.control.bakes import Bakes
from forktree_agent.control.branch_logs import BranchLogs
from forktree_agent.control.branch_reports import BranchReports
from forktree_agent.control.branches import Branches
from forktree_agent.control.early import EarlyForks, above_place
from forktree_agent.control.exits import watch_exits
from forktree_agent.control.expiry import Expiry
from forktree_agent.control.facade import Facade, Known
from forktree_agent.control.forks import Forks
from forktree_agent.control.living import Living
from forktree_agent.control.objects import Store
from forktree_agent.control.owners import child_owner, is_early
from forktree_agent.control.prune import Pruner
from forktree_agent.control.records import Records
from forktree_agent.control.sessions import Sessions
from forktree_agent.control.status_writer import StatusWriter
from forktree_agent.control.sweep import Sweep
from forktree_agent.control.traces import Traces
from forktree_agent.control.tree import Place
from forktree_agent.control.watches import Watches
from forktree_agent.control.workers import Workers
from forktree_agent.control.world import World, loop_now
from forktree_agent.engine.contract import Adoption, Engine
from forktree_agent.images.pulling import Images
from forktree_agent.journal import Journal
from forktree_agent.metrics import Metrics
from forktree_agent.settings import Settings

log = logging.getLogger(__name__)

BRANCH_LOGS = "branch-logs"
REPORTER = "forktree.dev/agent"
"""Who says what agents say in Events."""


class Control:
    """Everything that decides on this node. `facade` is what others may know and do."""

    def __init__(self, world: World, early: EarlyForks, bakes: Bakes) -> None:
        self.world = world
        branches = BranchReports(world.records, world.logs)
        self.facade = Facade(
            world.node,
            world.engine,
            Known(
                sessions=world.sessions,
                templates=bakes.templates,
                records=world.records,
                newborns=world.newborns,
            ),
            early,
            activity=world.activity,
            branches=branches,
            origin=world.settings.advertise_url,
        )

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        settings: Settings,
        *,
        client: KubeClient,
        engine: Engine,
        journal: Journal,
        adoption: Adoption,
        metrics: Metrics,
        images: Images | None = None,
        tracer: Tracer | None = None,
    ) -> AsyncGenerator[Control]:
        """Decide for this node until left. Machines run on then; the next agent takes them over.

        `adoption` is what `engine` answered to `adopt`. Without `images` none of registries are taken. No
        `tracer`: nobody follows traces.
        """
        async with asyncio.TaskGroup() as tasks:
            records, sessions = Records(journal), Store[Session]()
            world = World(
                settings=settings,
                client=client,
                engine=engine,
                records=records,
                writer=StatusWriter(client),
                announcer=Announcer(client, reporter=REPORTER, instance=settings.node_name),
                metrics=metrics,
                traces=Traces(tracer, records, sessions),
                living=Living(engine),
                activity=Activity(loop_now),
                session_work=Workers("session", tasks),
                fork_work=Workers("fork", tasks),
                prune_work=Workers("prune", tasks),
                branch_work=Workers("branch", tasks),
                early_work=Workers("early", tasks),
                logs=BranchLogs.opened(
                    settings.state_directory / BRANCH_LOGS, {each.uid for each in records.forks()}
                ),
                sessions=sessions,
            )
            place_known(world)
            bakes = Bakes(settings, client, engine, tasks, images=images, room_changed=world.room_changed)
            bakes.adopted(adoption.baselines)
            pruner = Pruner(world)
            sweep = Sweep(world, pruner)
            watches = Watches(world, bakes, pruner, sweep)
            world.session_work.do(Sessions(world, bakes).round)
            world.fork_work.do(Forks(world, tasks).round)
            world.prune_work.do(pruner.round)
            world.branch_work.do(Branches(world).round)
            early = EarlyForks(world, tasks, sweep.take_in)
            world.early_work.do(early.round)
            for record in records.forks():
                if is_early(record.uid):
                    world.early_work.poke(record.uid)
            endless = [
                # First, so that how a machine ended while no agent ran is noted before anybody asks.
                tasks.create_task(watch_exits(world), name="exits"),
                tasks.create_task(watches.templates(), name="watch-templates"),
                tasks.create_task(watches.sessions(), name="watch-sessions"),
                tasks.create_task(watches.forks(), name="watch-forks"),
                tasks.create_task(sweep.run(), name="sweep"),
                tasks.create_task(Expiry(world).run(), name="expiry"),
                tasks.create_task(world.announcer.run(), name="announcer"),
            ]
            unwatched = metrics.instruments.before_each_scrape(partial(tell_how_it_stands, world, early))
            try:
                yield cls(world, early, bakes)
            finally:
                unwatched()
                for task in endless:
                    task.cancel()
                for workers in (
                    world.session_work,
                    world.fork_work,
                    world.prune_work,
                    world.branch_work,
                    world.early_work,
                ):
                    workers.close()
                bakes.close()


def tell_how_it_stands(world: World, early: EarlyForks) -> None:
    """For whoever watches the node: what is true now, from memory."""
    world.metrics.node_is(
        world.engine.counts(),
        world.engine.usage(),
        phases=(session.status.phase for session in world.sessions.all()),
        unrecorded=early.unrecorded(),
    )


def place_known(world: World) -> None:
    """Enter what the journal knows into the tree: only what is known can be missed."""
    for session in world.records.sessions():
        if session.uid is not None and not session.ended:
            place = Place(kind=Session, namespace=session.namespace, name=session.name, uid=session.uid)
            world.tree.place(place, None, now=loop_now())
    for fork in world.records.forks():
        place = Place(kind=Fork, namespace=fork.namespace, name=fork.name, uid=fork.uid)
        # No object tells of an early fork what it hangs below.
        above = above_place(fork) if is_early(fork.uid) else None
        world.tree.place(place, above, now=loop_now())
        if fork.born is not None and fork.result is not None:
            without = [
                index
                for index in range(len(fork.result.children))
                if world.records.session(child_owner(fork.uid, index)) is None
            ]
            world.newborns.known(fork, without)
