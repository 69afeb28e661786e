"""Ranges of m that share a winner: a service that sees every m tunes a bounded number of times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from costmodel.errors import InvalidInput
from costmodel.gemm.workload import MOST, MOST_OFFSET, Workload

# Up to here the bounds are the powers of two, whatever the steps.
_BY_OCTAVES = 128
# Where every side is at most this, `auto` does not time: no bucket lies on both sides.
_SMALL = 512


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ranges of m that share a winner.

    Attributes:
        steps: how many equal ranges each octave above 128 has: 1, 2, 4, 8, .., 128. More are
            closer to tuning every m, and tune more often.
        bounds: upper ends of one's own, ascending, such as the batch sizes that a server pads to;
            past the last, the rule of ``steps`` goes on.
    """

    steps: int = 4
    bounds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise InvalidInput(f"steps={self.steps!r}: expected a power of two from 1 to 128")
        object.__setattr__(self, "bounds", _as_bounds(self.bounds))  # a list becomes a tuple

    def range_of(self, workload: Workload) -> tuple[int, int]:
        """The first and the last m that share the winner of a workload.

        The bucket of its m, cut where a larger product would be of another class of code: where
        its offsets would need 64 bits.
        """
        first, last = self.of(workload.m)
        last = min(last, MOST)
        most = (MOST_OFFSET + 1) // max(workload.n, workload.k, 1)
        if workload.code.wide or last <= most:
            return first, last
        return (first, most) if workload.m <= most else (max(first, most + 1), last)

    def of(self, m: int) -> tuple[int, int]:
        """The first and the last m of the bucket of an m."""
        first, last = self._by_bounds(m) if m <= self._bounded else self._by_steps(m)
        if first <= _SMALL < last:
            return (first, _SMALL) if m <= _SMALL else (_SMALL + 1, last)
        return first, last

    def count(self, m: int) -> int:
        """Count the buckets from 1 to m: the most tunings of one (n, k)."""
        found, last = 0, 0
        while last < m:
            last = self.of(last + 1)[1]
            found += 1
        return found

    @property
    def _bounded(self) -> int:
        return self.bounds[-1] if self.bounds else 0

    def _by_bounds(self, m: int) -> tuple[int, int]:
        place = bisect_left(self.bounds, m)
        return (self.bounds[place - 1] if place else 0) + 1, self.bounds[place]

    def _by_steps(self, m: int) -> tuple[int, int]:
        octave = 1 << (m - 1).bit_length()  # the power of two that m does not pass
        step = octave // 2 if m <= _BY_OCTAVES else octave // 2 // self.steps
        last = -(-m // step) * step if step else 1
        return max(last - step, self._bounded) + 1 if step else 1, last


def _as_bounds(bounds: Any) -> tuple[int, ...]:
    """Return the bounds of a caller as a tuple.

    Raises:
        InvalidInput: anything but ascending whole numbers over 0.
    """
    listed = isinstance(bounds, Iterable) and not isinstance(bounds, str | bytes | bytearray)
    found = tuple(bounds) if listed else None
    if (
        found is None
        or any(type(x) is not int for x in found)
        or any(x >= y for x, y in pairwise((0, *found)))
    ):
        raise InvalidInput(
            f"bounds={bounds!r:.80}: expected ascending whole numbers over 0, such as (24, 64)"
        )
    return found


def bucket(m: int) -> tuple[int, int]:
    """The first and the last m that share a winner with this one, where nothing else was set.

    The upper ends are the powers of two up to 128, and four steps an octave from there on.
    """
    return _DEFAULT.of(m)


_DEFAULT = Buckets()
