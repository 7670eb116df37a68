"""Argo's Workflows of one namespace: run from a template, and what their nodes and Forks say of time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

from forktree_dev.kubectl import Kubectl

_SECONDS = 600


@dataclass(frozen=True)
class Finished:
    """A Workflow that has ended, and the Forks that it made."""

    name: str
    status: Mapping[str, Any]
    forks: Mapping[str, Mapping[str, Any]]

    @property
    def outputs(self) -> dict[str, str]:
        """Of its entrypoint."""
        return _outputs(self.status["nodes"][self.name])

    def steps(self) -> list[Mapping[str, Any]]:
        """Those that were pods, in the order of their start."""
        pods = [node for node in self.status["nodes"].values() if node["type"] == "Pod"]
        return sorted(pods, key=lambda node: (node["startedAt"], node["finishedAt"]))

    def timings(self) -> list[str]:
        """A line for each step. Argo and Kubernetes note whole seconds, a Fork milliseconds."""
        steps = self.steps()
        ends = [*(step["startedAt"] for step in steps[1:]), self.status["finishedAt"]]
        total = _seconds(self.status["startedAt"], self.status["finishedAt"])
        lines = [f"workflow {self.name}: {total:.0f} s in all"]
        for step, end in zip(steps, ends, strict=True):
            ran = _seconds(step["startedAt"], step["finishedAt"])
            whole = _seconds(step["startedAt"], end)
            line = f"  step {step['displayName']:5} {whole:3.0f} s until the next; its pod until {ran:3.0f} s"
            lines.append(line + self._of_fork(step))
        return lines

    def _of_fork(self, step: Mapping[str, Any]) -> str:
        if "best" not in _outputs(step):
            return ""
        best = _outputs(step)["best"]
        (fork,) = [each for each in self.forks.values() if each["status"].get("best") == best]
        created = fork["metadata"]["creationTimestamp"]
        done = {each["type"]: each["lastTransitionTime"] for each in fork["status"]["conditions"]}["Complete"]
        return (
            f"; Fork created at {_seconds(step['startedAt'], created):.0f} s,"
            f" Complete at {_seconds(step['startedAt'], done):.0f} s (forkMs {fork['status']['forkMs']:.0f},"
            f" totalMs {fork['status']['totalMs']:.0f})"
        )


class Workflows:
    """Those of one namespace, by somebody who may do all there."""

    def __init__(self, kubectl: Kubectl, namespace: str) -> None:
        self._kubectl = kubectl
        self._in = f"--namespace={namespace}"

    async def run(
        self, template: str, parameters: Mapping[str, str] = MappingProxyType({}), *, on_exit: str = ""
    ) -> Finished:
        """Start one of a template and wait for its end, whichever it is. `on_exit` names what is run then."""
        given = [{"name": name, "value": value} for name, value in parameters.items()]
        workflow = {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": {"generateName": f"{template}-"},
            "spec": {
                "workflowTemplateRef": {"name": template},
                "arguments": {"parameters": given},
                **({"onExit": on_exit} if on_exit else {}),
            },
        }
        create = ("create", "-f", "-", "-o", "jsonpath={.metadata.name}", self._in)
        name = await self._kubectl.run(*create, stdin=json.dumps(workflow))
        await self._kubectl.run(
            *("wait", f"workflow/{name}", "--for=condition=Completed", self._in),
            f"--timeout={_SECONDS}s",
            timeout_seconds=_SECONDS + 10,
        )
        status = (await self._kubectl.json("get", "workflow", name, self._in))["status"]
        label = f"--selector=forktree.dev/workflow={name}"
        forks = (await self._kubectl.json("get", "forks", label, self._in))["items"]
        return Finished(name, status, {fork["metadata"]["name"]: fork for fork in forks})

    async def delete(self, name: str) -> None:
        """Returns when it is gone; what hangs below it goes in the background."""
        await self._kubectl.run("delete", "workflow", name, self._in)


def _outputs(node: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in node.get("outputs", {}).get("parameters", ())}


def _seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
