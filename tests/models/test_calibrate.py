"""Calibration: what a law is fitted to, and that it says of new workloads what then happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import CorruptFile
from costmodel.evaluation.metrics import speed_kept
from costmodel.evaluation.uncertainty import LIMIT, Signals
from costmodel.gemm.workload import Workload
from costmodel.models import TrainingTable, XgbCostModel, XgbParams, load, train
from costmodel.models.calibrate import Outcome, calibrate, fit_law, kept_curve, outcomes

MakeTable = Callable[..., TrainingTable]
MakeWorkloads = Callable[[int, int], list[Workload]]


@pytest.fixture(scope="module")
def calibrated(table: TrainingTable, fast_params: XgbParams) -> XgbCostModel:
    return train(table, params=replace(fast_params, rounds=40), nthread=1)


def made_up(count: int, seed: int = 0) -> list[Outcome]:
    """Outcomes of a law that is known: a tenth of the ratio is lost, four timings halve that."""
    rng = np.random.default_rng(seed)
    found = []
    for apart, spread in zip(
        np.exp(rng.normal(-3, 0.5, count)), np.exp(rng.normal(-1, 0.5, count)), strict=True
    ):
        loss = 0.1 * (apart + 0.003) / (spread + 0.01) / np.arange(1, LIMIT + 1) ** 0.5
        found.append(
            Outcome(
                Workload.dense(64, 64, 64), Signals(apart, spread), 1 - loss * rng.gamma(4, 1 / 4)
            )
        )
    return found


def test_a_law_is_found_again() -> None:
    law = fit_law(made_up(2000))
    assert law is not None
    assert 0.7 < law.exponent < 1.05, "the law is cautious: less rather than more"
    assert law.slope == pytest.approx(-0.5, abs=0.05)
    assert law.loss(Signals(0.05, 0.4)) == pytest.approx(0.1 * 0.053 / 0.41, rel=0.2)


def test_without_a_second_head_disagreement_is_no_part_of_it() -> None:
    lone = [replace(o, signals=replace(o.signals, disagreement=np.nan)) for o in made_up(200)]
    law = fit_law(lone)
    assert law is not None
    assert law.exponent == 0
    assert np.isfinite(law.loss(lone[0].signals))


def test_rankings_that_lost_nothing_are_no_error() -> None:
    law = fit_law([replace(o, kept=np.ones(LIMIT)) for o in made_up(50)])
    assert law is not None
    assert law.loss(Signals(0.05, 0.4)) < 1e-4


def test_too_few_workloads_tell_nothing(table: TrainingTable, fast_params: XgbParams) -> None:
    assert fit_law(made_up(20)) is None
    assert calibrate(table.of_workloads(range(10)), fast_params) is None
    model = train(table.of_workloads(range(3)), params=replace(fast_params, rounds=3))
    assert model.uncertainty_ is None


@pytest.mark.parametrize("working_pairs", [1, 2])
def test_workloads_without_a_working_row_tell_nothing(
    make_training_table: Callable[..., TrainingTable], working_pairs: int
) -> None:
    """The model itself can be trained: what it takes to calibrate it is another matter."""
    pairs = [(512 * i, 512) for i in range(2, 10)]
    chosen = [Workload.dense(64 + 16 * j, n, k) for j in range(6) for n, k in pairs]
    table = make_training_table(chosen, rows=8, failures=False)
    works = np.array([pairs.index(w.nk) < working_pairs for w in chosen])[table.workload_index]
    status = np.where(works, "ok", "timeout").astype(object)
    failed = replace(table, status=status, latency_us=np.where(works, table.latency_us, np.nan))
    tiny = XgbParams(rounds=2)
    assert calibrate(failed, tiny) is None
    assert train(failed, params=tiny).uncertainty_ is None


def test_one_part_with_all_the_working_rows_tells_nothing(
    make_training_table: Callable[..., TrainingTable],
) -> None:
    chosen = [Workload.dense(16 * j, 1024, 512) for j in range(1, 46)]
    others = [Workload.dense(64, 512 * i, 768) for i in range(2, 6)]
    table = make_training_table([*chosen, *others], rows=8, failures=False)
    works = table.workload_index < len(chosen)
    status = np.where(works, "ok", "timeout").astype(object)
    assert calibrate(replace(table, status=status), XgbParams(rounds=2)) is None


def test_the_curve_is_what_the_metric_says_at_each_k() -> None:
    rng = np.random.default_rng(1)
    latency = rng.uniform(1, 2, 50)
    latency[[3, 7]] = np.nan
    cost = rng.permutation(50).astype(float)
    curve = kept_curve(latency, np.arange(50), np.argsort(cost))
    assert curve == pytest.approx([speed_kept(latency, cost, k) for k in range(1, LIMIT + 1)])
    short = kept_curve(np.array([2.0, 1.0]), np.array([0, 1]), np.array([0, 1]))
    assert short.tolist() == [0.5, *[1.0] * (LIMIT - 1)]
    equal = kept_curve(np.array([2.0, 1.0]), np.array([0, 0]), np.array([0]))
    assert equal[0] == 1.0, "what does the same has the least of its latencies"


def test_what_is_expected_of_new_workloads_is_what_happens(
    fast_params: XgbParams, make_training_table: MakeTable, make_workloads: MakeWorkloads
) -> None:
    params = replace(fast_params, rounds=40)
    model = train(make_training_table(make_workloads(100, 7)), params=params, nthread=1)
    known = model.uncertainty_
    assert known is not None
    new = make_training_table(make_workloads(60, 123))
    for ptx in (True, False):
        found = list(outcomes(model, new, ptx=ptx))
        assert len(found) == 60
        for k in (1, 4, 16):
            sure = [known.confidence(o.signals, "") for o in found]
            expected = np.mean([1 - c.kept_at(k) for c in sure if c is not None])
            lost = np.mean([1 - o.kept[k - 1] for o in found])
            assert 0.3 < (expected + 0.002) / (lost + 0.002) < 3


def test_workloads_of_a_few_rows_and_without_artifacts_are_left_out(
    trained: XgbCostModel, make_training_table: MakeTable, make_workloads: MakeWorkloads
) -> None:
    few = make_training_table(make_workloads(3, 5), rows=20)
    assert list(outcomes(trained, few, ptx=False)) == []
    bare = make_training_table(make_workloads(3, 5), artifacts=False)
    assert list(outcomes(trained, bare, ptx=True)) == []
    assert len(list(outcomes(trained, bare, ptx=False))) == 3


def test_calibrating_is_deterministic(
    calibrated: XgbCostModel, table: TrainingTable, fast_params: XgbParams
) -> None:
    again = calibrate(table, replace(fast_params, rounds=40), nthread=1)
    assert again == calibrated.uncertainty_


def test_it_is_saved_with_the_model_and_older_models_have_none(
    calibrated: XgbCostModel, trained: XgbCostModel, tmp_path: Path
) -> None:
    assert load(calibrated.save(tmp_path / "new")).uncertainty_ == calibrated.uncertainty_
    assert trained.uncertainty_ is None
    assert load(trained.save(tmp_path / "old")).uncertainty_ is None
    card = tmp_path / "new" / "card.json"
    card.write_text(card.read_text().replace('"slope"', '"slop"'))
    with pytest.raises(CorruptFile, match="slope"):
        load(tmp_path / "new")


def test_other_trees_need_another_calibration(
    calibrated: XgbCostModel, table: TrainingTable, tmp_path: Path
) -> None:
    model = load(calibrated.save(tmp_path / "model"))
    model.fit(table.of_workloads(range(3)))
    assert model.uncertainty_ is None


def test_calibrating_trains_on_each_workload_but_one_time_less_than_there_are_folds(
    table: TrainingTable, fast_params: XgbParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[int] = []
    fit = XgbCostModel.fit

    def counts(self: XgbCostModel, part: TrainingTable) -> XgbCostModel:
        fitted.append(len(part))
        return fit(self, part)

    monkeypatch.setattr(XgbCostModel, "fit", counts)
    params = replace(fast_params, rounds=3)
    assert train(table, params=params, calibrated=False).uncertainty_ is None
    assert fitted == [len(table)]
    assert train(table, params=params).uncertainty_ is not None
    assert sum(fitted[1:]) == len(table) + 3 * len(table)
