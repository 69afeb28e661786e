"""Plans a bucket of m from the tuning of one of them.

The bucket is cut into a few slices. For each, the few configurations that are expected to be
fastest are timed in turn, with torch, at its first m, its last and the one before: the last is a
multiple of many, the others are not, and cuBLAS, which chooses its kernel by m as it likes, may
take half as long again for one of them, or up to some m within the slice. Where nothing is timed,
the expectation chooses. A configuration without a binary is considered only where it is expected
to gain more than a prediction errs, so that a bucket has few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import median
from typing import NamedTuple

from costmodel.data.candidates import CostModel
from costmodel.data.measurement import Runner
from costmodel.errors import InvalidInput, NotRecorded
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import Workload
from costmodel.tuning.bucket_plan import (
    BucketPlan,
    Segment,
    Times,
    TimesAt,
    cut,
    fastest_for_all,
)
from costmodel.tuning.ranking import Answering, rank_by
from costmodel.tuning.tuner import Compile
from costmodel.tuning.tuning_result import Costs, TuningResult

_SLICES = 8
_LOOKED_AT = 16  # first choices, for one that is new
_NEW_GAINS = 1.02  # how many times faster it must be
# What cuBLAS takes for another m is known less well than what a configuration does.
_TORCH_GAINS = 1.05
_FINALISTS = 2  # and the one that the model has first
_ROUNDS = 5
_BUDGET_S = 1.0


def plan_by_prediction(
    result: TuningResult,
    m_range: tuple[int, int],
    model: CostModel,
    *,
    attempted: bool = False,
) -> BucketPlan:
    """Plan the bucket of a result by what is expected of its other m.

    Args:
        m_range: the first and the last m of the bucket.
        model: the one that ranked, or one that knows as much.
        attempted: of :class:`BucketPlan`.
    """
    if result.config is None and not result.timed:  # torch is predicted to be faster by far
        return BucketPlan((Segment(m_range[1], None),), attempted)
    slices = _slices(Extrapolation(result, m_range, model))
    return BucketPlan.of(
        (Segment(each.last, each.forecast.choice(result)) for each in slices), attempted=attempted
    )


def plan_by_timing(
    result: TuningResult,
    m_range: tuple[int, int],
    model: CostModel,
    runner: Runner,
    compile_: Compile,
    *,
    first: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[BucketPlan, Costs]:
    """Plan the bucket of a result by timing the finalists at three m of each slice.

    After about a second of that, and where nothing can be timed, the expectation stands.

    Args:
        m_range, model: as for :func:`plan_by_prediction`.
        runner, compile_: what times and compiles.
        first: an m whose slice is timed before the others; default: they ascend.
        clock: in seconds.

    Returns:
        (plan, costs): ``costs.compiled`` counts configurations that had no binary.
    """
    start = clock()
    slices = _slices(Extrapolation(result, m_range, model))
    ranked = clock()
    slices = _compiled(slices, result, compile_)
    compiled = clock()
    timer = _Timer(runner)
    times: dict[int, list[TimesAt]] = {}
    try:
        for each in sorted(slices, key=lambda each: first is not None and each.last < first):
            if not times or clock() < compiled + _BUDGET_S:
                times[each.last] = timer.sample(each)
    finally:
        runner.rest()
    tried = {config for config, _ in result.measured}
    new = {c for each in slices for c in each.finalists if c is not None and c not in tried}
    costs = Costs(
        ranked - start, compiled - ranked, clock() - compiled, compiled=len(new), timed=timer.timed
    )
    segments = _segments(result, slices, times, timer.fatal)
    return BucketPlan.of(segments, attempted=True), costs


# --- what is expected ---------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A configuration that was tried, what it is expected to take, and what the model says."""

    config: GemmConfig
    expected_us: float
    predicted_us: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """The latencies expected at one m.

    Attributes:
        candidates: what was tried for the m that was tuned and works, fastest first.
        new: the first choice that was not tried and is known to compile, and its us.
        torch_us: of ``torch.matmul``; None where it was not timed.
    """

    candidates: tuple[Candidate, ...]
    new: tuple[GemmConfig, float] | None
    torch_us: float | None

    def without(self, failed: Collection[GemmConfig | None]) -> Forecast:
        """The same without configurations that do not work."""
        candidates = tuple(each for each in self.candidates if each.config not in failed)
        new = None if self.new is None or self.new[0] in failed else self.new
        return replace(self, candidates=candidates, new=new)

    def finalists(self) -> tuple[GemmConfig | None, ...]:
        """The few that may be the fastest; None is torch."""
        configs: list[GemmConfig | None] = [each.config for each in self.candidates[:_FINALISTS]]
        # A timing for another m can mislead as well: it may have been an unlucky one.
        foremost = min(self.candidates, key=lambda each: each.predicted_us, default=None)
        if foremost is not None and foremost.config not in configs:
            configs.append(foremost.config)
        if (new := self._better()) is not None:
            configs.append(new[0])
        if self.torch_us is not None:
            configs.append(None)
        return tuple(configs)

    def choice(self, result: TuningResult) -> GemmConfig | None:
        """Return the configuration expected to be fastest.

        torch (None) only if it is so by more than its time varies.

        Args:
            result: of the tuning; its choice stands where nothing is expected.
        """
        torch_us = self.torch_us
        best = self._better() or next((each[:2] for each in self.candidates), None)
        if best is None:
            return None if torch_us is not None else result.config
        gains = 1.0 if result.config is None else _TORCH_GAINS
        return None if torch_us is not None and gains * torch_us < best[1] else best[0]

    def _better(self) -> tuple[GemmConfig, float] | None:
        """The new configuration, where it gains more than predictions err."""
        if self.new is None:
            return None
        gains = not self.candidates or self.candidates[0].expected_us > _NEW_GAINS * self.new[1]
        return self.new if gains else None


@dataclass(frozen=True)
class Extrapolation:
    """Extrapolates the timings of one tuning to the other m of its bucket.

    A configuration that was timed is expected to take what it took, times what the model makes of
    the other m. One that was not is expected to take what the model says, times the factor by
    which the model was off where it can be compared.

    Attributes:
        result: of the tuning.
        m_range: the first and the last m of the bucket.
        model: that ranked, or one that knows as much.
    """

    result: TuningResult
    m_range: tuple[int, int]
    model: CostModel

    def at(self, m: int) -> Forecast:
        """Forecast the same product with another m."""
        workload = replace(self.result.workload, m=m)
        there = self._predicted(workload, [*self._factors])
        candidates = [Candidate(c, us * self._factors[c], us) for c, us in there.items()]
        return Forecast(
            tuple(sorted(candidates, key=lambda each: each.expected_us)),
            self._new(workload),
            self._torch_us(workload),
        )

    @cached_property
    def _factors(self) -> dict[GemmConfig, float]:
        """Measured over predicted latency of each configuration.

        If nothing was timed: 1, for the one that was chosen.
        """
        result = self.result
        timed = {c: m.latency_us for c, m in result.measured if m.ok} if result.timed else {}
        asked = list(timed) or [c for c in (result.config,) if c is not None]
        predicted = self._predicted(result.workload, asked)
        return {c: timed.get(c, us) / us for c, us in predicted.items()}

    def _predicted(
        self, workload: Workload, configs: Sequence[GemmConfig]
    ) -> dict[GemmConfig, float]:
        """Predicted us by configuration; without those that are known not to compile."""
        if not configs:
            return {}
        try:
            ranking = rank_by(Answering(self.model), workload, self.result.target, configs=configs)
        except InvalidInput:  # none of them compiles
            return {}
        return dict(zip(ranking.configs, ranking.cost.tolist(), strict=True))

    def _new(self, workload: Workload) -> tuple[GemmConfig, float] | None:
        """Only what is known to compile: a program may compile it without a child that may die."""
        tried = {config for config, _ in self.result.measured}
        factor = median(self._factors.values()) if self._factors else 1.0
        largest = replace(workload, m=self.m_range[1])
        ranking = rank_by(
            Answering(self.model), workload, self.result.target, _LOOKED_AT, largest=largest
        )
        columns = zip(ranking.configs, ranking.candidates.has_artifact, ranking.cost, strict=True)
        for config, compiles, us in columns:
            if compiles and config not in tried:
                return config, float(us) * factor
        return None

    def _torch_us(self, workload: Workload) -> float | None:
        result = self.result
        if result.torch is None or not result.torch.ok:
            return None
        products = (workload, result.workload)
        there, here = (self.model.predict_torch(w, result.target) for w in products)
        if not (here > 0 and there / here > 0):  # the model has not learned it
            device = result.target.device
            there, here = (device.roofline_us(w.flops(), w.bytes(), w.code.kind) for w in products)
        return result.torch.latency_us * there / here


# --- what is timed ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slice:
    """An eighth of a bucket, to be decided.

    Attributes:
        first: its first m.
        workload: the product of its last m.
        forecast: chooses where nothing can be timed.
        finalists: are timed; None is torch.
    """

    first: int
    workload: Workload
    forecast: Forecast
    finalists: tuple[GemmConfig | None, ...]

    @property
    def last(self) -> int:
        return self.workload.m

    @property
    def sample(self) -> list[int]:
        """The m that are timed; of columns only those that are as aligned as the workload's."""
        code, last = self.workload.code, self.last
        step = max(
            1,
            code.a_align // code.itemsize if code.a_layout == "col" else 1,
            code.c_align // code.out_itemsize if code.c_layout == "col" else 1,
        )
        aligned = {self.first + -self.first % step, *(m - m % step for m in (last - 1, last))}
        return sorted(m for m in aligned if self.first <= m <= last)


def _slices(extrapolation: Extrapolation) -> list[_Slice]:
    """Each ends at a multiple of many m: a tile more or less matters there."""
    first, last = extrapolation.m_range
    size = last - first + 1
    count = min(_SLICES, size)
    found: list[_Slice] = []
    for i in range(count):
        end = first - 1 + -(-size * (i + 1) // count)
        begin = found[-1].last + 1 if found else first
        forecast = extrapolation.at(end)
        workload = replace(extrapolation.result.workload, m=end)
        found.append(_Slice(begin, workload, forecast, forecast.finalists()))
    return found


def _compiled(slices: Sequence[_Slice], result: TuningResult, compile_: Compile) -> list[_Slice]:
    """Compile all finalists before any is timed; drop those that do not compile."""
    specs = {
        config: specialize(result.workload, config)
        for each in slices for config in each.finalists if config is not None
    }  # fmt: skip
    made = compile_(list(dict.fromkeys(specs.values())), result.target)
    bad = {artifact.spec for artifact in made if not artifact.ok}
    failed = {config for config, spec in specs.items() if spec in bad}
    return [
        replace(
            each,
            forecast=each.forecast.without(failed),
            finalists=tuple(config for config in each.finalists if config not in failed),
        )
        for each in slices
    ]


class _Timer:
    """Times finalists.

    Attributes:
        timed: how many timings there were.
        fatal: configurations that ended the timing process, which may have taken a minute: they
            are not tried again.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.timed = 0
        self.fatal: set[GemmConfig | None] = set()

    def sample(self, each: _Slice) -> list[TimesAt]:
        """The times at the m that stand for a slice.

        Left out is an m that a recording lacks, and one that there was no memory for.
        """
        found = ((m, self._times(each, m)) for m in each.sample)
        return [(m, times) for m, times in found if times is not None]

    def _times(self, each: _Slice, m: int) -> Times | None:
        configs = [config for config in each.finalists if config not in self.fatal]
        if not configs:
            return {}
        try:
            found = self._runner.compare(replace(each.workload, m=m), configs, _ROUNDS)
        except NotRecorded:
            return None
        self.timed += len(configs)
        timed = [*zip(configs, found, strict=True)]
        self.fatal.update(config for config, m in timed if m.status in ("crashed", "timeout"))
        works = {config: m.latency_us for config, m in timed if m.ok and 0 < m.latency_us < inf}
        return None if not works and any(m.no_room for _, m in timed) else works


def _segments(
    result: TuningResult,
    slices: Sequence[_Slice],
    times: Mapping[int, Sequence[TimesAt]],
    fatal: Collection[GemmConfig | None],
) -> Iterator[Segment]:
    """The fastest of each slice, which is cut where no choice is fast at all its m."""
    before = result.config
    failed = {
        config
        for each in slices for _, there in times.get(each.last, ())
        for config in each.finalists if config not in there
    }.union(fatal)  # fmt: skip
    for each in slices:
        timed = times.get(each.last, ())
        if not timed:
            yield Segment(each.last, each.forecast.without(failed).choice(result))
            continue
        for last, there in cut(timed, each.last):
            before = fastest_for_all(there, (result.config, before, None))
            yield Segment(last, before, there[-1].get(before))
