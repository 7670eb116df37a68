"""What tests of every reach share. A fixture that starts something proves at its end that nothing is left."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from forktree_dev.control_plane import ControlPlane
from leftovers import Traces, left_behind

_GARBAGE_COLLECTOR_QPS = 200.0
"""Ten times the default, so that tests wait for what they show and not for the collector's pace."""


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_in_the_end(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the run when anything that a test started outlives it. Set up first, so checked last."""
    before = Traces.now()
    run = f"forktree-tests-{os.getpid()}"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FORKTREE_TEST_RUN", run)  # Inherited by all that tests start.
        yield
        left = left_behind(before, [run, f"{tmp_path_factory.getbasetemp()}/"])
    assert left.lines() == []


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def control_plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ControlPlane]:
    """A real API server and controllers with our definitions, roles and policies; one for the whole run."""
    state_dir = tmp_path_factory.mktemp("control-plane")
    async with ControlPlane.running(state_dir, garbage_collector_qps=_GARBAGE_COLLECTOR_QPS) as plane:
        yield plane


@pytest.fixture
async def namespace(control_plane: ControlPlane) -> AsyncIterator[str]:
    """A namespace of the test's own. All in it goes with it, collected in the background."""
    name = f"test-{secrets.token_hex(4)}"
    await control_plane.kubectl.run("create", "namespace", name)
    yield name
    await control_plane.kubectl.run("delete", "namespace", name, "--wait=false")
