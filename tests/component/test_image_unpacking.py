"""Unpacking in the real jail: what an image comes to, and archives that are out to harm."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import resource
import stat
import struct
import subprocess
import tarfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from backports import zstd

from forktree_agent.images.errors import ImageInvalid
from forktree_agent.images.unpacker import UnpackLimits, unpack
from unit.image_registry import Entry, archive, folder, hard_link, link

UID = 204_095
SECONDS = 60.0
LIMITS = UnpackLimits(uid=UID, unpacked_bytes=64 << 20)


async def room(_: int) -> None:
    """There is enough."""


async def make(
    tmp_path: Path, *layers: bytes, limits: UnpackLimits = LIMITS, working_folder: str = "/"
) -> Path:
    """The image of these layers."""
    descriptors: list[int] = []
    try:
        for number, layer in enumerate(layers):
            path = tmp_path / f"layer-{number}"
            path.write_bytes(layer)
            descriptors.append(os.open(path, os.O_RDONLY))
        made = tmp_path / "root.erofs"
        descriptors.append(os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        size = await unpack(
            descriptors[:-1],
            descriptors[-1],
            working_folder=working_folder,
            limits=limits,
            make_room=room,
            deadline=asyncio.get_running_loop().time() + SECONDS,
        )
    finally:
        for each in descriptors:
            os.close(each)
    assert size == made.stat().st_size
    return made


async def extracted(tmp_path: Path, *layers: bytes, working_folder: str = "/") -> Path:
    """What EROFS's own checker finds in the image."""
    made = await make(tmp_path, *layers, working_folder=working_folder)
    root = tmp_path / "root"
    subprocess.run(["fsck.erofs", f"--extract={root}", str(made)], check=True, capture_output=True)
    return root


async def test_owners_modes_times_links_and_contents_are_the_archives(tmp_path: Path) -> None:
    long_name = "n" * 255
    entries = [
        folder("etc", 0o750, uid=7, gid=8, mtime=1_700_000_000),
        Entry(name="etc/secret", content=b"s", mode=0o640, uid=1000, gid=100_000, mtime=1_600_000_000),
        Entry(name="big", content=os.urandom((3 << 20) + 17)),
        *(
            Entry(name=f"sizes/{size}", content=os.urandom(size))
            for size in (0, 1, 2048, 2049, 4095, 4096, 4097)
        ),
        link("absolute", "/etc/secret"),
        link("upwards", "../../../etc/passwd"),
        link("long", "t" * 4000),
        hard_link("same", "big"),
        Entry(name=f"many/{long_name}", content=b"x"),
        *(Entry(name=f"many/file-{number}", content=b"%d" % number) for number in range(700)),
        Entry(name="pipe", kind=tarfile.FIFOTYPE),
        Entry(name="device", kind=tarfile.CHRTYPE),
    ]
    root = await extracted(tmp_path, archive(*entries))
    secret = (root / "etc/secret").stat()
    assert (secret.st_uid, secret.st_gid, stat.S_IMODE(secret.st_mode)) == (1000, 100_000, 0o640)
    assert secret.st_mtime == 1_600_000_000
    etc = (root / "etc").stat()
    assert (etc.st_uid, etc.st_gid, stat.S_IMODE(etc.st_mode)) == (7, 8, 0o750)
    for each in entries:
        if each.content:
            assert (root / each.name).read_bytes() == each.content, each.name
    assert (root / "sizes/0").read_bytes() == b""
    assert (root / "same").read_bytes() == (root / "big").read_bytes()
    links = {name: str((root / name).readlink()) for name in ("absolute", "upwards", "long")}
    assert links == {"absolute": "/etc/secret", "upwards": "../../../etc/passwd", "long": "t" * 4000}
    assert stat.S_ISFIFO((root / "pipe").stat().st_mode)
    assert not (root / "device").exists()
    assert len(list((root / "many").iterdir())) == 701


async def test_the_kernel_reads_what_was_written(tmp_path: Path) -> None:
    content = os.urandom(100_000)
    made = await make(
        tmp_path,
        archive(Entry(name="a/b", content=content, mode=0o4711), hard_link("a/c", "a/b"), link("l", "a/b")),
    )
    at = tmp_path / "mounted"
    at.mkdir()
    subprocess.run(["mount", "-t", "erofs", "-o", "loop,ro", str(made), str(at)], check=True)
    try:
        assert (at / "l").read_bytes() == content
        assert (at / "a/c").stat().st_ino == (at / "a/b").stat().st_ino
        assert (at / "a/b").stat().st_nlink == 2
        assert stat.S_IMODE((at / "a/b").stat().st_mode) == 0o4711
        assert {each.name for each in at.iterdir()} == {"a", "l", "dev", "etc", "proc", "run", "sys", "tmp"}
        assert (at / "..").stat().st_ino and at.stat().st_nlink == 2 + 7
    finally:
        subprocess.run(["umount", str(at)], check=True)


async def test_later_layers_hide_what_they_say_and_no_more(tmp_path: Path) -> None:
    lower = archive(
        Entry(name="kept", content=b"lower"), Entry(name="gone", content=b"lower"),
        Entry(name="opaque/lower", content=b"lower"), Entry(name="merged/lower", content=b"lower"),
        Entry(name="folder/lower", content=b"lower"), Entry(name="replaced/lower", content=b"lower"),
        Entry(name="again/lower", content=b"lower"), link("linked", "merged"),
    )  # fmt: skip
    upper = archive(
        Entry(name=".wh.gone"), Entry(name="opaque/upper", content=b"upper"),
        Entry(name="opaque/.wh..wh..opq"),
        folder("merged", 0o700), Entry(name="merged/upper", content=b"upper"), Entry(name=".wh.folder"),
        Entry(name="replaced", content=b"a file"), Entry(name="again/upper", content=b"upper"),
        Entry(name=".wh.again"), Entry(name="linked/through", content=b"upper"),
        Entry(name=".wh.never-there"), Entry(name=".wh..wh.plnk"),
    )  # fmt: skip
    root = await extracted(tmp_path, lower, upper)

    def names(path: str) -> set[str]:
        return {each.name for each in (root / path).iterdir()}

    made = {"dev", "etc", "proc", "run", "sys", "tmp"}
    assert names("") - made == {"kept", "opaque", "merged", "replaced", "again", "linked"}
    assert names("opaque") == {"upper"}
    assert names("merged") == {"lower", "upper", "through"}
    assert stat.S_IMODE((root / "merged").stat().st_mode) == 0o700
    assert (root / "replaced").read_bytes() == b"a file"
    assert names("again") == {"upper"}


@pytest.mark.parametrize("packed", [bytes, gzip.compress, zstd.compress], ids=["plain", "gzip", "zstd"])
async def test_layers_may_be_compressed(tmp_path: Path, packed: type[bytes]) -> None:
    root = await extracted(tmp_path, packed(archive(Entry(name="a", content=b"a" * 100_000))))
    assert (root / "a").read_bytes() == b"a" * 100_000


async def test_the_working_folder_and_what_init_needs_are_made(tmp_path: Path) -> None:
    root = await extracted(
        tmp_path, archive(link("dev", "/etc"), Entry(name="etc/hosts")), working_folder="/srv/app"
    )
    assert (root / "srv/app").is_dir() and (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert (root / "dev").is_dir() and not (root / "dev").is_symlink()
    assert "localhost" in (root / "etc/hosts").read_text()


def header(**fields: bytes) -> bytes:
    """A header block with these fields as they are, and a right checksum."""
    at = {
        "name": 0,
        "mode": 100,
        "uid": 108,
        "gid": 116,
        "size": 124,
        "mtime": 136,
        "type": 156,
        "magic": 257,
    }
    block = bytearray(512)
    for name, value in ({"mode": b"0000644\0", "magic": b"ustar\x0000", "type": b"0"} | fields).items():
        block[at[name] : at[name] + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def negative(number: int) -> bytes:
    return b"\xff" * 4 + struct.pack(">q", number)


END = bytes(1024)
HOSTILE = {
    "upwards": (archive(Entry(name="../out")), "leads upwards"),
    "upwards in the middle": (archive(Entry(name="a/../../out")), "leads upwards"),
    "a link to itself": (archive(link("a", "a"), Entry(name="a/b")), "follows more than 40 links"),
    "links in a ring": (archive(link("a", "b"), link("b", "a"), Entry(name="a/c")), "follows more than 40"),
    "through a file": (archive(Entry(name="a"), Entry(name="a/b")), "is no folder"),
    "hard link to nothing": (archive(hard_link("a", "/etc/shadow")), "is no file of the image"),
    "hard link to a folder": (archive(folder("a"), hard_link("b", "a")), "is no file of the image"),
    "hard link upwards": (archive(hard_link("a", "../../etc/shadow")), "leads upwards"),
    "a long name": (archive(Entry(name="n" * 256)), "longer than 255 bytes"),
    "a long path": (archive(Entry(name="/".join(["n"] * 3000))), "longer than 4095 bytes"),
    "deep": (archive(folder("/".join(["d"] * 300))), "256 deep"),
    "a link to nowhere": (archive(link("a", "")), "no target"),
    "an owner too large": (archive(Entry(name="a", pax={"uid": str(1 << 40)})), "which is no id"),
    "a negative owner": (archive(Entry(name="a", pax={"gid": "-1"})), "which is no id"),
    "a negative size": (header(name=b"a", size=negative(-512)) + END, "header of -512 bytes"),
    "a huge negative size": (header(name=b"a", size=negative(-(1 << 62))) + END, "header of -"),
    "a huge size": (
        header(name=b"a", size=b"\x80\0\0\0" + struct.pack(">q", 1 << 60)) + END,
        "unpacks to more",
    ),
    "a negative size in attributes": (archive(Entry(name="a", pax={"size": "-512"})), "entry of -512 bytes"),
    "a large header": (
        header(name=b"a", type=b"x", size=b"77777777777\0") + END,
        "header of 8589934591 bytes",
    ),
    "a broken header": (archive(Entry(name="a"))[:512] + b"\xa5" * 512 + END, "broken"),
    "half a header": (archive(Entry(name="a"))[:512] + b"a" * 100, "broken"),
    "half a file": (archive(Entry(name="a", content=b"a" * 9000))[:5000], "cannot be read"),
    "no archive": (b"\x01" * 4096, "is broken"),
    "broken gzip": (gzip.compress(archive(Entry(name="a")))[:-20] + b"\xff" * 20, "cannot be read"),
    "half of gzip": (gzip.compress(os.urandom(9000))[:4000], "cannot be read"),
    "broken zstd": (zstd.compress(archive(Entry(name="a")))[:20] + b"\xff" * 20, "cannot be read"),
    "a bomb": (gzip.compress(archive(Entry(name="a", content=bytes(80 << 20)))), "unpacks to more than"),
    "a bomb of zstd": (
        zstd.compress(archive(Entry(name="a", content=bytes(80 << 20)))),
        "unpacks to more than",
    ),
    "headers of headers": (header(name=b"a", type=b"x", size=b"0\0") * 20_000 + END, "without end"),
    "a sparse file": (header(name=b"a", type=b"S", size=b"0\0") + END, "sparse"),
    "of no kind": (header(name=b"a", type=b"V", size=b"0\0") + END, "which images do not have"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_archive_ends_with_one_sentence(tmp_path: Path, name: str) -> None:
    layer, sentence = HOSTILE[name]
    with pytest.raises(ImageInvalid) as refused:
        await make(tmp_path, layer)
    assert sentence in refused.value.message
    assert "\n" not in refused.value.message and len(refused.value.message) < 400
    assert not (tmp_path.parent / "out").exists()


async def test_more_entries_than_allowed_end_it(tmp_path: Path) -> None:
    limits = UnpackLimits(uid=UID, unpacked_bytes=64 << 20, entries=1000)
    with pytest.raises(ImageInvalid, match="more than 1000 entries"):
        await make(tmp_path, archive(*(Entry(name="same") for _ in range(1001))), limits=limits)


async def test_more_memory_than_allowed_ends_it(tmp_path: Path) -> None:
    limits = UnpackLimits(uid=UID, unpacked_bytes=1 << 30, memory_bytes=100 << 20)
    names = gzip.compress(archive(*(folder(f"{number:0200}") for number in range(60_000))))
    with pytest.raises(ImageInvalid, match="more memory"):
        await make(tmp_path, names, limits=limits)


async def test_more_processor_time_than_allowed_ends_it(tmp_path: Path) -> None:
    limits = UnpackLimits(uid=UID, unpacked_bytes=64 << 30, cpu_seconds=1)
    bomb = io.BytesIO()
    with gzip.GzipFile(fileobj=bomb, mode="wb", compresslevel=1) as stream:
        stream.write(header(name=b"a", size=b"77777777777\0"))
        for _ in range(3000):
            stream.write(bytes(1 << 20))
    with pytest.raises(ImageInvalid, match="more processor time"):
        await make(tmp_path, bomb.getvalue(), limits=limits)


@asynccontextmanager
async def jailed(script: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A process that has entered the jail and then does what a stranger who took it over would try."""
    begin = (
        "import os, sys, socket, signal; from forktree_agent.images.unpacking import jail;"
        f"jail.enter(jail.Limits(uid={UID}, memory_bytes=1 << 30, cpu_seconds=60, file_bytes=4096),"
        " parent=os.getppid());"
    )
    process = await asyncio.create_subprocess_exec(
        "python3", "-c", begin + script, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PYTHONPATH": "node-agent"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


ATTEMPTS: Sequence[tuple[str, str]] = (
    ("open('/etc/passwd')", "FileNotFoundError"),
    ("open('/new', 'w')", "PermissionError|OSError: .Errno 30|Read-only"),
    ("os.fork()", "BlockingIOError"),
    ("os.setuid(0)", "PermissionError"),
    ("os.chroot('..')", "PermissionError"),
    ("socket.socket().connect(('127.0.0.1', 1))", "Network is unreachable"),
    ("os.kill(os.getppid(), 9)", "PermissionError"),
    ("bytearray(2 << 30)", "MemoryError"),
    ("os.listdir('/proc')", "FileNotFoundError"),
)


@pytest.mark.parametrize(("attempt", "failure"), ATTEMPTS)
async def test_who_takes_the_jailed_process_over_can_do_nothing(attempt: str, failure: str) -> None:
    async with jailed(attempt) as process:
        _, said = await process.communicate()
    assert process.returncode == 1
    assert any(each in said.decode() for each in failure.split("|")), said.decode()


async def test_the_jailed_process_ends_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed takes it along: nothing else would end it."""
    script = (
        "import os, sys, time\n"
        "from forktree_agent.images.unpacking import jail\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        f"    limits = jail.Limits(uid={UID}, memory_bytes=1 << 30, cpu_seconds=60, file_bytes=0)\n"
        "    jail.enter(limits, parent=parent)\n"
        "    print('in', flush=True)\n"
        "    time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    process = await asyncio.create_subprocess_exec(
        "python3", "-c", script, stdout=subprocess.PIPE, env={"PYTHONPATH": "node-agent"}
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"in\n"
    process.kill()
    # Both held this pipe: its end says that both are gone.
    async with asyncio.timeout(SECONDS):
        assert await process.stdout.read() == b""
    await process.wait()


async def test_nothing_is_left_of_a_cancelled_one(tmp_path: Path) -> None:
    waiting = asyncio.Event()

    async def no_room_yet(_: int) -> None:
        waiting.set()
        await asyncio.Event().wait()

    source = tmp_path / "layer"
    source.write_bytes(archive(Entry(name="a")))
    layer = os.open(source, os.O_RDONLY)
    out = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    task = asyncio.create_task(
        unpack([layer], out, working_folder="/", limits=LIMITS, make_room=no_room_yet,
               deadline=asyncio.get_running_loop().time() + SECONDS),
        name="unpack",
    )  # fmt: skip
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    os.close(layer)
    os.close(out)
    assert (tmp_path / "out").stat().st_size == 0
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_maxrss > 0  # It was reaped.
