"""One node for all tests of a module: baking is what takes long, and sessions of one node do not meet."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from component.node import Node, held, running_node


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    async with held(running_node(tmp_path_factory.mktemp("node"))) as node:
        yield node


@pytest_asyncio.fixture(loop_scope="session")
async def node(shared_node: Node) -> AsyncIterator[Node]:
    """The shared node with a tree of the test's own, ended with the test."""
    before = {machine.id for machine in shared_node.engine.machines()}
    points = {point.id for point in shared_node.engine.points()}
    yield Node(shared_node.engine, shared_node.keeper, shared_node.journal)
    for machine in shared_node.engine.machines():
        if machine.id not in before:
            await shared_node.engine.release(machine.id)
    for point in shared_node.engine.points():
        if point.id not in points and point.tree is not None:
            await shared_node.engine.drop_point(point.id)
