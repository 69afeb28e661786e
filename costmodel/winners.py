"""The winner of each workload: from memory, from disk, or by tuning; each is tuned once.

Winners are shared by buckets of m, so that a service that sees every m tunes a bounded number of
times: (n, k) and the class of code are exact, and the first m of a bucket stands for the others.
Where its winner may not run a larger m of the bucket, the last m stands for those: two at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from costmodel.buckets import Buckets, bucket
from costmodel.cache import WinnerCache
from costmodel.candidates import CostModel
from costmodel.compile_pool import compile_for_device
from costmodel.counters import count
from costmodel.kernel_code import kernel_hashes
from costmodel.models.baselines import RuleHeuristic
from costmodel.ranking import answering_model
from costmodel.runner.protocol import TimingProtocol
from costmodel.space import legality
from costmodel.target import Target
from costmodel.timing_bench import Bench, TimingBench
from costmodel.trial import Compile
from costmodel.tuner import tune, untimed_because
from costmodel.tuning_result import TuningResult
from costmodel.uncertainty import TopK
from costmodel.workload import Workload

__all__ = ["Question", "Winners", "bucket", "winner_key"]

_REMEMBERED = 4096
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be computed, and how to choose.

    ``model`` is compared by identity, or as a path.
    """

    workload: Workload
    device_index: int
    mode: str = "auto"
    model: CostModel | str | PathLike[str] | None = None
    k: TopK = 8
    include_torch: bool = True


def winner_key(question: Question, target: Target, rows: tuple[int, int]) -> dict[str, Any]:
    """All that a choice rests on, readable: another device, compiler or model is another key."""
    import torch

    workload, mode = question.workload, question.mode
    model, _ = answering_model(question.model, target, workload)
    if mode == "heuristic":
        model = RuleHeuristic()
    timed = not untimed_because(workload, mode)
    first, last = rows
    return {
        "name": f"{first}-{last}x{workload.n}x{workload.k}-{target.device.name}",
        "m": list(rows),
        **{k: v for k, v in workload.to_dict().items() if k != "m"},
        "device": target.device.product,
        "arch": target.device.arch,
        "sm_count": target.device.sm_count,
        "triton": target.toolchain.triton,
        "ptxas": target.toolchain.ptxas,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "kernels": kernel_hashes(),
        "model": model.name,
        "model_hash": str(getattr(model, "hash", "")),
        "mode": mode,
        "top_k": question.k,
        "include_torch": question.include_torch,
        "protocol": TimingProtocol().to_dict() if timed else None,
    }


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
        self._locks: dict[Any, _Shared] = {}
        self._benches: dict[int, Bench] = {}
        self._forgotten = 0  # times

    def find(
        self, question: Question, instead_of: TuningResult | None = None, *, wait: bool = True
    ) -> TuningResult:
        """The winner: known, on disk, or tuned now.

        Args:
            instead_of: a winner that turned out not to work, to be replaced.
            wait: of :meth:`TimingBench.runner`, where something is to be timed.
        """
        rows = self.buckets.of(question.workload.m)
        result = self._find(question, rows, instead_of, wait)
        if not _fits(result, question.workload):
            result = self._find(*_at_the_end(question, rows), instead_of, wait)
        return result

    def known(self, question: Question, *, on_disk: bool = True) -> TuningResult | None:
        """The winner, if it is in memory, or on disk; waits for no other thread."""
        rows = self.buckets.of(question.workload.m)
        result = self._known(question, rows, on_disk)
        if result is not None and not _fits(result, question.workload):
            result = self._known(*_at_the_end(question, rows), on_disk)
        return result

    def tune(self, question: Question, **options: Any) -> TuningResult:
        """Tune now, whatever is known, and keep the winner; options as of ``tuner.tune``."""
        rows = self.buckets.of(question.workload.m)
        with self._alone(_memory_key(question, rows)):
            return self._tuned(question, rows, options)

    def forget(self) -> None:
        """Drop what is in memory, not what is on disk."""
        with self._lock:
            self._results.clear()
            self._forgotten += 1

    def _find(
        self,
        question: Question,
        rows: tuple[int, int],
        instead_of: TuningResult | None,
        wait: bool,
    ) -> TuningResult:
        with self._alone(_memory_key(question, rows)):
            if instead_of is None:
                found = self._known(question, rows)
            else:  # what is on disk is what turned out not to work
                found = self._results.get(_memory_key(question, rows))
            if found is not None and found is not instead_of:
                return found
            if instead_of is not None:
                self.cache.discard(self._key(question, rows))
            count(misses=1)
            return self._tuned(question, rows, {}, wait)

    def _known(
        self, question: Question, rows: tuple[int, int], on_disk: bool = True
    ) -> TuningResult | None:
        memory_key = _memory_key(question, rows)
        if (found := self._results.get(memory_key)) is not None:
            count(memory_hits=1)
            return found
        found = self.cache.get(self._key(question, rows)) if on_disk else None
        if found is None or not _serves(found, rows, self._target(question), question):
            return None
        count(disk_hits=1)
        self._remember(memory_key, found)
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
            "target": self._target(question), "model": question.model, "mode": question.mode,
            "k": question.k, "include_torch": question.include_torch, **options,
        }  # fmt: skip
        if untimed_because(question.workload, question.mode):
            result = tune(question.workload, runner=None, compile_=self._compile, **options)
        else:
            with self._bench(question.device_index).runner(wait) as runner:
                result = tune(question.workload, runner=runner, **options)
        count(
            tuned=int(result.timed), predicted=int(not result.timed),
            timed=result.costs.timed, compiled=result.costs.compiled,
        )  # fmt: skip
        if forgotten == self._forgotten:
            self._remember(_memory_key(question, rows), result)
        if result.reliable:
            self.cache.put(key, result)
        return result

    def _bench(self, index: int) -> Bench:
        with self._lock:
            if index not in self._benches:
                self._benches[index] = self._bench_of(index)
            return self._benches[index]

    def _remember(self, memory_key: Any, result: TuningResult) -> None:
        with self._lock:
            self._results[memory_key] = result
            while len(self._results) > _REMEMBERED:  # the oldest may still be on disk
                del self._results[next(iter(self._results))]

    def _key(self, question: Question, rows: tuple[int, int]) -> dict[str, Any]:
        return winner_key(question, self._target(question), rows)

    def _target(self, question: Question) -> Target:
        return self.target_of(question.device_index)

    @contextmanager
    def _alone(self, key: Any) -> Iterator[None]:
        """While no other thread is about the same key."""
        with self._lock:
            shared = self._locks.setdefault(key, _Shared())
            shared.users += 1
        try:
            with shared.lock:
                yield
        finally:
            with self._lock:
                shared.users -= 1
                if not shared.users:
                    del self._locks[key]


class _Shared:
    """A lock, and how many threads have or want it: it goes with the last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


def _memory_key(question: Question, rows: tuple[int, int]) -> Any:
    w, q = question.workload, question
    return rows, w.n, w.k, w.code, q.device_index, q.mode, q.model, q.k, q.include_torch


def _at_the_end(question: Question, rows: tuple[int, int]) -> tuple[Question, tuple[int, int]]:
    """The same question about the last m of a bucket, and its own row.

    What a configuration asks of the device grows with m: what may run the last may run them all.
    """
    workload = question.workload
    _, last = rows
    if not workload.code.wide and last * max(workload.n, workload.k) > _INT32_MAX:
        last = workload.m  # of the last m the operands would be another class of code
    return replace(question, workload=replace(workload, m=last)), (last, last)


def _fits(result: TuningResult, workload: Workload) -> bool:
    """Whether the winner of another m may run this one too."""
    device = result.target.device
    return result.config is None or not legality(result.config, workload, device)


def _serves(
    result: TuningResult, rows: tuple[int, int], target: Target, question: Question
) -> bool:
    """Whether a winner from disk is one of these rows, as its key says, and may run at all."""
    first, last = rows
    of = result.workload
    if not first <= of.m <= last or replace(question.workload, m=of.m) != of:
        return False
    return result.config is None or not legality(result.config, of, target.device)
