"""From the m that was tuned to the others of its bucket: which choice holds there too.

How a product falls into tiles, and tiles into waves, changes from one m to the next, and with it
what is fastest: a winner of another m was seen to take half as long again. So a bucket is cut into
a few parts. Of each the few that are expected to be fastest (:mod:`costmodel.expectation`) are
timed in turn, with torch, which chooses its kernel by m as it likes. Where nothing is to be timed,
the expectation chooses. What has no binary yet is looked at only where it is expected to gain more
than a prediction errs, so that a bucket has few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
_FINALISTS = 3
_ROUNDS = 5
_AS_FAST = 1.01  # what is that near the fastest may be taken, if it is in use already
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
    """What computes the other m of the bucket of a result best, by timing the last of each part.

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
    finals = [_Final.of(result, m, expectation.at(m)) for m in _ends(result.workload, rows)]
    ranked = clock()
    finals = _compiled(finals, result, compile_)
    compiled = clock()
    us: dict[int, Mapping[GemmConfig | None, float]] = {}
    try:
        for final in sorted(finals, key=lambda final: first is not None and final.last < first):
            if not us or clock() < compiled + _BUDGET_S:
                us[final.last] = final.timed_us(runner)
    finally:
        if isinstance(runner, Rests):
            runner.rest()
    tried = {config for config, _ in result.measured}
    new = {c for final in finals for c in final.configs if c is not None and c not in tried}
    costs = Costs(
        ranked - start, compiled - ranked, clock() - compiled, compiled=len(new),
        timed=sum(len(final.configs) for final in finals if final.last in us),
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


@dataclass(frozen=True, slots=True)
class _Final:
    """The few that may be the fastest of a part.

    Attributes:
        workload: the last m of the part.
        expected: what is chosen if nothing can be timed.
        configs: None is torch.
    """

    workload: Workload
    expected: GemmConfig | None
    configs: tuple[GemmConfig | None, ...]

    @classmethod
    def of(cls, result: TuningResult, m: int, expected: Expected) -> _Final:
        configs: list[GemmConfig | None] = [config for config, _ in expected.known[:_FINALISTS]]
        if _is_new_better(expected):
            assert expected.new is not None
            configs.append(expected.new[0])
        if expected.torch_us is not None:
            configs.append(None)
        return cls(replace(result.workload, m=m), _untimed(result, expected), tuple(configs))

    @property
    def last(self) -> int:
        return self.workload.m

    def without(self, failed: Collection[Specialization]) -> _Final:
        """Without what failed to compile."""
        configs = (
            c for c in self.configs if c is None or specialize(self.workload, c) not in failed
        )
        return replace(self, configs=tuple(configs))

    def timed_us(self, runner: Runner) -> dict[GemmConfig | None, float]:
        """What each takes that works; nothing of an m that a recording lacks."""
        try:
            found = in_turn(runner, self.workload, self.configs, _ROUNDS)
        except NotRecorded:
            return {}
        timed = zip(self.configs, found, strict=True)
        return {config: m.latency_us for config, m in timed if m.ok}


def _chosen(
    result: TuningResult,
    finals: Sequence[_Final],
    us: Mapping[int, Mapping[GemmConfig | None, float]],
) -> Iterator[Part]:
    """The fastest of each part; what computes the part before, or torch, if that is as fast."""
    before = result.config
    for final in finals:
        timed_us = us.get(final.last)
        if not timed_us:
            yield Part(final.last, final.expected)
            continue
        enough_us = _AS_FAST * min(timed_us.values())
        preferred = (result.config, before, None, min(timed_us, key=timed_us.__getitem__))
        before = next(c for c in preferred if timed_us.get(c, inf) <= enough_us)
        yield Part(final.last, before, timed_us[before])


def _joined(parts: Iterator[Part]) -> tuple[Part, ...]:
    """Neighbours that are computed alike as one."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].config == part.config:
            joined.pop()
        joined.append(part)
    return tuple(joined)


def _ends(workload: Workload, rows: tuple[int, int]) -> Iterator[int]:
    """The last m of each part. A tile more or less matters there: it is a multiple of many."""
    first, last = rows
    if not workload.code.wide:  # a larger product is of another class of code
        last = max(min(last, _INT32_MAX // max(workload.n, workload.k)), workload.m)
    size = last - first + 1
    count = min(_PARTS, size)
    yield from (first - 1 + -(-size * (i + 1) // count) for i in range(count))


def _is_new_better(expected: Expected) -> bool:
    if expected.new is None:
        return False
    return not expected.known or expected.known[0][1] > _NEW_GAINS * expected.new[1]


def _untimed(result: TuningResult, expected: Expected) -> GemmConfig | None:
    """What is expected to be the fastest; torch only if it is so by more than it varies."""
    best = expected.new if _is_new_better(expected) else next(iter(expected.known), None)
    torch_us = expected.torch_us
    if best is None:
        return None if torch_us is not None else result.config
    gains = 1.0 if result.config is None else _TORCH_GAINS
    return None if torch_us is not None and gains * torch_us < best[1] else best[0]
