"""The winner of each bucket: from memory, from disk, or by tuning; each is tuned once.

A bucket of m is the unit of a choice, so that a service that sees every m tunes a bounded number
of times: (n, k) and the class of code are exact. The first m that is asked for is tuned, among what
is legal for the whole bucket; when another one comes, the bucket is planned, once
(:mod:`costmodel.tuning.planning`).

In a process group a winner is what the ranks have agreed on, else what each of them predicts alike:
what is on the disk of one rank, or was asked first there, does not matter.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from costmodel.data.candidates import CostModel
from costmodel.errors import FileError, HostError, InvalidInput, ModelError
from costmodel.gemm.binaries import compile_for_device
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.host import warn_of_host
from costmodel.models.baselines import RuleHeuristic
from costmodel.tuning.bucket_plan import NO_PLAN, BucketPlan
from costmodel.tuning.buckets import Buckets, bucket
from costmodel.tuning.cache import WinnerCache
from costmodel.tuning.counters import count
from costmodel.tuning.locks import KeyedLocks
from costmodel.tuning.memory import Memory, lacks_plan, same_tuning
from costmodel.tuning.planning import plan_by_prediction, plan_by_timing
from costmodel.tuning.ranking import Answering, answering_model, named_model
from costmodel.tuning.timing_process import DeviceProcess, TimingProcess
from costmodel.tuning.tuner import Compile, tune_by, untimed_because
from costmodel.tuning.tuning_key import TuningKey
from costmodel.tuning.tuning_result import TuningResult
from costmodel.validation import one_line

__all__ = ["TuningKey", "Winners", "bucket"]

# These ask for timings: in a process group a prediction is no answer to them.
_TIMED_ON_REQUEST = ("topk", "exhaustive")
log = logging.getLogger("costmodel")


class Winners:
    """Results by key, tuned when they are first asked for. For any number of threads.

    Args:
        cache: where they are kept between processes.
        target_of: the target of a device index.
        process_of: the timing process of a device index; made when something is to be timed there.
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
        process_of: Callable[[int], TimingProcess] = DeviceProcess,
        compile_: Compile = compile_for_device,
    ) -> None:
        self.cache = cache
        self.buckets = Buckets()
        self.target_of = target_of
        self._process_of = process_of
        self._compile = compile_
        self._lock = threading.Lock()
        self._locks = KeyedLocks()
        self._processes: dict[int, TimingProcess] = {}
        self._memory = Memory()

    def key(self, workload: Workload, device_index: int, **options: Any) -> TuningKey:
        """The key of a product.

        Args:
            options: the other attributes of :class:`TuningKey`; ``model`` may be a directory.
        """
        m_range = self.buckets.range_of(workload)
        options["model"] = named_model(options.get("model"))
        return TuningKey(replace(workload, m=m_range[1]), m_range, device_index, **options)

    def find(
        self,
        key: TuningKey,
        m: int,
        *,
        whole: bool = False,
        wait: bool = True,
        may_time: bool = True,
    ) -> TuningResult:
        """The winner of a bucket, which is legal for all of it: known, on disk, or tuned now.

        In a process group: agreed on, or predicted.

        Args:
            m: one of the bucket; it is tuned if none was, else the bucket is planned.
            whole: plan the bucket in any case.
            wait: of :meth:`DeviceProcess.runner`, where something is to be timed.
            may_time: a bucket that is known may be planned by timing; else it is predicted.

        Raises:
            InvalidInput: in a process group, a mode that asks for timings, where the ranks have
                not agreed on a winner.
            HostError: the machine can neither time nor compile. Else it is predicted meanwhile.
        """
        if key.epoch:
            return self._find_in_group(key)
        memory = self._memory
        with self._locks.alone(key):
            found = memory.results.get(key)
            if found is not None:
                count(memory_hits=1)
                if not lacks_plan(found, None if whole else m, may_time):
                    return found
            basis = self._basis(key)
            if found is None:
                found = self._read(key, basis, memory)
            if found is None:
                count(misses=1)
                found = self._tune_or_predict(key, m, basis, memory, wait=wait)
            if lacks_plan(found, None if whole else m, may_time):
                found = self._plan(key, m, found, basis, memory, wait=wait, may_time=may_time)
            return found

    def known(self, key: TuningKey, *, on_disk: bool = True) -> TuningResult | None:
        """The winner, if it is in memory, or on disk; waits for no other thread.

        In a process group: what was agreed on, or predicted before.
        """
        if key.epoch:
            return self._known_in_group(key)
        memory = self._memory
        if (found := memory.results.get(key)) is not None:
            count(memory_hits=1)
            return found
        return self._read(key, self._basis(key), memory) if on_disk else None

    def is_final(
        self, key: TuningKey, m: int, result: TuningResult, *, may_time: bool = True
    ) -> bool:
        """Return True if :meth:`find` would have nothing else for this m than this result."""
        return bool(key.epoch) or not lacks_plan(result, m, may_time)

    def replace(
        self, key: TuningKey, m: int, unwanted: TuningResult, *, broken: bool, wait: bool = True
    ) -> TuningResult:
        """Tune again instead of a winner that could not be loaded: once, until :meth:`forget`.

        What came in its place stays, whether or not that works.

        Args:
            broken: it works for nobody, and not only not in this process: then it goes from the
                disk too.
        """
        memory = self._memory
        with self._locks.alone(key):
            found = memory.results.get(key, unwanted)
            if key not in memory.replaced and same_tuning(found, unwanted):
                workload = key.workload(m)
                log.warning("%s no longer works for %s: tuning again", unwanted.chosen, workload)
                memory.note_replaced(key, for_all=broken)
                basis = self._basis(key)
                if broken:
                    self.cache.discard(basis.disk_key)
                count(misses=1)
                self._tune_or_predict(key, m, basis, memory, wait=wait)
        return self.find(key, m, wait=wait)

    def tune(self, key: TuningKey, m: int, *, budget_s: float = inf) -> TuningResult:
        """Tune now, whatever is known, and keep the winner."""
        memory = self._memory
        with self._locks.alone(key):
            memory.replaced.pop(key, None)
            return self._tune(key, m, self._basis(key), memory, budget_s=budget_s)

    def disk_key(self, key: TuningKey) -> dict[str, Any]:
        """All that the choice for a bucket rests on, on this device, readable."""
        return self._basis(key).disk_key

    def agree(self, key: TuningKey, result: TuningResult) -> None:
        """Hold the ranks of the key's process group to this winner."""
        self._memory.agreed[key] = result

    def disagree(self, key: TuningKey) -> None:
        """No longer hold the ranks to a winner."""
        self._memory.agreed.pop(key, None)

    def forget(self) -> None:
        """Drop what is in memory, not what is on disk."""
        self._memory = Memory()  # who began before adds to the old one, which nobody asks

    # --- in a process group -------------------------------------------------------------------

    def _find_in_group(self, key: TuningKey) -> TuningResult:
        if (found := self._known_in_group(key)) is not None:
            return found
        mode = key.mode
        if mode in _TIMED_ON_REQUEST:
            raise InvalidInput(
                f"mode={mode!r} in a process group, where each rank would choose by timings of its "
                f"own: call costmodel.warmup([(m, n, k)], mode={mode!r}, group=...) on all ranks "
                f"before"
            )
        if mode == "auto":
            _say_once()
            key = replace(key, mode="predict")
        memory = self._memory
        with self._locks.alone(key):
            if (found := memory.results.get(key)) is not None:
                return found
            count(misses=1)
            # The last m, whichever m this rank was asked for first.
            return self._tune(key, key.m_range[1], self._basis(key), memory)

    def _known_in_group(self, key: TuningKey) -> TuningResult | None:
        memory = self._memory
        instead = [replace(key, mode="predict")] if key.mode == "auto" else []
        for each in (key, *instead):
            if (found := memory.agreed.get(each) or memory.results.get(each)) is not None:
                count(memory_hits=1)
                return found
        return None

    # --- what a choice takes ------------------------------------------------------------------

    def _basis(self, key: TuningKey) -> _Basis:
        target = self.target_of(key.device_index)
        answering = Answering(RuleHeuristic())
        if key.mode != "heuristic":
            answering = answering_model(key.model, target, key.largest)
        return _Basis(target, answering, key.on_disk(target, answering.model))

    def _read(self, key: TuningKey, basis: _Basis, memory: Memory) -> TuningResult | None:
        """The winner on disk, remembered from now on."""
        found = self.cache.get(basis.disk_key)
        if found is None or not key.accepts(found, basis.target, basis.answering.model):
            return None
        count(disk_hits=1)
        if not basis.can_plan(key, found):
            found = replace(found, plan=NO_PLAN)
        memory.remember(key, found)
        return found

    def _tune_or_predict(
        self, key: TuningKey, m: int, basis: _Basis, memory: Memory, *, wait: bool
    ) -> TuningResult:
        """Tune; where this machine cannot, predict, and keep that in this process only."""
        try:
            return self._tune(key, m, basis, memory, wait=wait)
        except HostError as error:
            if untimed_because(key.workload(m), key.mode):
                raise
            warn_of_host(error)
        return self._tune(key, m, basis, memory, mode="predict")

    def _tune(
        self,
        key: TuningKey,
        m: int,
        basis: _Basis,
        memory: Memory,
        *,
        mode: str | None = None,
        wait: bool = True,
        budget_s: float = inf,
    ) -> TuningResult:
        """Choose, and keep the choice in memory, and on disk if it would be made again.

        Args:
            mode: instead of the key's, whose choice it then is not.
        """
        workload, named = key.workload(m), mode or key.mode
        tune = functools.partial(
            tune_by, basis.answering, workload, basis.target, k=key.k, mode=named,
            include_torch=key.include_torch, budget_s=budget_s, largest=key.largest,
        )  # fmt: skip
        try:
            if untimed_because(workload, named):
                result = tune(runner=None, compile_=self._compile)
            else:
                with self._process(key.device_index).runner(wait) as runner:
                    result = tune(runner=runner)
        except (FileError, ModelError):  # it read its trees only now: the next one answers
            again = self._basis(key)
            if key.model is not None or again.answering.model is basis.answering.model:
                raise
            return self._tune(key, m, again, memory, mode=mode, wait=wait, budget_s=budget_s)
        if named != key.mode:
            result = replace(result, reliable=False)
        if not basis.can_plan(key, result):
            result = replace(result, plan=NO_PLAN)
        count(
            tuned=int(result.timed), predicted=int(not result.timed),
            timed=result.costs.timed, compiled=result.costs.compiled,
        )  # fmt: skip
        self._keep(key, result, basis, memory)
        return result

    def _plan(
        self,
        key: TuningKey,
        m: int,
        result: TuningResult,
        basis: _Basis,
        memory: Memory,
        *,
        wait: bool,
        may_time: bool,
    ) -> TuningResult:
        """The winner with a plan of its bucket, timed if the winner was and that works."""
        model = basis.answering.model
        if not basis.can_plan(key, result):
            return result  # another one came to answer
        kept = self.cache.get(basis.disk_key)  # another process may have planned it meanwhile
        if (
            kept is not None
            and same_tuning(kept, result)
            and key.accepts(kept, basis.target, model)
            and not lacks_plan(kept, None, may_time)
        ):
            memory.remember(key, kept)
            return kept
        plan = None
        timing = result.timed and may_time
        if timing:
            plan = self._timed_plan(key, m, result, model, wait)
        if plan is None:
            try:
                plan = plan_by_prediction(result, key.m_range, model, attempted=timing)
            except (FileError, ModelError) as error:  # its trees are read only now
                log.warning("%s: nothing is predicted of its other m: %s", result.workload, error)
                return result
        result = replace(result, plan=plan)
        self._keep(key, result, basis, memory)
        return result

    def _timed_plan(
        self, key: TuningKey, m: int, result: TuningResult, model: CostModel, wait: bool
    ) -> BucketPlan | None:
        """A plan by timing; None where that fails, for the product can be computed without it."""
        try:
            with self._process(key.device_index).runner(wait) as runner:
                plan, costs = plan_by_timing(
                    result, key.m_range, model, runner, self._compile, first=m
                )
        except Exception as error:
            told = one_line(f"{type(error).__name__}: {error}")
            log.warning("%s: the other m of its bucket are not timed: %s", result.workload, told)
            return None
        count(timed=costs.timed, compiled=costs.compiled)
        log.info(
            "%s: %d timed for the other m of its bucket, in %.2f s",
            result.workload, costs.timed, costs.total_s,
        )  # fmt: skip
        return plan

    def _keep(self, key: TuningKey, result: TuningResult, basis: _Basis, memory: Memory) -> None:
        """Keep in memory, and on disk what any process with this key would choose again."""
        memory.remember(key, result)
        if result.reliable and not key.epoch and memory.replaced.get(key, True):
            self.cache.put(basis.disk_key, result)

    def _process(self, index: int) -> TimingProcess:
        with self._lock:
            if index not in self._processes:
                self._processes[index] = self._process_of(index)
            return self._processes[index]


@dataclass(frozen=True, slots=True)
class _Basis:
    """The grounds of a choice, resolved once, before the choice takes its seconds."""

    target: Target
    answering: Answering
    disk_key: dict[str, Any] = field(repr=False)

    def can_plan(self, key: TuningKey, result: TuningResult) -> bool:
        """Return True if the model that ranked can extrapolate to another m of the bucket."""
        model = self.answering.model  # what another model says of the timings is not comparable
        can = model.kind == "learned" and model.hash == result.model_hash
        return can and key.m_range[0] != key.m_range[1]


@functools.cache
def _say_once() -> None:
    log.info("in a process group nothing is timed, and the model's first choice is taken: "
             "costmodel.warmup(problems, group=...) lets one rank decide for all")  # fmt: skip
