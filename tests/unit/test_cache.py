"""The build cache: an entry is made once, complete or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from forktree_dev import cache


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_an_entry_is_made_once_and_announced_once(capsys: pytest.CaptureFixture[str]) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "result").write_text("done")

    places = {cache.entry("kind", "key", make, announce="making it") for _ in range(3)}
    assert len(made) == 1
    assert [(place / "result").read_text() for place in places] == ["done"]
    assert capsys.readouterr().err == "making it\n"


def test_a_failed_build_leaves_nothing_and_the_next_one_works() -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("out of disk")

    with pytest.raises(RuntimeError, match="out of disk"):
        cache.entry("kind", "key", fail, announce="")
    assert list((cache.root() / "kind").iterdir()) == []
    place = cache.entry("kind", "key", lambda folder: (folder / "whole").touch(), announce="")
    assert [each.name for each in place.iterdir()] == ["whole"]


def test_two_builders_at_once_do_the_work_once() -> None:
    entered, go_on = threading.Event(), threading.Event()
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        entered.set()
        assert go_on.wait(10)

    first = threading.Thread(target=cache.entry, args=("kind", "key", make), kwargs={"announce": ""})
    second = threading.Thread(target=cache.entry, args=("kind", "key", make), kwargs={"announce": ""})
    first.start()
    assert entered.wait(10)
    second.start()
    go_on.set()
    first.join(10)
    second.join(10)
    assert len(made) == 1


def test_a_key_changes_with_content_and_with_where_one_input_ends(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("one")
    before = cache.key([source, "flag"])
    assert before == cache.key([source, "flag"])
    assert cache.key(["ab", "c"]) != cache.key(["a", "bc"])
    source.write_text("two")
    assert cache.key([source, "flag"]) != before
