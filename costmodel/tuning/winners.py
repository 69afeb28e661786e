"""The winner of each bucket: from memory, from disk, or by tuning; each is tuned once.

A bucket of m is the unit of a choice, so that a service that sees every m tunes a bounded number
of times. (n, k) and the class of code are exact. The first m that is asked for is tuned, among the
configurations that are legal for the whole bucket. When another m comes, the bucket is planned,
once (:mod:`costmodel.tuning.planning`).

In a process group a winner is what the ranks have agreed on, else a prediction that is the same on
all of them: the disk of a rank, and the m that was asked for first there, do not matter.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from threading import Lock
from typing import Any

from costmodel.data.measurement import Runner
from costmodel.errors import FileError, HostError, InvalidInput, ModelError
from costmodel.files import Named
from costmodel.gemm.specialize import compile_for_device
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models.baselines import RuleHeuristic
from costmodel.processes import IDLE_S
from costmodel.tuning.counters import count
from costmodel.tuning.memory import Memory, lacks_plan, same_tuning
from costmodel.tuning.planning import plan_by_prediction, plan_by_timing
from costmodel.tuning.ranking import Answering, answering_model, named_model, with_answering
from costmodel.tuning.tuner import Compile, tune_by, untimed_because
from costmodel.tuning.tuning_key import Buckets, TuningKey
from costmodel.tuning.tuning_result import NO_PLAN, BucketPlan, TuningResult
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.validation import log, one_line, warn_once

# These ask for timings: in a process group a prediction is no answer to them.
_TIMED_ON_REQUEST = ("topk", "exhaustive")

_RULES = RuleHeuristic()


def warn_of_host(error: HostError) -> None:
    """Warn, once in a process, that products are computed without tuning."""
    text = f"{error}; meanwhile products are predicted, or computed by torch"
    warn_once(text, "the machine", stacklevel=7)


class DeviceProcess:
    """The timing process of one device, for one user at a time; it takes seconds to start."""

    def __init__(self, device_index: int):
        from costmodel.measure.device import DeviceRunner

        self._index = device_index
        self._lock = Lock()
        self._runner = DeviceRunner(device_index, idle_s=IDLE_S)

    @contextmanager
    def runner(self, wait: bool = True) -> Iterator[Runner]:
        """The runner, while no other thread has it.

        Args:
            wait: until the device has nothing else to do, so that nothing disturbs the timings. The
                process reads none of the caller's memory, so results are right without waiting.
        """
        import torch

        with self._lock:
            self._runner.start()
            if wait:
                torch.cuda.synchronize(self._index)
            yield self._runner


@dataclass(eq=False)
class Winners:
    """Results by key, tuned when they are first asked for. For any number of threads.

    Attributes:
        cache: where they are kept between processes.
        target_of: returns the target of a device index.
        process_of: makes the timing process of a device index, when something is to be timed there.
        compile_: how to compile what is not timed; default: in supervised processes.
        buckets: which m share a winner. Call :meth:`forget` after a change: winners in memory are
            of the earlier buckets.
        memory: what is known in this process.
    """

    cache: WinnerCache
    target_of: Callable[[int], Target] = Target.current
    process_of: Callable[[int], DeviceProcess] = DeviceProcess
    compile_: Compile = compile_for_device
    buckets: Buckets = field(default_factory=Buckets)
    memory: Memory = field(default_factory=Memory)
    _processes: dict[int, DeviceProcess] = field(default_factory=dict)
    _lock: Any = field(default_factory=Lock)

    def key(self, workload: Workload, device_index: int, **options: Any) -> TuningKey:
        """The key of a product.

        Args:
            options: the other attributes of :class:`TuningKey`; ``model`` may be a directory.
        """
        m_range = self.buckets.range_of(workload)
        options["model"] = named_model(options.get("model"))
        if options.get("mode") == "heuristic":
            options["model"] = _RULES
        options["toolchain"] = self.target_of(device_index).toolchain
        return TuningKey(replace(workload, m=m_range[1]), m_range, device_index, **options)

    def find(
        self, key: TuningKey, m: int, *, whole: bool = False, wait: bool = True,
        may_time: bool = True,
    ) -> TuningResult:  # fmt: skip
        """The winner of a bucket, which is legal for all of it: known, on disk, or tuned now.

        In a process group: agreed on, or predicted.

        Args:
            m: one of the bucket. It is tuned if none was tuned before; else the bucket is planned.
            whole: plan the bucket in any case.
            wait: as in :meth:`DeviceProcess.runner`, where something is to be timed.
            may_time: if False, nothing is timed: a known bucket is planned by prediction, and for
                an unknown one the winner of mode ``predict`` is returned.

        Raises:
            InvalidInput: in a process group, the mode asks for timings, and the ranks have not
                agreed on a winner.
            HostError: the machine can neither time nor compile. If it can only not time, a
                prediction is returned.
        """
        if key.epoch:
            if (agreed := self.known(key)) is not None:
                return agreed
            key, m = _alike_on_all_ranks(key)
        planned_for = None if whole else m
        work = _Work(self, key, m, wait)
        with work.memory.alone(key):
            found = work.memory.get(key)
            if found is not None and may_time and work.memory.is_due(key):
                kept = work.read()  # another process may have found it
                found = work.remember(kept) if kept else work.tune_again(found)
            if found is not None:
                count(memory_hits=1)
                if not lacks_plan(found, planned_for, may_time):
                    return found
            # Another process may have planned what is in memory.
            kept = work.read()
            if kept is not None and (found is None or same_tuning(kept, found)):
                found = work.remember(kept)
            if found is None and may_time:
                count(misses=1)
                found = work.tune_or_predict()
            if found is not None:
                wants_plan = lacks_plan(found, planned_for, may_time)
                return work.plan(found, may_time) if wants_plan else found
        return self.find(replace(key, mode="predict"), m, whole=whole)

    def known(self, key: TuningKey, *, on_disk: bool = True) -> TuningResult | None:
        """The winner, if it is in memory, or on disk; waits for no other thread.

        In a process group: what was agreed on, or predicted before.
        """
        work = _Work(self, key)
        predicted = [replace(key, mode="predict")] if key.epoch and key.mode == "auto" else []
        for each in (key, *predicted):
            if (found := work.memory.get(each)) is not None:
                count(memory_hits=1)
                return found
        kept = work.read() if on_disk else None
        return kept and work.remember(kept)

    def is_final(
        self, key: TuningKey, m: int, result: TuningResult, *, may_time: bool = True
    ) -> bool:
        """Return True if :meth:`find` would return nothing else for this m than this result."""
        return bool(key.epoch) or not lacks_plan(result, m, may_time)

    def replace(
        self, key: TuningKey, m: int, unwanted: TuningResult, *, broken: bool, wait: bool = True
    ) -> TuningResult:
        """Tune again to replace a winner that could not be loaded: once, until :meth:`forget`.

        The new winner stays, whether or not it works.

        Args:
            broken: the winner works in no process, not only not in this one. Then it is removed
                from the disk, and the new one is for all processes.
        """
        work = _Work(self, key, m, wait, is_for_all=broken)
        with work.memory.alone(key):
            replaced = work.memory.replaced
            if key not in replaced and same_tuning(work.memory.get(key) or unwanted, unwanted):
                workload = key.workload(m)
                log.warning("%s no longer works for %s: tuning again", unwanted.chosen, workload)
                replaced.add(key)
                if broken:
                    self.cache.discard(work.disk_key())
                count(misses=1)
                work.tune_or_predict()
        return self.find(key, m, wait=wait)

    def tune(self, key: TuningKey, m: int, *, budget_s: float = inf) -> TuningResult:
        """Tune now, whatever is known, and keep the winner."""
        work = _Work(self, key, m)
        with work.memory.alone(key):
            work.memory.replaced.discard(key)
            return work.tune(budget_s=budget_s)

    def disk_key(self, key: TuningKey) -> Named:
        """All that the choice for a bucket rests on, on this device, readable."""
        return _Work(self, key).disk_key()

    def forget(self) -> None:
        """Drop what is in memory, not what is on disk."""
        self.memory = Memory()  # work begun before adds to the old one, which nobody reads

    def process(self, index: int) -> DeviceProcess:
        """The timing process of a device."""
        with self._lock:
            if index not in self._processes:
                self._processes[index] = self.process_of(index)
            return self._processes[index]


@dataclass
class _Work:
    """The work on one bucket: read its winner, tune it, plan it, keep it.

    Attributes:
        winners, key, m, wait: as in :meth:`Winners.find`.
        is_for_all: the winner is kept on disk, for all processes, if it would be chosen again.
        memory: of the winners when the work began; they may have another one since.
    """

    winners: Winners
    key: TuningKey
    m: int = 0
    wait: bool = True
    is_for_all: bool = True

    def __post_init__(self) -> None:
        self.memory = self.winners.memory

    @cached_property
    def _target(self) -> Target:
        return self.winners.target_of(self.key.device_index)

    @cached_property
    def _answering(self) -> Answering:
        """The model that answers, resolved once, before a choice takes seconds."""
        return answering_model(self.key.model, self._target, self.key.largest)

    def disk_key(self) -> Named:
        return self.key.on_disk(self._target, self._answering.model)

    def read(self) -> TuningResult | None:
        """The winner on disk; None in a process group, where the disk does not matter."""
        if self.key.epoch:
            return None
        found = self.winners.cache.get(self.disk_key())
        if found is None or not self.key.accepts(found, self._target, self._answering.model):
            return None
        count(disk_hits=1)
        return found

    def remember(self, result: TuningResult) -> TuningResult:
        """Keep in memory; a result whose bucket cannot be planned serves the whole bucket."""
        if not self._can_plan(result):
            result = replace(result, plan=NO_PLAN)
        self.memory.put(self.key, result)
        return result

    def tune_or_predict(self) -> TuningResult:
        """Tune; where this machine cannot, predict, and keep that in this process only."""
        try:
            return self.tune()
        except HostError as error:
            if untimed_because(self.key.workload(self.m), self.key.mode):
                raise
            warn_of_host(error)
        self.is_for_all = False
        return self.tune("predict")

    def tune_again(self, unsteady: TuningResult) -> TuningResult:
        """Tune once more; the winner so far stays where that fails."""
        self.memory.postpone(self.key)
        try:
            return self.tune()
        except Exception as error:  # whatever it is, there is a winner that works
            log.warning("%s is not tuned again: %s", unsteady.workload, one_line(error))
            return unsteady

    def tune(self, mode: str = "", budget_s: float = inf) -> TuningResult:
        """Choose, and keep the choice.

        Args:
            mode: instead of the key's.
        """
        key, workload, mode = self.key, self.key.workload(self.m), mode or self.key.mode
        untimed = untimed_because(workload, mode)

        def tune(answering: Answering) -> TuningResult:
            self._answering = answering
            with nullcontext() if untimed else self._runner() as runner:
                return tune_by(
                    answering, workload, self._target, runner=runner, k=key.k, mode=mode,
                    include_torch=key.include_torch, budget_s=budget_s, largest=key.largest,
                    compile_=self.winners.compile_ if untimed else None,
                )  # fmt: skip

        result = with_answering(key.model, self._target, key.largest, tune)
        count(
            tuned=int(result.timed), predicted=int(not result.timed),
            timed=result.costs.timed, compiled=result.costs.compiled,
        )  # fmt: skip
        return self._keep(result)

    def plan(self, result: TuningResult, may_time: bool) -> TuningResult:
        """The winner with a plan of its bucket, timed if the winner was timed and timing works."""
        if not self._can_plan(result):
            return result  # another model answers now
        timing = result.timed and may_time
        plan = self._timed_plan(result) if timing else None
        try:
            plan = plan or plan_by_prediction(
                result, self.key.m_range, self._answering.model, attempted=timing
            )
        except (FileError, ModelError) as error:  # its trees are read only now
            log.warning("%s: nothing is predicted of its other m: %s", result.workload, error)
            return result
        return self._keep(replace(result, plan=plan))

    def _timed_plan(self, result: TuningResult) -> BucketPlan | None:
        """A plan by timing; None if that fails, since the product can be computed without it."""
        model = self._answering.model
        try:
            with self._runner() as runner:
                plan, costs = plan_by_timing(
                    result, self.key.m_range, model, runner, self.winners.compile_, first=self.m
                )
        except Exception as error:
            told = one_line(f"{type(error).__name__}: {error}")
            log.warning("%s: the other m of its bucket are not timed: %s", result.workload, told)
            return None
        count(timed=costs.timed, compiled=costs.compiled)
        return plan

    def _can_plan(self, result: TuningResult) -> bool:
        """Return True if the model that ranked can extrapolate to another m of the bucket."""
        model, (first, last) = self._answering.model, self.key.m_range
        # What another model says of the timings is not comparable.
        return first != last and model.kind == "learned" and model.hash == result.model_hash

    def _keep(self, result: TuningResult) -> TuningResult:
        """Keep in memory, and on disk what any process with this key would choose again."""
        result = self.remember(replace(result, reliable=result.reliable and self.is_for_all))
        if result.reliable and not self.key.epoch:
            self.winners.cache.put(self.disk_key(), result)
        return result

    def _runner(self) -> AbstractContextManager[Runner]:
        return self.winners.process(self.key.device_index).runner(self.wait)


def _alike_on_all_ranks(key: TuningKey) -> tuple[TuningKey, int]:
    """The key and the m by which all ranks predict the same, whatever each was asked for first.

    Raises:
        InvalidInput: the mode asks for timings, and each rank would choose by its own.
    """
    if key.mode in _TIMED_ON_REQUEST:
        raise InvalidInput(
            f"mode={key.mode!r} in a process group, where each rank would choose by timings of its "
            f"own: call costmodel.warmup([(m, n, k)], mode={key.mode!r}, group=...) on all ranks "
            f"before"
        )
    if key.mode == "auto":
        log.info(
            "in a process group nothing is timed, and the model's first choice is taken: "
            "costmodel.warmup(problems, group=...) lets one rank decide for all"
        )
        key = replace(key, mode="predict")
    return key, key.m_range[1]
