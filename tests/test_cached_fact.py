"""What is remembered of files: asked once, and again when a file is another."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from costmodel.files import cached_fact


class Asked:
    """Works out the files' text, and counts how often."""

    def __init__(self, files: list[Path]) -> None:
        self.files, self.times = files, 0

    def __call__(self) -> dict[str, str]:
        self.times += 1
        return {path.name: path.read_text() for path in self.files if path.exists()}

    def now(self) -> dict[str, str]:
        return cached_fact("text", self.files, self)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("costmodel.files._SETTLED_S", -1.0)
    return tmp_path / "cache"


@pytest.fixture
def asked(tmp_path: Path, cache: Path) -> Asked:
    files = [tmp_path / "one", tmp_path / "two"]
    for path in files:
        path.write_text(path.name)
    time.sleep(0.02)  # what is written from here on has another time
    return Asked(files)


def rewrite(path: Path) -> None:
    path.write_text("other")


def rewrite_as_long_and_as_old(path: Path) -> None:
    old = path.stat()
    path.write_text(path.read_text()[::-1])
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


def replace(path: Path) -> None:
    path.with_name("new").write_text(path.read_text().upper())
    path.with_name("new").replace(path)


@pytest.mark.parametrize("change", [rewrite, rewrite_as_long_and_as_old, replace])
def test_it_is_worked_out_once_until_a_file_changes(
    asked: Asked, change: Callable[[Path], None]
) -> None:
    assert asked.now() == asked.now() == {"one": "one", "two": "two"}
    assert asked.times == 1
    change(asked.files[1])
    assert asked.now()["two"] == asked.files[1].read_text() != "two"
    assert asked.times == 2
    asked.now()
    assert asked.times == 2


def test_what_was_written_just_now_is_not_remembered(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written again within the same tick of the clock."""
    monkeypatch.setattr("costmodel.files._SETTLED_S", 1000.0)
    asked.now()
    asked.now()
    assert asked.times == 2


@pytest.mark.fault("B13")
@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"stamp": 1, "value": {}}', "\0" * 99, '{"value": {"one": "x"}}',
     {"one": 1}, ["one"], "one", None],
)  # fmt: skip
def test_what_is_no_memory_is_worked_out_again(asked: Asked, cache: Path, content: object) -> None:
    asked.now()
    (file,) = cache.rglob("*.json")
    if not isinstance(content, str) or content == "one":  # a value of another kind
        content = json.dumps(json.loads(file.read_text()) | {"value": content})
    file.write_text(content)
    assert asked.now() == asked.now() == {"one": "one", "two": "two"}
    assert asked.times == 2, "the file was written again"


def test_other_files_are_another_fact(asked: Asked) -> None:
    asked.now()
    one = Asked(asked.files[:1])
    assert one.now() == {"one": "one"}
    asked.now()
    assert (asked.times, one.times) == (1, 1)


@pytest.mark.fault("B22")
def test_without_a_cache_or_a_file_it_is_worked_out(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert asked.now() == asked.now() == {"one": "one", "two": "two"}
    assert asked.times == 2
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "cache"))
    asked.files[0].unlink()
    assert asked.now() == {"two": "two"}


@pytest.mark.fault("B21")
def test_many_may_write_at_once(asked: Asked, cache: Path) -> None:
    seen: list[dict[str, str]] = []
    threads = [threading.Thread(target=lambda: seen.append(asked.now())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [{"one": "one", "two": "two"}] * 16
    assert len([p for p in cache.rglob("*") if p.is_file()]) == 1, "nothing is left behind"


def test_a_path_that_is_no_text_is_remembered_too(tmp_path: Path, cache: Path) -> None:
    folders = [tmp_path / os.fsdecode(name) for name in (b"mod\xe9l", b"mod\xe8l")]
    try:
        for folder in folders:
            folder.mkdir()
    except OSError:
        pytest.skip("this file system has text only")
    asked = []
    for folder in folders:
        file = folder / "one"
        file.write_text("one")
        os.utime(file, (1, 1))
        asked.append(Asked([file]))
    for each in asked:
        assert each.now() == each.now() == {"one": "one"}
