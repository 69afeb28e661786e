"""What the learner promises, on made-up lists: what it tries next, and when it has seen enough."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.autotune.learner import Floats, Learner, Tried
from costmodel.autotune.store import config_name

VALUES: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-4, 2**70) | st.floats(-1e30, 1e300)
    | st.text("ab.", max_size=3) | st.lists(st.integers(1, 4), max_size=2)
)  # fmt: skip
CONFIGS = st.builds(
    lambda kwargs, warps, stages, ctas, registers: parsed(
        kwargs, num_warps=warps, num_stages=stages, num_ctas=ctas, maxnreg=registers
    ),
    st.dictionaries(st.sampled_from(["BLOCK", "SPLIT", "USE", "KIND"]), VALUES),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 6),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 64, 168]),
)
LATENCIES = st.just(math.nan) | st.floats(1e-6, 1e12)
SEEDS = st.integers(0, 2**32 - 1)


def parsed(kwargs: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return a configuration as a store has it."""
    found: dict[str, Any] = json.loads(config_name(triton.Config(kwargs, **options)))
    return found


def grid(count: int) -> list[dict[str, Any]]:
    """Return so many configurations of two block sizes, warps and stages."""
    sizes = [
        ({"BLOCK_M": 16 << m, "BLOCK_N": 16 << n}, 1 << warps, stages)
        for m in range(5) for n in range(5) for warps in range(4) for stages in range(1, 11)
    ]  # fmt: skip
    spread = np.random.default_rng(0).permutation(len(sizes))[:count]
    picked = (sizes[i] for i in spread)
    return [parsed(k, num_warps=warps, num_stages=stages) for k, warps, stages in picked]


def smooth(configs: Sequence[dict[str, Any]], seed: int) -> Floats:
    """Return latencies with one optimum: some percent for each factor of two, more far away."""
    rng = np.random.default_rng(seed)
    points = np.array(
        [[*(math.log2(x) for x in c["kwargs"].values()), math.log2(c["num_warps"])]
         for c in configs]
    )  # fmt: skip
    best = points[rng.integers(len(points))]
    stages = np.array([c["num_stages"] for c in configs])
    off = (points - best) ** 2 @ rng.uniform(0.01, 0.06, points.shape[1])
    return np.asarray(rng.uniform(5, 500) * np.exp(off + 0.01 * np.abs(stages - 3)))


def unknown(configs: Sequence[dict[str, Any]], **sizes: Any) -> Tried:
    """Return a list of which nothing is known or predicted."""
    zeros = np.zeros(len(configs))
    return Tried(configs, zeros, np.full(len(configs), np.nan), sizes)


def search(learner: Learner, latency: npt.NDArray[Any], workers: int = 1) -> list[int]:
    """Try what a learner wants, with so many at once; return the order in which it was timed."""
    pending, order = list[int](), list[int]()
    while True:
        while len(pending) < workers and (row := learner.next(pending)) is not None:
            assert row not in pending + order
            pending.append(row)
        if not pending or not learner.needs(pending):
            return order
        order.append(pending.pop(0))
        learner.tell(order[-1], latency[order[-1]])


def kept(latency: Floats, order: Sequence[int]) -> float:
    """Return the speed of the best that was timed, as a share of the best's."""
    return float(np.nanmin(latency) / np.nanmin(latency[[*order]]))


def needed(latency: Floats, order: Sequence[int]) -> int:
    """Return after how many timings the best was within 2 %."""
    return next(n for n in range(1, len(order) + 1) if kept(latency, order[:n]) > 0.98)


# --- Any list -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 15), st.integers(1, 24))
def test_any_list_ends_and_nothing_is_tried_twice(
    data: st.DataObject, workers: int, count: int
) -> None:
    configs = data.draw(st.lists(CONFIGS, min_size=count, max_size=count))
    floats = st.floats(-20, 20)
    predicted = np.array(data.draw(st.lists(floats, min_size=count, max_size=count)))
    keys = data.draw(st.integers(0, 2))
    times = [
        np.array(data.draw(st.lists(LATENCIES, min_size=count, max_size=count)))
        for _ in range(keys + 1)
    ]
    others = [Tried(configs, predicted, times[i], {"n": 2**i}) for i in range(keys)]
    now = Tried(configs, predicted, np.full(count, np.nan), {"n": 64})
    order = search(Learner(now, others), times[-1], workers)
    assert order
    if np.isnan(times[-1]).all():
        assert len(order) == count  # until something works, there is nothing to be satisfied with


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 15), SEEDS)
def test_all_are_tried_if_so_many_are_wanted(count: int, workers: int, seed: int) -> None:
    configs = grid(count)
    learner = Learner(unknown(configs), least=count)
    order = search(learner, smooth(configs, seed), workers)
    assert sorted(order) == [*range(count)]
    assert learner.next() is None
    assert not learner.needs([])


def test_what_is_known_is_not_tried() -> None:
    configs = grid(40)
    latency = smooth(configs, 3)
    some = np.where(np.arange(40) % 2, latency, np.nan)
    order = search(Learner(replace(unknown(configs), latency_us=some)), latency)
    assert not {*order} & {*range(1, 40, 2)}
    everything = Learner(replace(unknown(configs), latency_us=latency))
    assert everything.next() is None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_short_lists(count: int) -> None:
    configs = [parsed({}, num_warps=1 << i) for i in range(count)]
    order = search(Learner(unknown(configs)), np.arange(1.0, count + 1))
    assert 0 in order


def test_configurations_that_differ_in_nothing_known() -> None:
    configs = [parsed({"BLOCK": 64})] * 30
    latency = np.random.default_rng(0).uniform(1, 2, 30)
    others = [Tried(configs, np.zeros(30), latency[::-1], {"n": 1})]
    assert search(Learner(unknown(configs, n=1), others), latency, 4)
    assert search(Learner(unknown(configs)), latency)


# --- What it finds --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(SEEDS, st.sampled_from([1, 15]))
def test_a_smooth_list_is_searched_by_less_than_half(seed: int, workers: int) -> None:
    configs = grid(100)
    latency = smooth(configs, seed)
    order = search(Learner(unknown(configs)), latency, workers)
    assert kept(latency, order) > 0.98
    assert needed(latency, order) < 50
    if workers == 1:
        assert len(order) < 50


@pytest.mark.parametrize("seed", range(3))
def test_a_list_without_differences_ends_early(seed: int) -> None:
    latency = 7 * np.exp(np.random.default_rng(seed).normal(0, 0.01, 96))
    assert len(search(Learner(unknown(grid(96))), latency)) < 60


@settings(deadline=None, max_examples=15)
@given(SEEDS, st.sampled_from([1e-3, 3.0, 1e9]))
def test_the_unit_of_latencies_does_not_matter(seed: int, unit: float) -> None:
    configs = grid(40)
    latency, before = smooth(configs, seed), smooth(configs, seed + 1)
    orders = [
        search(Learner(unknown(configs, n=4), others), factor * latency)
        for factor in (1.0, unit)
        for others in ([], [replace(unknown(configs, n=1), latency_us=before * factor)])
    ]
    assert orders[:2] == orders[2:]


@settings(deadline=None, max_examples=15)
@given(SEEDS, st.floats(-5, 5))
def test_the_level_of_predictions_does_not_matter(seed: int, level: float) -> None:
    configs = grid(40)
    predicted = np.random.default_rng(seed).normal(size=40)
    latency = smooth(configs, seed)
    orders = [
        search(Learner(replace(unknown(configs), predicted=predicted + x)), latency)
        for x in (0, level)
    ]
    assert orders[0] == orders[1]


@settings(deadline=None, max_examples=20)
@given(SEEDS)
def test_what_fails_is_passed_over(seed: int) -> None:
    configs = grid(60)
    latency = smooth(configs, seed)
    latency[np.random.default_rng(seed).random(60) < 0.4] = math.nan
    order = search(Learner(unknown(configs)), latency)
    assert kept(latency, order) > 0.8


def test_what_is_like_what_fails_is_tried_last() -> None:
    configs = grid(100)
    large = np.array([c["kwargs"]["BLOCK_M"] > 64 for c in configs])
    tried = []
    for seed in range(10):
        latency = np.where(large, math.nan, smooth(configs, seed))
        order = search(Learner(unknown(configs)), latency)
        assert kept(latency, order) > 0.97
        tried.append(large[order].sum())
    assert np.mean(tried) < 0.3 * large.sum()


@settings(deadline=None, max_examples=20)
@given(SEEDS)
def test_good_predictions_shorten_the_search(seed: int) -> None:
    configs = grid(60)
    latency = smooth(configs, seed)
    with_model = replace(unknown(configs), predicted=np.log(latency))
    order = search(Learner(with_model), latency)
    assert needed(latency, order) <= 2


@settings(deadline=None, max_examples=20)
@given(SEEDS)
def test_misleading_predictions_are_overcome(seed: int) -> None:
    configs = grid(60)
    latency = smooth(configs, seed)
    against = replace(unknown(configs), predicted=-np.log(latency))
    assert kept(latency, search(Learner(against), latency)) > 0.95


# --- Other keys -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(SEEDS)
def test_keys_with_the_same_optimum_shorten_the_search(seed: int) -> None:
    configs = grid(60)
    latency = smooth(configs, seed)
    others = [replace(unknown(configs, n=1 << i), latency_us=latency * i) for i in (1, 2, 3)]
    order = search(Learner(unknown(configs, n=1), others), latency)
    assert needed(latency, order) == 1
    assert len(order) < 10


def test_keys_with_another_optimum_do_little_harm() -> None:
    configs, speeds, lengths = grid(60), [], []
    for seed in range(20):
        latency, unlike = smooth(configs, seed), smooth(configs, seed + 50)
        others = [replace(unknown(configs, n=1 << i), latency_us=unlike) for i in range(3)]
        order = search(Learner(unknown(configs, n=1 << 20), others), latency)
        speeds.append(kept(latency, order))
        lengths.append(len(order))
    assert np.mean(speeds) > 0.92
    assert np.mean(lengths) < 30


@settings(deadline=None, max_examples=10)
@given(SEEDS, st.permutations(range(12)))
def test_the_order_of_the_keys_does_not_matter(seed: int, permutation: list[int]) -> None:
    configs = grid(30)
    latency = smooth(configs, seed)
    others = [
        replace(unknown(configs, n=3**i), latency_us=smooth(configs, seed + i)) for i in range(12)
    ]
    orders = [
        search(Learner(unknown(configs, n=500), given_), latency)
        for given_ in (others, [others[i] for i in permutation])
    ]
    assert orders[0] == orders[1]


def test_other_keys_may_have_other_configurations() -> None:
    configs, latency = grid(60), smooth(grid(60), 5)
    others = [
        replace(unknown(configs[:7], n=1), latency_us=latency[:7]),
        Tried([parsed({"OTHER": "x"})], np.zeros(1), np.ones(1), {"m": 3, "x": ["int8", [4]]}),
        unknown([]),
        unknown(configs),
    ]
    order = search(Learner(unknown(configs, n=2), others), latency)
    assert kept(latency, order) > 0.98


# --- Cost -----------------------------------------------------------------------------------------


def test_a_thousand_configurations_are_no_wait() -> None:
    configs = grid(1000)
    latency = smooth(configs, 0)
    others = [replace(unknown(configs, n=2 << i), latency_us=latency) for i in range(8)]
    for known in ([], others):
        begin = time.process_time()
        learner = Learner(unknown(configs, n=1), known, least=100)
        assert time.process_time() - begin < 10
        for _ in range(30):
            row = learner.next()
            assert row is not None
            learner.tell(row, latency[row])
        begin = time.process_time()
        learner.next([int(row) for row in np.argsort(latency)[-15:]])
        assert time.process_time() - begin < 2


def test_hundreds_of_names_in_an_argument() -> None:
    configs = [parsed({"KIND": f"kind {i}", "BLOCK": 1 << i % 7}) for i in range(700)]
    assert Learner(unknown(configs)).next() is not None


def test_the_best_of_what_is_pending_says_what_waiting_is_worth() -> None:
    configs = grid(30)
    latency, learner = smooth(configs, 1), Learner(unknown(configs))
    for row in range(0, 30, 2):
        learner.tell(row, latency[row])
    pending = range(1, 30, 2)
    assert learner.gain(pending) == max(learner.gain([row]) for row in pending) > 0
    assert learner.gain([]) == 0
    assert Learner(unknown(configs), least=30).gain([3]) == math.inf
