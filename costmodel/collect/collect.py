"""The loop that makes a dataset: space -> compile -> measure -> record.

Compiling runs ahead in worker processes while the GPU times what is ready. Each workload is
recorded as soon as it is timed, so a run may be killed at any moment and started again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Collection as Container
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from time import monotonic

import numpy as np

from costmodel.collect.compile_ahead import Compiling
from costmodel.compile.artifact import Artifact
from costmodel.data.candidates import Candidates
from costmodel.data.dataset import Dataset, Role, RunInfo
from costmodel.data.measurement import Candidate, Measurement, TuningRecord
from costmodel.errors import NoGpu
from costmodel.evaluation.duplicates import identities
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.kernel_code import kernel_hashes
from costmodel.gemm.specialize import Specialization, artifact_key, specialize
from costmodel.gemm.workload import Workload
from costmodel.measure.device import DeviceRunner

__all__ = ["Job", "Progress", "collect"]

_FINALISTS = 6
_NO_ROOM_IN_A_ROW = 3  # jobs: then it is the card that is full
_ANCHOR_WORKLOADS = 4
_DRIFT_LIMIT = 0.05
_ANCHOR_BYTES = 2**24  # smaller ones are too short to tell a card from noise

log = logging.getLogger("costmodel")


@dataclass(frozen=True, slots=True)
class Job:
    """A workload, and the configurations of it to measure."""

    workload: Workload
    configs: tuple[GemmConfig, ...]
    role: Role = "train"


@dataclass(slots=True)
class Progress:
    """What a collection has done so far."""

    jobs_done: int = 0
    jobs: int = 0
    rows: int = 0
    ok_rows: int = 0
    compiled: int = 0
    compile_failures: int = 0
    timing_s: float = 0.0
    waiting_s: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)  # by workload: now over recorded, less 1


class Collection:
    """One run of the collector on one GPU.

    Args:
        dataset: where rows go; what it holds already is not measured again.
        runner: times on the device.
        run: recorded with every row.
        n_jobs: compiling processes; default: all cores but two, which time.
        cache: the folder of Triton's cache through which binaries reach the timing process;
            default: Triton's own.
        budget_s: stop handing out workloads after so many wall seconds.
    """

    def __init__(
        self,
        dataset: Dataset,
        runner: DeviceRunner,
        run: RunInfo,
        *,
        n_jobs: int | None = None,
        cache: Path | None = None,
        budget_s: float = float("inf"),
    ) -> None:
        self._dataset, self._runner, self._run = dataset, runner, run
        self._n_jobs = n_jobs or max((os.cpu_count() or 1) - 2, 1)
        self._cache = cache
        self._deadline = monotonic() + budget_s
        self._recorded = dataset.artifacts()
        self._compiled: dict[str, Artifact] = {}
        self._without_room = 0  # jobs in a row
        self.progress = Progress()

    def collect(
        self, jobs: Sequence[Job], on_job: Callable[[Job, Progress], None] = lambda *_: None
    ) -> Progress:
        """Measure what is not recorded yet.

        Args:
            jobs: in the order in which they are wanted.
            on_job: called after each recorded job.

        A job that the card has no room for is passed over with a warning, and not recorded.

        Raises:
            NoGpu: the card has no room for several jobs in a row, or for any.
        """
        wanted = _merged(jobs)
        self._tell_of_roles(wanted)
        todo = list(self._remaining(wanted))
        self.progress.jobs = len(todo)
        anchors = self._anchors() if todo else {}
        specs = dict.fromkeys(
            specialize(j.workload, c) for j in (*anchors, *todo) for c in j.configs
        )
        compiling = Compiling(specs, self._dataset, self._n_jobs, self._cache)
        try:
            for anchor, first_us in anchors.items():
                self._time_again(anchor, first_us, compiling)
            self._work_through(todo, compiling, on_job)
        finally:
            compiling.stop()
        return self.progress

    def _work_through(
        self, todo: Sequence[Job], compiling: Compiling, on_job: Callable[[Job, Progress], None]
    ) -> None:
        """Time one job after the other; the next is made ready, the last recorded, meanwhile.

        Both take a tenth of the time that timing takes, in which the GPU would do nothing.
        """
        with (
            ThreadPoolExecutor(1, "preparing") as ahead,
            ThreadPoolExecutor(1, "recording") as desk,
        ):
            recorded: list[tuple[Job, Future[None]]] = []
            ready = [ahead.submit(self._prepare, job, compiling) for job in todo[:1]]
            try:
                for job, following in zip_longest(todo, todo[1:]):
                    if monotonic() > self._deadline:
                        break
                    begin = monotonic()
                    candidates = ready.pop().result()
                    if following is not None:
                        ready.append(ahead.submit(self._prepare, following, compiling))
                    self._count_waiting(begin, compiling)
                    try:
                        outcome = self._measure(job, candidates)
                    except _NoRoom as error:
                        self._pass_over(job, error, len(todo))
                        continue
                    self._without_room = 0
                    self._hear_of(recorded, on_job)
                    recorded.append((job, desk.submit(self._record, job, outcome)))
            finally:
                compiling.give_up()
                self._hear_of(recorded, on_job)

    def _pass_over(self, job: Job, error: _NoRoom, jobs: int) -> None:
        """A workload may be too large for the card; several in a row say that the card is full.

        Raises:
            NoGpu: they do.
        """
        self._without_room += 1
        if self._without_room >= min(_NO_ROOM_IN_A_ROW, jobs):
            raise NoGpu(
                f"{job.workload} cannot be timed: {error}. Nothing of it is recorded, nor of those "
                f"just before it: free the card's memory and run this again, which goes on here; "
                f"leave out what is too large for this card"
            )
        log.warning("%s is passed over: %s", job.workload, error)

    def _tell_of_roles(self, jobs: Sequence[Job]) -> None:
        """What was recorded to learn from is not recorded to judge by as well."""
        to_judge = [job for job in jobs if job.role == "eval"]
        learned = set(self._dataset.workloads("train")) if to_judge else ()
        if twice := [job for job in to_judge if job.workload in learned]:
            log.warning(
                "%d workloads are in %s to learn from, %s among them, and stay so: record them to "
                "judge by in another dataset", len(twice), self._dataset.path, twice[0].workload,
            )  # fmt: skip

    def _hear_of(
        self, recorded: list[tuple[Job, Future[None]]], on_job: Callable[[Job, Progress], None]
    ) -> None:
        """Wait until what was given to be recorded is; raises what kept it from being so."""
        while recorded:
            job, future = recorded.pop()
            future.result()
            self.progress.jobs_done += 1
            on_job(job, self.progress)

    def _anchors(self) -> dict[Job, float]:
        """A few workloads of earlier runs, each with the best that was found, and its latency.

        By the kernels as they are now: that another version was faster is not the card's doing.
        """
        rows = self._dataset.measurements("train", "eval")
        table, _ = self._dataset.unchanged(rows, kernel_hashes())
        recorded = sorted(table.rows_of, key=Workload.key)
        large = [w for w in recorded if w.bytes() >= _ANCHOR_BYTES]
        found = {}
        for workload in large[:: max(len(large) // _ANCHOR_WORKLOADS, 1)][:_ANCHOR_WORKLOADS]:
            rows_of = table.rows_of[workload]
            ok = rows_of[table.ok[rows_of] & (table.config_index[rows_of] >= 0)]
            if len(ok):
                best = ok[np.argmin(table.latency_us[ok])]
                config = table.configs[table.config_index[best]]
                found[Job(workload, (config,), "anchor")] = float(table.latency_us[best])
        return found

    def _time_again(self, job: Job, first_us: float, compiling: Compiling) -> None:
        """Time an anchor and say how far this card is from the recorded run."""
        (config,) = job.configs
        spec = specialize(job.workload, config)
        artifact = compiling.wait_for([spec])[spec]
        (again,) = self._runner.measure(job.workload, [Candidate(config, artifact)])
        if again.no_room:
            log.warning("%s is not timed again: %s", job.workload, again.error)
            return
        record = TuningRecord(job.workload, config, artifact.key, again)
        self._dataset.append_artifacts([artifact])
        self._dataset.append_measurements([record], run=self._run, role="anchor")
        if again.ok:
            drift = again.latency_us / first_us - 1
            self.progress.drift[job.workload.key()] = drift
            if abs(drift) > _DRIFT_LIMIT:
                log.warning(
                    "%s took %.2f us, %.2f in an earlier run (%+.0f %%): another card, clocks or "
                    "load?", job.workload, again.latency_us, first_us, 100 * drift,
                )  # fmt: skip

    def _remaining(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Jobs less what is recorded, and less what is known to repeat it."""
        for job in jobs:
            done = self._done(job.workload)
            if not done:
                yield job  # what repeats another is left out when its turn comes
            elif left := _distinct(job, self._known(job), done):
                yield Job(job.workload, tuple(c.config for c in left), job.role)

    def _done(self, workload: Workload) -> set[GemmConfig]:
        """What is recorded of the kernels as they are now."""
        return self._dataset.measured(workload, kernel_hashes())

    def _known(self, job: Job) -> dict[Specialization, Artifact]:
        """The artifacts of a job that are recorded already."""
        specs = dict.fromkeys(specialize(job.workload, c) for c in job.configs)
        keys = [artifact_key(spec, self._dataset.target) for spec in specs]
        recorded = self._recorded.find(keys)
        found = [self._compiled.get(k) or r for k, r in zip(keys, recorded, strict=True)]
        return {spec: a for spec, a in zip(specs, found, strict=True) if a is not None}

    def _prepare(self, job: Job, compiling: Compiling) -> list[Candidate]:
        """What is to be timed of a job, once it is compiled."""
        by_spec = compiling.wait_for([specialize(job.workload, c) for c in job.configs])
        self._compiled |= {a.key: a for a in by_spec.values()}
        done = self._done(job.workload)
        everything = Job(job.workload, (*done, *job.configs), job.role)
        return _distinct(everything, self._known(everything) | by_spec, done)

    def _measure(self, job: Job, candidates: Sequence[Candidate]) -> _Outcome:
        begin = monotonic()
        torch = self._runner.measure_torch(job.workload)
        _require_room([torch])
        measured = self._runner.measure(job.workload, candidates)
        _require_room(measured)
        records = [
            TuningRecord(job.workload, c.config, c.artifact.key if c.artifact else "", m)
            for c, m in zip(candidates, measured, strict=True)
        ]
        again = self._finalists(job.workload, records)
        _require_room([r.measurement for r in again])
        self._count(records, monotonic() - begin)
        return _Outcome(records, again, torch)

    def _record(self, job: Job, outcome: _Outcome) -> None:
        """Write what was measured: binaries first, so that no row names an unknown one."""
        keys = dict.fromkeys(r.artifact_key for r in outcome.records)
        self._dataset.append_artifacts(self._compiled[k] for k in keys if k in self._compiled)
        self._dataset.append_measurements(
            outcome.records, run=self._run, role=job.role, torch={job.workload: outcome.torch}
        )
        self._dataset.append_measurements(outcome.again, run=self._run, role="anchor")

    def _finalists(self, workload: Workload, records: Sequence[TuningRecord]) -> list[TuningRecord]:
        """The best few once more, in turn: their second measurement tells the noise."""
        ok = sorted((r for r in records if r.measurement.ok), key=_latency)[:_FINALISTS]
        again = self._runner.compare(workload, [r.config for r in ok])
        return [
            TuningRecord(workload, r.config, r.artifact_key, m)
            for r, m in zip(ok, again, strict=True)
        ]

    def _count(self, records: Sequence[TuningRecord], timed_s: float) -> None:
        p = self.progress
        p.rows += len(records)
        p.ok_rows += sum(r.measurement.ok for r in records)
        for record in records:
            status = record.measurement.status
            p.statuses[status] = p.statuses.get(status, 0) + 1
        p.timing_s += timed_s

    def _count_waiting(self, begin: float, compiling: Compiling) -> None:
        self.progress.compiled, self.progress.compile_failures = compiling.counts()
        self.progress.waiting_s += monotonic() - begin


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What timing a job gave; ``again`` are its finalists."""

    records: list[TuningRecord]
    again: list[TuningRecord]
    torch: Measurement


def collect(
    jobs: Sequence[Job],
    dataset: Dataset,
    runner: DeviceRunner,
    run: RunInfo,
    *,
    n_jobs: int | None = None,
    cache: Path | None = None,
    budget_s: float = float("inf"),
    on_job: Callable[[Job, Progress], None] = lambda *_: None,
) -> Progress:
    """Measure ``jobs`` into ``dataset``; see :class:`Collection`."""
    collection = Collection(dataset, runner, run, n_jobs=n_jobs, cache=cache, budget_s=budget_s)
    return collection.collect(jobs, on_job)


class _NoRoom(Exception):
    """The card was too full for a job; it says how full."""


def _require_room(measured: Iterable[Measurement]) -> None:
    """Refuse what a full card gave: as rows, it would say that these configurations never run.

    Raises:
        _NoRoom: it was.
    """
    full = next((m for m in measured if m.no_room), None)
    if full is not None:
        raise _NoRoom(full.error)


def _merged(jobs: Sequence[Job]) -> list[Job]:
    """One job a workload and role, with the configurations of all."""
    configs: dict[tuple[Workload, Role], dict[GemmConfig, None]] = {}
    for job in jobs:
        configs.setdefault((job.workload, job.role), {}).update(dict.fromkeys(job.configs))
    return [Job(workload, tuple(found), role) for (workload, role), found in configs.items()]


def _latency(record: TuningRecord) -> float:
    return record.measurement.latency_us


def _distinct(
    job: Job, artifacts: Mapping[Specialization, Artifact], done: Container[GemmConfig]
) -> list[Candidate]:
    """Candidates not done yet, less those that do the same as another."""
    configs = sorted(dict.fromkeys(job.configs), key=lambda c: c not in done)
    found = [artifacts.get(specialize(job.workload, c)) for c in configs]
    numbers = identities(job.workload, Candidates.of(configs, found)).tolist()
    seen: set[int] = set()
    result = []
    for config, artifact, number in zip(configs, found, numbers, strict=True):
        if number not in seen and config not in done:
            result.append(Candidate(config, artifact))
        seen.add(number)
    return result
