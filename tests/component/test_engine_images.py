"""A later agent may come with other images: what runs, and what is forked of it, keeps its own disk."""

from __future__ import annotations

import dataclasses
import json
import secrets
from pathlib import Path

from component.keeper_fixtures import running_keeper
from component.node import TINY, engine_on, running_node, settings, soon
from forktree_agent.engine.contract import Disk

SHAPE = dataclasses.replace(TINY, image="builtin:changing")
READ_EVERYTHING = "find / -xdev -type f | sort | xargs sha256sum | sha256sum"


def with_changing(given: Path, folder: Path, content: str) -> Path:
    """The same guest directory, in which the image `content` also goes by the name `changing`."""
    manifest = json.loads((given / "manifest.json").read_text())
    manifest["images"]["changing"] = manifest["images"][content]
    (folder / "images").mkdir(parents=True)
    for file in ("vmlinux", "initrd", *(f"images/{name}.erofs" for name in ("tiny", "python"))):
        (folder / file).symlink_to((given / file).resolve())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


async def test_a_child_has_its_parents_disk_also_when_the_image_is_another_by_now(tmp_path: Path) -> None:
    config = settings(images=("tiny", "python"))
    before, after = (
        dataclasses.replace(
            config, guest_directory=with_changing(config.guest_directory, tmp_path / name, name)
        )
        for name in ("tiny", "python")
    )
    journal = tmp_path / "journal"
    async with running_keeper(tmp_path, f"forktree-test-{secrets.token_hex(4)}") as socket_path:
        async with engine_on(socket_path, journal, before) as first:
            parent, tree = await first.root(SHAPE), first.tree
        async with engine_on(socket_path, journal, after) as second:
            second.tree = tree
            child = (await second.fork(parent)).children[0]
            # The child reads first: what it reads is not yet in memory that it shares.
            seen = await second.sh(child, READ_EVERYTHING)
            assert await second.sh(parent, READ_EVERYTHING) == seen
            another = await second.root(SHAPE, name="another")
            assert another.baseline == parent.baseline
            assert await second.sh(another, READ_EVERYTHING) == seen
            for machine in second.engine.machines():
                await second.engine.release(machine.id)


async def test_a_disk_is_free_once_nothing_stands_on_it_and_can_be_had_again(tmp_path: Path) -> None:
    config = settings(images=("tiny",))
    manifest = json.loads((config.guest_directory / "manifest.json").read_text())
    file = tmp_path / "image.erofs"
    file.write_bytes((config.guest_directory / manifest["images"]["tiny"]["file"]).read_bytes())
    digest = "0123456789abcdef" * 4
    shape = dataclasses.replace(
        TINY, image="oci:by/one:name", disk=Disk(file=str(file), digest=digest), working_folder="/tmp"
    )
    async with running_node(tmp_path / "node", config) as node:
        engine = node.engine
        assert await engine.free_image(digest)
        root = await node.root(shape)
        other = dataclasses.replace(shape, image="oci:by/another:name")
        assert (await node.baseline(other)).id == root.baseline
        assert await node.sh(root, "pwd") == "/tmp\n"
        assert not await engine.free_image(digest)
        await engine.drop_baseline(root.baseline)
        assert not await engine.free_image(digest)
        file.unlink()  # The machine has it all the same, and so have its children.
        child = (await node.fork(root)).children[0]
        assert (await node.sh(child, READ_EVERYTHING)) == await node.sh(root, READ_EVERYTHING)
        for machine in engine.machines():
            await engine.release(machine.id)
        for point in engine.points():
            await engine.drop_point(point.id)
        assert await engine.free_image(digest)
        held = await node.keeper.listing(deadline=soon())
        assert f"disk-{digest}" not in held.files
