"""Counters of costly work: tuning, compiling, loading. A call of a known kind counts nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """The work that this process has done since it started.

    Attributes:
        tuned: choices that were timed; predicted: choices that rest on no timing.
        timed, compiled: configurations timed and compiled, for such choices and for choices of
            users' kernels.
        loaded: binaries brought onto a device. Triton compiles those that its own cache lacks.
        memory_hits, disk_hits, misses: where winners were found, if they were.
        prepared: calls of ``matmul`` that were the first of their kind, or the first after the
            launch of their kind was forgotten.
        makeshifts: calls inside a CUDA graph's capture that had to take what was loaded.
        background_done, background_failed: tunings in the background.
    """

    tuned: int = 0
    predicted: int = 0
    timed: int = 0
    compiled: int = 0
    loaded: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    prepared: int = 0
    makeshifts: int = 0
    background_done: int = 0
    background_failed: int = 0

    def since(self, before: Stats) -> Stats:
        """Return the work done since ``before`` was taken."""
        return Stats(**{n: getattr(self, n) - getattr(before, n) for n in _counts})


def count(**numbers: int) -> None:
    """Add to the counters; the names are those of :class:`Stats`."""
    with _lock:
        for name, number in numbers.items():
            _counts[name] += number


def stats() -> Stats:
    """Return the counters so far, of all threads of this process."""
    with _lock:
        return Stats(**_counts)


_lock = threading.Lock()
_counts = dict.fromkeys(Stats.__dataclass_fields__, 0)
