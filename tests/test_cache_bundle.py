"""``costmodel cache``, and winners that go from one machine to another."""

from __future__ import annotations

import errno
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up_recording import RECORDED, TARGET, write_recording
from test_cli import run, run_json

import costmodel
from costmodel.data.dataset import Dataset
from costmodel.errors import CorruptFile, FileError, InvalidInput, WrongVersion
from costmodel.measure import ReplayRunner
from costmodel.tuning import cache as cache_module
from costmodel.tuning.cache import WinnerCache
from costmodel.tuning.cache_bundle import export_winners, import_winners
from costmodel.tuning.tuning_result import TuningResult
from costmodel.tuning.winners import Question, bucket, winner_key


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TuningResult:
    data = write_recording(tmp_path_factory.mktemp("cache") / "data").path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # no model is named: the rules rank
        runner = ReplayRunner(Dataset.open(data))
        return costmodel.tune(RECORDED, runner=runner, mode="exhaustive")


@pytest.fixture
def key() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return winner_key(Question(RECORDED, 0), TARGET, bucket(RECORDED.m))


@pytest.fixture
def filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: TuningResult, key: dict[str, Any]
) -> WinnerCache:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "cache"))
    cache = WinnerCache()
    cache.put(key, result)
    return cache


def test_winners_are_listed_shown_and_forgotten(filled: WinnerCache) -> None:
    (entry,) = run_json("cache")["entries"]
    assert run_json("cache", "list")["entries"] == [entry]
    assert str(RECORDED) in run("cache").stdout
    name = Path(entry["path"]).stem
    assert run_json("cache", "show", name) == entry
    assert "why" in run("cache", "show", name).stdout
    missing = run("cache", "show", "nothing")
    assert missing.exit_code == 2
    assert "expected 1" in missing.stderr
    assert run_json("cache", "clear")["removed"] == 1
    assert run_json("cache")["entries"] == []


def test_what_is_no_winner_is_told(filled: WinnerCache) -> None:
    found = run_json("cache", "verify")
    assert found["unusable"] == 0
    assert sum(count for state, count in found.items() if state.startswith("of ")) == 1
    assert filled.path is not None
    (filled.path / "other.json").write_text("{")
    assert run("cache", "verify").exit_code == 1


def test_winners_go_to_another_machine_and_back(filled: WinnerCache, tmp_path: Path) -> None:
    file = tmp_path / "winners.json"
    assert run_json("cache", "export", file)["exported"] == 1
    other = WinnerCache(tmp_path / "other")
    assert import_winners(other, file) == {"added": 1, "known": 0, "refused": 0}
    assert import_winners(other, file) == {"added": 0, "known": 1, "refused": 0}
    ours, theirs = filled.entries(), other.entries()
    assert [(e.key, e.result) for e in ours] == [(e.key, e.result) for e in theirs]
    assert run_json("cache", "import", file)["known"] == 1


@pytest.mark.fault("B16")
@pytest.mark.parametrize(
    "change",
    [{"k": 1}, {"n": True}, {"m": [1, 2]}, {"m": "1-2"}, {"m": [1]}, {"dtype": "bfloat16"},
     {"name": 7}],
    ids=str,
)  # fmt: skip
def test_a_winner_under_the_key_of_another_is_refused(
    filled: WinnerCache, tmp_path: Path, change: dict[str, Any]
) -> None:
    file = tmp_path / "winners.json"
    export_winners(filled, file)
    data = json.loads(file.read_text())
    data["entries"][0]["key"] |= change
    data["entries"] += [None, {}, {"key": {}, "result": 1}]
    file.write_text(json.dumps(data))
    other = WinnerCache(tmp_path / "other")
    assert import_winners(other, file) == {"added": 0, "known": 0, "refused": 4}
    assert other.entries() == []


@pytest.mark.fault("B53")
@pytest.mark.parametrize(
    "change",
    [{"key": {"note": "x" * 10**5}}, {"result": {"why": "x" * (17 * 2**20)}}],
    ids=["key", "result"],
)
def test_an_entry_that_is_too_large_is_refused(
    filled: WinnerCache, tmp_path: Path, change: dict[str, Any]
) -> None:
    file = tmp_path / "winners.json"
    export_winners(filled, file)
    data = json.loads(file.read_text())
    for part, values in change.items():
        data["entries"][0][part] |= values
    file.write_text(json.dumps(data))
    other = WinnerCache(tmp_path / "other")
    assert import_winners(other, file) == {"added": 0, "known": 0, "refused": 1}


@pytest.mark.fault("B53")
@pytest.mark.parametrize(
    "name", ["../../../etc/cron.d/x", "/etc/x", "..", "\0", "\ud800", "a/b", ""]
)
def test_the_name_of_a_key_is_no_path(filled: WinnerCache, tmp_path: Path, name: str) -> None:
    file = tmp_path / "winners.json"
    export_winners(filled, file)
    data = json.loads(file.read_text())
    data["entries"][0]["key"]["name"] = name
    file.write_text(json.dumps(data))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    other = WinnerCache(tmp_path / "other")
    assert import_winners(other, file)["added"] == 1
    (new,) = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert new.parent == tmp_path / "other"
    assert other.entries()


@pytest.mark.fault("B53")
def test_texts_of_a_file_do_nothing_to_a_terminal(filled: WinnerCache) -> None:
    (entry,) = filled.entries()
    why = "\x1b]0;title\x07\x1b[2Jgone\r\u202e"
    filled.put(entry.key, replace(entry.result, why=why, reservation=why))
    for command in (("cache",), ("cache", "show", entry.path.stem)):
        done = run(*command)
        assert not set(done.stdout + done.stderr) & set("\x1b\x07\r\u202e")
    assert "gone" in done.stdout


@pytest.mark.fault("B13")
@pytest.mark.parametrize(
    ("text", "error"),
    [("", CorruptFile), ("[]", CorruptFile), ('{"winners": "1"}', CorruptFile),
     ('{"winners": 1, "entries": {}}', CorruptFile),
     ('{"winners": 99, "entries": []}', WrongVersion),
     ('{"winners": 1, "entries": [' + "[" * 10_000, CorruptFile), ("\0\xff", CorruptFile)],
    ids=lambda v: str(v)[:30],
)  # fmt: skip
def test_what_is_no_file_of_winners_is_refused(
    tmp_path: Path, text: str, error: type[Exception]
) -> None:
    file = tmp_path / "winners.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises((error, InvalidInput)):
        import_winners(WinnerCache(tmp_path / "other"), file)
    with pytest.raises(FileError):
        import_winners(WinnerCache(tmp_path / "other"), tmp_path / "missing.json")


@pytest.mark.fault("B22")
@pytest.mark.parametrize("place", ["in the way", "/proc/nowhere"])
def test_what_cannot_be_written_is_not_told_as_added(
    filled: WinnerCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    file = tmp_path / "winners.json"
    export_winners(filled, file)
    (tmp_path / "in the way").touch()
    folder = tmp_path / place / "winners"
    with (
        pytest.warns(RuntimeWarning, match="cannot be used"),
        pytest.raises(FileError, match=r"0 winners were added.*\((.+)\).*COSTMODEL_CACHE_DIR"),
    ):
        import_winners(WinnerCache(folder), file)
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(folder))
    done = run("cache", "import", file)
    assert done.exit_code != 0
    assert "added" not in done.stdout
    assert "error" in done.stderr


@pytest.mark.fault("B22")
def test_winners_before_a_full_disk_are_told(
    filled: WinnerCache,
    result: TuningResult,
    key: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled.put({**key, "torch": "other"}, result)
    file = tmp_path / "winners.json"
    export_winners(filled, file)
    other, real = WinnerCache(tmp_path / "other"), cache_module.replace_file

    def fills(path: Path, write: Any) -> None:
        if other.entries():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, write)

    monkeypatch.setattr(cache_module, "replace_file", fills)
    with (
        pytest.warns(RuntimeWarning, match="No space left"),
        pytest.raises(FileError, match=r"1 winners were added.*No space left"),
    ):
        import_winners(other, file)
