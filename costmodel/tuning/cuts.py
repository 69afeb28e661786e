"""From the timings of a few m of a part to what is taken for each m of it.

What is fastest at the worst of them is taken for the whole part; where nothing is fast for all,
the part is cut into runs of neighbours. Pure: nothing is timed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import inf

from costmodel.gemm.config import GemmConfig

__all__ = ["Timed", "Times", "fastest", "runs"]

Times = Mapping[GemmConfig | None, float]
"""What each configuration took that works, in us; None is torch. Empty: nothing works."""
Timed = tuple[int, Times]
"""An m, and the times of it."""

_AS_FAST = 1.01  # what is that near the fastest may be taken, if it is in use already
_APART = 1.02  # a part is cut rather than have a choice that is that much slower at one m


def runs(timed: Sequence[Timed], last: int) -> Iterator[tuple[int, list[Times]]]:
    """Neighbours that one choice is good enough for, and the last m that it is taken for.

    As few runs as can be. One ends half-way between what was timed of it and of the next.

    Args:
        timed: ascending by m, at least one.
        last: m of the part.
    """
    timed = _working(timed)
    cuts = (_cut(timed, where) for where in product((False, True), repeat=len(timed) - 1))
    judged = [(max(map(_at_worst, cut)), cut) for cut in cuts]
    _, found = min(judged, key=lambda each: (each[0] > _APART, len(each[1]), each[0]))
    ends = [(run[-1][0] + following[0][0]) // 2 for run, following in pairwise(found)]
    for run, end in zip(found, [*ends, last], strict=True):
        yield end, [times for _, times in run]


def fastest(timed: Sequence[Times], preferred: Sequence[GemmConfig | None]) -> GemmConfig | None:
    """What is fastest at the worst; one of those preferred, if it is as fast; torch if none works.

    Args:
        timed: those of a run.
    """
    slower = _slower(timed)
    if not slower:
        return None
    best = min(slower, key=slower.__getitem__)
    enough = _AS_FAST * slower[best]
    return next((c for c in preferred if slower.get(c, inf) <= enough), best)


def _working(timed: Sequence[Timed]) -> list[Timed]:
    """Only of what works for every m, if anything does."""
    works = {c for c in timed[0][1] if all(c in times for _, times in timed)}
    return [(m, {c: us for c, us in t.items() if not works or c in works}) for m, t in timed]


def _cut(timed: Sequence[Timed], where: Sequence[bool]) -> list[list[Timed]]:
    """In runs that end where this says so; the last one does in any case."""
    cut = [[timed[0]]]
    for each, begins in zip(timed[1:], where, strict=True):
        if begins:
            cut.append([each])
        else:
            cut[-1].append(each)
    return cut


def _at_worst(run: Sequence[Timed]) -> float:
    """How many times slower than the fastest the best choice for all of these is, at the worst."""
    if not any(times for _, times in run):
        return 1.0  # torch it is
    return min(_slower([times for _, times in run]).values(), default=inf)


def _slower(timed: Sequence[Times]) -> dict[GemmConfig | None, float]:
    """Of what works for all, how many times slower than the fastest it is, at the worst."""
    works = [config for config in timed[-1] if all(config in times for times in timed)]
    return {c: max(t[c] / min(t.values()) for t in timed) for c in works}
