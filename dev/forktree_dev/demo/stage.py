"""What every scene of the demo works with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from forktree.kube.client import KubeClient
from forktree.kube.watching import Changed, Deleted, Listed, watch
from forktree.models import Fork, ForkPhase, Session, SessionPhase
from forktree_dev.commands import Commands
from forktree_dev.demo.history import State
from forktree_dev.demo.manifests import NAMESPACE, Manifest
from forktree_dev.demo.narrating import Narrator
from forktree_dev.demo.report import Report
from forktree_dev.demo.workload import ask
from forktree_dev.system import System

Kind = TypeVar("Kind", Session, Fork)

WAIT_SECONDS = 180.0
"""For any one thing. Baking takes longest: about 20 s without KVM, more on a loaded machine."""


_OVER = frozenset({SessionPhase.FAILED, SessionPhase.RELEASED, ForkPhase.FAILED})
"""Phases in which nothing can come true any more. A fork that is complete has just become what it can be."""


class DemoFailed(Exception):
    """The demo did not see what it must see."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A running system, ways to talk to it, and who tells about it."""

    system: System
    cluster: KubeClient
    commands: Commands
    narrator: Narrator
    report: Report

    async def apply(self, manifest: Manifest) -> None:
        """`kubectl apply`, as a user types it."""
        await self.apply_text(json.dumps(manifest))

    async def apply_text(self, text: str) -> None:
        """The same with YAML, in the demo's namespace unless it says another."""
        await self.system.kubectl.run("apply", "-f", "-", f"--namespace={NAMESPACE}", stdin=text)

    async def until(self, kind: type[Kind], name: str, there: Callable[[Kind], bool]) -> Kind:
        """The object once `there` holds for it. Raises `DemoFailed` when it fails, goes or takes too long."""
        seen: Kind | None = None
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                changes = watch(
                    self.cluster, kind, namespace=NAMESPACE, field_selector=f"metadata.name={name}"
                )
                async with aclosing(changes):
                    async for change in changes:
                        match change:
                            case Listed(objects=objects):
                                seen = objects[0] if objects else None
                            case Changed(obj=obj):
                                seen = obj
                            case Deleted():
                                raise DemoFailed(f"{kind.resource.kind} {name} was deleted")
                        if seen is not None and seen.status.phase in _OVER:
                            raise DemoFailed(f"{kind.resource.kind} {name}: {_why(seen)}")
                        if seen is not None and there(seen):
                            return seen
        except TimeoutError as err:
            raise DemoFailed(
                f"{kind.resource.kind} {name} takes over {WAIT_SECONDS:g} s: {_why(seen)}"
            ) from err
        raise AssertionError("a watch ends only by being left")

    async def ask(self, session: str, note: str = "") -> State:
        """What the program in `session` says of itself, after writing `note` into its history."""
        state = State.model_validate_json(await self.commands.run(session, *ask(note)))
        if state.name != session:
            raise DemoFailed(f"the machine of {session} calls itself {state.name}")
        return state


def _why(seen: Session | Fork | None) -> str:
    if seen is None:
        return "it was never seen"
    return f"{seen.status.phase}, {seen.status.reason or 'no reason'}: {seen.status.message or 'no message'}"
