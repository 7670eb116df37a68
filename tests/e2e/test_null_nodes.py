"""A node without machines, for benchmarks of the control plane: all else is real, and it says what it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from forktree_dev.system import Artifacts, Sizes, System


async def test_a_node_without_machines_forks_records_and_claims_nothing_more(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    async with System.running(tmp_path, sizes=Sizes(engine="null"), artifacts=artifacts) as system:
        kubectl = system.kubectl
        node = await kubectl.json("get", "forknode", system.node)
        assert node["status"]["engine"] == "null"
        assert "accelerator" not in node["status"]
        template = {"image": "builtin:tiny", "machine": {"memory": "128Mi"}}
        await kubectl.apply(manifest("SessionTemplate", "nothing", template))
        await kubectl.apply(manifest("Session", "root", {"templateRef": {"name": "nothing"}}))
        source = {"session": {"name": "root"}}
        await kubectl.apply(manifest("Fork", "three", {"source": source, "replicas": 3}))
        await kubectl.run("wait", "fork/three", "--for=condition=Ready", "--timeout=60s")
        await kubectl.run("wait", "fork/three", "--for=jsonpath={.status.recorded}=3", "--timeout=60s")

        await system.agent.kill()
        system.agent.start()
        await kubectl.apply(manifest("Fork", "after", {"source": source, "replicas": 1}))
        await kubectl.run("wait", "fork/after", "--for=condition=Ready", "--timeout=60s")
        sessions = (await kubectl.json("get", "sessions"))["items"]
        assert len(sessions) == 1 + 3 + 1
        for session in sessions:
            status = session["status"]
            assert (status["phase"], status["mode"], status["level"]) == ("Running", "Clean", "None"), (
                json.dumps(status)
            )


def manifest(kind: str, name: str, spec: Mapping[str, object]) -> Mapping[str, object]:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "forktree.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
