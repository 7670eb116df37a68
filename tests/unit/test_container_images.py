"""Images hold what their list says, name it, and come out the same from the same content."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from forktree_dev.container_images import NODE, OPERATOR, dockerfiles, oci, python_files, sbom
from forktree_dev.container_images.debian_files import DebianPackage
from forktree_dev.container_images.oci import Config, Layer
from forktree_dev.container_images.python_files import PythonPackage

CONFIG = Config(user="65532:65532", command=("python3",), environment={"PATH": "/bin"}, labels={"a": "b"})


def root(folder: Path) -> Path:
    """A small file system, its files as old as they happen to be."""
    (folder / "etc").mkdir(parents=True)
    (folder / "etc" / "hostname").write_text("here\n")
    (folder / "program").write_text("#!/bin/sh\n")
    (folder / "program").chmod(0o4755)
    (folder / "bin").symlink_to("usr/bin")
    return folder


def blobs(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as opened:
        return {each.name: content.read() for each in opened if (content := opened.extractfile(each))}


def test_dockerfiles_are_what_the_list_says() -> None:
    assert dockerfiles.stale() == [], "run make generate"


def test_the_lock_gives_what_the_project_asks_for() -> None:
    unmet = "run `python -m forktree_dev.container_images lock`"
    assert python_files.unmet() == [], unmet
    assert all(each.sha256 for each in python_files.locked())


def test_a_requirement_that_the_lock_does_not_give_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = [
        line for line in python_files.REQUIREMENTS.read_text().splitlines() if not line.startswith("kopf")
    ]
    (tmp_path / "requirements.txt").write_text("\n".join(kept))
    monkeypatch.setattr(python_files, "REQUIREMENTS", tmp_path / "requirements.txt")
    (unmet,) = python_files.unmet()
    assert unmet.startswith("kopf")


def test_equal_content_gives_an_equal_layer_whenever_it_was_written(tmp_path: Path) -> None:
    first = Layer.packed(root(tmp_path / "one"), tmp_path / "one.tar")
    second_root = root(tmp_path / "two")
    os.utime(second_root / "program", (1, 1))
    assert Layer.packed(second_root, tmp_path / "two.tar").sha256 == first.sha256


def test_a_layer_is_roots_and_lets_nobody_become_root(tmp_path: Path) -> None:
    layer = Layer.packed(root(tmp_path / "root"), tmp_path / "layer.tar")
    with tarfile.open(layer.path) as opened:
        members = {each.name: each for each in opened}
    assert list(members) == ["bin", "etc", "etc/hostname", "program"]
    assert members["bin"].linkname == "usr/bin"
    assert members["program"].mode == 0o755
    assert {(each.uid, each.gid) for each in members.values()} == {(0, 0)}


def test_an_image_is_found_by_its_digests_from_the_index_down(tmp_path: Path) -> None:
    layer = Layer.packed(root(tmp_path / "root"), tmp_path / "layer.tar")
    oci.write(tmp_path / "image.tar", "localhost/forktree/test:1", CONFIG, [layer])
    files = blobs(tmp_path / "image.tar")

    def blob(digest: str) -> bytes:
        return files[f"blobs/{digest.replace(':', '/')}"]

    (described,) = json.loads(files["index.json"])["manifests"]
    assert described["annotations"]["io.containerd.image.name"] == "localhost/forktree/test:1"
    manifest = json.loads(blob(described["digest"]))
    config = json.loads(blob(manifest["config"]["digest"]))
    assert config["config"]["User"] == "65532:65532"
    assert config["rootfs"]["diff_ids"] == [f"sha256:{layer.sha256}"]
    assert blob(manifest["layers"][0]["digest"]) == layer.path.read_bytes()


def test_a_bill_names_every_part_once_and_says_how_it_is_found() -> None:
    debian = [DebianPackage(name="libc6", version="1:2.36-9+deb12u1", architecture="amd64", sha256="a" * 64)]
    python = [PythonPackage(name="aiohttp", version="3.14.5", sha256="b" * 64)]
    bill = json.loads(sbom.render(NODE, "0.1.0", debian, python))
    urls = [each["externalRefs"][0]["referenceLocator"] for each in bill["packages"]]
    assert "pkg:deb/debian/libc6@1%3A2.36-9%2Bdeb12u1?arch=amd64" in urls
    assert "pkg:pypi/aiohttp@3.14.5" in urls
    assert any(url.startswith("pkg:cargo/forktree-shim@") for url in urls)
    ids = [each["SPDXID"] for each in bill["packages"]]
    assert len(ids) == len(set(ids))
    assert {each["relatedSpdxElement"] for each in bill["relationships"]} == set(ids)
    assert not any(
        "cargo" in each["SPDXID"]
        for each in json.loads(sbom.render(OPERATOR, "1", debian, python))["packages"]
    )
