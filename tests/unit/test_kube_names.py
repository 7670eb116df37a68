"""Names that users write into objects become parts of paths, and must lead nowhere else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from forktree.kube.errors import NotFound
from forktree.models import Session
from forktree.models.fork import SourceRef
from forktree.wire import CreateSession
from unit.api_server import ScriptedServer

EVIL = (
    "../../other/sessions/victim",
    "..",
    ".",
    "tiny?x=1",
    "tiny#",
    "tiny/status",
    "%2e%2e",
    "",
    "a\n",
    "A",
)


@pytest.mark.parametrize("name", EVIL)
async def test_what_is_no_name_is_refused_and_never_sent(name: str) -> None:
    with pytest.raises(ValidationError):
        SourceRef(name=name)
    with pytest.raises(ValidationError):
        CreateSession(template_id=name)
    async with ScriptedServer.running() as server, server.client() as client:
        for namespace, asked in (("default", name), (name, "victim")):
            with pytest.raises(NotFound):
                await client.get(Session, namespace, asked)
            with pytest.raises(NotFound):
                await client.delete(Session, namespace, asked)
            with pytest.raises(NotFound):
                await client.merge_patch(Session, namespace, asked, {})
        assert server.seen == []
