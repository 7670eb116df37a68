"""Files and folders on their way in and out; what a session sends is not trusted."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from forktree import AsyncClient, AsyncSession, errors
from unit.agent_server import ScriptedAgent, breaks, breaks_after, created, refuses
from unit.api_server import Answer, says

WRITTEN = says({"path": "/f", "bytes": 1, "sha256": "0"})


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ScriptedAgent]:
    async with ScriptedAgent.running(tmp_path / "tls") as running:
        yield running


@pytest.fixture
async def client(server: ScriptedAgent) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client


@pytest.fixture
async def session(server: ScriptedAgent, client: AsyncClient) -> AsyncSession:
    server.script.append(created())
    return await client.sessions.create("t")


def sends(data: bytes) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=data, content_type="application/octet-stream")

    return answer


def packed(*members: tarfile.TarInfo) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = 1 if kind == tarfile.REGTYPE else 0
    return info


async def test_a_file_is_written_and_read_again_also_where_an_answer_is_lost(
    server: ScriptedAgent, session: AsyncSession
) -> None:
    server.script += [breaks, WRITTEN, breaks_after(b"hal"), sends(b"hallo\0")]
    await session.write("/a b/ü", "text", mode=0o600)
    assert await session.read("/f") == b"hallo\0"
    assert [(each.method, each.plain_path, each.body) for each in server.seen[1:3]] == [
        ("PUT", "/ns/ns/v1/sessions/s/files?path=/a b/ü&mode=0600", b"text")
    ] * 2


async def test_a_missing_file_is_told_and_a_removed_one_is_removed(
    server: ScriptedAgent, session: AsyncSession
) -> None:
    server.script += [refuses("not_found", 404, "there is no file /f"), refuses("not_found", 404)]
    with pytest.raises(errors.NotFound, match="no file /f"):
        await session.read("/f")
    await session.remove("/f")


async def test_a_folder_is_listed(server: ScriptedAgent, session: AsyncSession) -> None:
    entry = {"name": "x", "type": "file", "bytes": 3, "mode": "0644", "mtime": 1}
    server.script += [says({"path": "/d", "entries": [entry]}), says({"files": []})]
    (found,) = await session.files("/d")
    assert (found.name, found.bytes, found.mode) == ("x", 3, 0o644)
    with pytest.raises(errors.UnexpectedAnswer):
        await session.files("/d")


async def test_a_file_goes_in_with_its_mode_and_comes_out_all_at_once(
    server: ScriptedAgent, session: AsyncSession, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    local.write_bytes(b"a" * 3_000_000)
    local.chmod(0o755)
    server.script += [breaks, WRITTEN, breaks_after(b"b"), sends(b"new")]
    await session.upload(local, "/bin/x")
    assert server.seen[-1].plain_path.endswith("files?path=/bin/x&mode=0755")
    assert server.seen[-1].body == b"a" * 3_000_000
    await session.download("/bin/x", local)
    assert local.read_bytes() == b"new"

    server.script.append(refuses("not_found", 404))
    with pytest.raises(errors.NotFound):
        await session.download("/bin/x", local)
    assert local.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["local"]


async def test_a_folder_goes_in_and_comes_out(
    server: ScriptedAgent, session: AsyncSession, tmp_path: Path
) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "f").write_text("1")
    (tmp_path / "in" / "link").symlink_to("sub/f")
    server.script += [breaks, says({})]
    await session.upload(tmp_path / "in", "/work")
    sent = server.seen[-1].body
    assert isinstance(sent, bytes)
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        assert sorted(tar.getnames()) == ["link", "sub", "sub/f"]

    server.script += [breaks_after(sent[:600]), sends(sent)]
    await session.download("/work/", tmp_path / "out")
    assert (tmp_path / "out" / "link").read_text() == "1"
    assert server.seen[-1].plain_path.endswith("/tar?path=/work")


@pytest.mark.parametrize(
    "evil",
    [
        [member("../out")],
        [member("/tmp/forktree-evil")],
        [member("l", tarfile.SYMTYPE, "/etc"), member("l/passwd")],
        [member("l", tarfile.SYMTYPE, "../../..")],
        [member("d", tarfile.CHRTYPE)],
        [member("h", tarfile.LNKTYPE, "../../secret")],
    ],
)
async def test_a_session_puts_nothing_outside_of_the_folder(
    evil: list[tarfile.TarInfo], server: ScriptedAgent, session: AsyncSession, tmp_path: Path
) -> None:
    server.script.append(sends(packed(*evil)))
    (tmp_path / "secret").write_text("s")
    before = {each.name for each in tmp_path.iterdir()}
    target = tmp_path / "a" / "b"
    try:
        await session.download("/work/", target)
    except errors.UnexpectedAnswer as err:
        assert "the folder /work" in err.message
    else:
        assert [member.name for member in evil] == ["/tmp/forktree-evil"]
        assert (target / "tmp" / "forktree-evil").exists()  # Taken for a path below the folder.
    assert {each.name for each in tmp_path.iterdir()} - before <= {"a"}
    assert not Path("/tmp/forktree-evil").exists()


async def test_what_is_no_tar_is_told(server: ScriptedAgent, session: AsyncSession, tmp_path: Path) -> None:
    server.script.append(sends(b"<html>" * 1000))
    with pytest.raises(errors.UnexpectedAnswer, match="the folder /work"):
        await session.download("/work/", tmp_path / "x")


async def test_the_sync_client_carries_as_well(server: ScriptedAgent, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("1")
    server.script += [created(), breaks, WRITTEN, sends(b"2")]

    def work() -> None:
        with server.sync_client() as client:
            session = client.sessions.create("t")
            session.upload(tmp_path / "f", "/f")
            session.download("/f", tmp_path / "f")

    await asyncio.to_thread(work)
    assert server.seen[-2].body == b"1"
    assert (tmp_path / "f").read_text() == "2"
