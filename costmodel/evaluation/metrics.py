"""Measures of a ranking. Pure functions of arrays: one workload's latencies and predicted costs.

Latencies are in us, NaN where a candidate failed; lower costs rank first. Candidates of equal
cost count as ranked in random order, and the expected value is returned. So the order of rows in a
file neither helps nor harms a model, and a constant cost is the random baseline.
"""

from collections.abc import Sequence

import numpy as np

from costmodel.arrays import Floats, Indices, Integers


def speed_kept(latency_us: Floats, cost: Floats, k: int) -> float:
    """Best latency of all, divided by the best among the ``k`` of lowest cost: from 0 to 1.

    A pick that failed is wasted. Where all ``k`` failed, the slowest candidate that works is taken,
    so that failing is never better than being slow, and a mean over workloads is finite.

    Args:
        latency_us: [n], NaN where failed; at least one is not.
        cost: [n], predictions; NaN ranks last.
        k: at least 1; more than n counts as n.

    Raises:
        ValueError: k is below 1, or no latency is a number.
    """
    if k < 1 or not np.isfinite(latency_us).any():
        raise ValueError(f"k={k}: expected k >= 1 and at least one latency")
    works = np.isfinite(latency_us)
    latency = np.where(works, latency_us, latency_us[works].max())
    cost = np.where(np.isnan(cost), np.inf, cost)
    k = min(k, len(cost))
    edge = np.partition(cost, k - 1)[k - 1]
    certain = latency[cost < edge]
    tied = np.sort(latency[cost == edge])
    drawn, size = k - len(certain), len(tied)
    # P(the fastest of `drawn` out of `size` is the i-th) = C(size-1-i, drawn-1) / C(size, drawn).
    i = np.arange(size - drawn)
    chance = drawn / size * np.cumprod(np.append(1.0, (size - drawn - i) / (size - 1 - i)))
    fastest = np.minimum(tied[: size - drawn + 1], certain.min(initial=np.inf))
    return float(latency.min() * np.sum(chance / fastest))


def top_rows(cost: Floats, identity: Integers, k: int) -> Indices:
    """The ``k`` rows of lowest cost, in order, no two of one identity; int [<= k].

    Args:
        cost: [n]. identity: int [n], equal for candidates that do the same.
    """
    order = np.argsort(cost, kind="stable")
    first = np.sort(np.unique(identity[order], return_index=True)[1])
    return order[first[:k]]


def distinct_rows(cost: Floats, identity: Integers) -> Indices:
    """Return the row of lowest cost of each identity: a ranking without duplicates."""
    return np.sort(top_rows(cost, identity, len(cost)))


def kendall_tau(latency_us: Floats, cost: Floats) -> float:
    """Kendall's tau-b over the candidates that work; 0 where one side does not order them."""
    from scipy.stats import kendalltau  # type: ignore[import-untyped]

    works = np.isfinite(latency_us) & np.isfinite(cost)
    if works.sum() < 2:
        return 0.0
    tau = float(kendalltau(latency_us[works], cost[works]).statistic)
    return 0.0 if np.isnan(tau) else tau


def mape_pct(latency_us: Floats, predicted_us: Floats) -> float:
    """Mean absolute error of a predicted latency, in percent of the measured one."""
    works = np.isfinite(latency_us)
    error = np.abs(predicted_us[works] - latency_us[works]) / latency_us[works]
    return float(100 * error.mean())


def geomean(values: Sequence[float] | Floats) -> float:
    """Geometric mean of positive values."""
    return float(np.exp(np.mean(np.log(values))))
