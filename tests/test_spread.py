"""What computes the other m of a bucket: what is expected to be fastest there, little of it new."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_fakes import H100, Machine
from numpy.typing import NDArray

import costmodel
from costmodel import dispatch, spreader, winners
from costmodel.artifact import Artifact
from costmodel.candidates import Candidates
from costmodel.config import GemmConfig
from costmodel.errors import InvalidInput
from costmodel.measurement import Measurement
from costmodel.models import XgbCostModel
from costmodel.question import at_the_end, memory_key
from costmodel.ranking import rank
from costmodel.space import legality
from costmodel.specialize import Specialization, specialize
from costmodel.spread import spread, spread_by_timing
from costmodel.target import Target
from costmodel.tuning_result import Part, TuningResult
from costmodel.workload import Workload

N, K = 1024, 2048
ROWS = (2049, 2560)
ROOT = Path(__file__).resolve().parents[1]


class Law(XgbCostModel):
    """Whole waves of tiles, larger tiles being the more efficient: it knows all, if asked."""

    def __init__(self) -> None:
        super().__init__(name="law")
        self.target_, self.dtypes_, self._hash = H100, ("float16",), "0" * 16
        self._directory = ROOT / "models/h100-sxm"  # for the binaries that are known

    def nearest(
        self, workload: Workload, candidates: Candidates, target: Target, count: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        cost = [law_us(workload, config) for config in candidates.configs]
        return np.arange(len(candidates)), np.array(cost)

    def predict_torch(self, workload: Workload, target: Target) -> float:
        return 1.1 * law_us(workload, GemmConfig("pointer", 128, 128, 32))


LAW = Law()
"""One for all: a model reads the table of what is known to compile once."""


def law_us(workload: Workload, config: GemmConfig) -> float:
    tiles = -(-workload.m // config.block_m) * -(-workload.n // config.block_n)
    waves = -(-tiles * config.split_k // H100.device.sm_count)
    area = config.block_m * config.block_n
    split = 1 + 0.3 * (config.split_k > 1)
    own = 1 + len(str(config)) / 1e4 + config.group_m / 1e5  # so that no two are equal
    return 3 + split * own * waves * (area + 3000) * workload.k / config.split_k / 3e6


def tuned(m: int, k: int = 8, *, torch_us: float | None = None, timed: bool = True) -> TuningResult:
    """The top k, timed: all take 20 % longer than the law has it."""
    workload = Workload.dense(m, N, K)
    configs = rank(workload, H100, LAW, k).configs
    source = {"source": "device (h100-sxm)"} if timed else {}
    found = TuningResult.unranked(workload, H100, "auto", configs[0], "", **source)
    found = replace(found, model_hash=LAW.hash)
    if not timed:
        return found
    measured = tuple((c, Measurement("ok", 1.2 * law_us(workload, c))) for c in configs)
    return replace(
        found, measured=measured, reliable=True,
        torch=None if torch_us is None else Measurement("ok", torch_us),
    )  # fmt: skip


@functools.cache
def best_us(workload: Workload) -> float:
    return float(rank(workload, H100, LAW, 1).cost[0])


# --- the parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("m", [2049, 2300, 2560])
def test_every_part_is_computed_by_nearly_the_best(m: int, timed: bool) -> None:
    result = tuned(m, timed=timed)
    result = replace(result, parts=spread(result, ROWS, LAW))
    lasts = [part.last for part in result.parts]
    assert lasts == sorted(set(lasts))
    assert lasts[-1] == ROWS[1]
    worst_alone = 1.0
    for last in range(ROWS[0] + 63, ROWS[1] + 1, 64):
        workload = Workload.dense(last, N, K)
        config = result.at(last).config
        assert config is not None
        assert not legality(config, workload, H100.device)
        assert law_us(workload, config) <= 1.021 * best_us(workload)
        assert result.config is not None
        worst_alone = max(worst_alone, law_us(workload, result.config) / best_us(workload))
    assert worst_alone > 1.1, "else one winner would do for all"


def test_what_is_there_is_taken_unless_something_new_gains_more_than_predictions_err() -> None:
    """With all of the space timed nothing is new; with one configuration timed most is."""
    every, one = tuned(2049, 10**6), tuned(2049, 1)
    for result in (every, one):
        parts = spread(result, ROWS, LAW)
        there = {config for config, _ in result.measured}
        for part in parts:
            workload = Workload.dense(part.last, N, K)
            if part.config not in there:
                assert result is one
                assert part.config is not None
                gained = min(law_us(workload, c) for c in there) / law_us(workload, part.config)
                assert gained > 1.02


def test_timings_count_for_more_than_what_was_predicted_of_them() -> None:
    """The second choice takes a tenth of what was predicted: so it will elsewhere."""
    result = tuned(2049)
    _, second, *_ = (config for config, _ in result.measured)
    measured = dict(result.measured)
    measured[second] = Measurement("ok", 0.1 * law_us(result.workload, second))
    result = replace(result, config=second, measured=tuple(measured.items()))
    assert spread(result, ROWS, LAW) == (Part(ROWS[1], second),)


@pytest.mark.parametrize("status", ["wrong_result", "crashed", "too_slow", "compile_error"])
def test_what_failed_where_it_was_tuned_is_chosen_nowhere(status: Any) -> None:
    result = tuned(2049)
    failed, *rest = result.measured
    measured = ((failed[0], Measurement(status)), *rest)
    result = replace(result, config=rest[0][0], measured=measured)
    parts = spread(result, ROWS, LAW)
    assert failed[0] not in {part.config for part in parts}


def test_what_is_not_known_to_compile_is_not_new() -> None:
    law = Law()
    law._directory = None
    result = tuned(2049)
    there = {config for config, _ in result.measured}
    assert {part.config for part in spread(result, ROWS, law)} <= there


def test_torch_is_taken_where_it_is_expected_to_be_faster_by_more_than_it_varies() -> None:
    torch_us = 1.2 * 1.1 * law_us(Workload.dense(2049, N, K), GemmConfig("pointer", 128, 128, 32))
    for factor, expected in ((0.1, {None}), (10.0, None)):
        result = tuned(2049, torch_us=factor * torch_us)
        chosen = {part.config for part in spread(result, ROWS, LAW)}
        assert chosen == expected if expected else None not in chosen


def test_torch_predicted_is_torch_for_all() -> None:
    result = replace(tuned(2049, timed=False), config=None)
    assert spread(result, ROWS, LAW) == (Part(ROWS[1], None),)


@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (3, 4), (2**30 + 1, 2**30 + 7)])
def test_buckets_of_any_size_have_parts(rows: tuple[int, int]) -> None:
    small = Workload.dense(rows[0], 1, 1)
    config = rank(small, H100, LAW, 1).configs[0]
    parts = spread(TuningResult.unranked(small, H100, "predict", config, ""), rows, LAW)
    assert parts[-1].last == rows[1]
    assert len(parts) <= 8


# --- by timing ----------------------------------------------------------------------------------


class Stopwatch:
    """Times by a law of its own, and can fail; each timing takes its time.

    Attributes:
        compiled, timed, rested: what was asked for.
    """

    def __init__(self, law: Callable[[Workload, GemmConfig | None], float], takes_s: float = 0.0):
        self.law, self._takes_s, self.now_s = law, takes_s, 0.0
        self.compiled: set[Specialization] = set()
        self.timed: dict[int, list[GemmConfig | None]] = {}
        self.rested = 0
        self.fails: Callable[[Workload, GemmConfig | None], bool] = lambda *_: False
        self.refuses: Callable[[Specialization], bool] = lambda _: False

    def compile(self, specs: Sequence[Specialization], target: Target) -> list[Artifact]:
        self.compiled |= set(specs)
        status = {True: "compile_error", False: "ok"}
        return [Artifact(str(s), s, status=status[self.refuses(s)]) for s in specs]  # type: ignore[arg-type]

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> list[Measurement]:
        self.now_s += self._takes_s
        self.timed[workload.m] = [*configs]
        return [
            Measurement("crashed") if self.fails(workload, c) else
            Measurement("ok", self.law(workload, c))
            for c in configs
        ]  # fmt: skip

    def measure(self, *_: Any) -> list[Measurement]:
        raise AssertionError("not in turn")

    measure_torch = measure  # type: ignore[assignment]

    def rest(self) -> None:
        self.rested += 1

    def spread(self, result: TuningResult, first: int | None = None) -> TuningResult:
        parts, self.costs = spread_by_timing(
            result, ROWS, LAW, self, self.compile, first=first, clock=lambda: self.now_s
        )
        return replace(result, parts=parts)


def odd_us(workload: Workload, config: GemmConfig | None) -> float:
    """What the model does not know: torch and every third configuration wins at times."""
    if config is None:
        return best_us(workload) * (0.5 if workload.m // 64 % 3 == 0 else 2.0)
    return law_us(workload, config) * (1 + len(str(config)) * workload.m // 64 % 3)


@pytest.mark.parametrize("torch_us", [None, 40.0])
def test_of_each_part_what_is_timed_as_fastest_is_taken(torch_us: float | None) -> None:
    watch, result = Stopwatch(odd_us), tuned(2049, torch_us=torch_us)
    result = watch.spread(result)
    assert len(result.parts) > 1
    assert len(watch.timed) == 16
    for m, configs in watch.timed.items():
        workload = Workload.dense(m, N, K)
        assert 2 <= len(configs) <= 5
        assert (None in configs) == (torch_us is not None)
        taken_us = odd_us(workload, result.at(m).config)
        assert taken_us <= 1.01 * 1.02 * min(odd_us(workload, config) for config in configs)
        assert {specialize(workload, c) for c in configs if c is not None} <= watch.compiled
    assert watch.rested == 1
    assert watch.costs.timed == sum(map(len, watch.timed.values()))
    assert result.parts_timed
    for part in result.parts:
        assert part.latency_us == odd_us(Workload.dense(part.last, N, K), part.config)
    assert {part.last % 64 for part in result.parts} == {0, 63}, "some are cut"
    assert TuningResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_what_is_as_fast_as_the_winner_does_not_replace_it() -> None:
    result = Stopwatch(lambda *_: 7.0).spread(tuned(2049, torch_us=7.0))
    assert [part.config for part in result.parts] == [result.config]


def test_without_time_the_part_that_is_asked_for_is_timed_and_the_rest_expected() -> None:
    watch = Stopwatch(odd_us, takes_s=60.0)
    result = watch.spread(tuned(2049), first=2300)
    assert set(watch.timed) == {2303, 2304}
    assert {part.last for part in result.parts if part.latency_us is not None} <= {2303, 2304}
    others = [m for m in range(2112, 2561, 64) if m != 2304]
    assert [result.at(m).config for m in others] == [
        replace(result, parts=spread(result, ROWS, LAW)).at(m).config for m in others
    ]


def test_what_fails_in_a_part_is_not_taken_there() -> None:
    watch, result = Stopwatch(odd_us), tuned(2049, torch_us=40.0)
    watch.fails = lambda w, c: c is None or c == result.config
    found = watch.spread(result)
    assert {part.config for part in found.parts}.isdisjoint({None, result.config})
    watch.fails = lambda *_: True
    found = watch.spread(result)
    assert found.parts == spread(result, ROWS, LAW)
    assert not found.parts_timed
    assert watch.rested == 2


@pytest.mark.parametrize("align", [16, 8, 2])
@pytest.mark.parametrize("layouts", [("col", "row"), ("row", "col"), ("row", "row")])
def test_columns_are_timed_only_as_aligned_as_they_are(
    layouts: tuple[Any, Any], align: int
) -> None:
    """Of 16-bit numbers a column of m is aligned to 16 bytes only if m is a multiple of 8."""
    watch, result = Stopwatch(odd_us), tuned(2049)
    a_layout, c_layout = layouts
    aligns = {"a_align": align} if a_layout == "col" else {"c_align": align}
    code = replace(
        result.workload.code,
        a_layout=a_layout,
        c_layout=c_layout,
        **aligns,  # type: ignore[arg-type]
    )
    workload = replace(result.workload, m=2056, code=code)
    watch.spread(replace(result, workload=workload))
    step = align // 2 if "col" in layouts else 1
    assert watch.timed
    assert all(m % step == 0 for m in watch.timed)
    assert len(watch.timed) >= 8


def test_small_buckets_are_timed_at_each_m() -> None:
    watch = Stopwatch(odd_us)
    for rows in ((3, 3), (5, 6), (17, 20)):
        first = Workload.dense(rows[0], N, K)
        config = rank(first, H100, LAW, 1).configs[0]
        result = replace(tuned(2049, 1), workload=first, config=config)
        watch.timed.clear()
        parts, _ = spread_by_timing(result, rows, LAW, watch, watch.compile)
        assert sorted(watch.timed) == [*range(rows[0], rows[1] + 1)]
        assert parts[-1].last == rows[1]


def test_what_does_not_compile_is_not_timed() -> None:
    watch, result = Stopwatch(odd_us), tuned(2049)
    assert result.config is not None
    gone = result.config
    watch.refuses = lambda spec: spec.config_binary == gone.binary
    watch.spread(result)
    timed = {c.binary for configs in watch.timed.values() for c in configs if c is not None}
    assert timed
    assert gone.binary not in timed


# --- the result ---------------------------------------------------------------------------------


def test_another_m_has_its_own_choice_and_says_why() -> None:
    a, b, c = (GemmConfig("pointer", side, 64, 32) for side in (16, 32, 64))
    base = TuningResult.unranked(Workload.dense(40, N, K), H100, "auto", a, "fastest")
    result = replace(base, parts=(Part(48, b), Part(56, None, 8.5), Part(64, c)))
    assert [result.at(m).config for m in (33, 40, 48, 49, 57, 64)] == [b, a, b, None, c, c]
    assert result.at(40) is result
    assert f"m=48 expected to be faster than {a}" in result.at(48).why
    assert f"m=49 timed as better around it than {a}" in result.at(49).why
    assert result.at(65).config == a, "past the bucket"
    assert TuningResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


@pytest.mark.parametrize(
    "parts",
    [5, {}, [5], [{}], [{"last": "a", "config": "torch"}], [{"last": 0, "config": "torch"}],
     [{"last": 5, "config": "cublas"}], [{"last": 5, "config": {}}], [{"last": 5}],
     [{"last": 5, "config": "torch", "latency_us": "9"}],
     [{"last": 5, "config": "torch", "latency_us": -1.0}]],
    ids=str,
)  # fmt: skip
def test_parts_of_another_kind_are_refused(parts: Any) -> None:
    data = tuned(2049, 1).to_dict() | {"parts": parts}
    with pytest.raises(InvalidInput, match="not a tuning result"):
        TuningResult.from_dict(data)


# --- calls --------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    # Nothing is computed: in float16 a CPU takes seconds for one of these.
    monkeypatch.setattr("dispatch_fakes.FakeLaunch.__call__", lambda *_: None)
    monkeypatch.setattr(torch, "mm", lambda a, b, **_: a.new_empty(a.shape[0], b.shape[1]))
    machine = Machine(monkeypatch, tmp_path)
    machine.bench.latency_us = timed_us
    return machine


def timed_us(workload: Workload, config: GemmConfig | None) -> float:
    """As the law has it, 20 % more; torch is far slower."""
    return 1.2 * law_us(workload, config) if config else 9 * best_us(workload)


def ask(m: int, mode: str = "auto") -> TuningResult:
    a, b = torch.empty(m, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
    costmodel.matmul(a, b, mode=mode, model=LAW)
    found = costmodel.result_for(a, b, mode=mode, model=LAW)
    assert found is not None
    return found


@pytest.mark.parametrize("mode", ["auto", "predict"])
def test_a_bucket_is_tuned_once_and_each_m_has_what_is_fastest(machine: Machine, mode: str) -> None:
    before = costmodel.stats()
    found = {m: ask(m, mode) for m in range(2060, 2561, 50)}
    done = costmodel.stats().since(before)
    assert done.tuned + done.predicted == 1
    assert len({result.chosen for result in found.values()}) > 1
    for m, result in found.items():
        assert result.config is not None
        workload = Workload.dense(m, N, K)
        assert law_us(workload, result.config) < 1.1 * best_us(workload)


def test_a_later_process_finds_the_parts_on_disk(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {m: ask(m).chosen for m in (2060, 2300, 2560)}
    machine.restart()
    for name in ("spread", "spread_by_timing"):
        monkeypatch.setattr(spreader, name, lambda *_, **__: pytest.fail("found out again"))
    assert {m: ask(m).chosen for m in found} == found


def test_a_single_m_is_never_spread(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("spread", "spread_by_timing"):
        monkeypatch.setattr(spreader, name, lambda *_, **__: pytest.fail("nobody asked"))
    assert ask(2300) is ask(2300)


def test_what_cannot_be_loaded_gives_way_to_the_winner(machine: Machine) -> None:
    winner = ask(2060)
    assert winner.config is not None
    machine.refuses = lambda spec: spec.config_binary != winner.config.binary
    for m in (2300, 2560):
        ask(m)
    launches = {launch.config for launch, *_ in dispatch._launches.young.values()}
    assert launches == {winner.config}


@pytest.mark.parametrize("mode", ["auto", "predict", "never", "background"])
@pytest.mark.parametrize("m", [2060, 2560])
def test_after_warmup_no_m_of_the_bucket_compiles_or_loads(
    machine: Machine, m: int, mode: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("costmodel.warming._blank_operands", blank_operands)
        patch.setattr("costmodel.warming.Target.current", lambda *_: H100)
        patch.setattr(torch.cuda, "current_device", lambda: -1)
        costmodel.warmup([(m, N, K)], mode=mode, model=LAW)
    before = costmodel.stats()
    chosen = {ask(any_m, mode).chosen for any_m in range(2049, 2561, 17)}
    done = costmodel.stats().since(before)
    assert (done.tuned, done.predicted, done.compiled, done.loaded) == (0, 0, 0, 0)
    assert len(chosen) > 1


def test_never_takes_what_its_part_has_and_times_nothing(machine: Machine) -> None:
    winner = ask(2060)
    machine.restart()
    machine.bench.before = lambda: pytest.fail("something is timed")
    assert ask(2060, "never").config == winner.config
    chosen = ask(2560, "never").config
    assert chosen != winner.config
    machine.restart()
    assert ask(2560, "never").config == chosen, "it is on disk"
    machine.bench.before = lambda: None
    machine.restart()
    timed = len(machine.bench.timed)
    ask(2560)
    assert len(machine.bench.timed) > timed, "a prediction does not stand in for timings"
    machine.restart()
    machine.bench.before = lambda: pytest.fail("timed again")
    assert ask(2560).config == ask(2560, "never").config


@pytest.mark.parametrize("tuned_before", [True, False])
def test_threads_with_other_m_tune_once_and_spread_once(
    machine: Machine, tuned_before: bool
) -> None:
    if tuned_before:
        ask(2060)
    ms = [*range(2100, 2500, 50)]
    before, used = costmodel.stats(), len(machine.bench.waited)
    start = threading.Barrier(len(ms))
    found: dict[int, TuningResult] = {}

    def work(m: int) -> None:
        start.wait(60)
        found[m] = ask(m)

    threads = [threading.Thread(target=work, args=(m,)) for m in ms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert costmodel.stats().since(before).tuned == (not tuned_before)
    assert len(machine.bench.waited) == used + 1 + (not tuned_before)
    (entry,) = dispatch.winners.cache.entries()
    assert {m: result.config for m, result in found.items()} == {
        m: entry.result.at(m).config for m in ms
    }


def test_parts_of_an_earlier_release_are_timed(machine: Machine) -> None:
    """They had no timings."""
    ask(2060), ask(2560)
    assert dispatch.winners.cache.path is not None
    (path,) = dispatch.winners.cache.path.glob("*.json")
    data = json.loads(path.read_text())
    for part in data["result"]["parts"]:
        del part["latency_us"]
    path.write_text(json.dumps(data))
    machine.restart()
    used = len(machine.bench.waited)
    ask(2560), ask(2300)
    assert len(machine.bench.waited) == used + 1
    (entry,) = dispatch.winners.cache.entries()
    assert entry.result.parts_timed


@pytest.mark.parametrize("us", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_latency_that_cannot_be_is_none(us: float) -> None:
    watch = Stopwatch(lambda w, c: us if len(str(c)) % 2 else odd_us(w, c))
    result = watch.spread(tuned(2049, torch_us=40.0))
    assert all(part.latency_us is None or part.latency_us > 0 for part in result.parts)
    assert TuningResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


@pytest.mark.parametrize("how", ["refuses", "fails"])
def test_what_failed_is_not_expected_either(how: str) -> None:
    """With time for one part only, the others are expected: of what did not fail there."""
    watch, result = Stopwatch(odd_us, takes_s=60.0), tuned(2049, 1)
    new = {part.config for part in spread(result, ROWS, LAW)} - {result.config}
    assert new
    watch.refuses = lambda spec: (
        how == "refuses"
        and spec in {specialize(replace(result.workload, m=2560), c) for c in new if c is not None}
    )
    watch.fails = lambda _, config: how == "fails" and config in new
    found = watch.spread(result, first=2560)
    assert len(watch.timed) == 2
    timed = {config for configs in watch.timed.values() for config in configs}
    gone = new if how == "refuses" else new & timed
    assert gone
    assert gone.isdisjoint(part.config for part in found.parts)


def in_another_process(machine: Machine, m: int, mode: str = "auto") -> TuningResult:
    """Ask with memory of its own, and put back what this process has."""
    here = dispatch.winners, dispatch._launches, dispatch._background
    machine.restart()
    found = ask(m, mode)
    dispatch.winners, dispatch._launches, dispatch._background = here
    return found


def test_what_another_process_has_timed_is_not_timed_again(machine: Machine) -> None:
    ask(2060)
    there = in_another_process(machine, 2560)
    timed = len(machine.bench.timed)
    assert ask(2560, "never").config == ask(2560).config == there.config
    assert len(machine.bench.timed) == timed
    (entry,) = dispatch.winners.cache.entries()
    assert entry.result.parts_timed


def test_a_budget_for_one_part_is_spent_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("costmodel.spread._BUDGET_S", -1.0)
    for first in (2100, 2300, 2500):
        machine.restart()
        dispatch.winners.cache.clear()
        ask(2060), ask(first)
        timed = len(machine.bench.timed)
        machine.restart()
        ask(first), ask(2200)
        assert len(machine.bench.timed) == timed
        (entry,) = dispatch.winners.cache.entries()
        assert entry.result.parts_timed
        assert len({part.latency_us is None for part in entry.result.parts}) == 2


def test_warmup_loads_the_winner_of_the_m_that_was_tuned(machine: Machine) -> None:
    winner = ask(2060)
    machine.bench.latency_us = lambda w, c: 500.0 if c == winner.config else timed_us(w, c)
    machine.restart()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("costmodel.warming._blank_operands", blank_operands)
        patch.setattr("costmodel.warming.Target.current", lambda *_: H100)
        patch.setattr(torch.cuda, "current_device", lambda: -1)
        costmodel.warmup([(2300, N, K)], model=LAW)
    before = costmodel.stats()
    assert ask(2060).config == winner.config
    assert costmodel.stats().since(before).loaded == 0


def test_the_largest_m_there_is() -> None:
    first = 2**31 - 2**27 - 5
    for n, k in ((2, 1), (1, 1)):
        workload = Workload.dense(first, n, k)
        config = rank(workload, H100, LAW, 1).configs[0]
        result = TuningResult.unranked(workload, H100, "predict", config, "")
        assert spread(result, (first - 9, 2**31), LAW)[-1].last == 2**31 - 1


def test_what_cannot_be_timed_does_not_stop_the_product(machine: Machine) -> None:
    winner = ask(2060)
    machine.restart()

    def refuse() -> None:
        raise OSError(28, "No space left on device")

    machine.bench.before = refuse
    assert ask(2560).config not in (None, winner.config), "what is expected stands"
    deadline = time.monotonic() + 60
    while not (found := launched(2300)) or found.config is None:
        assert time.monotonic() < deadline, "the background leaves it to torch"
        time.sleep(0.005)


def test_a_tuning_is_done_anew_whether_or_not_it_was_spread_meanwhile(machine: Machine) -> None:
    question = winners.Question(Workload.dense(2060, N, K), -1, "auto", LAW)
    broken = dispatch.winners.find(question)
    ask(2560)
    before = costmodel.stats()
    replaced = dispatch.winners.find(question, instead_of=broken)
    assert costmodel.stats().since(before).tuned == 1
    assert dispatch.winners.find(question, instead_of=broken) is replaced


def test_what_was_forgotten_while_the_disk_was_read_stays_forgotten(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(2060)
    in_another_process(machine, 2560)
    read = dispatch.winners.cache.get

    def slow(key: Any) -> TuningResult | None:
        found = read(key)
        dispatch.winners.forget()
        return found

    monkeypatch.setattr(dispatch.winners.cache, "get", slow)
    question = winners.Question(Workload.dense(2300, N, K), -1, "auto", LAW)
    assert dispatch.winners.find(question).parts_timed
    assert dispatch.winners.known(question, on_disk=False) is None


def test_the_second_winner_of_a_bucket_covers_what_the_first_has_nothing_for(
    machine: Machine,
) -> None:
    """It has no parts of its own; the first, which may not run the last m, is to be spread."""
    workload = Workload.dense(1793, 8704, 16384)
    config = GemmConfig("pointer", 16, 128, 64, 4, 3, split_k=16)
    question = winners.Question(workload, -1, "auto", LAW)
    first = replace(dispatch.winners.find(question), config=config)
    last, its_row = at_the_end(question, dispatch.winners.buckets.of(1793))
    dispatch.winners._find(last, its_row, None, True)
    name = memory_key(question, dispatch.winners.buckets.of(1793))
    for parts in ((), (Part(its_row[1], config, 9.0),)):
        dispatch.winners._results[name] = replace(first, parts=parts)
        second = dispatch.winners.known(last)
        assert second is not None
        assert second.workload.m == its_row[1]
        near = replace(question, workload=replace(workload, m=its_row[1] - 1))
        assert dispatch.winners.covers(near, second) == bool(parts)


def test_timing_in_vain_is_not_tried_again(machine: Machine) -> None:
    ask(2060)
    machine.bench.latency_us = lambda *_: float("nan")
    used = len(machine.bench.waited)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dispatch_fakes._ok", lambda _: Measurement("crashed"))
        chosen = {ask(m).chosen for m in (2300, 2400, 2560)}
    assert len(machine.bench.waited) == used + 1
    assert chosen, "what is expected stands"
    question = winners.Question(Workload.dense(2060, N, K), -1, "auto", LAW)
    machine.bench.latency_us = timed_us
    dispatch.winners.tune(question)
    used = len(machine.bench.waited)
    dispatch.forget_launches()
    ask(2300)
    assert len(machine.bench.waited) == used + 1, "of a new tuning it is tried anew"


def test_parts_are_counted_and_wait_only_where_a_call_does(machine: Machine) -> None:
    ask(2060)
    before, timed = costmodel.stats(), len(machine.bench.timed)
    ask(2560)
    done = costmodel.stats().since(before)
    assert done.timed >= len(machine.bench.timed) - timed > 8
    assert machine.bench.waited[-1] is True


def test_what_cannot_be_written_can_still_be_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(2060), ask(3000)
    machine.restart()

    def refuse(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("costmodel.cache.replace_file", refuse)
    with pytest.warns(RuntimeWarning, match="Read-only"):
        ask(2300)
    timed = len(machine.bench.timed)
    ask(3000)
    assert len(machine.bench.timed) == timed, "it is on disk"


def blank_operands(workload: Workload, index: int) -> tuple[torch.Tensor, ...]:
    shapes = (workload.m, workload.k), (workload.k, workload.n), (workload.m, workload.n)
    return (*(torch.empty(s, dtype=torch.float16) for s in shapes), None)  # type: ignore[return-value]


def test_a_capture_takes_what_is_loaded_and_does_not_keep_it(machine: Machine) -> None:
    winner = ask(2060)
    machine.capturing = True
    a, b = torch.empty(2560, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
    costmodel.matmul(a, b, model=LAW)
    assert costmodel.result_for(a, b, model=LAW) is None
    machine.capturing = False
    assert ask(2560).config != winner.config
    machine.capturing = True
    assert ask(2560).config != winner.config, "now it is loaded"


def test_in_the_background_no_call_waits_for_another_part(machine: Machine) -> None:
    loaded_by: set[int] = set()
    machine.refuses = lambda _: bool(loaded_by.add(threading.get_ident()))
    chosen = set()
    for m in (2060, 2300, 2560):
        deadline = time.monotonic() + 60
        while not (found := launched(m)) or found.config != expected(m):
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.005)
        chosen.add(found.config)
    assert len(chosen) > 1
    assert threading.get_ident() not in loaded_by


def test_in_the_background_a_winner_on_disk_serves_until_its_part_is_timed(
    machine: Machine,
) -> None:
    winner = ask(2060)
    machine.restart()
    go_on = threading.Event()
    machine.bench.before = lambda: go_on.wait(60)

    def becomes(wanted: Callable[[TuningResult], bool]) -> None:
        deadline = time.monotonic() + 60
        while not (found := launched(2560)) or not wanted(found):
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.005)

    becomes(lambda found: found.config == winner.config)
    go_on.set()
    becomes(lambda found: found.config not in (None, winner.config))


def launched(m: int) -> TuningResult | None:
    a, b = torch.empty(m, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)
    costmodel.matmul(a, b, mode="background", model=LAW)
    return costmodel.result_for(a, b, mode="background", model=LAW)


def expected(m: int) -> GemmConfig | str | None:
    """What a bucket that was tuned, and spread, has for an m."""
    question = winners.Question(Workload.dense(m, N, K), -1, "auto", LAW)
    found = dispatch.winners.known(question)
    if found is None or not dispatch.winners.covers(question, found):
        return "not known yet"
    return found.at(m).config
