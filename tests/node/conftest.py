"""A control plane with a real node: kubelet, containerd, pods. Tests in this folder are marked `node`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from forktree_dev import container_images
from forktree_dev.container_images import BuiltImage
from forktree_dev.real_node.cluster import RealCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is in this folder needs what `make test-node` prepares."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.node)


@pytest.fixture(scope="session")
def operator_image() -> BuiltImage:
    return container_images.build(container_images.OPERATOR)


@pytest.fixture(scope="session")
def node_image() -> BuiltImage:
    return container_images.build(container_images.NODE)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def real_cluster(
    operator_image: BuiltImage, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealCluster]:
    """One for the whole run, with nothing of ours in it but the operator's image."""
    state_dir = tmp_path_factory.mktemp("real")
    async with RealCluster.running(state_dir, [operator_image.archive]) as cluster:
        yield cluster
