"""What a machine is asked before it is frozen, and secrets of its environment that nobody else may know."""

from __future__ import annotations

import dataclasses
import time

import pytest

from component.node import TINY, Node
from forktree_agent.engine.contract import HttpGet, NeverReady, Probe, SecretVariable, Shape

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVER = (
    "/bin/sh",
    "-c",
    "sleep 2; mkdir /tmp/www; echo $TOKEN > /tmp/www/ready; exec httpd -f -p 127.0.0.1:8000 -h /tmp/www",
)
VALUE = "value-that-is-nowhere-else"


def asked(path: str, *, tries: int) -> Shape:
    """A machine whose server comes up late and is asked for `path`."""
    probe = Probe(ask=HttpGet(port=8000, path=path), period_seconds=0.2, failure_threshold=tries)
    return dataclasses.replace(TINY, command=SERVER, probe=probe)


async def test_a_machine_is_ready_once_its_server_answers_and_knows_its_secrets(node: Node) -> None:
    secret = SecretVariable(name="TOKEN", value=VALUE, version="u/1/token")
    ready = dataclasses.replace(asked("/ready", tries=200), secret_env=(secret,))
    began = time.monotonic()
    root = await node.root(ready)
    assert time.monotonic() - began > 2, "frozen before it was ready"
    assert await node.sh(root, "wget -q -O - http://127.0.0.1:8000/ready; echo $TOKEN") == f"{VALUE}\n" * 2
    (child,) = (await node.fork(root)).children
    assert await node.sh(child, "echo $TOKEN") == f"{VALUE}\n"
    assert (await node.baseline(ready)).id == root.baseline


async def test_a_server_that_answers_otherwise_is_never_ready(node: Node) -> None:
    with pytest.raises(NeverReady, match=r"GET http://127\.0\.0\.1:8000/no failed 40 times.*status 404"):
        await node.baseline(asked("/no", tries=40))


async def test_the_journal_holds_no_value_of_a_secret(node: Node) -> None:
    secret = SecretVariable(name="TOKEN", value=VALUE, version="u/2/token")
    await node.root(dataclasses.replace(TINY, secret_env=(secret,)))
    files = [path for path in node.journal.rglob("*") if path.is_file()]
    assert any(path.suffix == ".json" for path in files)
    assert [path for path in files if VALUE.encode() in path.read_bytes()] == []
