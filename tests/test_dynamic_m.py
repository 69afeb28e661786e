"""A service that sees every m: tunings, launches and memory are bounded, and nothing stalls."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_fakes import H100, MODEL, Machine, find
from hypothesis import given, settings
from hypothesis import strategies as st

import costmodel
from costmodel.dispatch import dispatch
from costmodel.dispatch.launches import Launches
from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace, why_illegal
from costmodel.gemm.workload import MOST, MOST_OFFSET, Workload
from costmodel.tuning.tuning_key import Buckets

N, K = 640, 128


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """One on which nothing is computed: only the bookkeeping is looked at."""
    monkeypatch.setattr("dispatch_fakes.FakeLaunch.__call__", lambda *_: None)
    return Machine(monkeypatch, tmp_path)


def call(m: int, mode: str = "auto") -> None:
    costmodel.matmul(rows(m), WEIGHT, out=OUT[:m], mode=mode, model=MODEL)


def rows(m: int) -> torch.Tensor:
    return ROWS[:m]


ROWS = torch.empty(20_000, K, dtype=torch.float16)
WEIGHT = torch.empty(K, N, dtype=torch.float16)
OUT = torch.empty(20_000, N, dtype=torch.float16)


# --- buckets ------------------------------------------------------------------------------------

any_buckets = st.builds(
    Buckets,
    st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    st.lists(st.integers(1, 5000), unique=True).map(lambda x: tuple(sorted(x))),
)


@pytest.mark.fault("B23")
@given(any_buckets, st.integers(1, MOST))
def test_a_bucket_holds_its_m_and_all_of_them_agree(buckets: Buckets, m: int) -> None:
    first, last = buckets.of(m)
    assert first <= m <= last
    assert buckets.of(first) == buckets.of(last) == (first, last)
    assert not first <= 512 < last, "small products are not timed, and have winners of their own"
    if first > 1:
        assert buckets.of(first - 1)[1] == first - 1, "no gap, no overlap"


@pytest.mark.fault("B23")
@given(st.lists(st.integers(1, 5000), unique=True, min_size=1).map(sorted))
def test_own_bounds_are_kept_to(bounds: list[int]) -> None:
    buckets = Buckets(bounds=tuple(bounds))
    for bound in bounds:
        assert buckets.of(bound)[1] == bound


@pytest.mark.fault("B23")
def test_how_many_buckets_there_are() -> None:
    """As docs/tuning.md has it."""
    found = [len({Buckets(steps).of(m) for m in range(1, 8193)}) for steps in (1, 2, 4, 8, 16)]
    assert found == [14, 20, 32, 56, 104]


@pytest.mark.parametrize(
    ("steps", "bounds"), [(0, ()), (3, ()), (256, ()), (True, ()), (4, (0,)), (4, (8, 8)),
                          (4, (16, 8)), (4, (1.5,))],
)  # fmt: skip
def test_wrong_buckets_are_refused(steps: int, bounds: tuple[int, ...]) -> None:
    before = dispatch.winners.buckets
    with pytest.raises(InvalidInput, match="expected"):
        costmodel.set_buckets(steps, bounds)
    assert dispatch.winners.buckets is before


@pytest.mark.parametrize(
    "bounds", [64, None, 1.5, "8", "ab", ("a",), ("1", "2"), [None], [[1]], (True, 2),
               (1 + 0j,), [3, 2], [0], [-1], [float("nan")], {"a": 1}, object(), len],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_bounds_of_any_kind_are_refused_in_our_own_words(bounds: Any) -> None:
    with pytest.raises(InvalidInput, match=r"bounds=.*expected ascending whole numbers"):
        Buckets(bounds=bounds)


@pytest.mark.parametrize("given", [[24, 64], (24, 64), range(24, 65, 40), iter((24, 64))])
def test_bounds_listed_in_any_way_are_the_same(given: Any) -> None:
    buckets = Buckets(bounds=given)
    assert buckets == Buckets(bounds=(24, 64))
    assert hash(buckets) == hash(Buckets(bounds=(24, 64))), "a list would have none"


def test_buckets_can_be_set(machine: Machine) -> None:
    for m in range(1, 65):
        call(m)
    assert tunings(machine) == 7
    costmodel.set_buckets(bounds=(24, 64))
    for m in range(1, 65):
        call(m)
    assert tunings(machine) == 7 + 2
    costmodel.set_buckets()
    for m in range(1, 65):
        call(m)
    assert tunings(machine) == 7 + 2, "those of before are still on disk"


def tunings(machine: Machine) -> int:
    return len(machine.bench.waited)


# --- tunings ------------------------------------------------------------------------------------


@pytest.mark.fault("B23")
def test_every_m_to_8192_tunes_32_times(machine: Machine) -> None:
    before = costmodel.stats()
    for m in range(1, 8193):
        call(m)
    done = costmodel.stats().since(before)
    assert done.tuned == 32
    assert done.compiled <= 32 * 8
    assert done.loaded <= 32
    assert done.prepared == 8192
    before = costmodel.stats()
    for m in range(8192, 0, -1):
        call(m)
    again = costmodel.stats().since(before)
    assert (again.tuned, again.compiled, again.loaded) == (0, 0, 0)


@pytest.mark.fault("B23")
def test_one_winner_serves_all_m_of_a_bucket_that_scratch_memory_limits(machine: Machine) -> None:
    """Scratch memory grows with m: a configuration is legal for the first m, and not the last."""
    n, k, first, last = 8704, 16384, 1793, 2048
    config = GemmConfig("pointer", 16, 128, 64, 4, 3, split_k=16)
    assert not why_illegal(config, Workload.dense(first, n, k), H100.device)
    assert why_illegal(config, Workload.dense(last, n, k), H100.device)
    before = costmodel.stats()
    for m in range(first, last + 1):
        result = find(Workload.dense(m, n, k))
        for chosen in (result.config_at(m), *(ranked for ranked, _ in result.ranked)):
            assert chosen is not None
            assert not why_illegal(chosen, Workload.dense(last, n, k), H100.device)
    assert costmodel.stats().since(before).tuned == 1


@pytest.mark.fault("B23")
@given(st.sampled_from(range(4)), st.integers(1, 4000), st.integers(1, 4000))
def test_what_may_run_the_last_m_may_run_all(which: int, m: int, less: int) -> None:
    """What the winner of a bucket's last m rests on."""
    n, k = ((8704, 16384), (40_000, 4096), (1003, 70_001), (65_536, 640))[which]
    most, least = Workload.dense(m, n, k), Workload.dense(max(m - less, 1), n, k)
    for config in SearchSpace.of(most, H100).configs[::37]:
        assert not why_illegal(config, least, H100.device)


def test_the_last_m_of_a_bucket_is_one_that_can_be() -> None:
    assert Buckets().of(MOST - 7)[1] == MOST
    assert Buckets(bounds=(2**40,)).of(513) == (513, MOST)
    assert Buckets().range_of(Workload.dense(MOST - 7, 8, 8))[1] == MOST


@given(any_buckets, st.integers(1, MOST), st.integers(1, MOST), st.integers(1, MOST))
def test_a_range_of_m_is_of_one_class_of_code(buckets: Buckets, m: int, n: int, k: int) -> None:
    """Where the offsets of a larger product need 64 bits, it has a winner of its own."""
    workload = Workload.dense(m, n, k)
    first, last = buckets.range_of(workload)
    assert first <= m <= last <= MOST
    if not workload.code.wide:
        for other in (first, last):
            assert buckets.range_of(replace(workload, m=other)) == (first, last)
            span = (other - 1) * max(n, k) + max(n, k) - 1  # of A or of C, in rows
            assert span <= MOST_OFFSET


@pytest.mark.fault("B23")
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2**16), st.sampled_from([1, 8, 65_544, 2**20, 2**24]), st.integers(1, 2**12))
def test_something_is_legal_for_all_of_a_bucket_that_ends_beyond_any_product(
    m: int, n: int, k: int
) -> None:
    """As of a server that has one bucket for all m above its last batch size."""
    workload = Workload.dense(m, n, k)
    _, last = Buckets(bounds=(64, 2**31 - 1)).range_of(workload)
    assert len(SearchSpace.of(replace(workload, m=last), H100))


@pytest.mark.fault("B23")
def test_the_last_bucket_may_end_beyond_any_product(machine: Machine) -> None:
    costmodel.set_buckets(bounds=(64, 2**31 - 1))
    workload = Workload.dense(4096, 2**20, 8)
    assert workload.code.wide, "so that its bucket is not cut where offsets need 64 bits"
    assert find(workload).workload == workload


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.fault("B23")
@pytest.mark.slow
def test_any_number_of_m_keeps_memory_level(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty times as many as launches are kept, of which there are fewer here, to be quick."""
    monkeypatch.setattr(dispatch, "launches", Launches(at_most=256))
    sizes = []
    tracemalloc.start()
    try:
        for m in range(1, 5_121):
            call(m, "heuristic")
            if m % 1024 == 0:  # each time the same number of launches is kept
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
                assert len(dispatch.launches) <= 256
    finally:
        tracemalloc.stop()
    assert max(sizes[1:]) <= 1.2 * sizes[0], f"bytes: {sizes}"


@pytest.mark.fault("B15", "B23")
def test_the_oldest_of_too_many_launches_goes() -> None:
    kept, entry = Launches(at_most=8), ("launch", ())
    for i in range(100):
        kept.put(i, entry, kept.begin())  # type: ignore[arg-type]
        assert len(kept) <= 8
    assert [i for i in range(100) if kept.get(i) is entry] == [*range(92, 100)]


@pytest.mark.fault("B23", "B47")
def test_no_call_clears_up_what_thousands_left() -> None:
    """Keeping a launch compares its key with no other."""

    class Key:
        compared = 0

        def __init__(self, value: int) -> None:
            self.value = value

        def __hash__(self) -> int:
            return self.value

        def __eq__(self, other: object) -> bool:
            Key.compared += 1
            return self is other

    kept = Launches(at_most=4096)
    for i in range(20_000):
        kept.put(Key(i), ("launch", ()), kept.begin())  # type: ignore[arg-type]
    assert Key.compared == 0
    assert len(kept) == 4096


@pytest.mark.fault("B23")
def test_winners_in_memory_are_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costmodel.tuning.memory._REMEMBERED", 10)
    for n in range(64, 64 * 40, 64):
        find(Workload.dense(8, n, 128), "heuristic")
    before = costmodel.stats()
    for n in range(64 * 39, 0, -64):
        find(Workload.dense(8, n, 128), "heuristic")
    done = costmodel.stats().since(before)
    assert (done.memory_hits, done.disk_hits) == (10, 29), "the rest is on disk"
