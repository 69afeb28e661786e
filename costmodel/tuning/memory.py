"""The winners that a process has in memory, and when one of them still serves."""

from __future__ import annotations

import threading

from costmodel.bounded import drop_oldest
from costmodel.tuning.tuning_key import TuningKey
from costmodel.tuning.tuning_result import TuningResult

_REMEMBERED = 4096


class Memory:
    """The winners that a process knows; told to forget, it drops all of them at once.

    Attributes:
        results: the winner of each key; of too many, the oldest go, and may still be on disk.
        agreed: those that the ranks of a process group hold to.
        replaced: keys of winners that could not be loaded, and whether what is found instead is
            for all processes. They are tuned again once, and not at each m of their bucket.
    """

    def __init__(self) -> None:
        self.results: dict[TuningKey, TuningResult] = {}
        self.agreed: dict[TuningKey, TuningResult] = {}
        self.replaced: dict[TuningKey, bool] = {}
        self._lock = threading.Lock()

    def remember(self, key: TuningKey, result: TuningResult) -> None:
        with self._lock:
            self.results[key] = result
            drop_oldest(self.results, _REMEMBERED)

    def note_replaced(self, key: TuningKey, *, for_all: bool) -> None:
        with self._lock:
            self.replaced[key] = for_all
            drop_oldest(self.replaced, _REMEMBERED)


def lacks_plan(result: TuningResult, m: int | None, may_time: bool) -> bool:
    """Return True if the bucket is still to be planned for this m; for any m, if it is None."""
    if m == result.workload.m:
        return False
    plan = result.plan
    return plan is None or (may_time and result.timed and not plan.attempted)


def same_tuning(a: TuningResult, b: TuningResult) -> bool:
    """Return True if both are of one tuning, whatever their plans."""
    return (a.workload, a.config, a.why, a.costs) == (b.workload, b.config, b.why, b.costs)
