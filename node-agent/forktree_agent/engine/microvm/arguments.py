"""QEMU's command line (pure). A parent, its children and the machine that was baked agree in all devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

from forktree_agent.engine.microvm import egress

Accelerator = Literal["kvm", "tcg"]

MACHINE_TYPE = "microvm,acpi=on,memory-backend=ram,suppress-vmdesc=on"
CPU_MODEL = "max"
KERNEL_COMMAND_LINE = "console=ttyS0 reboot=t panic=-1 quiet nowatchdog psi=0 lsm=landlock,yama audit=0"
"""What watches and accounts in a guest is of use to nobody, and what a child does first after a fork."""
TCG_COMMAND_LINE = "lpj=4000000 no_timer_check"
"""Debian's kernel hangs in timer calibration under emulation without these, and without being told the rate
of the time stamp counter (Linux 6.1, QEMU 7.2)."""
UNKNOWN_COUNTER = "tsc_early_khz=2000000"
"""Any rate lets it boot. It then counts timer interrupts for time, and loses some when the host is busy."""
TRANSLATION_CACHE_MIB = 32
"""Bounds what one emulated machine keeps of translated code: it is private memory of every child."""
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"

Descriptor = NewType("Descriptor", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What only the machine that is baked needs: a kernel to boot."""

    kernel: Descriptor
    initrd: Descriptor
    overlay_bytes: int
    network: bool
    """It has a network device, and is to set that up."""
    counter_khz: int | None
    """Rate of the host's time stamp counter, which an emulated guest keeps time by. None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Descriptors that QEMU inherits, by number in its own process."""

    ram: Descriptor
    """File behind guest RAM: written through when booting, else mapped privately."""
    root_disk: Descriptor
    monitor: Descriptor
    guest: Descriptor
    network: Descriptor | None = None
    """Stream socket to the machine's companion. None: it has no network device at all."""


def qemu_arguments(
    binary: str,
    name: str,
    *,
    accelerator: Accelerator,
    vcpus: int,
    memory_bytes: int,
    wiring: Wiring,
    boot: Boot | None,
) -> list[str]:
    """The argument list of a machine to be booted, or with `boot` None of one that waits for its state."""
    share = "on" if boot else "off"
    return [
        binary,
        *("-name", name),
        "-no-user-config",
        "-nodefaults",
        *("-machine", MACHINE_TYPE),
        *("-accel", f"tcg,tb-size={TRANSLATION_CACHE_MIB}" if accelerator == "tcg" else "kvm"),
        *("-cpu", CPU_MODEL),
        # Emulated, each has a thread of its own: QEMU's default for a guest of the host's own kind.
        *("-smp", str(vcpus)),
        *("-m", f"{memory_bytes >> 20}M"),
        *(
            "-object",
            f"memory-backend-file,id=ram,size={memory_bytes},mem-path={_inherited(wiring.ram)},share={share}",
        ),
        *("-display", "none"),
        "-no-reboot",
        *("-global", "migration.send-configuration=off"),
        *("-sandbox", SANDBOX),
        *("-chardev", f"socket,id=monitor,fd={wiring.monitor}"),
        *("-mon", "chardev=monitor,mode=control"),
        # The console of a machine that runs a stranger's program goes nowhere; while it boots, to its log.
        *("-chardev", "stdio,id=console,signal=off" if boot else "null,id=console"),
        *("-serial", "chardev:console"),
        *("-device", "virtio-serial-device"),
        *("-chardev", f"socket,id=guest,fd={wiring.guest}"),
        *("-device", "virtserialport,chardev=guest,name=forktree"),
        *("-drive", f"id=root,file={_inherited(wiring.root_disk)},format=raw,if=none,readonly=on"),
        *("-device", "virtio-blk-device,drive=root"),
        *(_network_arguments(wiring.network) if wiring.network is not None else ()),
        *(_boot_arguments(accelerator, boot) if boot else ("-incoming", "defer", "-S")),
    ]


def _network_arguments(network: Descriptor) -> tuple[str, ...]:
    return (
        *("-netdev", f"stream,id=network,server=off,addr.type=fd,addr.str={network}"),
        # The address is the same in all: each has a wire to itself.
        *("-device", f"virtio-net-device,netdev=network,mac={egress.MAC}"),
    )


def _boot_arguments(accelerator: Accelerator, boot: Boot) -> tuple[str, ...]:
    words = [KERNEL_COMMAND_LINE, f"forktree.overlay={boot.overlay_bytes}"]
    if boot.network:
        words.append(egress.KERNEL_ARGUMENT)
    if accelerator == "tcg":
        words.append(TCG_COMMAND_LINE)
        known = boot.counter_khz is not None
        words.append(f"tsc_early_khz={boot.counter_khz} tsc=reliable" if known else UNKNOWN_COUNTER)
    return (
        *("-kernel", _inherited(boot.kernel)),
        *("-initrd", _inherited(boot.initrd)),
        *("-append", " ".join(words)),
    )


def _inherited(descriptor: Descriptor) -> str:
    # A path through the process's own descriptors needs no rights on the folders above the file.
    return f"/proc/self/fd/{descriptor}"
