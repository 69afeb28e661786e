"""Learning from use: what fits a data set is learned from, and all else is counted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_recording import TARGET, TRAINING, write_recording
from typer.testing import CliRunner

import costmodel
from costmodel.cli import app
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement
from costmodel.errors import MissingData
from costmodel.evaluation.heldout import eval_workloads
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Toolchain
from costmodel.measure.protocol import TimingProtocol
from costmodel.models import TrainingTable
from costmodel.models.registry import model_directory
from costmodel.tuning.from_use import UNREADABLE, open_cache, used_rows, with_use
from costmodel.tuning.tuning_result import PREDICTED, Costs, TuningResult
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners

PROTOCOL = TimingProtocol().to_dict()
NEW = Workload.dense(777, 3000, 1500)
ON = f"device ({TARGET.device.name})"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_recording(tmp_path_factory.mktemp("use") / "data", protocol=PROTOCOL)


@pytest.fixture
def cache(tmp_path: Path) -> WinnerCache:
    return WinnerCache(tmp_path / "winners")


def tuned(workload: Workload, first_us: float = 50.0, count: int = 8) -> TuningResult:
    """What tuning on a device gives: a few timings, and one that failed."""
    configs = SearchSpace.of(workload, TARGET).configs[::40][: count + 1]
    measured = [
        (config, Measurement("ok", us, us, us, 5))
        for us, config in enumerate(configs, int(first_us))
    ]
    measured[-1] = measured[-1][0], Measurement("timeout", error="over 60 s")
    return TuningResult(
        workload=workload, target=TARGET, model="xgb", model_hash="abc", caveat="",
        mode="auto", k=8, ranked=(), measured=tuple(measured),
        torch=Measurement("ok", 47.0, 47.0, 47.0, 5), config=configs[0], why="fastest", source=ON,
        reliable=True, costs=Costs(),
    )  # fmt: skip


def put(cache: WinnerCache, result: TuningResult, **changes: Any) -> Path:
    """Keep it as the tuner does, with changes to its key; the file."""
    workload = result.workload
    winners = Winners(cache, target_of=lambda _: TARGET)
    key = winners.disk_key(winners.key(workload, 0)) | changes
    assert cache.path is not None
    before = set(cache.path.glob("*")) if cache.path.exists() else set()
    cache.put(key, result)
    (path,) = set(cache.path.glob("*")) - before
    return path


def test_what_was_timed_in_use_is_learned_from(data: Dataset, cache: WinnerCache) -> None:
    put(cache, tuned(NEW))
    before = TrainingTable.from_dataset(data)
    table, card = with_use(data, cache)
    assert (card["rows"], card["workloads"], card["dropped"]) == (8, 1, {"timeout": 1})
    unknown = sum(~table.candidates.has_artifact[-8:])
    assert card["without_artifact"] == unknown
    assert len(table) == len(before) + 8
    assert table.workloads == (*before.workloads, NEW)
    rows = np.flatnonzero(table.workload_index == len(before.workloads))
    np.testing.assert_array_equal(table.latency_us[rows], np.arange(50.0, 58.0))
    assert table.ok[rows].all()
    expected = [config for config, _ in tuned(NEW).measured[:8]]
    assert [table.candidates.configs[i] for i in rows] == expected
    assert table.torch_us is not None
    assert table.torch_us[-1] == 47.0
    np.testing.assert_array_equal(table.latency_us[: len(before)], before.latency_us)


def test_binaries_that_the_data_set_knows_are_used(data: Dataset, cache: WinnerCache) -> None:
    known = replace(TRAINING[0], m=TRAINING[0].m * 2)  # the same code
    config = next(iter(data.recorded(TRAINING[0])))
    result = tuned(known)
    put(cache, replace(result, measured=((config, Measurement("ok", 40.0)),)))
    table, card = with_use(data, cache)
    assert card["without_artifact"] == 0
    assert table.candidates.has_artifact[-1]


def test_the_data_set_decides_where_both_know(data: Dataset, cache: WinnerCache) -> None:
    recorded = data.recorded(TRAINING[0])
    measured = tuple((config, Measurement("ok", 77.0)) for config in list(recorded)[:5])
    put(cache, replace(tuned(TRAINING[0]), measured=measured))
    before = TrainingTable.from_dataset(data)
    table, card = with_use(data, cache)
    assert card["rows"] == 0
    assert card["dropped"] == {"in the data set already": 5}
    np.testing.assert_array_equal(table.latency_us, before.latency_us)
    assert table.torch_us is not None
    assert 47.0 not in table.torch_us


def test_binaries_that_the_shipped_model_knows_are_used(data: Dataset, cache: WinnerCache) -> None:
    aligned = Workload.dense(768, 3008, 1536)
    put(cache, tuned(aligned))
    table, card = with_use(data, cache)
    assert card["without_artifact"] < card["rows"] == 8
    keys = [
        artifact_key(specialize(aligned, config), data.target)
        for config in table.candidates.configs[-8:]
    ]
    assert any(table.candidates.has_artifact[-8:])
    assert not set(keys) & set(data.artifacts())


@pytest.mark.parametrize("change", [{"feature_schema": 99}, {"format": 99}, {"name": 5}])
def test_a_shipped_model_of_another_release_costs_its_binaries_alone(
    data: Dataset, cache: WinnerCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
) -> None:  # fmt: skip
    put(cache, tuned(Workload.dense(768, 3008, 1536)))
    shipped = model_directory(data.target)
    assert shipped is not None
    card = json.loads((shipped / "card.json").read_text()) | change
    (tmp_path / "card.json").write_text(json.dumps(card))
    monkeypatch.setattr("costmodel.tuning.from_use.model_directory", lambda _: tmp_path)
    _, told = with_use(data, cache)
    assert told["without_artifact"] == told["rows"] == 8


@pytest.mark.parametrize("m", [1, 77, 4096])
def test_eval_pairs_are_dropped_and_counted(data: Dataset, cache: WinnerCache, m: int) -> None:
    held_out = eval_workloads()[0]
    put(cache, tuned(Workload.dense(m, held_out.n, held_out.k)))
    put(cache, tuned(Workload.dense(held_out.n, m + 3000, held_out.k)))  # its twin
    _, card = with_use(data, cache)
    assert card["rows"] == 0
    assert set(card["dropped"]) == {"held out for evaluation"}


FOREIGN: dict[str, tuple[Callable[[TuningResult], TuningResult], dict[str, Any], str]] = {
    "device": (
        lambda r: replace(r, target=replace(TARGET, device=replace(TARGET.device, sm_count=99))),
        {}, "of another device or toolchain",
    ),
    "toolchain": (
        lambda r: replace(r, target=replace(TARGET, toolchain=Toolchain("3.7.0", "12.8"))), {},
        "of another device or toolchain",
    ),
    "replay": (lambda r: replace(r, source="replay of h100-sxm"), {}, "not timed on a device"),
    "prediction": (lambda r: replace(r, source=PREDICTED), {}, "not timed on a device"),
    "protocol version": (
        lambda r: r, {"protocol": PROTOCOL | {"version": 2}}, "of another timing protocol",
    ),
    "hot cache": (
        lambda r: r, {"protocol": PROTOCOL | {"cache": "hot"}}, "of another timing protocol",
    ),
    "no protocol": (lambda r: r, {"protocol": None}, "of another timing protocol"),
    "odd protocol": (lambda r: r, {"protocol": ["version", 3]}, "of another timing protocol"),
    "odd kernels": (lambda r: r, {"kernels": "all"}, "kernel pointer has changed"),
    "changed kernels": (
        lambda r: r, {"kernels": {"pointer": "0" * 16}}, "kernel pointer has changed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_what_does_not_fit_is_left_out(data: Dataset, cache: WinnerCache, what: str) -> None:
    change, key, reason = FOREIGN[what]
    put(cache, change(tuned(NEW)), **key)
    table, card = with_use(data, cache)
    assert card["rows"] == card["workloads"] == 0
    assert card["dropped"].get(reason)
    assert sum(card["dropped"].values()) == 9
    assert len(table) == len(TrainingTable.from_dataset(data))


@pytest.mark.parametrize("us", [1e-9, 0.01, 1e12])
def test_times_that_cannot_be_are_left_out(data: Dataset, cache: WinnerCache, us: float) -> None:
    result = tuned(NEW)
    odd = Measurement("ok", us)
    measured = ((result.measured[0][0], odd), result.measured[1])
    put(cache, replace(result, measured=measured, torch=odd))
    table, card = with_use(data, cache)
    assert card["rows"] == 1
    assert card["dropped"] == {"a time that cannot be": 1}
    assert table.torch_us is not None
    assert np.isnan(table.torch_us[-1])


def test_what_is_not_legal_is_left_out(data: Dataset, cache: WinnerCache) -> None:
    giant = GemmConfig("pointer", 1024, 1024, 256, num_stages=8)
    put(cache, replace(tuned(NEW), measured=((giant, Measurement("ok", 50.0)),)))
    assert with_use(data, cache)[1]["dropped"] == {"not legal": 1}


def test_a_pair_that_was_timed_twice_counts_once(cache: WinnerCache) -> None:
    put(cache, tuned(NEW))
    put(cache, tuned(NEW, 60.0), mode="exhaustive")
    latency_us, _, dropped = used_rows(cache, TARGET, PROTOCOL)
    assert len(latency_us) == 8
    assert dropped == {"timed twice": 8, "timeout": 2}


def spoil_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def spoil_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SPOILED: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:300]),
    "deep": lambda path: path.write_text("[" * 100_000),
    "pickle": lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    "not a time": lambda path: path.write_text(path.read_text().replace("50.0", "1e999")),
    "an older format": lambda path: path.write_text(
        path.read_text().replace('"schema": 2', '"schema": 1')
    ),
    "an endless device": spoil_link,
    "a pipe": spoil_pipe,
}


@pytest.mark.fault("B13")
@pytest.mark.parametrize("fault", SPOILED)
def test_a_spoiled_file_is_counted_and_no_more(
    data: Dataset, cache: WinnerCache, fault: str
) -> None:
    put(cache, tuned(NEW))
    SPOILED[fault](put(cache, tuned(replace(NEW, m=2000))))
    _, card = with_use(data, cache)
    assert card["rows"] == 8
    assert card["dropped"] == {"timeout": 1, UNREADABLE: 1}


def test_the_model_says_what_it_learned_from_use(
    data: Dataset, cache: WinnerCache, tmp_path: Path
) -> None:
    put(cache, tuned(NEW))
    put(cache, tuned(Workload.dense(64, 4096, 4096)))
    alone = costmodel.train(data)
    assert "from_use" not in alone.card.training
    model = costmodel.train(data, add_cache=cache.path or "")
    used = model.card.training["from_use"]
    assert (used["rows"], used["workloads"]) == (8, 1)
    assert used["dropped"] == {"held out for evaluation": 9, "timeout": 1}
    assert model.card.training["rows"] == alone.card.training["rows"] + 8
    assert model.card.training["data_hash"] != alone.card.training["data_hash"]
    model.save(tmp_path / "model")
    assert costmodel.load(tmp_path / "model").card.training["from_use"] == used


@pytest.mark.slow
def test_the_command_folds_in_the_cache_of_tuning(
    data: Dataset, cache: WinnerCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, tuned(NEW))
    arguments = ["train", str(data.path), "--out", str(tmp_path / "model")]
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(cache.path))
    for more in (["--add-cache"], ["--cache-dir", str(cache.path)]):
        done = CliRunner().invoke(app, [*arguments, *more, "--json"], catch_exceptions=False)
        assert json.loads(done.stdout)["training"]["from_use"]["rows"] == 8
    people = CliRunner().invoke(app, [*arguments, "--add-cache"], catch_exceptions=False)
    assert "from use" in people.stdout
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "none yet"))
    empty = CliRunner().invoke(app, [*arguments, "--add-cache", "--json"], catch_exceptions=False)
    assert json.loads(empty.stdout)["training"]["from_use"]["rows"] == 0


def test_a_cache_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="no cache of winners at"):
        open_cache(tmp_path / "nothing")
