"""Finds out what computes the other m of a winner's bucket: by timing, else by what is expected.

Which is to be found out, and whether again; what is timed and chosen is of
:mod:`costmodel.tuning.spread`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from costmodel.errors import FileError, ModelError
from costmodel.models.xgb import XgbCostModel
from costmodel.support.bounded import drop_oldest
from costmodel.support.counters import count
from costmodel.support.untrusted import one_line
from costmodel.tuning.question import Question, memory_key
from costmodel.tuning.ranking import answering_model
from costmodel.tuning.spread import spread, spread_by_timing
from costmodel.tuning.timing_bench import Bench
from costmodel.tuning.trial import Compile
from costmodel.tuning.tuning_result import TuningResult

__all__ = ["Spreader"]

_REMEMBERED = 4096

log = logging.getLogger("costmodel")


class Spreader:
    """Spreads winners over their buckets. For any number of threads.

    Args:
        bench_of: what times on a device of an index.
        compile_: how to compile what is to be timed.
    """

    def __init__(self, bench_of: Callable[[int], Bench], compile_: Compile) -> None:
        self._bench_of = bench_of
        self._compile = compile_
        self._lock = threading.Lock()
        self._in_vain: dict[Any, None] = {}  # buckets that were to be timed, and could not be

    def model_for(
        self, question: Question, rows: tuple[int, int], result: TuningResult, *, may_time: bool
    ) -> XgbCostModel | None:
        """The model that is to spread a winner; None where it is spread, or cannot be."""
        if rows[0] == rows[1] or question.mode == "heuristic":
            return None
        better = result.timed and may_time and not result.parts_timed
        if result.parts and not (better and memory_key(question, rows) not in self._in_vain):
            return None
        model, _ = answering_model(question.model, result.target, question.workload)
        # Not by another one than ranked: what it says of the timings is not comparable.
        same = isinstance(model, XgbCostModel) and model.hash == result.model_hash
        return model if isinstance(model, XgbCostModel) and same else None

    def spread(
        self,
        question: Question,
        rows: tuple[int, int],
        result: TuningResult,
        model: XgbCostModel,
        *,
        wait: bool,
        may_time: bool,
    ) -> TuningResult:
        """The winner with what computes the other m; timed, if it was and that works."""
        if result.timed and may_time:
            try:
                with self._bench_of(question.device_index).runner(wait) as runner:
                    parts, costs = spread_by_timing(
                        result, rows, model, runner, self._compile, first=question.workload.m
                    )
            except Exception as error:  # the product can be computed without it
                told = one_line(f"{type(error).__name__}: {error}")
                log.warning(
                    "%s: the other m of its bucket are not timed: %s", result.workload, told
                )
            else:
                count(timed=costs.timed, compiled=costs.compiled)
                log.info(
                    "%s: %d timed for the other m of its bucket, in %.2f s",
                    result.workload, costs.timed, costs.total_s,
                )  # fmt: skip
                return replace(result, parts=parts)
        try:
            return replace(result, parts=spread(result, rows, model))
        except (FileError, ModelError) as error:  # its trees are read only now
            log.warning("%s: nothing is predicted of its other m: %s", result.workload, error)
            return result

    def give_up(self, question: Question, rows: tuple[int, int]) -> None:
        """Do not try again to time what was not timed of this bucket."""
        with self._lock:
            self._in_vain[memory_key(question, rows)] = None
            drop_oldest(self._in_vain, _REMEMBERED)

    def try_anew(self, question: Question, rows: tuple[int, int]) -> None:
        """Of a new tuning it may work."""
        with self._lock:
            self._in_vain.pop(memory_key(question, rows), None)

    def forget(self) -> None:
        """All may be tried anew."""
        with self._lock:
            self._in_vain.clear()
