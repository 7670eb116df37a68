"""Templates on this node: made ready once, said so in their status, and dropped when they are deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import ClassVar

from forktree.errors import ForktreeError
from forktree.kube.client import KubeClient
from forktree.kube.errors import KubeError, NotFound
from forktree.models import BakePhase, Reason, Session, SessionTemplate, Uid
from forktree.models.session_template import BakedNode, Egress, ReadinessProbe
from forktree_agent.control.environment import SecretUnreadable, pull_login, secret_variables
from forktree_agent.control.objects import Store
from forktree_agent.control.workers import Workers
from forktree_agent.engine.contract import (
    AtCapacity,
    Baseline,
    BaselineId,
    Disk,
    Engine,
    EngineError,
    HttpGet,
    Pin,
    Probe,
    SecretVariable,
    Shape,
)
from forktree_agent.images.errors import ImageError, ImagePullFailed
from forktree_agent.images.pulling import Images
from forktree_agent.images.references import OCI, parse_reference
from forktree_agent.images.store import KeptImage
from forktree_agent.journal import JournalError
from forktree_agent.settings import Settings

log = logging.getLogger(__name__)

PIN_SECONDS = 60.0
"""For one pin's command to print its version."""


class TemplateNotFound(ForktreeError):
    """There is no such template in the session's namespace."""

    reason: ClassVar[Reason] = Reason.TEMPLATE_NOT_FOUND


class Bake:
    """One making of a baseline, which may be over before anybody waits for it."""

    def __init__(self, running: asyncio.Task[Baseline | Exception]) -> None:
        self._running = running

    async def baseline(self) -> Baseline:
        """What came of it. Raises as `Engine.bake` does."""
        # Shielded: a session that is deleted meanwhile must not end what others wait for too.
        outcome = await asyncio.shield(self._running)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Bakes:
    """All templates, and the baselines that this node holds for them."""

    def __init__(
        self,
        settings: Settings,
        client: KubeClient,
        engine: Engine,
        tasks: asyncio.TaskGroup,
        *,
        images: Images | None,
        room_changed: Callable[[], None],
    ) -> None:
        """`room_changed` is told when a baseline has taken room of the node, or given it back.

        Without `images` none of registries can be had.
        """
        self._images = images
        self._room_changed = room_changed
        self._settings = settings
        self._client = client
        self._engine = engine
        self._tasks = tasks
        self.templates: Store[SessionTemplate] = Store()
        self._held: dict[Uid, Baseline] = {}
        self._adopted: dict[BaselineId, Baseline] = {}
        self._running: dict[Uid, asyncio.Task[Baseline | Exception]] = {}
        self._wanted_ahead: dict[Uid, int] = {}
        """Of templates that were to be baked before anybody asked: how many they wanted in wait then."""
        self._entries: dict[Uid, BakedNode | None] = {}
        """What this node's entry in a template's status should be; None: there should be none."""
        self._reports = Workers("template", tasks)
        self._reports.do(self._report)

    def close(self) -> None:
        """Cancel all that is being done. What a cancelled bake had begun, the engine undoes."""
        self._reports.close()
        for task in self._running.values():
            task.cancel()

    def adopted(self, baselines: Iterable[Baseline]) -> None:
        """Baselines that an agent before this one left. Which template they are of, its status says."""
        self._adopted = {each.id: each for each in baselines}

    async def listed(self, templates: Iterable[SessionTemplate], *, complete: bool) -> None:
        """All templates there are, unless not `complete`: then some could not be read."""
        present = tuple(templates)
        for template in present:
            self.observed(template)
        if not complete:
            return
        uids = {template.metadata.uid for template in present}
        for template in self.templates.all():
            if template.metadata.uid not in uids:
                self.deleted(template)
        wanted = {entry.baseline_id for each in present if (entry := self._entry(each)) is not None}
        for baseline in tuple(self._adopted.values()):
            if baseline.id not in wanted and not self._in_use(baseline.id):
                await self._drop(baseline)
            self._adopted.pop(baseline.id, None)

    def observed(self, template: SessionTemplate) -> None:
        """A template as it is now."""
        self.templates.observe(template)
        self._match(template)
        self._keep_ready(template)

    def _match(self, template: SessionTemplate) -> None:
        """What its status says of this node, with what is here."""
        uid = template.metadata.uid
        entry = self._entry(template)
        if entry is None or uid in self._held or uid in self._running or uid in self._entries:
            return
        adopted = self._adopted.get(BaselineId(entry.baseline_id or ""))
        if adopted is not None:
            self._held[uid] = adopted
        elif entry.phase is not BakePhase.FAILED:
            self._say(uid, None)  # Of before a reboot, or of an agent that died while it baked.

    def _keep_ready(self, template: SessionTemplate) -> None:
        """Have as many in wait for its roots as it says, and bake it first if that is to be done."""
        uid, count = template.metadata.uid, template.spec.standby
        baseline = self._held.get(uid)
        if baseline is not None:
            # Of templates that have one baseline the largest wish holds.
            wishes = [each.spec.standby for each in self.templates.all() if self._has(each, baseline.id)]
            self._engine.keep_ready(baseline.id, max(wishes, default=0))
        elif count != self._wanted_ahead.get(uid, 0):
            # Once for each number: what failed is said in its status, and tried again when a root comes.
            self._wanted_ahead[uid] = count
            if count > 0:
                self.begin(template)

    def _has(self, template: SessionTemplate, baseline: BaselineId) -> bool:
        held = self._held.get(template.metadata.uid)
        return held is not None and held.id == baseline

    def deleted(self, template: SessionTemplate) -> None:
        """The template is gone. Its baseline goes with it unless another template has the same."""
        self.templates.forget(template.metadata.uid)
        self._reports.poke(template.metadata.uid)

    async def template_of(self, session: Session) -> SessionTemplate:
        """The template that a root names. Raises `TemplateNotFound`, and `KubeError` if that is not known."""
        reference = session.spec.template_ref
        assert reference is not None
        namespace = session.metadata.namespace or ""
        known = self.templates.named(namespace, reference.name)
        if known is not None:
            return known
        try:
            template = await self._client.get(SessionTemplate, namespace, reference.name)
        except NotFound as err:
            raise TemplateNotFound(f"there is no template {reference.name} in namespace {namespace}") from err
        self.observed(template)
        return template

    def held(self, template: SessionTemplate) -> Baseline | None:
        """Its baseline, if this node has it now."""
        baseline = self._held.get(template.metadata.uid)
        if baseline is not None and self._engine.holds(baseline.point):
            return baseline
        return None

    def forget(self, template: SessionTemplate) -> None:
        """Its baseline turned out to be gone."""
        self._held.pop(template.metadata.uid, None)

    def begin(self, template: SessionTemplate) -> Bake:
        """Have it made ready, or take part in its being made already. Goes on whoever waits."""
        uid = template.metadata.uid
        running = self._running.get(uid)
        if running is None:
            running = self._running[uid] = self._tasks.create_task(self._bake(template), name=f"bake-{uid}")
        return Bake(running)

    async def _bake(self, template: SessionTemplate) -> Baseline | Exception:
        uid = template.metadata.uid
        try:
            outcome, digest = await self._baked(template)
        finally:
            self._running.pop(uid, None)
        if isinstance(outcome, Baseline):
            self._held[uid] = outcome
            self._keep_ready(self.templates.get(uid) or template)
            self._room_changed()
            log.info("baked template=%s baseline=%s boot_ms=%.0f", uid, outcome.id, outcome.boot_ms)
        else:
            log.error("bake_failed template=%s error=%r", uid, str(outcome))
        self._say(uid, entry_after(outcome, self._settings.node_name, digest))
        return outcome

    async def _baked(self, template: SessionTemplate) -> tuple[Baseline | Exception, str | None]:
        """What came of it, and the digest of its image once that is known."""
        uid, node = template.metadata.uid, self._settings.node_name
        digest: str | None = None
        try:
            async with self._image(template) as image:
                digest = None if image is None else f"sha256:{image.digest}"
                self._say(uid, BakedNode(node=node, phase=BakePhase.BAKING, image_digest=digest))
                seconds = bake_seconds(template, self._settings.boot_seconds)
                deadline = asyncio.get_running_loop().time() + seconds
                # Read anew for each bake, and not kept: what is baked has them.
                namespace = template.metadata.namespace or ""
                secrets = await secret_variables(self._client, namespace, template.spec.env)
                return await self._engine.bake(shape_of(template, secrets, image), deadline=deadline), digest
        except (EngineError, ImageError, JournalError, SecretUnreadable, KubeError) as err:
            return err, digest
        except Exception as err:  # The task's edge: a defect met by one template must not end the agent.
            log.exception("bake_broke template=%s", uid)
            return err, digest

    @asynccontextmanager
    async def _image(self, template: SessionTemplate) -> AsyncGenerator[KeptImage | None]:
        """The image of a registry that a template names, kept as long as this is held; None for another.

        Raises `ImageError`, `SecretUnreadable`, `KubeError`.
        """
        reference, secret = template.spec.image, template.spec.image_pull_secret
        if not reference.startswith(OCI):
            yield None
            return
        node = self._settings.node_name
        if self._images is None:
            raise ImagePullFailed(
                f"node {node} takes no images of registries: its agent is given no --image-dir"
            )
        message = f"pulling {reference}"
        self._say(
            template.metadata.uid,
            BakedNode(node=node, phase=BakePhase.BAKING, reason=Reason.PULLING_IMAGE, message=message),
        )
        namespace, login = template.metadata.namespace or "", None
        if secret is not None:
            registry = parse_reference(reference).registry
            login = await pull_login(self._client, namespace, secret, registry)
        deadline = asyncio.get_running_loop().time() + self._settings.pull_seconds
        async with self._images.image(reference, login, namespace=namespace, deadline=deadline) as image:
            yield image

    def _entry(self, template: SessionTemplate) -> BakedNode | None:
        return template.status.on(self._settings.node_name)

    def _say(self, uid: Uid, entry: BakedNode | None) -> None:
        self._entries[uid] = entry
        self._reports.poke(uid)

    async def _drop(self, baseline: Baseline) -> None:
        await self._engine.drop_baseline(baseline.id)
        log.info("baseline_dropped id=%s", baseline.id)
        self._room_changed()

    def _in_use(self, baseline: BaselineId) -> bool:
        return any(each.id == baseline for each in self._held.values())

    async def _report(self, uid: Uid) -> float | None:
        """One step for one template: write this node's entry, or let go of what is deleted."""
        if self.templates.gone(uid):
            self._entries.pop(uid, None)
            self._wanted_ahead.pop(uid, None)
            baseline = self._held.pop(uid, None)
            if baseline is not None and not self._in_use(baseline.id):
                await self._drop(baseline)
            return None
        template = self.templates.get(uid)
        if template is None or uid not in self._entries:
            return None
        entry = self._entries[uid]
        if entry == self._entry(template):
            return None
        nodes = [] if entry is None else [entry.to_json()]
        try:
            written = await self._client.apply(
                SessionTemplate,
                template.metadata.namespace,
                template.metadata.name,
                {"metadata": {"uid": uid}, "status": {"nodes": nodes}},
                manager=self._settings.field_manager,
                subresource="status",
                force=True,
            )
        except NotFound:
            return None  # Its deletion is on the way to us.
        self.templates.observe(written)
        return 0.0


def entry_after(outcome: Baseline | Exception, node: str, image_digest: str | None = None) -> BakedNode:
    """What a node says of a template after a bake. Pure."""
    entry = _entry_after(outcome, node)
    return entry.model_copy(update={"image_digest": image_digest})


def _entry_after(outcome: Baseline | Exception, node: str) -> BakedNode:
    match outcome:
        case Baseline():
            return BakedNode(
                node=node,
                phase=BakePhase.READY,
                baseline_id=outcome.id,
                boot_ms=round(outcome.boot_ms, 3),
            )
        case AtCapacity() | JournalError() | KubeError():
            # Nothing has failed: it is tried again as long as a session waits.
            return BakedNode(
                node=node, phase=BakePhase.BAKING, reason=outcome.reason, message=outcome.message
            )
        case EngineError() | ImageError() | SecretUnreadable():
            return BakedNode(
                node=node, phase=BakePhase.FAILED, reason=outcome.reason, message=outcome.message
            )
        case _:
            message = f"the engine broke: {outcome!r}"
            return BakedNode(node=node, phase=BakePhase.FAILED, reason=Reason.INTERNAL, message=message)


def shape_of(
    template: SessionTemplate, secrets: tuple[SecretVariable, ...] = (), image: KeptImage | None = None
) -> Shape:
    """What of a template decides what its baseline is. Its own variables win over its image's."""
    spec = template.spec
    env = {} if image is None else dict(image.runtime.env)
    env |= {each.name: each.value for each in spec.env if each.value is not None}
    checks = spec.readiness_probe
    pins = () if checks is None else checks.pins
    return Shape(
        image=spec.image,
        disk=None if image is None else Disk(file=str(image.path), digest=image.digest),
        vcpus=spec.machine.vcpus,
        memory_bytes=spec.machine.memory_bytes,
        egress=spec.network.egress is Egress.OPEN,
        overlay_bytes=spec.machine.overlay_bytes,
        command=tuple(spec.command),
        working_folder="/" if image is None else image.runtime.working_folder,
        env=tuple(env.items()),
        secret_env=secrets,
        probe=None if checks is None else _probe(checks),
        pins=tuple(Pin(name=each.name, argv=tuple(each.command), expect=each.expect) for each in pins),
    )


def _probe(checks: ReadinessProbe) -> Probe | None:
    """None where nothing is asked: the machine is ready as soon as it is up."""
    if checks.exec is not None:
        ask: tuple[str, ...] | HttpGet = tuple(checks.exec.command)
    elif checks.http_get is not None:
        ask = HttpGet(port=checks.http_get.port, path=checks.http_get.path)
    else:
        return None
    return Probe(
        ask=ask,
        initial_delay_seconds=float(checks.initial_delay_seconds),
        period_seconds=float(checks.period_seconds),
        timeout_seconds=float(checks.timeout_seconds),
        failure_threshold=checks.failure_threshold,
    )


def bake_seconds(template: SessionTemplate, boot_seconds: float) -> float:
    """How long a bake may take: the boot, and all that its own checks are allowed to."""
    checks = template.spec.readiness_probe
    if checks is None:
        return boot_seconds
    tries = checks.failure_threshold * (checks.period_seconds + checks.timeout_seconds)
    return boot_seconds + checks.initial_delay_seconds + tries + PIN_SECONDS * len(checks.pins)
