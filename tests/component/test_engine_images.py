"""A later agent may come with other images: what runs, and what is forked of it, keeps its own disk."""

from __future__ import annotations

import dataclasses
import json
import secrets
from pathlib import Path

from component.keeper_fixtures import running_keeper
from component.node import TINY, engine_on, settings

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
