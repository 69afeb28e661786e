"""The winner of each workload: from memory, from disk, or by tuning; each is tuned once.

Winners are shared by buckets of m, so that a service that sees every m tunes a bounded number of
times: (n, k) and the class of code are exact, and the first m that is asked for is tuned. When
another one is asked for, what computes the rest of the bucket is found out, once
(:mod:`costmodel.tuning.spread`). Where the winner may not run a larger m of the bucket, the last m
is tuned as well: two at most.

In a process group a winner is what the ranks have agreed on, else what each of them predicts alike:
what is on the disk of one rank, or was asked first there, does not matter.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from costmodel.errors import HostError, InvalidInput
from costmodel.gemm.binaries import compile_for_device
from costmodel.hardware.target import Target
from costmodel.support.bounded import drop_oldest
from costmodel.support.counters import count
from costmodel.support.host import warn_of_host
from costmodel.support.locks import KeyedLocks
from costmodel.tuning.buckets import Buckets, bucket
from costmodel.tuning.cache import WinnerCache
from costmodel.tuning.question import (
    Question,
    at_the_end,
    fits,
    is_by_model_of,
    memory_key,
    serves,
    winner_key,
)
from costmodel.tuning.spreader import Spreader
from costmodel.tuning.timing_bench import Bench, TimingBench
from costmodel.tuning.trial import Compile
from costmodel.tuning.tuner import tune, untimed_because
from costmodel.tuning.tuning_result import TuningResult

__all__ = ["Question", "Winners", "bucket", "winner_key"]

_REMEMBERED = 4096
# These ask for timings, so that in a process group a prediction is no answer to them.
_TIMED_ON_REQUEST = ("topk", "exhaustive")

log = logging.getLogger("costmodel")


class Winners:
    """Results by question, tuned when they are first asked for. For any number of threads.

    Args:
        cache: where they are kept between processes.
        target_of: the target of a device index.
        bench_of: a bench for a device index; made when something is to be timed there.
        compile_: how to compile what is not timed; default: in supervised processes.

    Attributes:
        buckets: which m share a winner; what was found by others before is forgotten by
            :meth:`forget`.
        target_of: the target of a device index.
    """

    def __init__(
        self,
        cache: WinnerCache,
        *,
        target_of: Callable[[int], Target] = Target.current,
        bench_of: Callable[[int], Bench] = TimingBench,
        compile_: Compile = compile_for_device,
    ) -> None:
        self.cache = cache
        self.buckets = Buckets()
        self.target_of = target_of
        self._bench_of = bench_of
        self._compile = compile_
        self._lock = threading.Lock()
        self._results: dict[Any, TuningResult] = {}
        self._agreed: dict[Any, tuple[TuningResult, ...]] = {}
        self._locks = KeyedLocks()
        self._benches: dict[int, Bench] = {}
        self._spreader = Spreader(self._bench, compile_)
        # Memory keys of winners that did not work, and whether they are to go from the disk too.
        self._replaced: dict[Any, bool] = {}
        self._forgotten = 0  # times

    def find(
        self,
        question: Question,
        instead_of: TuningResult | None = None,
        *,
        broken: bool = True,
        wait: bool = True,
        may_time: bool = True,
    ) -> TuningResult:
        """The winner: known, on disk, or tuned now; in a process group neither of the latter.

        Args:
            instead_of: a winner that turned out not to work, to be replaced: once, until
                :meth:`forget`. What came in its place stays, whether or not that works.
            broken: it works for nobody, and not only not in this process; then it is to go from
                the disk too.
            wait: of :meth:`TimingBench.runner`, where something is to be timed.
            may_time: another m of a bucket that is known may be timed; else it is predicted.

        Raises:
            InvalidInput: in a process group, a mode that asks for timings, where the ranks have
                not agreed on a winner.
            HostError: the machine can neither time nor compile. Else it is predicted meanwhile.
        """
        if question.epoch:
            return self._in_group(question)
        rows = self.buckets.of(question.workload.m)
        result = self._find(question, rows, instead_of, wait, broken)
        if question.workload.m != result.workload.m:
            result = self._spread(question, rows, result, wait, may_time)
        if not fits(result, question.workload):
            question, rows = at_the_end(question, rows)
            if instead_of is not None and instead_of.workload.m != question.workload.m:
                instead_of = None  # it is the first one that did not work
            result = self._find(question, rows, instead_of, wait, broken)
        return result

    def known(self, question: Question, *, on_disk: bool = True) -> TuningResult | None:
        """The winner, if it is in memory, or on disk; waits for no other thread.

        In a process group: what was agreed on, or predicted before.
        """
        if question.epoch:
            return self._known_in_group(question)
        rows = self.buckets.of(question.workload.m)
        result = self._known(question, rows, on_disk)
        if result is not None and not fits(result, question.workload):
            result = self._known(*at_the_end(question, rows), on_disk)
        return result

    def covers(self, question: Question, result: TuningResult, *, may_time: bool = True) -> bool:
        """Whether a known winner says what computes this m, and not only that it may."""
        if question.workload.m == result.workload.m:
            return True
        rows = self.buckets.of(question.workload.m)
        first = self._results.get(memory_key(question, rows), result)
        # Where the second winner of a bucket stands in, the first was found to have nothing for
        # this m, if it is spread.
        spread = result if first.workload.m == result.workload.m else first
        return self._spreader.model_for(question, rows, spread, may_time=may_time) is None

    def tune(self, question: Question, **options: Any) -> TuningResult:
        """Tune now, whatever is known, and keep the winner; options as of ``tuner.tune``."""
        rows = self.buckets.of(question.workload.m)
        name = memory_key(question, rows)
        with self._locks.alone(name):
            with self._lock:
                self._replaced.pop(name, None)
            return self._tuned(question, rows, options)

    def of_bucket(self, question: Question, *, may_time: bool = True) -> list[TuningResult]:
        """The winners of all m of a bucket, outside a process group: one, or two.

        They are spread over the bucket. The second one is for those m that the first may not run.
        """
        rows = self.buckets.of(question.workload.m)
        result = self._find(question, rows, None, True)
        found = [self._spread(question, rows, result, True, may_time)]
        last, its_row = at_the_end(question, rows)
        if not fits(found[0], last.workload):
            end = self._find(last, its_row, None, True) if may_time else self._known(last, its_row)
            found += [] if end is None else [end]
        return found

    def key(self, question: Question) -> dict[str, Any]:
        """All that the choice for the bucket of this workload rests on, on this device."""
        return self._key(question, self.buckets.of(question.workload.m))

    def agree(self, question: Question, results: Sequence[TuningResult]) -> None:
        """Make these the bucket's winners in the process group; of each m the first that fits."""
        name = memory_key(question, self.buckets.of(question.workload.m))
        with self._lock:
            self._agreed[name] = tuple(results)

    def disagree(self, question: Question) -> None:
        """No longer hold the ranks to winners."""
        with self._lock:
            self._agreed.pop(memory_key(question, self.buckets.of(question.workload.m)), None)

    def forget(self) -> None:
        """Drop what is in memory, not what is on disk."""
        with self._lock:
            self._results.clear()
            self._agreed.clear()
            self._replaced.clear()
            self._spreader.forget()
            self._forgotten += 1

    def _in_group(self, question: Question) -> TuningResult:
        if (found := self._known_in_group(question)) is not None:
            return found
        mode = question.mode
        if mode in _TIMED_ON_REQUEST:
            raise InvalidInput(
                f"mode={mode!r} in a process group, where each rank would choose by timings of its "
                f"own: call costmodel.warmup([(m, n, k)], mode={mode!r}, group=...) on all ranks "
                f"before"
            )
        if mode == "auto":
            _say_once()
            return self._in_group(replace(question, mode="predict"))
        # By the last m, whichever m this rank was asked for first.
        last, its_row = at_the_end(question, self.buckets.of(question.workload.m))
        return self._find(last, its_row, None, True)

    def _known_in_group(self, question: Question) -> TuningResult | None:
        rows = self.buckets.of(question.workload.m)
        for agreed in self._agreed.get(memory_key(question, rows), ()):
            if fits(agreed, question.workload):
                count(memory_hits=1)
                return agreed
        if question.mode in _TIMED_ON_REQUEST:
            return None
        if question.mode == "auto":
            return self._known_in_group(replace(question, mode="predict"))
        return self._known(*at_the_end(question, rows), on_disk=False)

    def _find(
        self,
        question: Question,
        rows: tuple[int, int],
        instead_of: TuningResult | None,
        wait: bool,
        broken: bool = True,
    ) -> TuningResult:
        name = memory_key(question, rows)
        with self._locks.alone(name):
            if instead_of is None or name in self._replaced:
                # Else what does not work here would be tuned anew at each m of its bucket.
                found, unwanted = self._known(question, rows, on_disk=not question.epoch), None
            else:  # what is on disk is what turned out not to work
                found, unwanted = self._results.get(name), instead_of
            if found is not None and not (unwanted and _same_tuning(found, unwanted)):
                return found
            if unwanted is not None:
                self._replace(question, rows, unwanted, broken)
            count(misses=1)
            try:
                return self._tuned(question, rows, {}, wait)
            except HostError as error:
                if untimed_because(question.workload, question.mode):
                    raise
                warn_of_host(error)
                return self._tuned(question, rows, {"mode": "predict"})

    def _replace(
        self, question: Question, rows: tuple[int, int], unwanted: TuningResult, broken: bool
    ) -> None:
        """Have a winner that does not work tuned again, this once."""
        log.warning("%s no longer works for %s: tuning again", unwanted.chosen, question.workload)
        with self._lock:
            self._replaced[memory_key(question, rows)] = broken
            drop_oldest(self._replaced, _REMEMBERED)
        if broken:
            self.cache.discard(self._key(question, rows))

    def _spread(
        self,
        question: Question,
        rows: tuple[int, int],
        result: TuningResult,
        wait: bool,
        may_time: bool,
    ) -> TuningResult:
        """The winner with what computes the other m of its bucket."""
        model_for = functools.partial(self._spreader.model_for, question, rows, may_time=may_time)
        name, forgotten = memory_key(question, rows), self._forgotten
        if model_for(result) is None:
            return result
        key = self._key(question, rows)  # before it takes its time, as for a tuning
        with self._locks.alone(name):
            found = self._results.get(name, result)
            if (model := model_for(found)) is None:  # another thread was faster
                return found
            kept = None if question.epoch else self.cache.get(key)
            if kept is not None and _spread_alike(kept, found) and model_for(kept) is None:
                self._remember(name, kept, forgotten)
                return kept
            found = self._spreader.spread(
                question, rows, found, model, wait=wait, may_time=may_time
            )
            if self._remember(name, found, forgotten):
                if found.timed and may_time and not found.parts_timed:
                    self._spreader.give_up(question, rows)
                self._put(question, rows, key, found)
        return found

    def _known(
        self, question: Question, rows: tuple[int, int], on_disk: bool = True
    ) -> TuningResult | None:
        name, forgotten = memory_key(question, rows), self._forgotten
        if (found := self._results.get(name)) is not None:
            count(memory_hits=1)
            return found
        if not on_disk:
            return None
        target = self.target_of(question.device_index)
        found = self.cache.get(key := self._key(question, rows))
        usable = found is not None and serves(found, rows, target, question)
        if found is None or not (usable and is_by_model_of(key, found)):
            return None
        count(disk_hits=1)
        self._remember(name, found, forgotten)
        return found

    def _tuned(
        self,
        question: Question,
        rows: tuple[int, int],
        options: Mapping[str, Any],
        wait: bool = True,
    ) -> TuningResult:
        """Choose, and keep the choice in memory, and on disk if it would be made again."""
        # Before it takes its seconds: meanwhile another model may come to answer.
        key, forgotten = self._key(question, rows), self._forgotten
        options = {
            "target": self.target_of(question.device_index), "model": question.model,
            "mode": question.mode, "k": question.k, "include_torch": question.include_torch,
            **options,
        }  # fmt: skip
        if untimed_because(question.workload, options["mode"]):
            result = tune(question.workload, runner=None, compile_=self._compile, **options)
            if options["mode"] != question.mode:  # in place of timings: not to be kept on disk
                result = replace(result, reliable=False)
        else:
            with self._bench(question.device_index).runner(wait) as runner:
                result = tune(question.workload, runner=runner, **options)
        count(
            tuned=int(result.timed), predicted=int(not result.timed),
            timed=result.costs.timed, compiled=result.costs.compiled,
        )  # fmt: skip
        if not is_by_model_of(key, result):  # as that model has it, it was not chosen yet
            return result
        self._remember(memory_key(question, rows), result, forgotten)
        self._spreader.try_anew(question, rows)
        self._put(question, rows, key, result)
        return result

    def _put(
        self,
        question: Question,
        rows: tuple[int, int],
        key: Mapping[str, Any],
        result: TuningResult,
    ) -> None:
        """Keep on disk what would be chosen again, by any process that has this key."""
        for_all = self._replaced.get(memory_key(question, rows), True)
        if result.reliable and not question.epoch and for_all and is_by_model_of(key, result):
            self.cache.put(key, result)

    def _bench(self, index: int) -> Bench:
        with self._lock:
            if index not in self._benches:
                self._benches[index] = self._bench_of(index)
            return self._benches[index]

    def _remember(self, name: Any, result: TuningResult, forgotten: int) -> bool:
        """Keep in memory what was begun when so often had been forgotten; else it is of before."""
        with self._lock:
            if forgotten != self._forgotten:
                return False
            self._results[name] = result
            drop_oldest(self._results, _REMEMBERED)  # which may still be on disk
            return True

    def _key(self, question: Question, rows: tuple[int, int]) -> dict[str, Any]:
        return winner_key(question, self.target_of(question.device_index), rows)


def _spread_alike(kept: TuningResult, found: TuningResult) -> bool:
    """Whether another process has spread this very winner meanwhile."""
    return bool(kept.parts) and _same_tuning(kept, found)


def _same_tuning(a: TuningResult, b: TuningResult) -> bool:
    """Whether they are of one tuning, which one of them may lack the parts of."""
    return (a.workload, a.config, a.why, a.costs) == (b.workload, b.config, b.why, b.costs)


@functools.cache
def _say_once() -> None:
    log.info(
        "a process group is there, so nothing is timed and the model's first choice is taken: "
        "costmodel.warmup(problems, group=...) on all ranks lets one of them decide for all"
    )
