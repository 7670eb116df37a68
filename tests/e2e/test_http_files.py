"""Files of a session over HTTP, in a real machine whose image has neither tar nor most other tools."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tarfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from e2e.whole import Whole

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = 1 << 20


@pytest_asyncio.fixture(loop_scope="session")
async def whole(whole: Whole) -> Whole:
    """With a session that has room for 64 MiB."""
    await whole.template("roomy", machine={"memory": "384Mi", "overlay": "200Mi"})
    await whole.session("work", "roomy")
    return whole


async def ask(
    whole: Whole, method: str, what: str, path: str, body: Any = None, **query: str
) -> tuple[int, Any, aiohttp.ClientResponse]:
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/work/{what}"
    async with whole.http.request(
        method,
        url,
        params={"path": path, **query},
        data=io.BytesIO(body) if isinstance(body, bytes) else body,
        timeout=aiohttp.ClientTimeout(total=800),
    ) as answer:
        is_json = answer.content_type == "application/json"
        return answer.status, await (answer.json() if is_json else answer.read()), answer


async def test_a_file_comes_back_as_it_was_written(whole: Whole) -> None:
    content = bytes(range(256)) * 700
    status, written, _ = await ask(whole, "PUT", "files", "/srv/new/a b.bin", content, mode="0600")
    assert (status, written) == (
        200,
        {"path": "/srv/new/a b.bin", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()},
    )
    status, read, answer = await ask(whole, "GET", "files", "/srv/new/a b.bin")
    assert (status, read) == (200, content)
    assert answer.headers["X-Forktree-Mode"] == "0600"
    assert answer.content_length == len(content)
    assert await whole.sh("work", "stat -c %a '/srv/new/a b.bin'; ls -A /srv/new") == "600\na b.bin\n"
    assert (await ask(whole, "PUT", "files", "/srv/new/a b.bin", b""))[0] == 200
    assert (await ask(whole, "GET", "files", "/srv/new/a b.bin"))[1] == b""
    status, read, _ = await ask(whole, "GET", "files", "/proc/version")
    assert (status, read[:5]) == (200, b"Linux")
    # A tool is not among the commands that others can ask for.
    assert (await whole.get("sessions/work/execs"))[1] == {"ids": [], "execs": []}


async def test_folders_are_listed_and_removed(whole: Whole) -> None:
    await whole.sh("work", "mkdir -p /d/sub; echo x > /d/f; ln -s f /d/l; mkfifo /d/p; chmod 640 /d/f")
    status, listed, _ = await ask(whole, "GET", "files/list", "/d")
    assert status == 200
    kinds = {each["name"]: each["type"] for each in listed["entries"]}
    assert kinds == {"f": "file", "l": "symlink", "p": "fifo", "sub": "directory"}
    assert (listed["entries"][0]["mode"], listed["entries"][0]["bytes"]) == ("0640", 2)
    await whole.sh("work", "echo x > /d/sub/f")
    status, refused, _ = await ask(whole, "DELETE", "files", "/d/sub")
    assert (status, refused["code"]) == (409, "conflict")
    assert (await ask(whole, "DELETE", "files", "/d/l"))[0] == 200
    status, removed, _ = await ask(whole, "DELETE", "files", "/d/sub", recursive="1")
    assert (status, removed) == (200, {"path": "/d/sub", "removed": True})
    assert await whole.sh("work", "ls /d") == "f\np\n"
    await whole.sh("work", "for i in $(seq 3000); do : > /d/sub$i; done")
    assert len((await ask(whole, "GET", "files/list", "/d"))[1]["entries"]) == 3002


@pytest.mark.parametrize(
    ("method", "what", "path", "told"),
    [
        ("GET", "files", "/none", (404, "No such file")),
        ("GET", "files", "/etc", (409, "is a directory")),
        ("GET", "files", "/dev/null", (409, "is a device")),
        ("GET", "files/list", "/etc/passwd", (409, "is a file, not a directory")),
        ("GET", "tar", "/none", (404, "No such file")),
        ("PUT", "files", "/etc", (409, "is a directory")),
        ("PUT", "files", "/etc/passwd/x", (409, "exists")),
        ("PUT", "files", "/proc/x", (404, "No such file")),
        ("PUT", "files", "/sys/kernel/x", (403, "ermi")),
        ("PUT", "tar", "/etc/passwd", (409, "exists")),
        ("DELETE", "files", "/none", (404, "No such file")),
        ("DELETE", "files", "/", (409, "")),
        ("GET", "files", "etc/passwd", (400, "absolute")),
        ("GET", "files", "/a\0", (400, "NUL")),
        ("GET", "files", "/" + "x" * 300, (409, "too long")),
        ("GET", "files", "/" + "x" * 5000, (400, "4096")),
    ],
    ids=range(16),
)
async def test_what_cannot_be_done_is_told_in_a_sentence(
    whole: Whole, method: str, what: str, path: str, told: tuple[int, str]
) -> None:
    status, body, _ = await ask(whole, method, what, path, b"x" if method == "PUT" else None)
    assert (status, told[1] in body["message"]) == (told[0], True), body
    assert await whole.sh("work", "echo alive") == "alive\n"


async def test_links_and_dots_lead_where_they_lead(whole: Whole) -> None:
    await whole.sh("work", "mkdir -p /t; echo old > /t/real; ln -s real /t/link; ln -s loop /t/loop")
    assert (await ask(whole, "PUT", "files", "/t/../t/./link", b"new"))[0] == 200
    assert await whole.sh("work", "cat /t/real; readlink /t/link") == "newreal\n"
    assert (await ask(whole, "GET", "files", "/t/../../t/link"))[1] == b"new"
    assert (await ask(whole, "GET", "files", "/t/loop"))[0] == 409


@pytest.mark.timeout(900)  # An emulated guest takes a minute each way where others work beside it.
async def test_64_mib_go_in_and_out_and_into_a_child(whole: Whole) -> None:
    content = os.urandom(MIB) * 64
    status, written, _ = await ask(whole, "PUT", "files", "/big", _pieces(content))
    assert (status, written["bytes"]) == (200, len(content))
    assert written["sha256"] == hashlib.sha256(content).hexdigest()
    assert (await whole.sh("work", "sha256sum /big")).split()[0] == written["sha256"]
    status, read, _ = await ask(whole, "GET", "files", "/big")
    assert (status, hashlib.sha256(read).hexdigest()) == (200, written["sha256"])
    assert (await ask(whole, "DELETE", "files", "/big"))[0] == 200


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), 100_000):
        yield content[at : at + 100_000]


async def test_a_full_disk_is_told_and_nothing_is_left(whole: Whole) -> None:
    await whole.sh("work", "mkdir -p /full; echo before > /full/file")
    status, refused, _ = await ask(whole, "PUT", "files", "/full/file", _pieces(bytes(300 * MIB)))
    assert (status, refused["code"]) == (507, "no_space"), refused
    assert "No space left" in refused["message"]
    assert await whole.sh("work", "cat /full/file; ls -A /full") == "before\nfile\n"


async def test_an_upload_that_breaks_off_changes_nothing(whole: Whole) -> None:
    await whole.sh("work", "mkdir -p /cut; echo before > /cut/file")
    begun = asyncio.Event()

    async def stalled() -> AsyncIterator[bytes]:
        yield bytes(3 * MIB)
        begun.set()
        await asyncio.sleep(1000)

    sending = asyncio.create_task(ask(whole, "PUT", "files", "/cut/file", stalled()))
    await begun.wait()
    await whole.sh("work", "until ls -A /cut | grep -q forktree; do usleep 20000; done")
    sending.cancel()
    await whole.sh("work", "while ls -A /cut | grep -q forktree; do usleep 20000; done")
    assert await whole.sh("work", "cat /cut/file") == "before\n"


async def test_a_download_that_breaks_off_ends_its_tool(whole: Whole) -> None:
    await whole.sh("work", "head -c 30000000 /dev/zero > /much")
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/work/files"
    async with whole.http.get(url, params={"path": "/much"}) as answer:
        await answer.content.readexactly(1000)
        answer.close()
    await whole.sh("work", "while ps | grep -q ' [r]ead /much'; do usleep 20000; done; rm /much")


async def test_folders_travel_as_tar(whole: Whole) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in (("a/file", b"one"), ("a/" + "n" * 150, b"two"), ("top", bytes(MIB))):
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(content), 0o750, 1_700_000_000
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("a/link")
        link.type, link.linkname = tarfile.SYMTYPE, "../top"
        archive.addfile(link)
    status, unpacked, _ = await ask(whole, "PUT", "tar", "/into/here", packed.getvalue())
    assert (status, unpacked) == (
        200,
        {"path": "/into/here", "entries": 4, "bytes": len(packed.getvalue())},
    )
    assert await whole.sh("work", "cd /into/here; cat a/file; stat -c '%a %Y' top; readlink a/link") == (
        "one750 1700000000\n../top\n"
    )
    status, tar, answer = await ask(whole, "GET", "tar", "/into/here")
    assert (status, answer.content_type) == (200, "application/x-tar")
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        assert sorted(archive.getnames()) == ["a", "a/file", "a/link", "a/" + "n" * 150, "top"]
        extracted = archive.extractfile("top")
        assert extracted is not None
        assert extracted.read() == bytes(MIB)
    status, refused, _ = await ask(whole, "PUT", "tar", "/into", b"x" * 5000)
    assert (status, refused["code"]) == (400, "bad_request")


async def test_the_whole_of_a_root_is_its_own_file_system_only(whole: Whole) -> None:
    status, tar, _ = await ask(whole, "GET", "tar", "/")
    assert status == 200
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        names = archive.getnames()
    assert "etc/passwd" in names
    assert not [name for name in names if name.startswith(("proc/", "sys/", "dev/"))]
