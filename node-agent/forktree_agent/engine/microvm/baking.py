"""Baking: boot a shape, wait until every check holds, and freeze it as a baseline."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from forktree_agent.engine.contract import (
    BakeFailed,
    BaselineId,
    Command,
    CommandRefused,
    DeadlineExceeded,
    EgressForbidden,
    HttpGet,
    MachineGone,
    NeverReady,
    NotStill,
    PinMismatch,
    Probe,
    Shape,
)
from forktree_agent.engine.microvm import stillness
from forktree_agent.engine.microvm.arguments import CPU_MODEL, KERNEL_COMMAND_LINE, MACHINE_TYPE, Accelerator
from forktree_agent.engine.microvm.endings import until
from forktree_agent.engine.microvm.guest import UNIDENTIFIED
from forktree_agent.engine.microvm.images import baseline_id
from forktree_agent.engine.microvm.layers import PAGE_BYTES
from forktree_agent.engine.microvm.monitor import MonitorError
from forktree_agent.engine.microvm.records import (
    BaselineRecord,
    BatchRecord,
    Build,
    LayerRecord,
    PointRecord,
)
from forktree_agent.engine.microvm.resources import POINT_KIND
from forktree_agent.engine.microvm.vmms import Group, Vmm, VmmOrder
from forktree_agent.typed_records import to_journal

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.resources import Resources

log = logging.getLogger(__name__)

BASELINE_KIND = "baseline"
PIN_SECONDS = 30.0
HTTP_SUCCESS_MIN, HTTP_SUCCESS_MAX = 200, 399


async def bake(
    resources: Resources, shape: Shape, shape_digest: str, accelerator: Accelerator, *, deadline: float
) -> tuple[BaselineRecord, PointRecord]:
    """Boot and freeze. Nothing is left after a failure. Raises what `Engine.bake` promises."""
    if shape.egress and resources.vmms.no_egress is not None:
        raise EgressForbidden(resources.vmms.no_egress)
    image, image_sha256 = _root_image(resources, shape)
    name = f"b-{uuid.uuid4().hex[:12]}"
    layer, point = f"ram-{name}", f"p-{uuid.uuid4().hex[:12]}"
    build = Build(
        image=shape.image,
        image_sha256=image_sha256,
        memory_bytes=shape.memory_bytes,
        accelerator=accelerator,
        vcpus=shape.vcpus,
        egress=shape.egress,
    )
    uid = resources.vmms.take_uid()
    try:
        group = f"bake-{name}"
        batch_record = BatchRecord(
            machines=(name,), files=(layer, f"state-{point}"), points=(point,), group=group
        )
        async with resources.begun(batch_record) as batch:
            resources.ledger.reserve(name, build.admitted_bytes, None)
            ram = await resources.store.create(layer)
            os.ftruncate(ram, shape.memory_bytes)
            disk = await resources.store.hold_disk(build.disk_file, image)
            order = VmmOrder(name=name, uid=uid, build=build, ram=ram, disk=disk, group=group)
            pins, boot_ms = await _boot(resources, order, shape, f"state-{point}", deadline=deadline)
            await resources.vmms.end(name)
            vmm = {
                "qemu": resources.qemu_version,
                "machine": MACHINE_TYPE,
                "cpu": CPU_MODEL,
                "kernel_arguments": KERNEL_COMMAND_LINE,
                "accelerator": accelerator,
            }
            identity = baseline_id(shape, image_sha256, resources.guest, vmm=vmm, pins=pins)
            point_record = _keep(resources, layer, point, identity, build)
            resources.ledger.free(name)
            baseline = BaselineRecord(id=identity, shape_digest=shape_digest, point=point, boot_ms=boot_ms)
            resources.journal.put(BASELINE_KIND, shape_digest, to_journal(baseline))
            batch.commit()
    finally:
        resources.vmms.give_back_uid(uid)
    log.info("baked image=%s baseline=%s boot_ms=%.0f", shape.image, identity[:12], boot_ms)
    return baseline, point_record


def _root_image(resources: Resources, shape: Shape) -> tuple[Path, str]:
    """The file and its digest. Raises `ImageNotFound`."""
    if shape.disk is not None:
        return Path(shape.disk.file), shape.disk.digest
    return resources.guest.image(shape.image), resources.guest.digest(shape.image)


async def _boot(
    resources: Resources, order: VmmOrder, shape: Shape, state_file: str, *, deadline: float
) -> tuple[dict[str, str], float]:
    """Boot, become ready, freeze. Returns what the pins printed, and milliseconds from start to ready."""
    await resources.vmms.join(Group(order.group, None), order.name, deadline=deadline)
    began = time.monotonic()
    try:
        vmm = await resources.vmms.boot(order, shape.overlay_bytes, deadline=deadline)
        async with resources.vmms.unborn(order.name):
            await vmm.guest.wait_booted(deadline=deadline)
            pins = await _become_ready(vmm, shape, deadline=deadline)
            boot_ms = (time.monotonic() - began) * 1000
            if vmm.network_lost is not None:
                raise BakeFailed(f"{shape.image} lost its way to the outside: {vmm.network_lost}")
            async with until(deadline, "freezing"):
                await _freeze(resources, vmm, state_file, deadline=deadline)
    except (MachineGone, MonitorError, NotStill) as err:
        raise BakeFailed(f"{shape.image} did not boot: {err}") from err
    except DeadlineExceeded as err:
        said = resources.vmms.last_words(order.name)
        raise BakeFailed(f"{shape.image} was not ready in time: {err}; it said: {said}") from err
    return pins, boot_ms


def _keep(resources: Resources, layer: str, point: str, identity: BaselineId, build: Build) -> PointRecord:
    resources.store.seal(layer)
    record = PointRecord(
        id=point,
        owner=f"baseline/{identity}",
        tree=None,
        baseline=identity,
        chain=(layer,),
        own_bytes=build.memory_bytes,
        build=build,
    )
    # Before it uses its layer: undoing finds by the record what it is to leave.
    resources.journal.put(POINT_KIND, point, to_journal(record))
    resources.store.add_layer(
        LayerRecord(
            id=layer, bytes=build.memory_bytes, pages=build.memory_bytes // PAGE_BYTES, runs=0, table_offset=0
        ),
        user=point,
    )
    return record


async def _freeze(resources: Resources, vmm: Vmm, state_file: str, *, deadline: float) -> None:
    state = await resources.store.create(state_file)
    await vmm.monitor.offer_state_file(state)
    await stillness.hold(vmm, deadline=deadline)  # Each root is born so; this machine itself ends here.
    await vmm.monitor.stop()
    await vmm.monitor.save_state()


async def _become_ready(vmm: Vmm, shape: Shape, *, deadline: float) -> dict[str, str]:
    """Start the workload, wait for the probe, check the pins. Returns what each pin printed."""
    env = dict(shape.env) | {each.name: each.value for each in shape.secret_env}
    try:
        # Also without a command: it is how the guest learns the template's environment.
        await vmm.guest.start_workload(shape.command, env, folder=shape.working_folder, deadline=deadline)
    except CommandRefused as err:
        raise BakeFailed(f"the template's command did not start: {err}") from err
    if shape.probe is not None:
        await _probe(vmm, shape.probe, deadline=deadline)
    seen: dict[str, str] = {}
    for pin in shape.pins:
        command = Command(argv=pin.argv, timeout_seconds=PIN_SECONDS)
        try:
            result = await vmm.guest.exec(command, UNIDENTIFIED, deadline=deadline)
        except CommandRefused as err:
            raise PinMismatch(f"pin {pin.name}: {err}") from err
        seen[pin.name] = result.stdout.decode(errors="replace").strip()
        if seen[pin.name] != pin.expect.strip() or result.exit_code != 0:
            raise PinMismatch(
                f"pin {pin.name} wants {pin.expect.strip()!r} but {' '.join(pin.argv)} printed "
                f"{seen[pin.name][:200]!r} (exit code {result.exit_code})"
            )
    return seen


async def _probe(vmm: Vmm, probe: Probe, *, deadline: float) -> None:
    """Ask until it succeeds. The pauses are the probe's own period, not a wait for something to happen."""
    name = _name(probe)
    last = "it had not answered once"
    try:
        async with until(deadline, name):
            await asyncio.sleep(probe.initial_delay_seconds)
            for attempt in range(probe.failure_threshold):
                if attempt:
                    await asyncio.sleep(probe.period_seconds)
                failure = await _ask(vmm, probe, deadline=deadline)
                if failure is None:
                    return
                last = failure
    except DeadlineExceeded as err:
        raise NeverReady(f"{name} did not succeed before the deadline; the last time: {last}") from err
    raise NeverReady(f"{name} failed {probe.failure_threshold} times in a row; the last time: {last}")


def _name(probe: Probe) -> str:
    if isinstance(probe.ask, HttpGet):
        return f"GET http://127.0.0.1:{probe.ask.port}{probe.ask.path}"
    return " ".join(probe.ask)


async def _ask(vmm: Vmm, probe: Probe, *, deadline: float) -> str | None:
    """None if the machine is ready, else why not."""
    if isinstance(probe.ask, HttpGet):
        answer = await vmm.guest.asking.http_get(
            probe.ask.port, probe.ask.path, timeout_seconds=probe.timeout_seconds, deadline=deadline
        )
        if answer.status is None:
            return answer.message or "no answer"
        return None if HTTP_SUCCESS_MIN <= answer.status <= HTTP_SUCCESS_MAX else f"status {answer.status}"
    command = Command(argv=probe.ask, timeout_seconds=probe.timeout_seconds)
    try:
        result = await vmm.guest.exec(command, UNIDENTIFIED, deadline=deadline)
    except CommandRefused as err:
        return str(err)
    return None if result.exit_code == 0 else result.told()
