"""The benches of transfer and of objectives, on a made-up machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from costmodel.gemm.workload import Workload
from costmodel.models import TrainingTable

MakeTable = Callable[..., TrainingTable]
MakeWorkloads = Callable[[int, int], list[Workload]]


@pytest.fixture(scope="module")
def mixed(make_training_table: MakeTable, make_workloads: MakeWorkloads) -> TrainingTable:
    """Every third workload is of bfloat16; every (n, k) is there twice."""
    sizes = make_workloads(15, 5)
    sizes += [replace(w, m=w.m + 64) for w in sizes]
    bfloat16 = Workload.dense(8, 8, 8, "bfloat16").code
    return make_training_table(
        [replace(w, code=bfloat16) if i % 3 == 0 else w for i, w in enumerate(sizes)], rows=25
    )


@pytest.fixture
def small(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scripts, with trees that take no time."""
    params = replace(script("bench_ablation").PARAMS, rounds=8)
    for name in ("bench_ablation", "bench_transfer", "bench_objectives"):
        monkeypatch.setattr(script(name), "PARAMS", params)
    return script


# --- transfer -----------------------------------------------------------------------------------


def test_transfer_judges_each_new_workload_once_and_shares_no_shape(
    small: Any, mixed: TrainingTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = small("bench_transfer")
    seen: list[set[int]] = []
    judged: list[set[int]] = []
    learn, judge = bench.learn, bench.judge

    def learns(parts: Any, nthread: int, trees: Any) -> Any:
        seen.append({int(s.table.workload_index[r]) for s, rows in parts for r in rows})
        return learn(parts, nthread, trees)

    def judges(booster: Any, study: Any, workloads: Any) -> Any:
        judged.append(set(workloads.tolist()))
        return judge(booster, study, workloads)

    monkeypatch.setattr(bench, "learn", learns)
    monkeypatch.setattr(bench, "judge", judges)
    study = bench.Rows(mixed, 1)
    pair = next(p for p in bench.pairs(study, None) if p.name == "float16 → bfloat16")
    rows = list(bench.validate(pair, 1))
    shapes = [w.nk for w in mixed.workloads]
    for learned, asked in zip(seen, judged, strict=True):
        assert {shapes[w] for w in learned}.isdisjoint({shapes[w] for w in asked})
    assert [row["new_workloads"] for row in rows] == ["0", "2", bench.ALL, bench.ALONE]
    assert all(row["workloads"] == 10 for row in rows)
    assert [row["new_rows"] > 0 for row in rows] == [False, True, True, True]
    assert all(30 < row["top1_pct"] <= row["top8_pct"] <= 100 for row in rows)
    assert all(mixed.workloads[w].code.dtype == "bfloat16" for asked in judged for w in asked)


def test_transfer_to_another_device_reads_its_own_features(
    small: Any, mixed: TrainingTable
) -> None:
    bench = small("bench_transfer")
    slower = replace(mixed.target.device, name="h200-sxm", bandwidth_gbs=4800.0)
    other = replace(mixed, target=replace(mixed.target, device=slower))
    studies = bench.Rows(mixed, 1), bench.Rows(other, 1)
    pair = list(bench.pairs(*studies))[-1]
    assert pair.name == "h100-sxm → h200-sxm"
    assert not np.array_equal(studies[0].matrix, studies[1].matrix)
    rows = list(bench.validate(pair, 1))
    assert rows[0]["workloads"] == len(mixed.workloads)
    (shipped,) = bench.validate(pair, 1, trees=replace(bench.PARAMS, rounds=20))
    assert (shipped["group"], shipped["new_workloads"]) == ("shipped", "0")
    summary = bench.summarize([*rows, shipped])
    assert summary["top1_geomean_pct"] == {pair.name: shipped["top1_pct"]}
    assert summary["top8_geomean_pct"] == {pair.name: shipped["top8_pct"]}


def test_the_held_out_list_of_another_device_is_judged_whole(
    small: Any, mixed: TrainingTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = small("bench_transfer")
    study = bench.Rows(mixed, 1)
    held_out = bench.Rows(mixed.of_workloads([0, 3, 4]), 1)
    shapes = {w.nk for w in held_out.table.workloads}
    seen: list[set[tuple[int, int]]] = []
    learn = bench.learn

    def learns(parts: Any, nthread: int, trees: Any) -> Any:
        (old, rows), _ = parts if len(parts) == 2 else (parts[0], None)
        seen.append({old.table.workloads[old.table.workload_index[r]].nk for r in rows})
        return learn(parts, nthread, trees)

    monkeypatch.setattr(bench, "learn", learns)
    pair = list(bench.pairs(study, study, held_out))[-1]
    rows = list(bench.validate(pair, 1))
    assert all(row["workloads"] == 3 for row in rows)
    assert seen[0].isdisjoint(shapes), "of the old device no held-out shape is learned"


# --- objectives ---------------------------------------------------------------------------------


def test_each_objective_and_blend_is_judged_on_every_workload(
    small: Any, mixed: TrainingTable
) -> None:
    bench = small("bench_objectives")
    study = small("bench_transfer").Rows(mixed, 1)
    found = bench.validate(study, 2, 0)
    assert list(found) == list(bench.BLENDS)
    assert all(scores.shape == (len(mixed.workloads), 3) for scores in found.values())
    for name in bench.OBJECTIVES:
        assert found[name][:, 2].mean() > 0.3, "each learns an order"


def test_a_blend_of_a_cost_with_itself_ranks_as_the_cost(script: Any) -> None:
    bench = script("bench_objectives")
    one, other = np.array([3.0, 1.0, 2.0]), np.array([30.0, 50.0, 40.0])
    assert np.argsort(bench.blended({"a": one}, {"a": 1.0})).tolist() == [1, 2, 0]
    both = {"a": one, "b": other}
    assert np.allclose(bench.blended(both, {"a": 1.0, "b": 0.0}), one / one.std())
    assert np.argsort(bench.blended(both, {"a": 0.1, "b": 1.0})).tolist() == [0, 2, 1]
    assert np.isfinite(bench.blended({"a": np.ones(3)}, {"a": 1.0})).all()


def test_the_classifier_learns_from_what_failed(
    small: Any, mixed: TrainingTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = small("bench_objectives")
    study = small("bench_transfer").Rows(mixed, 1)
    labels: dict[str, np.ndarray[Any, Any]] = {}

    def trains(study: Any, rows: Any, seed: int, options: Any, **data: Any) -> None:
        labels[options.get("objective", "")] = data["label"]

    def grows(lesson: Any, params: Any, *, nthread: int) -> None:
        labels[""] = lesson.label

    monkeypatch.setattr(bench, "_train", trains)
    monkeypatch.setattr(bench, "train_booster", grows)
    seen = np.ones(len(mixed), dtype=bool)
    for learn in bench.OBJECTIVES.values():
        learn(study, seen, 0)
    failed = int((~mixed.ok & study.fits).sum())  # what cannot run is nobody's pick
    assert failed > 0
    assert len(labels["binary:logistic"]) == len(labels[""]) + failed
    assert set(labels["binary:logistic"]) == {0.0, 1.0}
    assert labels["rank:pairwise"].max() == 1.0
