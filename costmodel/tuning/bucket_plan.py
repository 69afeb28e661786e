"""The plan of a bucket: what computes which of its m.

How a product falls into tiles, and tiles into waves, changes from one m to the next, and with it
what is fastest: a winner of another m was seen to take half as long again. So a bucket is cut into
segments, each with a choice of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import inf

from costmodel.gemm.config import GemmConfig

Times = Mapping[GemmConfig | None, float]
"""Latency in us of each configuration that works; None is torch. Empty if nothing works."""
TimesAt = tuple[int, Times]
"""An m, and its times."""

_AS_FAST = 1.01  # a configuration that is already in use is kept if it is that near the fastest
_APART = 1.02  # a segment is cut rather than slowed down by more than this at one of its m


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring m of a bucket, and what computes them.

    Attributes:
        last: the last m; the segment begins after the one before.
        config: None is torch.
        latency_us: at the last m that was timed; None where the choice is predicted.
    """

    last: int
    config: GemmConfig | None
    latency_us: float | None = None


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Segments in ascending order, which together are the bucket.

    Attributes:
        segments: no two neighbours are alike.
        attempted: its m were to be timed, whether or not that worked. It is not on disk: another
            process may try again.
    """

    segments: tuple[Segment, ...]
    attempted: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, segments: Iterable[Segment], *, attempted: bool = False) -> BucketPlan:
        """Join neighbours with one choice that is known by the same means."""
        joined: list[Segment] = []
        for segment in segments:
            if joined and _is_alike(joined[-1], segment):
                joined.pop()
            joined.append(segment)
        return cls(tuple(joined), attempted)

    @property
    def timed(self) -> bool:
        """True if a choice rests on timings."""
        return any(segment.latency_us is not None for segment in self.segments)

    def at(self, m: int) -> Segment | None:
        """The segment of an m; None past the bucket."""
        return next((segment for segment in self.segments if m <= segment.last), None)


NO_PLAN = BucketPlan((), attempted=True)
"""The plan of a bucket whose winner serves all its m."""


def _is_alike(a: Segment, b: Segment) -> bool:
    return a.config == b.config and (a.latency_us is None) == (b.latency_us is None)


def cut(timed: Sequence[TimesAt], last: int) -> Iterator[tuple[int, list[Times]]]:
    """Cut a range of m into as few runs as have one choice that is good enough for all their m.

    Args:
        timed: ascending by m, at least one.
        last: the last m of the range.

    Yields:
        (last m, times): of each run; it ends half-way between its m and those of the next.
    """
    timed = _without_partial(timed)
    ways = (_split(timed, where) for where in product((False, True), repeat=len(timed) - 1))
    judged = [(max(map(_worst_slowdown, way)), way) for way in ways]
    _, found = min(judged, key=lambda each: (each[0] > _APART, len(each[1]), each[0]))
    ends = [(run[-1][0] + following[0][0]) // 2 for run, following in pairwise(found)]
    for run, end in zip(found, [*ends, last], strict=True):
        yield end, [times for _, times in run]


def fastest_for_all(
    timed: Sequence[Times], preferred: Sequence[GemmConfig | None]
) -> GemmConfig | None:
    """The configuration with the smallest worst-case slowdown; None means torch.

    Args:
        timed: the times at each m of a run.
        preferred: one of these is taken if it ties.
    """
    slowdowns = _slowdowns(timed)
    if not slowdowns:
        return None
    best = min(slowdowns, key=slowdowns.__getitem__)
    enough = _AS_FAST * slowdowns[best]
    return next((c for c in preferred if slowdowns.get(c, inf) <= enough), best)


def _without_partial(timed: Sequence[TimesAt]) -> list[TimesAt]:
    """Drop what does not work at every m, unless nothing does."""
    works = {c for c in timed[0][1] if all(c in times for _, times in timed)}
    return [(m, {c: us for c, us in t.items() if not works or c in works}) for m, t in timed]


def _split(timed: Sequence[TimesAt], where: Sequence[bool]) -> list[list[TimesAt]]:
    """Split into runs; a new one begins after each m whose flag is set."""
    runs = [[timed[0]]]
    for each, begins in zip(timed[1:], where, strict=True):
        if begins:
            runs.append([each])
        else:
            runs[-1].append(each)
    return runs


def _worst_slowdown(run: Sequence[TimesAt]) -> float:
    """Slowdown of the best choice for a run at its worst m, as a factor; 1 where torch serves."""
    if not any(times for _, times in run):
        return 1.0
    return min(_slowdowns([times for _, times in run]).values(), default=inf)


def _slowdowns(timed: Sequence[Times]) -> dict[GemmConfig | None, float]:
    """Factor over the fastest, at the worst m, of each configuration that works at all of them."""
    works = [config for config in timed[-1] if all(config in times for times in timed)]
    return {c: max(t[c] / min(t.values()) for t in timed) for c in works}
