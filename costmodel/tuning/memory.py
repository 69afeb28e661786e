"""The winners that a process has in memory, and when one of them may still be used."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from threading import Lock, local
from typing import Any
from weakref import WeakValueDictionary

from costmodel.errors import CostModelError
from costmodel.tuning.tuning_key import TuningKey
from costmodel.tuning.tuning_result import TuningResult
from costmodel.validation import drop_oldest

_REMEMBERED = 4096
# An unsteady winner is used, and tuned again this many times, this many seconds apart: not every
# call may wait for a device that stays busy.
_RETRIES = 2
_RETRY_AFTER_S = 60.0


class Memory:
    """The winners that a process knows. To forget them, a process begins a new memory.

    Attributes:
        results: the winner of each key; if there are too many, the oldest are dropped, and may
            still be on disk.
        agreed: those that the ranks of a process group have agreed on.
        replaced: keys of winners that could not be loaded: they are tuned again once, and not at
            each m of their bucket.
    """

    def __init__(self) -> None:
        self.results: dict[TuningKey, TuningResult] = {}
        self.agreed: dict[TuningKey, TuningResult] = {}
        self.replaced: set[TuningKey] = set()
        self._unsteady: dict[TuningKey, tuple[int, float]] = {}  # tuned how often, and when last
        self._lock = Lock()
        # The lock of a key goes with the last thread that wants it.
        self._locks: WeakValueDictionary[TuningKey, Any] = WeakValueDictionary()

    def get(self, key: TuningKey) -> TuningResult | None:
        return self.agreed.get(key) or self.results.get(key)

    def put(self, key: TuningKey, result: TuningResult) -> None:
        with self._lock:
            if not result.unsteady:
                self._unsteady.pop(key, None)
            elif key not in self._unsteady:
                self._unsteady[key] = 1, time.monotonic()
            self.results[key] = result
            drop_oldest(self.results, _REMEMBERED)

    def is_due(self, key: TuningKey) -> bool:
        """Return True if the timings of the winner scattered and it is time to tune again."""
        count, last = self._unsteady.get(key, (0, inf))
        return count <= _RETRIES and time.monotonic() > last + _RETRY_AFTER_S

    def postpone(self, key: TuningKey) -> None:
        """Let the next attempt to tune an unsteady winner again wait as long as this one did."""
        with self._lock:
            if key in self._unsteady:
                self._unsteady[key] = self._unsteady[key][0] + 1, time.monotonic()

    @contextmanager
    def alone(self, key: TuningKey) -> Iterator[None]:
        """Keep other threads from the same key.

        Raises:
            CostModelError: this thread is already finding a winner, and might wait for itself.
        """
        if getattr(_thread, "is_finding", False):
            raise CostModelError(
                "a winner was asked for while one is being found, as by a model that multiplies "
                "with costmodel: multiply with torch there"
            )
        with self._lock:
            lock = self._locks.setdefault(key, Lock())
        with lock:
            _thread.is_finding = True
            try:
                yield
            finally:
                _thread.is_finding = False


_thread = local()


def lacks_plan(result: TuningResult, m: int | None, may_time: bool) -> bool:
    """Return True if the bucket is still to be planned for this m; for any m, if it is None."""
    if m == result.workload.m:
        return False
    plan = result.plan
    return plan is None or (may_time and result.timed and not plan.attempted)


def same_tuning(a: TuningResult, b: TuningResult) -> bool:
    """Return True if both are of one tuning, whatever their plans."""
    return (a.workload, a.config, a.why, a.costs) == (b.workload, b.config, b.why, b.costs)
