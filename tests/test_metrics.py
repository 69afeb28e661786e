"""Metrics, against what their definitions say, worked out by hand or by trying all orders."""

from __future__ import annotations

import itertools
from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.evaluation.metrics import (
    distinct_rows,
    geomean,
    kendall_tau,
    mape_pct,
    speed_kept,
    top_rows,
)

LATENCY = np.array([40.0, 10.0, 20.0, nan])


def costs(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


@pytest.mark.parametrize(
    ("cost", "k", "kept"),
    [
        (costs(4, 1, 2, 9), 1, 1.0),  # the best first
        (costs(1, 4, 2, 9), 1, 10 / 40),
        (costs(1, 4, 2, 9), 2, 10 / 20),
        (costs(1, 4, 2, 9), 3, 1.0),
        (costs(1, 4, 2, 9), 16, 1.0),  # more than there are
        (costs(1, 4, 2, 0), 2, 10 / 40),  # the failed one takes a pick
        (costs(2, 4, 3, 1), 1, 10 / 40),  # only a failed one: the slowest that works
        (costs(nan, 4, 2, 9), 3, 1.0),  # no prediction ranks last
        (costs(-np.inf, 4, 2, 9), 1, 10 / 40),
    ],
)
def test_speed_kept_by_hand(cost: np.ndarray, k: int, kept: float) -> None:
    assert speed_kept(LATENCY, cost, k) == pytest.approx(kept)


@given(
    st.lists(
        st.tuples(st.one_of(st.just(nan), st.floats(1, 100)), st.integers(0, 2)),
        min_size=1,
        max_size=6,
    ).filter(lambda rows: any(latency == latency for latency, _ in rows)),
    st.integers(1, 7),
)
def test_ties_give_the_mean_over_all_orders(rows: list[tuple[float, int]], k: int) -> None:
    latency = np.array([r[0] for r in rows])
    cost = np.array([float(r[1]) for r in rows])
    works = latency[np.isfinite(latency)]
    answers = []
    for order in itertools.permutations(range(len(rows))):
        picks = sorted(order, key=lambda i: cost[i])[:k]
        answers.append(works.min() / np.fmin(np.nanmin([*latency[picks], np.inf]), works.max()))
    assert speed_kept(latency, cost, k) == pytest.approx(np.mean(answers))


@given(st.lists(st.floats(0.5, 1e6), min_size=1, max_size=40), st.data())
def test_more_picks_keep_more_and_the_truth_keeps_all(
    values: list[float], data: st.DataObject
) -> None:
    latency = np.array(values)
    cost = np.array(data.draw(st.permutations(range(len(values)))), dtype=np.float64)
    kept = [speed_kept(latency, cost, k) for k in (1, 4, 8, 16, 40)]
    assert kept == sorted(kept)
    assert kept[-1] == pytest.approx(1.0)
    assert speed_kept(latency, latency, 1) == pytest.approx(1.0)


@pytest.mark.parametrize(("latency", "k"), [(LATENCY, 0), (costs(nan, nan), 1), (costs(), 1)])
def test_nothing_to_pick_from_is_an_error(latency: np.ndarray, k: int) -> None:
    with pytest.raises(ValueError, match="expected k >= 1"):
        speed_kept(latency, np.zeros(len(latency)), k)


def test_a_top_k_never_holds_two_equal_ones() -> None:
    cost, identity = costs(3, 1, 2, 1.5, 4), np.array([0, 1, 1, 2, 0])
    assert top_rows(cost, identity, 3).tolist() == [1, 3, 0]
    assert top_rows(cost, identity, 9).tolist() == [1, 3, 0]
    assert distinct_rows(cost, identity).tolist() == [0, 1, 3]


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 9)), min_size=1), st.integers(1, 8))
def test_top_rows_are_the_best_of_each_identity(rows: list[tuple[int, float]], k: int) -> None:
    identity, cost = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    top = top_rows(cost, identity, k)
    best = {i: cost[identity == i].min() for i in identity.tolist()}
    assert len(set(identity[top].tolist())) == len(top) == min(k, len(best))
    assert cost[top].tolist() == sorted(best.values())[:k]


def test_kendall_tau() -> None:
    assert kendall_tau(costs(1, 2, 3, 4), costs(1, 2, 3, 4)) == pytest.approx(1)
    assert kendall_tau(costs(1, 2, 3, 4), costs(4, 3, 2, 1)) == pytest.approx(-1)
    # 5 of 6 pairs agree: (5 - 1) / 6.
    assert kendall_tau(costs(1, 2, 3, 4), costs(1, 2, 4, 3)) == pytest.approx(4 / 6)
    assert kendall_tau(costs(1, 2, nan, 4), costs(1, 2, -9, 4)) == pytest.approx(1)  # failed
    assert kendall_tau(costs(1, 2), costs(7, 7)) == 0
    assert kendall_tau(costs(1), costs(1)) == 0


def test_mape_and_geomean() -> None:
    assert mape_pct(costs(10, 20, nan), costs(11, 16, 99)) == pytest.approx((10 + 20) / 2)
    assert geomean([0.5, 2.0, 1.0]) == pytest.approx(1.0)
