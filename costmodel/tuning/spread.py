"""From the m that was tuned to the others of its bucket: which choice holds there too.

How a product falls into tiles, and tiles into waves, changes from one m to the next, and with it
what is fastest: a winner of another m was seen to take half as long again. So a bucket is cut into
a few parts. Of each the few that are expected to be fastest (:mod:`costmodel.tuning.expectation`)
are timed in turn, with torch, for the first m, the last and the one before: the last is a multiple
of many, the others are not, and cuBLAS, which chooses its kernel by m as it likes, may take half as
long again for one of them, or up to some m within the part. Where nothing is to be timed, the
expectation chooses. What has no binary yet is looked at only where it is expected to gain more than
a prediction errs, so that a bucket has few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from costmodel.data.measurement import Rests, Runner, in_turn
from costmodel.errors import NotRecorded
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import Specialization, specialize
from costmodel.gemm.workload import MOST, MOST_OFFSET, Workload
from costmodel.models.xgb import XgbCostModel
from costmodel.tuning.cuts import Timed, Times, fastest, runs
from costmodel.tuning.expectation import Expectation, Expected
from costmodel.tuning.trial import Compile
from costmodel.tuning.tuning_result import Costs, Part, TuningResult

__all__ = ["spread", "spread_by_timing"]

_PARTS = 8
_NEW_GAINS = 1.02  # so many times faster must be what is not compiled yet
# What cuBLAS takes for another m is known less well than what a configuration does.
_TORCH_GAINS = 1.05
_FINALISTS = 2  # and the one that the model has first
_ROUNDS = 5
_BUDGET_S = 1.0


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
    timer = _Timer(runner)
    us: dict[int, list[Timed]] = {}
    try:
        for final in sorted(finals, key=lambda final: first is not None and final.last < first):
            if not us or clock() < compiled + _BUDGET_S:
                us[final.last] = timer.sample(final)
    finally:
        if isinstance(runner, Rests):
            runner.rest()
    tried = {config for config, _ in result.measured}
    new = {c for final in finals for c in final.configs if c is not None and c not in tried}
    costs = Costs(
        ranked - start, compiled - ranked, clock() - compiled, compiled=len(new), timed=timer.timed
    )
    return _joined(_chosen(result, finals, us, timer.fatal)), costs


def _compiled(finals: Sequence[_Final], result: TuningResult, compile_: Compile) -> list[_Final]:
    """With the binaries of all there before any is timed; without what does not compile."""
    wanted = {
        specialize(final.workload, config): None
        for final in finals for config in final.configs if config is not None
    }  # fmt: skip
    failed = {made.spec for made in compile_([*wanted], result.target) if not made.ok}
    return [final.without(failed) for final in finals]


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


class _Timer:
    """Times what may be the fastest.

    Attributes:
        timed: how many were.
        fatal: what ended the timing process, which may have taken a minute: it is not tried again.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.timed = 0
        self.fatal: set[GemmConfig | None] = set()

    def sample(self, final: _Final) -> list[Timed]:
        """What each takes that works, at the m that stand for a part.

        Left out is an m that a recording lacks, and one that there was no memory for.
        """
        found = ((m, self._times(final, m)) for m in final.sample)
        return [(m, times) for m, times in found if times is not None]

    def _times(self, final: _Final, m: int) -> Times | None:
        configs = [config for config in final.configs if config not in self.fatal]
        if not configs:
            return {}
        try:
            found = in_turn(self._runner, replace(final.workload, m=m), configs, _ROUNDS)
        except NotRecorded:
            return None
        self.timed += len(configs)
        timed = [*zip(configs, found, strict=True)]
        self.fatal.update(config for config, m in timed if m.status in ("crashed", "timeout"))
        works = {config: m.latency_us for config, m in timed if m.ok and 0 < m.latency_us < inf}
        return None if not works and any(m.no_room for _, m in timed) else works


def _chosen(
    result: TuningResult,
    finals: Sequence[_Final],
    us: Mapping[int, Sequence[Timed]],
    fatal: Collection[GemmConfig | None],
) -> Iterator[Part]:
    """The fastest of each part, which is cut where none is fast for all that was timed of it."""
    before = result.config
    failed = {
        config
        for final in finals for _, times in us.get(final.last, ())
        for config in final.configs if config not in times
    }.union(fatal)  # fmt: skip
    for final in finals:
        timed = us.get(final.last, ())
        if not timed:
            expected = final.expected.only(lambda config: config not in failed)
            yield Part(final.last, _untimed(result, expected))
            continue
        for last, times in runs(timed, final.last):
            before = fastest(times, (result.config, before, None))
            yield Part(last, before, times[-1].get(before))


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
    first, last = rows[0], min(rows[1], MOST)
    if not workload.code.wide:  # a larger product is of another class of code
        last = max(min(last, MOST_OFFSET // max(workload.n, workload.k)), workload.m)
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
