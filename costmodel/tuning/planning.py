"""Plans a bucket of m from the tuning of one of them.

The number of tiles and of waves changes from one m to the next, and with it the fastest
configuration: the winner of another m was seen to take half as long again. So the bucket is cut
into a few slices. For each slice, the few configurations that are expected to be fastest are timed
in turn, with torch, at three m: the first, the last, and the one before the last. The last is a
multiple of many numbers, the others are not. cuBLAS chooses its kernel by m in its own way, and may
take half as long again at one of the three, or up to some m within the slice. Where nothing is
timed, the expectation decides. A configuration without a binary is considered only if its expected
gain is larger than the error of a prediction, so that a bucket has few binaries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby, pairwise
from math import inf
from statistics import median
from typing import NamedTuple

from costmodel.data.candidates import CostModel
from costmodel.data.measurement import Runner
from costmodel.errors import InvalidInput, NotRecorded
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import Workload
from costmodel.tuning.ranking import Answering, rank_by
from costmodel.tuning.search import LIBRARY_COUNTS, fastest
from costmodel.tuning.tuner import Compile
from costmodel.tuning.tuning_result import BucketPlan, Costs, OrTorch, Segment, TuningResult

_SLICES = 8
_LOOKED_AT = 16  # first choices of the model, to find a new configuration
_NEW_GAINS = 1.02  # how many times faster the new one must be
# The time of cuBLAS at another m is known less well than that of a configuration.
_TORCH_GAINS = 1.05
_FINALISTS = 2  # and the model's first choice
_ROUNDS = 5
_BUDGET_S = 1.0
_AS_FAST = 1.01  # a configuration that is already in use is kept if it is that near the fastest
_APART = 1.02  # a segment is cut if one choice would be slower by more at one of its m

TimesAt = tuple[int, Mapping[OrTorch, float]]
"""An m, and the us of each configuration that works there; None is torch. Empty: nothing works."""


def plan_by_prediction(
    result: TuningResult, m_range: tuple[int, int], model: CostModel, *, attempted: bool = False
) -> BucketPlan:
    """Plan the bucket of a result by the latencies expected at its other m.

    Args:
        m_range: the first and the last m of the bucket.
        model: the one that ranked, or one of the same hash.
        attempted: as in :class:`BucketPlan`.
    """
    if result.config is None and not result.timed:  # torch is predicted to be faster by far
        return BucketPlan((Segment(m_range[1], None),), attempted)
    return _planned(result, _slices(result, m_range, model), (), attempted)


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

    After about a second of timing, and where nothing can be timed, the expectation decides.

    Args:
        m_range, model: as for :func:`plan_by_prediction`.
        runner, compile_: time and compile the finalists.
        first: an m whose slice is timed before the others; default: they ascend.
        clock: returns seconds.

    Returns:
        (plan, costs): ``costs.compiled`` counts configurations that had no binary.
    """
    start = clock()
    slices = _slices(result, m_range, model)
    ranked = clock()
    finalists = {c for each in slices for c in each.finalists if c is not None}
    failed = _refused(finalists, result, compile_)  # what ends the timing process is added to it
    compiled = clock()
    timed = 0
    try:
        for each in sorted(slices, key=lambda each: first is not None and each.last < first):
            if timed and clock() >= compiled + _BUDGET_S:
                break
            timed += each.measure(runner, failed)
    finally:
        runner.rest()
    costs = Costs(
        ranked - start, compiled - ranked, clock() - compiled,
        compiled=len(finalists - {config for config, _ in result.measured}), timed=timed,
    )  # fmt: skip
    lost = {c for s in slices for _, times in s.times for c in s.finalists if c not in times}
    return _planned(result, slices, failed | lost, attempted=True), costs


def _refused(
    configs: Collection[GemmConfig], result: TuningResult, compile_: Compile
) -> set[OrTorch]:
    """Compile all finalists before any is timed; return those that do not compile."""
    specs = {config: specialize(result.workload, config) for config in configs}
    made = compile_(list(dict.fromkeys(specs.values())), result.target)
    bad = {artifact.spec for artifact in made if not artifact.ok}
    return {config for config, spec in specs.items() if spec in bad}


def _planned(
    result: TuningResult, slices: Sequence[_Slice], failed: Collection[OrTorch], attempted: bool
) -> BucketPlan:
    """Join neighbouring segments with the same choice, if both are timed, or both are not."""
    segments = groupby(
        _segments(result, slices, failed), key=lambda each: (each.config, each.latency_us is None)
    )
    return BucketPlan(tuple([*alike][-1] for _, alike in segments), attempted)


def _segments(
    result: TuningResult, slices: Sequence[_Slice], failed: Collection[OrTorch]
) -> Iterator[Segment]:
    """The fastest of each slice, which is cut if no choice is fast at all its m.

    Args:
        failed: configurations that are not chosen where nothing was timed.
    """
    before = result.config
    for each in slices:
        if not each.times:
            yield Segment(each.last, each.expected(result, failed))
            continue
        for last, run in _cut(each.times, each.last):
            before, _ = _fastest(run, (result.config, before, None))
            yield Segment(last, before, run[-1][1].get(before))


# --- what is expected ---------------------------------------------------------------------------


class _Tried(NamedTuple):
    """A configuration that was tried, with its expected latency and the one by the model alone."""

    config: GemmConfig
    expected_us: float
    predicted_us: float


@dataclass
class _Slice:
    """An eighth of a bucket, to be decided.

    Attributes:
        first: its first m.
        workload: the product of its last m, for which latencies are expected.
        tried: configurations that were tried at the tuned m and work, fastest first.
        new: the first choice that was not tried and is known to compile, and its expected us.
        torch_us: expected of ``torch.matmul``; infinite where it was not timed.
        finalists: the few that may be the fastest; None is torch.
        times: of the finalists, ascending by m; empty where nothing could be timed.
    """

    first: int
    workload: Workload
    tried: list[_Tried]
    new: tuple[GemmConfig, float] | None
    torch_us: float
    finalists: list[OrTorch] = field(init=False)
    times: list[TimesAt] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A timing at another m can mislead too, for example if it was an unlucky one.
        by_prediction = sorted(self.tried, key=lambda each: each.predicted_us)
        foremost = [each.config for each in (*self.tried[:_FINALISTS], *by_prediction[:1])]
        self.finalists = [*dict.fromkeys(foremost)]
        if self.new and self._gains(self.tried):
            self.finalists.append(self.new[0])
        if self.torch_us < inf:
            self.finalists.append(None)

    @property
    def last(self) -> int:
        return self.workload.m

    def expected(self, result: TuningResult, failed: Collection[OrTorch]) -> OrTorch:
        """Return the configuration expected to be fastest.

        torch (None) only if it is expected to be faster by more than its time varies.

        Args:
            result: of the tuning; its choice stands if no latency is expected.
            failed: configurations that do not work.
        """
        tried = [each for each in self.tried if each.config not in failed]
        config, us = tried[0][:2] if tried else (result.config, inf)
        if self.new and self.new[0] not in failed and self._gains(tried):
            config, us = self.new
        gains = 1.0 if result.config is None else _TORCH_GAINS
        return None if gains * self.torch_us < us else config

    def _gains(self, tried: Sequence[_Tried]) -> bool:
        """Return True if the new configuration gains more than predictions err."""
        if self.new is None:
            return False
        return not tried or tried[0].expected_us > _NEW_GAINS * self.new[1]

    @property
    def _sample(self) -> list[int]:
        """The m that are timed; with column-major A or C, only m as aligned as the workload's."""
        along_m = (x for x in self.workload.code.matrices if x.in_memory[1] == "m")
        step, last = max((x.align // x.itemsize for x in along_m), default=1), self.last
        aligned = {self.first + -self.first % step, *(m - m % step for m in (last - 1, last))}
        return sorted(m for m in aligned if self.first <= m <= last)

    def measure(self, runner: Runner, failed: set[OrTorch]) -> int:
        """Time the finalists at the m that stand for the slice; return how many timings that took.

        An m is left out if a recording lacks it, if there was no memory for it, or if its timings
        scatter too much to tell the fastest.

        Args:
            failed: configurations that are not timed. One that ends the timing process, which may
                have taken a minute, is added, so that it is not tried again.
        """
        timed = 0
        for m in self._sample:
            configs = [config for config in self.finalists if config not in failed]
            try:
                workload = replace(self.workload, m=m)
                found = runner.compare(workload, configs, _ROUNDS) if configs else []
            except NotRecorded:
                continue
            timed += len(configs)
            pairs = [*zip(configs, found, strict=True)]
            failed.update(config for config, x in pairs if x.status in ("crashed", "timeout"))
            works = {config: x for config, x in pairs if x.ok}
            if works and fastest(works)[1]:
                continue
            if works or not any(x.no_room for x in found):
                self.times.append((m, {config: x.latency_us for config, x in works.items()}))
        return timed


def _slices(result: TuningResult, m_range: tuple[int, int], model: CostModel) -> list[_Slice]:
    """Cut a bucket into slices; each ends at a round m, where one tile more or less matters.

    The expected latency of a timed configuration is its timed one, times the ratio that the model
    predicts between the two m. That of another one is the predicted latency, times the median
    factor by which the model was off on the timed ones.
    """
    answering, target = Answering(model), result.target

    def predicted(workload: Workload, configs: Sequence[GemmConfig]) -> dict[GemmConfig, float]:
        """Predicted us by configuration; without those that are known not to compile."""
        try:
            ranking = rank_by(answering, workload, target, configs=configs)
        except InvalidInput:  # none of them compiles
            return {}
        return dict(zip(ranking.configs, ranking.cost.tolist()))

    was_tried = dict(result.measured)
    timed = {c: x.latency_us for c, x in was_tried.items() if x.ok} if result.timed else {}
    chosen = [] if result.config is None else [result.config]
    # Measured over predicted latency; 1 for a configuration that was chosen without timing.
    here = predicted(result.workload, [*timed] or chosen)
    factors = {config: timed.get(config, us) / us for config, us in here.items()}
    factor = median(factors.values()) if factors else 1.0

    def new(workload: Workload) -> tuple[GemmConfig, float] | None:
        """Find one that is known to compile: the program may compile it in its own process."""
        found = rank_by(
            answering, workload, target, _LOOKED_AT, largest=replace(workload, m=m_range[1])
        )
        rows = zip(found.configs, found.candidates.has_artifact, found.cost.tolist())
        untried = ((c, us * factor) for c, known, us in rows if known and c not in was_tried)
        return next(untried, None)

    def torch_us(workload: Workload) -> float:
        if result.torch is None or not result.torch.ok:
            return inf
        products = (workload, result.workload)
        there, here = (model.predict_torch(each, target) for each in products)
        if not (here > 0 and there / here > 0):  # the model has not learned it
            there, here = (each.roofline_us(target.device) for each in products)
        return result.torch.latency_us * there / here

    first, last = m_range
    size = last - first + 1
    count = min(_SLICES, size)
    ends = [first - 1 + -(-size * (i + 1) // count) for i in range(count)]
    slices = []
    for before, end in pairwise((first - 1, *ends)):
        workload = replace(result.workload, m=end)
        there = predicted(workload, [*factors]).items()
        tried = [_Tried(config, us * factors[config], us) for config, us in there]
        tried.sort(key=lambda each: each.expected_us)
        slices.append(_Slice(before + 1, workload, tried, new(workload), torch_us(workload)))
    return slices


# --- where a slice is cut -----------------------------------------------------------------------


def _cut(timed: Sequence[TimesAt], last: int) -> Iterator[tuple[int, Sequence[TimesAt]]]:
    """Cut a range of m into as few runs as possible, each with one choice that is good enough.

    Args:
        timed: ascending by m, at least one.
        last: the last m of the range.

    Yields:
        (last m, times): of each run; a run ends half-way between its timed m and those of the next.
    """
    works = {c for c in timed[0][1] if all(c in times for _, times in timed)}
    if works:  # drop what does not work at every m
        timed = [(m, {c: us for c, us in times.items() if c in works}) for m, times in timed]
    inner = range(len(timed) - 1, 0, -1)
    ways = [
        [timed[i:j] for i, j in pairwise((0, *sorted(cuts), len(timed)))]
        for count in range(len(timed))
        for cuts in combinations(inner, count)
    ]

    def cost(way: Sequence[Sequence[TimesAt]]) -> tuple[bool, int, float]:
        worst = max(_fastest(run)[1] for run in way)
        return worst > _APART, len(way), worst

    found = min(ways, key=cost)
    ends = [(run[-1][0] + following[0][0]) // 2 for run, following in pairwise(found)]
    yield from zip([*ends, last], found)


def _fastest(run: Sequence[TimesAt], preferred: Sequence[OrTorch] = ()) -> tuple[OrTorch, float]:
    """Choose the configuration with the smallest worst-case slowdown; None means torch.

    Args:
        run: neighbouring m with their times.
        preferred: one of these is taken if it ties.

    Returns:
        (configuration, slowdown): the slowdown at its worst m, as a factor of the fastest there; 1
        where nothing works, so that torch computes.
    """
    run = [
        (m, {c: us if c else LIBRARY_COUNTS * us for c, us in times.items()}) for m, times in run
    ]
    if not any(times for _, times in run):
        return None, 1.0
    works = [config for config in run[-1][1] if all(config in times for _, times in run)]
    slowdowns = {c: max(times[c] / min(times.values()) for _, times in run) for c in works}
    best = min(slowdowns, key=slowdowns.__getitem__, default=None)
    worst = slowdowns.get(best, inf)
    ties = (c for c in preferred if slowdowns.get(c, inf) <= _AS_FAST * worst)
    return (next(ties, best) if slowdowns else None), worst
