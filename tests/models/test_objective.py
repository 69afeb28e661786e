"""What the trees learn: the derivatives are those of the loss, and the order near the best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from costmodel.models import TrainingTable, XgbCostModel, XgbParams
from costmodel.models.trees import LabelledRows, NearBest, train_booster

SCALE = 7.0


def loss(near: NearBest, predicted: NDArray[np.float64]) -> float:
    """Written out, pair by pair."""
    total = 0.0
    for rows, weights in zip(near.rows, near.weight.astype(np.float64), strict=True):
        for i, j in zip(*np.nonzero(weights), strict=True):
            wrong_by = predicted[rows[i]] - predicted[rows[j]]
            total += weights[i, j] * np.logaddexp(0, SCALE * wrong_by)
    return total


@st.composite
def lessons(draw: st.DrawFn) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Log latencies of a few workloads, rows of which lie in any order."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    workload = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return rng.normal(workload, 0.3), workload.astype(np.intp)


@given(lessons(), st.integers(0, 2**32 - 1))
def test_the_gradient_is_that_of_the_loss(
    lesson: tuple[NDArray[np.float64], NDArray[np.intp]], seed: int
) -> None:
    log_latency, workload = lesson
    near = NearBest(log_latency, workload)
    predicted = log_latency + np.random.default_rng(seed).normal(0, 0.1, len(log_latency))
    gradient, curvature = near.gradients(predicted.astype(np.float32), SCALE)
    step = 1e-3
    for row in range(min(len(log_latency), 5)):
        up, down = predicted.copy(), predicted.copy()
        up[row] += step
        down[row] -= step
        there = [loss(near, p) for p in (down, predicted, up)]
        assert gradient[row] == pytest.approx((there[2] - there[0]) / 2 / step, abs=2e-2)
        second = (there[2] - 2 * there[1] + there[0]) / step**2
        assert curvature[row] == pytest.approx(second, rel=0.02, abs=0.05)


@given(lessons())
def test_pairs_are_of_one_workload_the_faster_one_first(
    lesson: tuple[NDArray[np.float64], NDArray[np.intp]],
) -> None:
    log_latency, workload = lesson
    near = NearBest(log_latency, workload)
    for rows, weights in zip(near.rows, near.weight, strict=True):
        for i, j in zip(*np.nonzero(weights), strict=True):
            assert workload[rows[i]] == workload[rows[j]]
            assert log_latency[rows[i]] < log_latency[rows[j]]
        best = log_latency[workload == workload[rows[0]]].min()
        assert log_latency[rows[weights.any(axis=0)]].max(initial=best) < best + np.log(1.6)


def test_a_right_order_is_left_alone_and_a_wrong_one_is_not() -> None:
    log_latency = np.log([1.0, 1.1, 1.3, 5.0])
    near = NearBest(log_latency, np.zeros(4, dtype=np.intp))
    right, _ = near.gradients((10 * log_latency).astype(np.float32), 30.0)
    wrong, _ = near.gradients((-10 * log_latency).astype(np.float32), 30.0)
    assert np.abs(right).max() < 1e-6
    assert wrong[0] > 1, "the fastest is predicted as too slow"
    assert wrong[2] < 0
    assert wrong[3] == 0, "far from the best nothing is compared"
    far, bent = near.gradients(np.float32([1e4, 0, 0, 0]), 30.0)
    assert np.isfinite(far).all()
    assert np.isfinite(bent).all()


def test_the_order_near_the_best_is_learned_where_the_latency_is_not() -> None:
    """One leaf must serve rows of other workloads whose level it cannot know: the order it can."""
    rng = np.random.default_rng(0)
    workload = np.repeat(np.arange(200), 12).astype(np.intp)
    faster = np.tile(np.arange(12), 200)
    level = rng.normal(0, 1, 200)[workload]
    label = level + 0.02 * faster
    matrix = np.stack([faster, rng.normal(size=len(label))], axis=1).astype(np.float32)
    start, weight = np.zeros(len(label)), np.ones(len(label))
    labelled = LabelledRows(matrix, label, start, weight, workload)
    params = XgbParams(rounds=30, max_depth=4, learning_rate=0.2)
    asked = np.stack([np.arange(12), np.zeros(12)], axis=1).astype(np.float32)

    def span(pairs: float) -> float:
        found = train_booster(labelled, replace(params, pairs=pairs), nthread=1).inplace_predict(
            asked
        )
        return float(np.corrcoef(found, np.arange(12))[0, 1])

    assert span(1.0) > 0.95
    assert span(1.0) > span(0.0)


def test_training_repeats_exactly_whatever_the_threads(table: TrainingTable) -> None:
    params = XgbParams(rounds=10, max_depth=4)
    assert params.pairs > 0
    hashes = {XgbCostModel(params, nthread=n).fit(table).hash for n in (1, 1, 2)}
    assert len(hashes) == 1
    for other in (replace(params, seed=7), replace(params, pairs=0.0)):
        assert XgbCostModel(other).fit(table).hash not in hashes
