"""Confidence: what rankings of unseen workloads keep, and which products are new to a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel.errors import CorruptFile
from costmodel.gemm.workload import Workload
from costmodel.models import TrainingTable, XgbCostModel, XgbParams, load, train
from costmodel.models.confidence import (
    KEPT_AT,
    Confidence,
    Coverage,
    calibrate,
    kept_at,
    kind_of,
)

MakeTable = Callable[..., TrainingTable]
MakeWorkloads = Callable[[int, int], list[Workload]]

SEEN = Coverage.of([Workload.dense(16, 256, 128), Workload.dense(4096, 8192, 1024)])
KNOWN = Confidence({"1": 0.95, "8": 0.99}, {"1": 0.9}, SEEN)
INSIDE = Workload.dense(512, 512, 512)
TINY = XgbParams(rounds=5, max_depth=3)


def calibrated_by(table: TrainingTable, params: XgbParams = TINY) -> Confidence | None:
    """As training measures it."""
    return calibrate(table, XgbCostModel(params).fit, seed=params.seed)


# --- Coverage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (INSIDE, ""),
        (Workload.dense(16, 8192, 1024), ""),
        (Workload.dense(8, 512, 512), "m = 8 is beyond what the model has seen (16 to 4096)"),
        (Workload.dense(512, 200_000, 512), "n = 200000 is beyond"),
        (Workload.dense(512, 512, 2048), "k = 2048 is beyond"),
        (Workload.dense(512, 512, 512, b_layout="col"), "B col-major aligned"),
        (Workload.dense(512, 511, 512), "B row-major unaligned"),
        (Workload.dense(512, 512, 512, out_dtype="float32"), "wider than the operands"),
        (Workload.dense(512, 512, 512, "bfloat16"), ""),
    ],
    ids=str,
)
def test_what_lies_outside_the_training_is_said(workload: Workload, words: str) -> None:
    found = SEEN.why_outside(workload)
    assert words in found
    assert bool(words) == bool(found)


def test_kinds_are_counted() -> None:
    many = Coverage.of([INSIDE, INSIDE, Workload.dense(512, 511, 512)])
    assert many.kinds[kind_of(INSIDE)] == 2
    assert len(many.kinds) == 2


# --- The table ----------------------------------------------------------------------------------


def test_a_number_between_two_entries_counts_as_the_smaller_one() -> None:
    table = {"1": 0.9, "8": 0.99}
    assert [kept_at(table, k) for k in (1, 7, 8, 100)] == [0.9, 0.9, 0.99, 0.99]
    assert kept_at({}, 8) is None


@pytest.mark.parametrize(
    "change",
    [{"ptx": [1.0]}, {"config": {"1": "__import__('os')"}}, {"coverage": {}},
     {"coverage": {**asdict(SEEN), "least": [1, 2]}}],
    ids=str,
)  # fmt: skip
def test_what_is_not_its_json_is_refused(
    trained: XgbCostModel, tmp_path: Path, change: dict[str, Any]
) -> None:
    card = trained.save(tmp_path / "model") / "card.json"
    found = json.loads(card.read_text())
    card.write_text(json.dumps(found | {"confidence": asdict(KNOWN)}))
    assert load(tmp_path / "model").card.confidence == KNOWN
    card.write_text(json.dumps(found | {"confidence": asdict(KNOWN) | change}))
    with pytest.raises(CorruptFile, match="confidence"):
        load(tmp_path / "model")


# --- Measuring it -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibrated(table: TrainingTable, fast_params: XgbParams) -> XgbCostModel:
    return train(table, params=replace(fast_params, rounds=40), nthread=1)


def test_each_head_keeps_more_the_more_are_timed(calibrated: XgbCostModel) -> None:
    for ptx in (True, False):
        kept = calibrated.expected_kept(ptx=ptx)
        assert tuple(kept) == tuple(map(str, KEPT_AT))
        assert sorted(kept.values()) == list(kept.values())
        assert 0.8 < kept["1"] < kept["32"] <= 1


def test_too_few_workloads_tell_nothing(table: TrainingTable, fast_params: XgbParams) -> None:
    assert calibrated_by(table.of_workloads(range(10))) is None
    model = train(table.of_workloads(range(3)), params=replace(fast_params, rounds=3))
    assert model.card.confidence is None
    assert model.expected_kept(ptx=True) == {}
    assert model.out_of_coverage(INSIDE) == ""


@pytest.mark.parametrize("working", ["a few workloads", "one pair"])
def test_too_few_workloads_with_a_working_row_tell_nothing(
    make_training_table: MakeTable, working: str
) -> None:
    """The model itself can be trained: what it takes to calibrate it is another matter."""
    pair = [Workload.dense(16 * j, 1024, 512) for j in range(1, 46)]
    others = [Workload.dense(64, 512 * i, 768) for i in range(2, 6)]
    table = make_training_table([*pair, *others], rows=8, failures=False)
    works = table.workload_index < (len(pair) if working == "one pair" else 20)
    failed = replace(table, status=np.where(works, "ok", "timeout").astype(object))
    assert calibrated_by(failed) is None
    assert train(failed, params=TINY).card.confidence is None


@pytest.mark.slow
def test_what_is_expected_of_new_workloads_is_what_happens(
    fast_params: XgbParams, make_training_table: MakeTable, make_workloads: MakeWorkloads
) -> None:
    params = replace(fast_params, rounds=40)
    model = train(make_training_table(make_workloads(100, 7)), params=params, nthread=1)
    again = calibrated_by(make_training_table(make_workloads(60, 123)), params)
    assert again is not None
    for ptx, other in ((True, again.ptx), (False, again.config)):
        for k, kept in model.expected_kept(ptx=ptx).items():
            assert 0.3 < (1 - kept + 0.002) / (1 - other[k] + 0.002) < 3


def test_workloads_of_a_few_rows_and_without_artifacts_are_left_out(
    make_training_table: MakeTable, make_workloads: MakeWorkloads, fast_params: XgbParams
) -> None:
    few = calibrated_by(make_training_table(make_workloads(40, 5), rows=20))
    assert few is not None
    assert (few.ptx, few.config) == ({}, {}), "among the first of a ranking nothing is lost"
    bare = calibrated_by(make_training_table(make_workloads(45, 5), artifacts=False))
    assert bare is not None
    assert bare.ptx == {}
    assert tuple(bare.config) == tuple(map(str, KEPT_AT))


def test_it_is_saved_with_the_model_and_other_trees_have_none(
    calibrated: XgbCostModel, table: TrainingTable, tmp_path: Path
) -> None:
    model = load(calibrated.save(tmp_path))
    assert model.card.confidence == calibrated.card.confidence
    assert model.fit(table.of_workloads(range(3))).card.confidence is None
    assert load(model.save(tmp_path)).card.confidence is None
    assert train(table, params=TINY, calibrated=False).card.confidence is None
