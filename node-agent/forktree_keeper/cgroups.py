"""Control groups: one per tree, below one root group of the keeper's own.

Version 2 has one hierarchy and hands controllers down by `cgroup.subtree_control`; version 1 has a hierarchy
per controller, so a group is a folder in each of them and joining is a write in each.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from forktree_keeper.protocol import Code, Refusal, check_name, close_all

END_SECONDS = 5.0
"""Until giving up on a killed process that the kernel does not let go of."""
CONTROLLERS = ("memory", "cpu", "pids")
"""Memory for a tree's limit, cpu so that trees (not machines) share it evenly, pids to count processes."""


class CgroupsUnavailable(Exception):
    """This host has no control groups that the keeper could use."""


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The groups of one keeper. Group names must be checked before: they are joined to paths."""

    roots: tuple[Path, ...]
    """The root group's folder in each hierarchy: one for version 2. The first has the memory controller."""
    version: int

    @classmethod
    def found(cls, mount: Path, root: str) -> ControlGroups:
        """The groups named `root` where control groups are mounted. Nothing is made yet.

        Raises `CgroupsUnavailable` when there is neither version 2 nor version 1's memory controller, or when
        `root` is not a plain name: whatever is below it will be ended.
        """
        try:
            check_name("root group", root)
        except ValueError as error:
            raise CgroupsUnavailable(str(error)) from error
        if (mount / "cgroup.controllers").exists():
            return cls(roots=(mount / root,), version=2)
        if (mount / "memory").is_dir():
            # Controllers may be mounted together (cpu,cpuacct); their single names are links then.
            present = (controller for controller in CONTROLLERS if (mount / controller).is_dir())
            return cls(roots=tuple(mount / controller / root for controller in present), version=1)
        raise CgroupsUnavailable(f"no control groups with a memory controller at {mount}")

    @contextmanager
    def owned(self) -> Generator[None]:
        """Make the root group and own it; at the begin and the end, end whatever is below it.

        Raises `CgroupsUnavailable` when another keeper owns it or it cannot be made.
        """
        try:
            for root in self.roots:
                root.mkdir(exist_ok=True)
            owner = os.open(self.roots[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CgroupsUnavailable(f"cannot make the root group: {error}") from error
        try:
            self._lock(owner)
            try:
                if self.version == 2:
                    self._hand_down(self.roots[0].parent)
                    self._hand_down(self.roots[0])
                self._clear()
                yield
            finally:
                self._clear()
                self._remove_roots()
        finally:
            os.close(owner)

    def make(self, group: str) -> None:
        """Idempotent. Raises `Refusal` (cgroup failed)."""
        for folder in self._folders(group):
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise _failed("make", folder, error) from error

    def entrances(self, group: str) -> tuple[Path, ...]:
        """The files into which a process writes 0 to move itself into the group."""
        return tuple(folder / "cgroup.procs" for folder in self._folders(group))

    def limit_memory(self, group: str, memory_bytes: int | None) -> None:
        """Raises `Refusal` (cgroup failed): under version 1 also when more than that is in use already."""
        name, unlimited = ("memory.max", "max") if self.version == 2 else ("memory.limit_in_bytes", "-1")
        file = self._folders(group)[0] / name
        try:
            # Opened without O_CREAT: a missing controller is an error, never a new file.
            descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            try:
                os.write(descriptor, (unlimited if memory_bytes is None else str(memory_bytes)).encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _failed("write", file, error) from error

    def drop(self, group: str) -> None:
        """Remove an empty group; one that is not there is fine. Raises `Refusal` (cgroup busy, failed)."""
        for folder in self._folders(group):
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno == errno.EBUSY:
                    raise Refusal(Code.CGROUP_BUSY, f"cgroup {group} still holds processes") from error
                raise _failed("remove", folder, error) from error

    def _folders(self, group: str) -> tuple[Path, ...]:
        return tuple(root / group for root in self.roots)

    def _lock(self, owner: int) -> None:
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CgroupsUnavailable(f"another keeper owns {self.roots[0]}") from error

    def _hand_down(self, group: Path) -> None:
        """Enable our controllers for the groups below. What is missing shows when it is asked for."""
        for controller in (group / "cgroup.controllers").read_text().split():
            if controller in CONTROLLERS:
                with suppress(OSError):
                    (group / "cgroup.subtree_control").write_text(f"+{controller}")

    def _clear(self) -> None:
        """End what is in the groups and remove them; one that the kernel does not let go of stays."""
        self._end_members()
        for root in self.roots:
            for folder in _subgroups(root):
                with suppress(OSError):
                    folder.rmdir()

    def _remove_roots(self) -> None:
        for root in self.roots:
            with suppress(OSError):
                root.rmdir()

    def _end_members(self) -> None:
        """The kernel ends a keeper's machines with it, but not processes that those had started."""
        deadline = time.monotonic() + END_SECONDS
        while (members := self._members()) and (left := deadline - time.monotonic()) > 0:
            for member in members:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(member, signal.SIGKILL)
            ending = select.poll()
            ending.register(members[0], select.POLLIN)
            ending.poll(left * 1000)
            close_all(members)
        close_all(members)

    def _members(self) -> list[int]:
        """Process descriptors of some of the processes in our groups, for the caller to close."""
        pids = {
            int(pid)
            for root in self.roots
            for folder in _subgroups(root)
            for pid in (folder / "cgroup.procs").read_text().split()
        }
        members: list[int] = []
        # 0 stands for a process of another PID namespace; as a target it would be our own process group.
        for pid in sorted(pids - {0})[:100]:
            with suppress(ProcessLookupError):
                members.append(os.pidfd_open(pid))
        return members


def _subgroups(root: Path) -> list[Path]:
    return [entry for entry in root.iterdir() if entry.is_dir()]


def _failed(verb: str, path: Path, error: OSError) -> Refusal:
    return Refusal(Code.CGROUP_FAILED, f"cannot {verb} {path}: {error.strerror}")
