"""The winner of each workload: from memory, from disk, or by tuning; each is tuned once.

Winners are shared by buckets of m, so that a service that sees every m tunes a bounded number of
times: (n, k) and the class of code are exact, and the first m of a bucket stands for the others.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

from costmodel.cache import WinnerCache
from costmodel.candidates import CostModel
from costmodel.errors import CostModelError, InvalidInput
from costmodel.grid import grid_hash
from costmodel.installed import driver_version, triton_build
from costmodel.kept import IDLE_S, Kept
from costmodel.kernel_code import kernel_hashes
from costmodel.measurement import Runner
from costmodel.models.baselines import RuleHeuristic
from costmodel.ranking import answering_model
from costmodel.runner.protocol import TimingProtocol
from costmodel.space import legality
from costmodel.target import Target
from costmodel.trial import Compile
from costmodel.tuner import compile_for_device, tune, untimed_because
from costmodel.tuning_result import TuningResult
from costmodel.workload import Workload

if TYPE_CHECKING:
    from costmodel.runner.device import DeviceRunner

__all__ = ["Bench", "Question", "TimingBench", "Winners", "bucket", "winner_key"]

log = logging.getLogger("costmodel")


def bucket(m: int) -> tuple[int, int]:
    """The first and the last m that share a winner with this one.

    The upper ends are the powers of two up to 128, and four steps an octave from there on.
    """
    if m <= 128:
        last = 1 << (m - 1).bit_length()
        return (last // 2 + 1, last) if last > 1 else (1, 1)
    step = 1 << ((m - 1).bit_length() - 3)
    last = -(-m // step) * step
    return last - step + 1, last


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be computed, and how to choose.

    ``model`` is compared by identity, or as a path. ``epoch`` is that of the process group whose
    ranks are to choose alike (:func:`costmodel.ranks.epoch`); 0 is none.
    """

    workload: Workload
    device_index: int
    mode: str = "auto"
    model: CostModel | str | PathLike[str] | None = None
    k: int = 8
    include_torch: bool = True
    epoch: int = 0


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
        "driver": driver_version(),
        "triton": target.toolchain.triton,
        "triton_build": triton_build(),
        "ptxas": target.toolchain.ptxas,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "kernels": kernel_hashes(),
        "space": grid_hash(),
        "model": model.name,
        "model_hash": str(getattr(model, "hash", "")),
        "mode": mode,
        "top_k": question.k,
        "include_torch": question.include_torch,
        "protocol": TimingProtocol().to_dict() if timed else None,
    }


class TimingBench:
    """The timing process of one device, for one user at a time; it takes seconds to start."""

    def __init__(self, device_index: int, idle_s: float = IDLE_S) -> None:
        self._index = device_index
        self._kept: Kept[DeviceRunner] = Kept(self._started, idle_s)

    def _started(self) -> DeviceRunner:
        from costmodel.runner.device import DeviceRunner

        runner = DeviceRunner(self._index)
        runner.start()
        return runner

    @contextmanager
    def runner(self) -> Iterator[Runner]:
        """The runner, while no other thread has it and the device has nothing else to do."""
        import torch

        with self._kept.use() as runner:
            torch.cuda.synchronize(self._index)
            yield runner

    def close(self) -> None:
        """End the process, if there is one; the next user starts another."""
        self._kept.close()


class Bench(Protocol):
    """Where a device is timed: gives its runner to one thread at a time."""

    def runner(self) -> AbstractContextManager[Runner]: ...


class Winners:
    """Results by question, tuned when they are first asked for. For any number of threads.

    Args:
        cache: where they are kept between processes.
        target_of: the target of a device index.
        bench_of: a bench for a device index; made when something is to be timed there.
        compile_: how to compile what is not timed; default: in supervised processes.
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
        self._target_of = target_of
        self._bench_of = bench_of
        self._compile = compile_
        self._lock = threading.Lock()
        self._results: dict[Any, TuningResult] = {}
        self._agreed: dict[Any, TuningResult] = {}
        self._locks: dict[Any, threading.Lock] = {}
        self._benches: dict[int, Bench] = {}
        self._thread = threading.local()

    def find(self, question: Question, instead_of: TuningResult | None = None) -> TuningResult:
        """The winner: known, on disk, or tuned now; in a process group neither of the latter.

        Args:
            instead_of: a winner that turned out not to work, to be replaced.

        Raises:
            InvalidInput: ``exhaustive`` in a process group whose ranks have not agreed on one.
        """
        if question.epoch:
            return self._in_group(question)
        result = self._find(question, bucket(question.workload.m), instead_of)
        if not _fits(result, question.workload):
            result = self._find(question, _exactly(question.workload), instead_of)
        return result

    def tune(self, question: Question, **options: Any) -> TuningResult:
        """Tune now, whatever is known, and keep the winner; options as of ``tuner.tune``."""
        rows = bucket(question.workload.m)
        target = self._target_of(question.device_index)
        with self._lock_of(_memory_key(question, rows)):
            result = self._tuned(question, target, options)
            self._keep(question, rows, winner_key(question, target, rows), result)
        return result

    def key(self, question: Question) -> dict[str, Any]:
        """All that the choice for exactly this workload rests on, on this device."""
        target = self._target_of(question.device_index)
        return winner_key(question, target, _exactly(question.workload))

    def agree(self, question: Question, result: TuningResult) -> None:
        """From now on this is the winner in the process group of the question."""
        for rows in (_exactly(question.workload), bucket(question.workload.m)):
            self._agreed[_memory_key(question, rows)] = result

    def disagree(self, question: Question) -> None:
        """No longer hold the ranks to a winner."""
        for rows in (_exactly(question.workload), bucket(question.workload.m)):
            self._agreed.pop(_memory_key(question, rows), None)

    def forget(self) -> None:
        """Drop what is in memory, not what is on disk."""
        with self._lock:
            self._results.clear()
            self._agreed.clear()

    def _in_group(self, question: Question) -> TuningResult:
        """What the ranks have agreed on, else what each of them predicts alike.

        What is on the disk of one rank, or was asked first there, must not matter: a bucket goes
        by its last m.
        """
        workload, mode = question.workload, question.mode
        for rows in (_exactly(workload), bucket(workload.m)):
            found = self._agreed.get(_memory_key(question, rows))
            if found is not None and _fits(found, workload):
                return found
        if mode == "exhaustive":
            raise InvalidInput(
                "mode='exhaustive' in a process group, where each rank would choose by timings of "
                "its own: call costmodel.warmup([(m, n, k)], mode='exhaustive', group=...) on all "
                "ranks before"
            )
        _say_once()
        ask = replace(question, mode="predict" if mode == "auto" else mode)
        result = self._predicted(ask, bucket(workload.m))
        if not _fits(result, workload):
            result = self._predicted(ask, _exactly(workload))
        return result

    def _predicted(self, question: Question, rows: tuple[int, int]) -> TuningResult:
        memory_key = _memory_key(question, rows)
        with self._lock_of(memory_key):
            if memory_key not in self._results:
                last = min(rows[1], 2**31 - 1)
                ask = replace(question, workload=replace(question.workload, m=last))
                target = self._target_of(question.device_index)
                self._results[memory_key] = self._tuned(ask, target, {})
            return self._results[memory_key]

    def _find(
        self, question: Question, rows: tuple[int, int], instead_of: TuningResult | None
    ) -> TuningResult:
        memory_key = _memory_key(question, rows)
        with self._lock_of(memory_key):
            found = self._results.get(memory_key)
            if found is not None and found is not instead_of:
                return found
            target = self._target_of(question.device_index)
            key = winner_key(question, target, rows)
            if instead_of is not None:
                self.cache.discard(key)
            elif (found := self.cache.get(key)) is not None and _serves(
                found, rows, target, question
            ):
                self._results[memory_key] = found
                return found
            result = self._tuned(question, target, {})
            self._keep(question, rows, key, result)
            return result

    @contextmanager
    def _lock_of(self, memory_key: Any) -> Iterator[None]:
        """One thread at a time finds a winner; one that is at it already would wait for itself."""
        if getattr(self._thread, "is_tuning", False):
            raise CostModelError(
                "a winner was asked for while one is being found, as by a model that multiplies "
                "with costmodel: multiply with torch there"
            )
        with self._lock:
            lock = self._locks.setdefault(memory_key, threading.Lock())
        with lock:
            self._thread.is_tuning = True
            try:
                yield
            finally:
                self._thread.is_tuning = False

    def _tuned(
        self, question: Question, target: Target, options: Mapping[str, Any]
    ) -> TuningResult:
        options = {
            "target": target, "model": question.model, "mode": question.mode, "k": question.k,
            "include_torch": question.include_torch, **options,
        }  # fmt: skip
        if untimed_because(question.workload, question.mode):
            return tune(question.workload, runner=None, compile_=self._compile, **options)
        with self._lock:
            index = question.device_index
            if index not in self._benches:
                self._benches[index] = self._bench_of(index)
            bench = self._benches[index]
        with bench.runner() as runner:
            return tune(question.workload, runner=runner, **options)

    def _keep(
        self,
        question: Question,
        rows: tuple[int, int],
        key: Mapping[str, Any],
        result: TuningResult,
    ) -> None:
        self._results[_memory_key(question, rows)] = result
        if result.reliable:
            self.cache.put(key, result)


def _memory_key(question: Question, rows: tuple[int, int]) -> Any:
    w, q = question.workload, question
    return rows, w.n, w.k, w.code, q.device_index, q.mode, q.model, q.k, q.include_torch, q.epoch


@functools.cache
def _say_once() -> None:
    log.info(
        "a process group is there, so nothing is timed and the model's first choice is taken: "
        "costmodel.warmup(problems, group=...) on all ranks lets one of them decide for all"
    )


def _exactly(workload: Workload) -> tuple[int, int]:
    return workload.m, workload.m


def _fits(result: TuningResult, workload: Workload) -> bool:
    """Whether the winner of another m may run this one too."""
    device = result.target.device
    return result.config is None or not legality(result.config, workload, device)


def _serves(
    result: TuningResult, rows: tuple[int, int], target: Target, question: Question
) -> bool:
    """Whether a winner from disk is one of these rows, as its key says, and may run here."""
    first, last = rows
    of = result.workload
    if not first <= of.m <= last or replace(question.workload, m=of.m) != of:
        return False
    if result.target != target:  # whose figures a launch goes by
        return False
    return result.config is None or not legality(result.config, of, target.device)
