"""One model of several devices that run the same binaries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import InvalidInput
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.models import (
    TrainingTable,
    XgbCostModel,
    XgbParams,
    find_model,
    load,
    train,
    use,
)
from costmodel.models.confidence import folds_by_nk

PARAMS = XgbParams(rounds=40, max_depth=6, learning_rate=0.15)
TOOLS = Toolchain("3.6.0", "12.8")
H200, A100 = (Target.named(name, TOOLS) for name in ("h200-sxm", "a100-sxm"))
Tables = Callable[..., TrainingTable]
Lists = Callable[[int, int], list[Workload]]


@pytest.fixture(scope="module")
def both(make_training_table: Tables, make_workloads: Lists) -> list[TrainingTable]:
    """The same law on two devices, of which the second takes twice as long."""
    ours = make_training_table(make_workloads(25, 1))
    theirs = make_training_table(make_workloads(20, 2), seed=1)
    theirs = replace(theirs, target=H200, latency_us=2 * theirs.latency_us)
    return [replace(t, torch_us=(5.0,) * len(t.workloads)) for t in (ours, theirs)]


@pytest.fixture(scope="module")
def joined(both: list[TrainingTable]) -> TrainingTable:
    return TrainingTable.joined(both)


@pytest.fixture(autouse=True)
def nothing_in_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("costmodel.validation._warned", set())
    yield
    use(None)


def test_each_row_keeps_what_it_was_measured_on(
    both: list[TrainingTable], joined: TrainingTable
) -> None:
    assert [t.device.name for t in joined.learned_on()] == ["h100-sxm", "h200-sxm"]
    assert joined.target == both[0].target
    assert len(joined) == len(both[0]) + len(both[1])
    for name in ("latency_us", "roofline_us", "best_us", "ok"):
        parts = [getattr(t, name) for t in (joined, *both)]
        whole, *each = (part() if callable(part) else part for part in parts)
        np.testing.assert_array_equal(whole, np.concatenate(each))
    for ptx in (True, False):
        each = [t.design_matrix(ptx=ptx) for t in both]
        np.testing.assert_array_equal(joined.design_matrix(ptx=ptx), np.concatenate(each))
    part = joined.of_workloads([30, 2])
    assert [target.device.name for target in part.target_of_each()] == ["h200-sxm", "h100-sxm"]
    assert joined.content_hash() not in {t.content_hash() for t in both}


@pytest.mark.parametrize("broken", [0, 1])
def test_a_device_without_a_working_row_was_not_learned_of(
    both: list[TrainingTable], tmp_path: Path, broken: int
) -> None:
    parts = list(both)
    status = np.full(len(parts[broken]), "timeout", dtype=object)
    parts[broken] = replace(parts[broken], status=status)
    table, rest = TrainingTable.joined(parts), both[1 - broken].target
    assert [t.device.name for t in table.learned_on()] == [rest.device.name]
    model = train(table, params=replace(PARAMS, rounds=2), calibrated=False)
    assert (model.card.target, model.card.devices) == (rest, (rest.device.name,))
    loaded = load(model.save(tmp_path / "model"))
    assert (loaded.card.target, loaded.card.devices) == (rest, (rest.device.name,))


def test_a_shape_of_both_is_in_one_fold(both: list[TrainingTable]) -> None:
    same = TrainingTable.joined([both[0], replace(both[0], target=H200)])
    for fold in folds_by_nk(same, 4):
        shapes = {same.workloads[w].nk for w in fold}
        rest = np.setdiff1d(np.arange(len(same.workloads)), fold)
        assert shapes.isdisjoint({same.workloads[w].nk for w in rest})


def test_it_predicts_for_each_of_them(
    both: list[TrainingTable], joined: TrainingTable, speed_kept: Callable[..., tuple[float, float]]
) -> None:
    model = XgbCostModel(PARAMS).fit(joined)
    for table in both:
        assert speed_kept(model, table)[1] > 0.98
        ratios = []
        for w, workload in enumerate(table.workloads):
            rows = np.flatnonzero(table.ok & (table.workload_index == w))
            cost = model.predict(workload, table.candidates.take(rows), table.target)
            ratios.append(np.median(cost / table.latency_us[rows]))
        assert 0.8 < np.median(ratios) < 1.25, "though one is twice as slow as the other"


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        (A100, "a100-sxm does not run what was compiled for h100-sxm"),
        (Target.named("h200-sxm", Toolchain("3.7.0", "12.8")), "expected one toolchain"),
    ],
    ids=["architecture", "toolchain"],
)
def test_others_are_refused(both: list[TrainingTable], target: Target, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        TrainingTable.joined([both[0], replace(both[1], target=target)])


@pytest.mark.fault("B03")
def test_only_devices_that_it_has_not_seen_are_mentioned(
    both: list[TrainingTable], joined: TrainingTable, tmp_path: Path
) -> None:
    mixed = load(train(joined, params=PARAMS).save(tmp_path / "mixed"))
    alone = load(train(both[0], params=PARAMS).save(tmp_path / "alone"))
    assert mixed.card.devices == ("h100-sxm", "h200-sxm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(mixed)
        assert find_model(H200) == (mixed, "")
        assert find_model(both[0].target) == (mixed, "")
        use(alone)
        model, told = find_model(H200)
    assert model is alone
    assert "was trained on h100-sxm, this is h200-sxm" in told
    assert "not on a100-sxm" in mixed.why_not_usable(None, A100)
