"""Training: learns what there is to learn, drops failures by name, repeats exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from costmodel.data.candidates import Candidates
from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models import (
    StaticRank,
    TrainingTable,
    XgbCostModel,
    XgbParams,
    train,
)
from costmodel.models.confidence import folds_by_nk

MakeTable = Callable[..., TrainingTable]
SpeedKept = Callable[..., tuple[float, float]]
_CONFIG = GemmConfig("pointer", 64, 64, 32)


@pytest.fixture(scope="module")
def held_out(make_training_table: MakeTable, make_workloads: Callable[..., list[Workload]]):
    return make_training_table(make_workloads(25, 99), rows=150, failures=False)


def test_the_law_of_a_made_up_machine_is_recovered_on_unseen_workloads(
    trained: XgbCostModel, table: TrainingTable, held_out: TrainingTable, speed_kept: SpeedKept
) -> None:
    top1, top8 = speed_kept(trained, held_out)
    static, _ = speed_kept(StaticRank().fit(table), held_out)
    assert top1 > 0.93
    assert top8 > 0.985
    assert top1 > static + 0.1


def test_predictions_are_latencies_in_us(trained: XgbCostModel, held_out: TrainingTable) -> None:
    ratios = []
    for w, workload in enumerate(held_out.workloads):
        rows = np.flatnonzero(held_out.ok & (held_out.workload_index == w))
        cost = trained.predict(workload, held_out.candidates.take(rows), held_out.target)
        ratios.append(cost / held_out.latency_us[rows])
    error = np.abs(np.log(np.concatenate(ratios)))
    assert np.median(error) < 0.15


def test_the_configuration_head_works_alone(
    table: TrainingTable, make_training_table: MakeTable, held_out: TrainingTable,
    fast_params: XgbParams, speed_kept: SpeedKept,
) -> None:  # fmt: skip
    bare = make_training_table(table.workloads, artifacts=False)
    model = XgbCostModel(fast_params).fit(bare)
    unknown = replace(held_out, candidates=Candidates.of(held_out.candidates.configs))
    assert speed_kept(model, unknown)[0] > 0.9


@pytest.mark.fault("B66")
def test_failures_are_dropped_by_name_and_counted(
    trained: XgbCostModel, table: TrainingTable
) -> None:
    failed = int((table.status == "timeout").sum())
    assert failed > 0
    assert trained.card.training["dropped"] == {"timeout": failed}
    assert trained.card.training["rows"] == len(table) - failed


def test_a_failure_with_a_latency_is_no_lesson(
    table: TrainingTable, fast_params: XgbParams
) -> None:
    params = replace(fast_params, rounds=5)
    silly = replace(table, latency_us=np.where(table.ok, table.latency_us, 1e10))
    assert train(silly, params=params).hash == train(table, params=params).hash


def test_nothing_ok_is_refused(table: TrainingTable) -> None:
    status = np.full(len(table), "crashed", dtype=object)
    with pytest.raises(InvalidInput, match="crashed"):
        train(replace(table, status=status))


def test_weights_fall_with_the_distance_from_the_best(table: TrainingTable) -> None:
    model = XgbCostModel()
    weight = model.row_weights(table)
    best = table.latency_us == table.best_us()[table.workload_index]
    assert weight[best] == pytest.approx(1.0)
    rows = np.flatnonzero(table.ok & (table.workload_index == 0))
    by_latency = rows[np.argsort(table.latency_us[rows])]
    assert (np.diff(weight[by_latency]) <= 0).all()
    assert np.nanmin(weight) >= model.params.floor


def test_no_pair_of_n_and_k_lies_in_two_folds(target: Target) -> None:
    workloads = tuple(
        Workload.dense(m, n, k) for m in (16, 64, 256) for n in (64, 128) for k in (64, 128, 256)
    )
    rows = np.arange(len(workloads))
    table = TrainingTable(
        workloads=workloads, workload_index=rows, latency_us=np.ones(len(rows)), target=target,
        status=np.full(len(rows), "ok", dtype=object),
        candidates=Candidates.of([_CONFIG] * len(rows)),
    )  # fmt: skip
    folds = list(folds_by_nk(table, 3))
    assert sorted(np.concatenate(folds)) == list(range(len(workloads)))
    pairs = [{workloads[w].nk for w in fold} for fold in folds]
    assert sum(map(len, pairs)) == len(set.union(*pairs))
    with pytest.raises(InvalidInput, match="7 folds of 6"):
        list(folds_by_nk(table, 7))
