"""What a model expects of ``torch.matmul``, and what the tuner makes of it untimed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import CorruptFile
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models import TrainingTable, XgbCostModel, XgbParams, load
from costmodel.models.torch_time import predict_torch_us, train_torch_time
from costmodel.tuning.tuner import tune

TINY = XgbParams(rounds=3, max_depth=3)
Tables = Callable[..., TrainingTable]
Lists = Callable[[int, int], list[Workload]]


def law_us(workload: Workload, target: Target) -> float:
    """Whole waves of 128 x 128 tiles at 70 % of the data sheet, and a launch."""
    tiles = -(-workload.m // 128) * -(-workload.n // 128)
    waves = -(-tiles // target.device.sm_count)
    wave_us = 128 * 128 * workload.k * 2 * target.device.sm_count / target.device.tflops / 1e6
    return 3.0 + max(waves * wave_us / 0.7, workload.bytes() / target.device.bandwidth_gbs / 1e3)


@pytest.fixture
def with_torch(
    target: Target, make_training_table: Tables, make_workloads: Lists
) -> Callable[[float], TrainingTable]:
    """A table whose torch timings are the law times a factor."""

    def make(factor: float) -> TrainingTable:
        table = make_training_table(make_workloads(40, 1), rows=20)
        torch_us = tuple(factor * law_us(w, target) for w in table.workloads)
        return replace(table, torch_us=torch_us)

    return make


def test_it_learns_a_law_for_shapes_it_has_not_seen(target: Target, make_workloads: Lists) -> None:
    known, new = make_workloads(200, 3), make_workloads(50, 4)
    learned = train_torch_time((w, target, law_us(w, target)) for w in known)
    assert learned is not None
    errors = [abs(predict_torch_us(learned, w, target) / law_us(w, target) - 1) for w in new]
    assert np.median(errors) < 0.1


def test_too_little_teaches_nothing(target: Target, make_workloads: Lists) -> None:
    times = [5.0] * 10 + [float("nan")] * 20
    few = zip(make_workloads(30, 5), [target] * 30, times, strict=True)
    assert train_torch_time(few) is None


def test_it_is_saved_with_the_model(
    target: Target, tmp_path: Path, with_torch: Callable[[float], TrainingTable]
) -> None:
    model = XgbCostModel(TINY).fit(with_torch(1.0))
    again = load(model.save(tmp_path))
    shape = Workload.dense(300, 1000, 2000)
    assert again.predict_torch(shape, target) == model.predict_torch(shape, target) > 0
    (file,) = tmp_path.glob("torch-*.ubj")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CorruptFile, match=r"torch-.*\.ubj: not that of card"):
        load(tmp_path)


def test_a_model_without_it_leaves_none_behind(
    tmp_path: Path, target: Target, with_torch: Callable[[float], TrainingTable]
) -> None:
    table = with_torch(1.0)
    XgbCostModel(TINY).fit(table).save(tmp_path)
    XgbCostModel(TINY).fit(replace(table, torch_us=())).save(tmp_path)
    assert "torch.ubj" not in json.loads((tmp_path / "card.json").read_text())["files"]
    assert isnan(load(tmp_path).predict_torch(Workload.dense(8, 8, 8), target))


@pytest.mark.parametrize(("factor", "chooses_torch"), [(0.01, True), (100.0, False)])
def test_untimed_torch_is_chosen_only_where_it_is_expected_to_be_faster(
    target: Target,
    with_torch: Callable[[float], TrainingTable],
    factor: float,
    chooses_torch: bool,
) -> None:
    model = XgbCostModel(TINY).fit(with_torch(factor))
    shape = Workload.dense(256, 512, 512)
    result = tune(shape, runner=None, target=target, model=model)
    assert (result.config is None) == chooses_torch
    assert ("torch is predicted" in result.why) == chooses_torch
    alone = tune(shape, runner=None, target=target, model=model, include_torch=False)
    assert alone.config is not None


def test_training_again_keeps_nothing_of_the_data_before(
    target: Target, with_torch: Callable[[float], TrainingTable]
) -> None:
    table, model = with_torch(1.0), XgbCostModel(TINY)
    assert model.fit(table).predict_torch(table.workloads[0], target) > 0
    few = table.of_workloads(range(5))
    for next_one in (few, replace(table, torch_us=())):
        model.fit(table).fit(next_one)
        assert isnan(model.predict_torch(table.workloads[0], target))


def test_what_is_learned_of_torch_is_in_the_hash_of_the_data(
    with_torch: Callable[[float], TrainingTable],
) -> None:
    tables = [with_torch(1.0), with_torch(2.0), replace(with_torch(1.0), torch_us=())]
    assert len({table.content_hash() for table in tables}) == 3
    assert with_torch(1.0).content_hash() == tables[0].content_hash()
