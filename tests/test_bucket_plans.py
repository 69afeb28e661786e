"""What computes the other m of a bucket: what is expected to be fastest there, little of it new."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from bucket_fakes import H100, LAW, ROWS, K, Law, N, best_us, is_timed, law_us, tuned
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.compile.compiler import Artifact
from costmodel.data.measurement import NO_ROOM, Measurement, Runner
from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.space import why_illegal
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import MOST, Workload
from costmodel.hardware.target import Target
from costmodel.tuning.planning import plan_by_prediction, plan_by_timing
from costmodel.tuning.ranking import rank
from costmodel.tuning.tuning_key import Buckets
from costmodel.tuning.tuning_result import BucketPlan, Segment, TuningResult


def segments(result: TuningResult) -> tuple[Segment, ...]:
    assert result.plan is not None
    return result.plan.segments


def predicted(
    result: TuningResult, m_range: tuple[int, int] = ROWS, model: Law = LAW
) -> tuple[Segment, ...]:
    return plan_by_prediction(result, m_range, model).segments


def configs(of: Sequence[Segment]) -> set[GemmConfig | None]:
    return {segment.config for segment in of}


# --- the parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("m", [2049, 2300, 2560])
def test_every_part_is_computed_by_nearly_the_best(m: int, timed: bool) -> None:
    result = tuned(m, timed=timed)
    result = replace(result, plan=plan_by_prediction(result, ROWS, LAW))
    lasts = [segment.last for segment in segments(result)]
    assert lasts == sorted(set(lasts))
    assert lasts[-1] == ROWS[1]
    worst_alone = 1.0
    for last in range(ROWS[0] + 63, ROWS[1] + 1, 64):
        workload = Workload.dense(last, N, K)
        config = result.at(last).config
        assert config is not None
        assert not why_illegal(config, workload, H100.device)
        assert law_us(workload, config) <= 1.021 * best_us(workload)
        assert result.config is not None
        worst_alone = max(worst_alone, law_us(workload, result.config) / best_us(workload))
    assert worst_alone > 1.1, "else one winner would do for all"


def test_what_is_there_is_taken_unless_something_new_gains_more_than_predictions_err() -> None:
    """With all of the space timed nothing is new; with one configuration timed most is."""
    every, one = tuned(2049, 10**6), tuned(2049, 1)
    for result in (every, one):
        parts = predicted(result)
        there = {config for config, _ in result.measured}
        for segment in parts:
            workload = Workload.dense(segment.last, N, K)
            if segment.config not in there:
                assert result is one
                assert segment.config is not None
                gained = min(law_us(workload, c) for c in there) / law_us(workload, segment.config)
                assert gained > 1.02


def test_timings_count_for_more_than_what_was_predicted_of_them() -> None:
    """The second choice takes a tenth of what was predicted: so it will elsewhere."""
    result = tuned(2049)
    _, second, *_ = (config for config, _ in result.measured)
    measured = dict(result.measured)
    measured[second] = Measurement("ok", 0.1 * law_us(result.workload, second))
    result = replace(result, config=second, measured=tuple(measured.items()))
    assert predicted(result) == (Segment(ROWS[1], second),)


@pytest.mark.fault("B13")
@pytest.mark.parametrize("status", ["wrong_result", "crashed", "too_slow", "compile_error"])
def test_what_failed_where_it_was_tuned_is_chosen_nowhere(status: Any) -> None:
    result = tuned(2049)
    failed, *rest = result.measured
    outcome = Measurement(status, 900.0 if status == "too_slow" else float("nan"))
    measured = ((failed[0], outcome), *rest)
    result = replace(result, config=rest[0][0], measured=measured)
    parts = predicted(result)
    assert failed[0] not in configs(parts)


def test_what_is_not_known_to_compile_is_not_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costmodel.models.registry.model_directory", lambda target: None)
    law = Law()
    law.directory = None
    result = tuned(2049)
    there = {config for config, _ in result.measured}
    assert configs(predicted(result, model=law)) <= there


def test_torch_is_taken_where_it_is_expected_to_be_faster_by_more_than_it_varies() -> None:
    torch_us = 1.2 * 1.1 * law_us(Workload.dense(2049, N, K), GemmConfig("pointer", 128, 128, 32))
    for factor, expected in ((0.1, {None}), (10.0, None)):
        result = tuned(2049, torch_us=factor * torch_us)
        chosen = configs(predicted(result))
        assert chosen == expected if expected else None not in chosen


def test_torch_predicted_is_torch_for_all() -> None:
    result = replace(tuned(2049, timed=False), config=None)
    assert predicted(result) == (Segment(ROWS[1], None),)


@pytest.mark.parametrize("m", [1, 2, 3, 2**30 + 1, 2**31 - 2**27 - 5])
def test_buckets_of_any_size_have_parts(m: int) -> None:
    workload = Workload.dense(m, 1, 1)
    config = rank(workload, H100, LAW, 1).configs[0]
    m_range = Buckets().range_of(workload)
    parts = predicted(TuningResult.unranked(workload, H100, "predict", config, ""), m_range)
    assert parts[-1].last == m_range[1] <= MOST
    assert len(parts) <= 8


# --- by timing ----------------------------------------------------------------------------------


class Stopwatch(Runner):
    """Times by a law of its own, and can fail; each timing takes its time.

    Attributes:
        compiled, timed, rested: what was asked for.
    """

    def __init__(self, law: Callable[[Workload, GemmConfig | None], float], takes_s: float = 0.0):
        self.law, self._takes_s, self.now_s = law, takes_s, 0.0
        self.compiled: set[Specialization] = set()
        self.timed: dict[int, list[GemmConfig | None]] = {}
        self.rested = 0
        self.failure: Any = "wrong_result"
        self.error = ""
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
            Measurement(self.failure, error=self.error) if self.fails(workload, c) else
            Measurement("ok", self.law(workload, c))
            for c in configs
        ]  # fmt: skip

    def measure(self, *_: Any) -> list[Measurement]:
        raise AssertionError("not in turn")

    measure_torch = measure  # type: ignore[assignment]

    def rest(self) -> None:
        self.rested += 1

    def plan(self, result: TuningResult, first: int | None = None) -> TuningResult:
        plan, self.costs = plan_by_timing(
            result, ROWS, LAW, self, self.compile, first=first, clock=lambda: self.now_s
        )
        return replace(result, plan=plan)


JUMPING = tuned(2049, torch_us=10.0)


def odd_us(workload: Workload, config: GemmConfig | None) -> float:
    """What the model does not know: torch and every third configuration wins at times."""
    if config is None:
        return best_us(workload) * (0.5 if workload.m // 64 % 3 == 0 else 2.0)
    return law_us(workload, config) * (1 + len(str(config)) * workload.m // 64 % 3)


@pytest.mark.parametrize("torch_us", [None, 40.0])
def test_of_each_part_what_is_timed_as_fastest_is_taken(torch_us: float | None) -> None:
    watch, result = Stopwatch(odd_us), tuned(2049, torch_us=torch_us)
    result = watch.plan(result)
    assert len(segments(result)) > 1
    assert len(watch.timed) == 24
    for m, configs in watch.timed.items():
        workload = Workload.dense(m, N, K)
        assert 2 <= len(configs) <= 5
        assert (None in configs) == (torch_us is not None)
        assert {specialize(workload, c) for c in configs if c is not None} <= watch.compiled
        if m == 2049:  # the one that was tuned keeps its winner
            continue
        taken_us = odd_us(workload, result.at(m).config)
        assert taken_us <= 1.01 * 1.02 * min(odd_us(workload, config) for config in configs)
    assert watch.rested == 1
    assert watch.costs.timed == sum(map(len, watch.timed.values()))
    assert is_timed(result)
    for segment in segments(result):
        there = [m for m in watch.timed if result.at(m).config == segment.config]
        took = {odd_us(Workload.dense(m, N, K), segment.config) for m in there}
        assert segment.latency_us in took
    assert {segment.last % 64 for segment in segments(result)} == {0, 32, 63}, "some are cut"
    text = json.dumps(result.to_dict())
    assert json.dumps(TuningResult.from_dict(json.loads(text)).to_dict()) == text


@settings(max_examples=20, deadline=None)
@given(jump=st.integers(ROWS[0] + 1, ROWS[1]), faster_first=st.booleans())
@pytest.mark.slow
def test_a_jump_within_a_part_is_missed_by_half_of_it_at_most(
    jump: int, faster_first: bool
) -> None:
    """As cuBLAS has one, where it goes over to another kernel."""

    def torch_is_faster(m: int) -> bool:
        return (m < jump) == faster_first

    watch = Stopwatch(lambda w, c: 10.0 if c else 5.0 if torch_is_faster(w.m) else 20.0)
    result = watch.plan(JUMPING)
    others = range(ROWS[0] + 1, ROWS[1] + 1)  # the first is the one that was tuned
    wrong = {m for m in others if (result.at(m).config is None) != torch_is_faster(m)}
    assert len(wrong) <= 32
    assert not wrong & set(watch.timed)
    assert len(segments(result)) == 2


def test_what_is_as_fast_as_the_winner_does_not_replace_it() -> None:
    result = Stopwatch(lambda w, c: 7.0 if c else 7.5).plan(tuned(2049, torch_us=7.5))
    assert [segment.config for segment in segments(result)] == [result.config]


@pytest.mark.fault("N11")
def test_torch_is_taken_where_it_is_close() -> None:
    result = Stopwatch(lambda w, c: 7.0 if c else 7.1).plan(tuned(2049, torch_us=7.5))
    assert [(segment.config, segment.latency_us) for segment in segments(result)] == [(None, 7.1)]


def test_without_time_the_part_that_is_asked_for_is_timed_and_the_rest_expected() -> None:
    watch = Stopwatch(odd_us, takes_s=60.0)
    result = watch.plan(tuned(2049), first=2300)
    assert set(watch.timed) == {2241, 2303, 2304}
    timed = {each.last for each in segments(result) if each.latency_us is not None}
    assert timed <= {2303, 2304}
    others = [m for m in range(2112, 2561, 64) if m != 2304]
    assert [result.at(m).config for m in others] == [
        replace(result, plan=plan_by_prediction(result, ROWS, LAW)).at(m).config for m in others
    ]


def test_what_fails_in_a_part_is_not_taken_there() -> None:
    watch, result = Stopwatch(odd_us), tuned(2049, torch_us=40.0)
    watch.fails = lambda w, c: c is None or c == result.config
    found = watch.plan(result)
    assert configs(segments(found)).isdisjoint({None, result.config})
    watch.fails = lambda *_: True
    found = watch.plan(result)
    assert segments(found) == (Segment(ROWS[1], None),), "torch, where nothing works"
    assert not is_timed(found)
    assert watch.rested == 2


def test_without_memory_to_time_in_what_is_expected_stands() -> None:
    watch, result = Stopwatch(odd_us), tuned(2049, torch_us=40.0)
    watch.fails, watch.failure = lambda *_: True, "out_of_resources"
    watch.error = f"{NO_ROOM} for the operands"
    assert segments(watch.plan(result)) == predicted(result)


@pytest.mark.parametrize("status", ["crashed", "wrong_result"])
def test_where_all_fails_at_one_m_torch_serves_around_it(status: Any) -> None:
    """torch was not timed here. A choice for the other m of the part may not reach as far."""
    watch, result = Stopwatch(odd_us), tuned(2049)
    watch.fails, watch.failure = lambda w, _: w.m > 2300, status
    found = watch.plan(result)
    assert found.at(2241).config is not None, "which works"
    for m in range(2302, ROWS[1] + 1):
        assert found.at(m).config is None


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
    watch.plan(replace(result, workload=workload))
    step = align // 2 if "col" in layouts else 1
    assert watch.timed
    assert all(m % step == 0 for m in watch.timed)
    assert len(watch.timed) >= 8


@pytest.mark.parametrize("status", ["crashed", "timeout"])
def test_what_ends_the_timing_process_is_timed_once(status: Any) -> None:
    """Each time may cost a minute; what fails in another way may work for another m."""
    watch, result = Stopwatch(odd_us), tuned(2049)
    watch.fails, watch.failure = lambda _, config: config == result.config, status
    found = watch.plan(result)
    assert sum(result.config in configs for configs in watch.timed.values()) == 1
    assert result.config not in configs(segments(found))
    watch.timed.clear()
    watch.failure = "out_of_resources"
    watch.plan(result)
    assert sum(result.config in configs for configs in watch.timed.values()) > 1


def test_small_buckets_are_timed_at_each_m() -> None:
    watch = Stopwatch(odd_us)
    for rows in ((3, 3), (5, 6), (17, 20)):
        first = Workload.dense(rows[0], N, K)
        config = rank(first, H100, LAW, 1).configs[0]
        result = replace(tuned(2049, 1), workload=first, config=config)
        watch.timed.clear()
        plan, _ = plan_by_timing(result, rows, LAW, watch, watch.compile)
        assert sorted(watch.timed) == [*range(rows[0], rows[1] + 1)]
        assert plan.segments[-1].last == rows[1]


@pytest.mark.parametrize("how", ["refuses", "fails"])
def test_what_failed_is_not_expected_either(how: str) -> None:
    """With time for one part only, the others are expected: of what did not fail there."""
    watch, result = Stopwatch(odd_us, takes_s=60.0), tuned(2049, 1)
    new = configs(predicted(result)) - {result.config}
    assert new
    watch.refuses = lambda spec: (
        how == "refuses"
        and spec in {specialize(replace(result.workload, m=2560), c) for c in new if c is not None}
    )
    watch.fails = lambda _, config: how == "fails" and config in new
    found = watch.plan(result, first=2560)
    assert len(watch.timed) == 3
    timed = {config for configs in watch.timed.values() for config in configs}
    assert timed.isdisjoint(new) or how == "fails", "what does not compile is not timed"
    gone = new if how == "refuses" else new & timed
    assert gone
    assert gone.isdisjoint(configs(segments(found)))


# --- the result ---------------------------------------------------------------------------------


def test_another_m_has_its_own_choice_and_says_why() -> None:
    a, b, c = (GemmConfig("pointer", side, 64, 32) for side in (16, 32, 64))
    base = TuningResult.unranked(Workload.dense(40, N, K), H100, "auto", a, "fastest")
    plan = BucketPlan((Segment(48, b), Segment(56, None, 8.5), Segment(64, c)))
    result = replace(base, plan=plan)
    assert [result.at(m).config for m in (33, 40, 48, 49, 57, 64)] == [b, a, b, None, c, c]
    assert [result.config_at(m) for m in (33, 40, 48, 49, 57, 64)] == [b, a, b, None, c, c]
    assert result.at(40) is result
    assert f"m=48 expected to be faster than {a}" in result.at(48).why
    assert f"m=49 timed as better around it than {a}" in result.at(49).why
    assert result.at(65).config == a, "past the bucket"
    text = json.dumps(result.to_dict())
    assert json.dumps(TuningResult.from_dict(json.loads(text)).to_dict()) == text


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
