"""What the image builder makes: guest directories that hold together, and images with what they promise."""

from __future__ import annotations

import hashlib
import json
import stat
import subprocess
from pathlib import Path

from component.guest_machine import booted
from forktree_dev.images import guest_directory
from forktree_dev.images.initrd import archive


def test_a_guest_directory_holds_what_its_manifest_says_and_is_made_once() -> None:
    folder = guest_directory(["tiny"])
    assert guest_directory(["tiny"]) == folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert list(manifest["images"]) == ["tiny"]
    said = {"vmlinux": manifest["kernel_sha256"], "initrd": manifest["initrd_sha256"]}
    said |= {image["file"]: image["sha256"] for image in manifest["images"].values()}
    for file, digest in said.items():
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == digest, file


def test_the_initramfs_is_read_by_cpio_as_it_was_written(tmp_path: Path) -> None:
    entries = [
        ("init", stat.S_IFREG | 0o755, b"program"),
        ("modules", stat.S_IFDIR | 0o755, b""),
        ("modules/odd", stat.S_IFREG | 0o644, b"x" * 4097),
        ("modules/empty", stat.S_IFREG | 0o600, b""),
    ]
    packed = archive(entries)
    assert packed == archive(entries)
    subprocess.run(["cpio", "--extract", "--quiet"], input=packed, cwd=tmp_path, check=True)
    for path, mode, content in entries:
        unpacked = tmp_path / path
        assert unpacked.stat().st_mode == mode
        assert stat.S_ISDIR(mode) or unpacked.read_bytes() == content


async def test_the_python_image_has_the_library_and_numpy_and_nothing_of_the_builder(tmp_path: Path) -> None:
    async with booted(tmp_path, "python") as machine:
        program = (
            "import asyncio, ctypes, http.server, multiprocessing, sqlite3, ssl, threading;"
            "import numpy, socket, subprocess;"
            "a, b = socket.socketpair(); a.send(b'x');"
            "print(b.recv(1), subprocess.check_output(['echo', 'hi']));"
            "print(numpy.arange(4) @ numpy.arange(4))"
        )
        assert await machine.sh(f'python3 -c "{program}"') == "b'x' b'hi\\n'\n14\n"
        # Importing wrote nothing, since compiled files are there and fresh: what is written is guest memory.
        assert await machine.sh("df -k --output=used / | tail -1; ls /tmp") == "    0\n"
        assert (
            await machine.sh("cat /etc/hostname /etc/resolv.conf; ls /etc/apt 2>/dev/null || true")
            == "localhost\n"
        )


async def test_the_gym_image_has_a_live_environment_that_answers_by_a_command(tmp_path: Path) -> None:
    async with booted(tmp_path, "gym") as machine:
        await machine.sh("gym-environment CliffWalking-v1 --seed 3 >/tmp/log 2>&1 & echo $! >/tmp/pid")
        await machine.sh("until gym-ask state 2>/dev/null; do sleep 0.2; done")
        assert (await machine.sh("gym-ask score; gym-ask step 0 1 >/dev/null; gym-ask score")).split() == [
            "0.0",
            "-2.0",
        ]
        state = json.loads(await machine.sh("gym-ask state"))
        assert (state["observation"], state["actions"], state["ended"]) == (25, [0, 1], False)
        refused = await machine.exec("gym-ask", "step", "9")
        assert (refused.exit_code, refused.stdout) == (1, b"")
        assert b"9 is not an action of Discrete(4)" in refused.stderr
        await machine.sh("kill $(cat /tmp/pid)")
        gone = await machine.exec("gym-ask", "state")
        assert (gone.exit_code, gone.stdout) == (1, b"")
        # Compiled files are there and fresh, so that a start writes nothing: what is written is guest memory.
        assert await machine.sh("cat /tmp/log; find / -xdev -newer /tmp/pid -name '*.pyc'") == ""
