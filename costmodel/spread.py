"""From the m that was tuned to the others of its bucket: which choice holds there too.

How a product falls into tiles, and tiles into waves, changes from one m to the next, and with it
what is fastest: a winner of another m was seen to take half as long again. So a bucket is cut into
a few parts. Of each the few that are expected to be fastest (:mod:`costmodel.expectation`) are
timed in turn, with torch, for the first m, the last and the one before: the last is a multiple of
many, the others are not, and cuBLAS, which chooses its kernel by m as it likes, may take half as
long again for one of them, or up to some m within the part. Where nothing is to be timed, the
expectation chooses. What has no binary yet is looked at only where it is expected to gain more than
a prediction errs, so that a bucket has few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import inf

from costmodel.config import GemmConfig
from costmodel.errors import NotRecorded
from costmodel.expectation import Expectation, Expected
from costmodel.measurement import Rests, Runner, in_turn
from costmodel.models.xgb import XgbCostModel
from costmodel.specialize import Specialization, specialize
from costmodel.trial import Compile
from costmodel.tuning_result import Costs, Part, TuningResult
from costmodel.workload import Workload

__all__ = ["spread", "spread_by_timing"]

_PARTS = 8
_NEW_GAINS = 1.02  # so many times faster must be what is not compiled yet
# What cuBLAS takes for another m is known less well than what a configuration does.
_TORCH_GAINS = 1.05
_FINALISTS = 2  # and the one that the model has first
_ROUNDS = 5
_AS_FAST = 1.01  # what is that near the fastest may be taken, if it is in use already
_APART = 1.02  # a part is cut rather than have a choice that is that much slower at one m
_BUDGET_S = 1.0
_INT32_MAX = 2**31 - 1


def spread(result: TuningResult, rows: tuple[int, int], model: XgbCostModel) -> tuple[Part, ...]:
    """What is expected to compute the other m of the bucket of a result best.

    Args:
        rows: the first and the last m of the bucket.
        model: that ranked, or one that knows as much.

    Returns:
        Ascending parts, at least one; together they are the bucket.
    """
    if result.config is None and not result.timed:
        return (Part(rows[1], None),)  # torch is predicted to be faster by far
    expectation = Expectation(result, model)
    ends = _ends(result.workload, rows)
    return _joined(Part(m, _untimed(result, expectation.at(m))) for m in ends)


def spread_by_timing(
    result: TuningResult,
    rows: tuple[int, int],
    model: XgbCostModel,
    runner: Runner,
    compile_: Compile,
    *,
    first: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[tuple[Part, ...], Costs]:
    """What computes the other m of the bucket of a result best, by timing three m of each part.

    After about a second of that, and where nothing can be timed, the expectation stands.

    Args:
        runner, compile_: what times and compiles.
        first: an m whose part is timed before the others; default: they ascend.
        clock: in seconds.

    Returns:
        Parts as of :func:`spread`, and what they cost; ``compiled`` is what had no binary.
    """
    start = clock()
    expectation = Expectation(result, model)
    finals: list[_Final] = []
    for last in _ends(result.workload, rows):
        first_m = finals[-1].last + 1 if finals else rows[0]
        finals.append(_Final.of(result, first_m, last, expectation.at(last)))
    ranked = clock()
    finals = _compiled(finals, result, compile_)
    compiled = clock()
    us: dict[int, list[_Timed]] = {}
    fatal: set[GemmConfig | None] = set()
    try:
        for final in sorted(finals, key=lambda final: first is not None and final.last < first):
            if not us or clock() < compiled + _BUDGET_S:
                us[final.last] = [(m, final.timed_us(runner, m, fatal)) for m in final.sample]
    finally:
        if isinstance(runner, Rests):
            runner.rest()
    tried = {config for config, _ in result.measured}
    new = {c for final in finals for c in final.configs if c is not None and c not in tried}
    costs = Costs(
        ranked - start, compiled - ranked, clock() - compiled, compiled=len(new),
        timed=sum(len(f.configs) * len(f.sample) for f in finals if f.last in us),
    )  # fmt: skip
    return _joined(_chosen(result, finals, us)), costs


def _compiled(finals: Sequence[_Final], result: TuningResult, compile_: Compile) -> list[_Final]:
    """With the binaries of all there before any is timed; without what does not compile."""
    wanted = {
        specialize(final.workload, config): None
        for final in finals for config in final.configs if config is not None
    }  # fmt: skip
    failed = {made.spec for made in compile_([*wanted], result.target) if not made.ok}
    return [final.without(failed) for final in finals]


_Times = Mapping[GemmConfig | None, float]
"""What each took that works, in us."""
_Timed = tuple[int, _Times]
"""An m, and that of it."""


@dataclass(frozen=True, slots=True)
class _Final:
    """The few that may be the fastest of a part.

    Attributes:
        first: m of the part.
        workload: the last one.
        expected: where nothing can be timed, this chooses.
        configs: None is torch.
    """

    first: int
    workload: Workload
    expected: Expected
    configs: tuple[GemmConfig | None, ...]

    @classmethod
    def of(cls, result: TuningResult, first: int, last: int, expected: Expected) -> _Final:
        configs: list[GemmConfig | None] = [each.config for each in expected.known[:_FINALISTS]]
        # A timing for another m can mislead as well: it may have been an unlucky one.
        foremost = min(expected.known, key=lambda each: each.predicted_us, default=None)
        if foremost is not None and foremost.config not in configs:
            configs.append(foremost.config)
        if _is_new_better(expected):
            assert expected.new is not None
            configs.append(expected.new[0])
        if expected.torch_us is not None:
            configs.append(None)
        workload = replace(result.workload, m=last)
        return cls(first, workload, expected, tuple(configs))

    @property
    def last(self) -> int:
        return self.workload.m

    @property
    def sample(self) -> list[int]:
        """The m that are timed; of columns only those that are as aligned as the workload's."""
        code, last = self.workload.code, self.workload.m
        step = max(
            1,
            code.a_align // code.itemsize if code.a_layout == "col" else 1,
            code.c_align // code.out_itemsize if code.c_layout == "col" else 1,
        )
        aligned = {self.first + -self.first % step, *(m - m % step for m in (last - 1, last))}
        return sorted(m for m in aligned if self.first <= m <= last)

    def without(self, failed: Collection[Specialization]) -> _Final:
        """Without what failed to compile."""

        def made(config: GemmConfig | None) -> bool:
            return config is None or specialize(self.workload, config) not in failed

        expected = self.expected.only(made)
        return replace(self, expected=expected, configs=tuple(filter(made, self.configs)))

    def timed_us(self, runner: Runner, m: int, fatal: set[GemmConfig | None]) -> _Times:
        """What each takes that works; nothing of an m that a recording lacks.

        Args:
            fatal: what ended the timing process before, at the cost of a minute perhaps: it is not
                tried again, and what does so now is added.
        """
        configs = [config for config in self.configs if config not in fatal]
        if not configs:
            return {}
        try:
            found = in_turn(runner, replace(self.workload, m=m), configs, _ROUNDS)
        except NotRecorded:
            return {}
        timed = [*zip(configs, found, strict=True)]
        fatal.update(config for config, m in timed if m.status in ("crashed", "timeout"))
        return {config: m.latency_us for config, m in timed if m.ok and 0 < m.latency_us < inf}


def _chosen(
    result: TuningResult, finals: Sequence[_Final], us: Mapping[int, Sequence[_Timed]]
) -> Iterator[Part]:
    """The fastest of each part, which is cut where none is fast for all that was timed of it."""
    before = result.config
    failed = {
        config
        for final in finals for _, times in us.get(final.last, ()) if times
        for config in final.configs if config not in times
    }  # fmt: skip
    for final in finals:
        timed = [(m, times) for m, times in us.get(final.last, ()) if times]
        if not timed:
            expected = final.expected.only(lambda config: config not in failed)
            yield Part(final.last, _untimed(result, expected))
            continue
        for last, times in _runs(_working(timed), final.last):
            before = _fastest(times, (result.config, before, None))
            yield Part(last, before, times[-1][before])


def _working(timed: Sequence[_Timed]) -> list[_Timed]:
    """Only of what works for every m, if anything does."""
    works = {c for c in timed[0][1] if all(c in times for _, times in timed)}
    return [(m, {c: us for c, us in t.items() if not works or c in works}) for m, t in timed]


def _runs(timed: Sequence[_Timed], last: int) -> Iterator[tuple[int, list[_Times]]]:
    """Neighbours that one choice is good enough for, and the last m that it is taken for.

    As few runs as can be. One ends half-way between what was timed of it and of the next.
    """
    runs = min(
        (_cut(timed, where) for where in product((False, True), repeat=len(timed) - 1)),
        key=lambda runs: (max(map(_at_worst, runs)) > _APART, len(runs), max(map(_at_worst, runs))),
    )
    ends = [(run[-1][0] + following[0][0]) // 2 for run, following in pairwise(runs)]
    for run, end in zip(runs, [*ends, last], strict=True):
        yield end, [times for _, times in run]


def _cut(timed: Sequence[_Timed], where: Sequence[bool]) -> list[list[_Timed]]:
    """In runs that end where this says so; the last one does in any case."""
    runs = [[timed[0]]]
    for each, begins in zip(timed[1:], where, strict=True):
        if begins:
            runs.append([each])
        else:
            runs[-1].append(each)
    return runs


def _at_worst(run: Sequence[_Timed]) -> float:
    """How many times slower than the fastest the best choice for all of these is, at the worst."""
    return min(_slower([times for _, times in run]).values(), default=inf)


def _slower(timed: Sequence[_Times]) -> dict[GemmConfig | None, float]:
    """Of what works for all, how many times slower than the fastest it is, at the worst."""
    best_us = [min(times.values()) for times in timed]
    works = [config for config in timed[-1] if all(config in times for times in timed)]
    return {c: max(t[c] / us for t, us in zip(timed, best_us, strict=True)) for c in works}


def _fastest(timed: Sequence[_Times], preferred: Sequence[GemmConfig | None]) -> GemmConfig | None:
    """What is fastest at the worst; one of those preferred, if it is as fast."""
    slower = _slower(timed)
    best = min(slower, key=slower.__getitem__)
    enough = _AS_FAST * slower[best]
    return next((c for c in preferred if slower.get(c, inf) <= enough), best)


def _joined(parts: Iterator[Part]) -> tuple[Part, ...]:
    """Neighbours that are computed alike, and known to be by the same means, as one."""
    joined: list[Part] = []
    for part in parts:
        before = joined[-1] if joined else None
        timed = part.latency_us is not None
        if before and before.config == part.config and timed == (before.latency_us is not None):
            joined.pop()
        joined.append(part)
    return tuple(joined)


def _ends(workload: Workload, rows: tuple[int, int]) -> Iterator[int]:
    """The last m of each part. A tile more or less matters there: it is a multiple of many."""
    first, last = rows[0], min(rows[1], _INT32_MAX)
    if not workload.code.wide:  # a larger product is of another class of code
        last = max(min(last, _INT32_MAX // max(workload.n, workload.k)), workload.m)
    size = last - first + 1
    count = min(_PARTS, size)
    yield from (first - 1 + -(-size * (i + 1) // count) for i in range(count))


def _is_new_better(expected: Expected) -> bool:
    if expected.new is None:
        return False
    return not expected.known or expected.known[0].expected_us > _NEW_GAINS * expected.new[1]


def _untimed(result: TuningResult, expected: Expected) -> GemmConfig | None:
    """What is expected to be the fastest; torch only if it is so by more than it varies."""
    known = next((each[:2] for each in expected.known), None)
    best = expected.new if _is_new_better(expected) else known
    torch_us = expected.torch_us
    if best is None:
        return None if torch_us is not None else result.config
    gains = 1.0 if result.config is None else _TORCH_GAINS
    return None if torch_us is not None and gains * torch_us < best[1] else best[0]
