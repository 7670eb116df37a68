"""A browser at work, forked: page, cookie and open connection go on in every branch, each its own way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypedDict

import pytest
import pytest_asyncio

from component.node import Node, held, running_node, settings, soon
from forktree_agent.engine.contract import Machine, Probe, Shape
from forktree_bench.guest import ask

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
    pytest.mark.slow,  # It boots for a minute, and its image has half a gigabyte.
]

PROGRAM = (Path(__file__).parent / "browsing.py").read_text()
SHAPE = Shape(
    image="builtin:browser",
    vcpus=1,
    memory_bytes=1 << 30,
    overlay_bytes=128 << 20,
    command=("python3", "-c", PROGRAM),
    probe=Probe(ask=ask("link.readyState"), timeout_seconds=60, failure_threshold=600),
)
OPEN = 1
"""Of a WebSocket: `WebSocket.OPEN`."""


class Page(TypedDict):
    """What the page is found to be: of its memory, of its cookies, and of its connection."""

    born: str
    said: list[str]
    cookie: str
    sent: str
    link: int


class Heard(TypedDict):
    """What the server says it has heard, and by which of its connections."""

    connection: int
    heard: list[str]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser_node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    config = await asyncio.to_thread(settings, images=("tiny", "browser"))
    async with held(running_node(tmp_path_factory.mktemp("browser"), config)) as node:
        await node.engine.bake(SHAPE, deadline=soon() + 600)
        yield node


async def value(node: Node, machine: Machine, expression: str) -> str:
    result = await node.run(machine, *ask(expression))
    assert result.exit_code == 0, result.told()
    return result.stdout.decode()


async def look(node: Node, machine: Machine) -> Page:
    page: Page = json.loads(await value(node, machine, "look()"))
    return page


async def say(node: Node, machine: Machine, word: str) -> Heard:
    heard: Heard = json.loads(await value(node, machine, f"say('{word}')"))
    return heard


async def test_a_forked_browser_goes_on_in_every_branch_with_its_page_its_cookie_and_its_connection(
    browser_node: Node,
) -> None:
    node = browser_node
    parent = await node.root(SHAPE)
    first = await say(node, parent, "one")
    assert first == {"connection": 1, "heard": ["one"]}
    before = await look(node, parent)
    assert (before["said"], before["link"]) == (["one"], OPEN)
    assert before["cookie"].startswith("visitor=")
    assert before["sent"] == before["cookie"]  # What the browser sends is what the page sees.

    left, right = (await node.fork(parent, 2)).children
    branches = {"parent": parent, "left": left, "right": right}
    found = await asyncio.gather(*(look(node, each) for each in branches.values()))
    assert found == [before] * 3

    for name, machine in branches.items():
        await value(node, machine, f"document.cookie = 'branch={name}'")
        # By the connection that was open at the fork, both of whose ends were forked.
        assert await say(node, machine, name) == {"connection": 1, "heard": ["one", name]}
    for name, machine in branches.items():
        after = await look(node, machine)
        cookies = f"{before['cookie']}; branch={name}"
        assert after == {**before, "said": ["one", name], "cookie": cookies, "sent": cookies}

    (deeper,) = (await node.fork(left)).children
    assert await say(node, deeper, "deep") == {"connection": 1, "heard": ["one", "left", "deep"]}
    assert (await look(node, left))["said"] == ["one", "left"]
