"""``costmodel cache``, and what a folder of winners may hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up_recording import RECORDED, TARGET, write_recording
from test_cli import run, run_json
from typer.testing import CliRunner

import costmodel
from costmodel.cli import app
from costmodel.data.dataset import Dataset
from costmodel.measure.replay import ReplayRunner
from costmodel.tuning.tuning_result import TuningResult
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners


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
        winners = Winners(WinnerCache(), target_of=lambda _: TARGET)
        return winners.disk_key(winners.key(RECORDED, 0))


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
    assert run_json("cache", "clear", "--yes")["removed"] == 1
    assert run_json("cache")["entries"] == []


def test_some_may_be_cleared(filled: WinnerCache) -> None:
    (entry,) = filled.entries()
    assert run_json("cache", "clear", entry.path.stem[:12])["removed"] == 1


def test_a_person_is_asked(filled: WinnerCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costmodel.cli.common.is_terminal", lambda: True)
    refused = CliRunner().invoke(app, ["cache", "clear"], input="n\n")
    assert refused.exit_code == 1
    assert "forget all winners" in refused.output
    assert len(filled.entries()) == 1
    assert CliRunner().invoke(app, ["cache", "clear", "--yes"]).exit_code == 0
    assert filled.entries() == []


@pytest.mark.parametrize("group", ["cache", "kernels"])
@pytest.mark.parametrize("answer", ["", "n\n", "y\n"])
def test_what_nobody_can_be_asked_is_refused(
    filled: WinnerCache, tmp_path: Path, group: str, answer: str
) -> None:
    """As in ``echo n | costmodel kernels clear``: without a terminal, --yes is the only yes."""
    kept = tmp_path / "cache" / "kernels" / "kept.jsonl"
    kept.parent.mkdir()
    kept.write_text("mine")
    command = [sys.executable, "-m", "costmodel", group, "clear"]
    ended = subprocess.run(command, input=answer, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--yes" in ended.stderr
    assert len(filled.entries()) == 1
    assert kept.exists()
    assert run_json(group, "clear", "--yes")["removed"] == 1


@pytest.mark.parametrize("group", ["cache", "kernels"])
def test_a_name_of_nothing_forgets_nothing_and_says_so(filled: WinnerCache, group: str) -> None:
    found = run(group, "clear", "no such name")
    assert found.exit_code == 2
    assert "'no such name' fits 0" in found.stderr
    assert len(filled.entries()) == 1


def test_what_is_no_winner_is_told(filled: WinnerCache) -> None:
    found = run_json("cache", "verify")
    assert found["unusable"] == 0
    assert sum(count for state, count in found.items() if state.startswith("of ")) == 1
    assert filled.path is not None
    (filled.path / "other.json").write_text("{")
    assert run("cache", "verify").exit_code == 1


def test_a_copied_folder_is_a_cache_of_its_own(filled: WinnerCache, tmp_path: Path) -> None:
    assert filled.path is not None
    copy = WinnerCache(shutil.copytree(filled.path, tmp_path / "copy"))
    before, after = (
        [(e.key, e.result and e.result.to_dict()) for e in cache.entries()]
        for cache in (filled, copy)
    )
    assert before == after


@pytest.mark.fault("B53")
@pytest.mark.parametrize(
    "name", ["../../../etc/cron.d/x", "/etc/x", "..", "\0", "\ud800", "a/b", ""]
)
def test_the_name_of_a_key_is_no_path(
    tmp_path: Path, result: TuningResult, key: dict[str, Any], name: str
) -> None:
    cache = WinnerCache(tmp_path / "other")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    cache.put({**key, "name": name}, result)
    (new,) = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert new.parent == tmp_path / "other"
    assert cache.entries()


@pytest.mark.fault("B53")
def test_texts_of_a_file_do_nothing_to_a_terminal(filled: WinnerCache) -> None:
    (entry,) = filled.entries()
    why = "\x1b]0;title\x07\x1b[2Jgone\r\u202e"
    filled.put(entry.key, replace(entry.result, why=why, caveat=why))
    for command in (("cache",), ("cache", "show", entry.path.stem)):
        done = run(*command)
        assert not set(done.stdout + done.stderr) & set("\x1b\x07\r\u202e")
    assert "gone" in done.stdout
