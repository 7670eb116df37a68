"""What Argo is given as YAML and what Hera makes in Python are the same searches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self

import pytest
import yaml

from forktree_dev.checkout import CHECKOUT

EXAMPLES = CHECKOUT / "examples" / "argo"


@pytest.mark.parametrize("search", ["fan-out", "beam-search"])
def test_the_same_search_in_python(search: str) -> None:
    program = [sys.executable, str(EXAMPLES / "search_hera.py"), search]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert comparable(printed) == comparable((EXAMPLES / f"{search}.yaml").read_text())


def test_a_search_is_started_at_an_argo_server_as_who_has_the_token() -> None:
    with ArgoServer() as server:
        place = f"http://127.0.0.1:{server.server_port}"
        program = [sys.executable, str(EXAMPLES / "search_hera.py"), "fan-out", "--submit", place]
        printed = subprocess.run(
            [*program, "--namespace=searches"],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "ARGO_TOKEN": "Bearer of-somebody"},
        ).stdout
    (asked,) = server.asked
    assert printed == "fan-out-1\n"
    assert (asked.path, asked.token) == ("/api/v1/workflows/searches", "Bearer of-somebody")
    assert asked.workflow["metadata"]["generateName"] == "fan-out-"
    template = yaml.safe_load((EXAMPLES / "fan-out.yaml").read_text())
    assert asked.workflow["spec"]["ttlStrategy"] == template["spec"]["ttlStrategy"]
    names = [each["name"] for each in asked.workflow["spec"]["templates"]]
    assert sorted(names) == sorted(each["name"] for each in template["spec"]["templates"])


def test_the_lake_is_that_of_the_search_without_argo() -> None:
    ours = yaml.safe_load((EXAMPLES / "lake.yaml").read_text())
    template, _ = yaml.safe_load_all((EXAMPLES.parent / "beam-search" / "lake.yaml").read_text())
    assert ours == template


@dataclass(frozen=True)
class Asked:
    path: str
    token: str
    workflow: Any


class ArgoServer(ThreadingHTTPServer):
    """Notes what it is asked to start, and starts nothing: which requests Hera makes is what is looked at."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[Asked] = []
        self._thread = Thread(target=self.serve_forever, name="argo-server")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, ArgoServer)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(Asked(self.path, self.headers["Authorization"], body["workflow"]))
        made = {**body["workflow"], "metadata": {"name": "fan-out-1", "namespace": "searches"}}
        answer = json.dumps(made).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def comparable(text: str) -> Any:
    """A WorkflowTemplate with its manifests decoded, and its templates by name: their order says nothing."""
    found = yaml.safe_load(text)
    found["spec"]["templates"] = {each["name"]: each for each in found["spec"]["templates"]}
    for template in found["spec"]["templates"].values():
        if "manifest" in template.get("resource", {}):
            # What stands there without quotes comes to be a number.
            manifest = re.sub(r": ({{[^}]*}})", r': "\1"', template["resource"]["manifest"])
            template["resource"]["manifest"] = yaml.safe_load(manifest)
    return found
