"""The loop that makes a dataset: space -> compile -> measure -> record.

Compiling runs ahead in worker processes while the GPU times what is ready. Each workload is
recorded as soon as it is timed, so a run may be killed at any moment and started again.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from time import monotonic

import numpy as np

from costmodel.compile.compile_pool import CompilePool
from costmodel.compile.compiler import Artifact
from costmodel.data.candidates import Candidates
from costmodel.data.dataset import Dataset, Role, RunInfo
from costmodel.data.measurement import Candidate, Measurement, TuningRecord
from costmodel.errors import NoGpu
from costmodel.evaluation.duplicates import identities
from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.specialize import (
    artifact_key,
    import_kernels,
    kernel_hashes,
    specialize,
    submit,
)
from costmodel.gemm.workload import Workload
from costmodel.measure.device import DeviceRunner

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
    """Counts of what a collection has done so far."""

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


OnJob = Callable[[Job, Progress], None]


def collect(
    jobs: Sequence[Job],
    dataset: Dataset,
    runner: DeviceRunner,
    run: RunInfo,
    *,
    n_jobs: int | None = None,
    cache: Path | None = None,
    budget_s: float = float("inf"),
    on_job: OnJob = lambda *_: None,
) -> Progress:
    """Measure what is not recorded yet.

    A job that the card has no room for is passed over with a warning, and not recorded.

    Args:
        jobs: in the order in which they are wanted.
        dataset: where rows go; what it holds already is not measured again.
        runner: times on the device.
        run: recorded with every row.
        n_jobs: compiling processes; default: all cores but two, which time.
        cache: the folder of Triton's cache through which binaries reach the timing process;
            default: Triton's own.
        budget_s: begin no workload after so many wall seconds.
        on_job: called after each recorded job.

    Raises:
        NoGpu: the card has no room for several jobs in a row, or for any.
    """
    from triton import knobs

    deadline = monotonic() + budget_s
    collection = _Collection(dataset, runner, run, cache or Path(knobs.cache.dir))
    merged = _merged(jobs)
    _warn_of_roles(merged, dataset)
    todo = collection.remaining(merged)
    collection.progress.jobs = len(todo)
    anchors = _anchors(dataset) if todo else {}
    n_jobs = n_jobs or max((os.cpu_count() or 1) - 2, 1)
    with CompilePool(n_jobs, preload=import_kernels) as pool:
        collection.compile([*anchors, *todo], pool)
        for anchor, first_us in anchors.items():
            collection.time_again(anchor, first_us)
        collection.work_through(todo, deadline, on_job, pool)
    return collection.progress


class _Collection:
    """One run of the collector on one GPU."""

    def __init__(self, dataset: Dataset, runner: DeviceRunner, run: RunInfo, cache: Path) -> None:
        self._dataset, self._runner, self._run, self._cache = dataset, runner, run, cache
        self._recorded = dataset.artifacts()
        self._compiled: dict[str, Artifact] = {}
        self._futures: dict[Specialization, Future[Artifact]] = {}
        self.progress = Progress()

    def remaining(self, jobs: Iterable[Job]) -> list[Job]:
        """Return the jobs less what is recorded, and less what is known to repeat it."""
        found = []
        for job in jobs:
            if not self._done(job.workload):
                found.append(job)  # what repeats another is left out when its turn comes
            elif left := self._new(job, {}):
                found.append(Job(job.workload, tuple(c.config for c in left), job.role))
        return found

    def compile(self, jobs: Iterable[Job], pool: CompilePool) -> None:
        """Begin to compile what jobs need, in their order."""
        for job in jobs:
            for config in job.configs:
                spec = specialize(job.workload, config)
                if spec not in self._futures:
                    target = self._dataset.target
                    self._futures[spec] = submit(pool, spec, target, cache=self._cache)

    def work_through(
        self, todo: Sequence[Job], deadline: float, on_job: OnJob, pool: CompilePool
    ) -> None:
        """Time one job after the other; the next is prepared, and the last recorded, meanwhile.

        Each takes a tenth of the time that timing takes, in which the GPU would do nothing.
        """
        with (
            ThreadPoolExecutor(1, "preparing") as ahead,
            ThreadPoolExecutor(1, "recording") as desk,
        ):
            recording: list[tuple[Job, Future[None]]] = []
            ready = [ahead.submit(self._prepare, job) for job in todo[:1]]
            without_room = 0
            try:
                for job, following in zip_longest(todo, todo[1:]):
                    if monotonic() > deadline:
                        break
                    begin = monotonic()
                    candidates = ready.pop().result()
                    if following is not None:
                        ready.append(ahead.submit(self._prepare, following))
                    self._count_waiting(begin)
                    outcome = self._measure(job, candidates)
                    if outcome.no_room:
                        without_room += 1
                        _pass_over(job, outcome.no_room, without_room, len(todo))
                        continue
                    without_room = 0
                    self._finish(recording, on_job)
                    recording.append((job, desk.submit(self._record, job, outcome)))
            finally:
                pool.close()  # who waits for a binary need wait no longer
                self._finish(recording, on_job)

    def time_again(self, job: Job, first_us: float) -> None:
        """Time an anchor, and say how far this card is from the recorded run."""
        (config,) = job.configs
        artifact = self._artifact(specialize(job.workload, config))
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

    def _done(self, workload: Workload) -> set[GemmConfig]:
        """Return the configurations that are recorded with the present kernels."""
        return self._dataset.measured(workload, kernel_hashes())

    def _artifact(self, spec: Specialization) -> Artifact:
        """Wait for the binary of a specialization."""
        artifact = self._futures[spec].result()
        self._compiled[artifact.key] = artifact
        return artifact

    def _prepare(self, job: Job) -> list[Candidate]:
        """Wait for the binaries of a job; return what is to be timed of it."""
        specs = dict.fromkeys(specialize(job.workload, config) for config in job.configs)
        return self._new(job, {spec: self._artifact(spec) for spec in specs})

    def _new(self, job: Job, compiled: Mapping[Specialization, Artifact]) -> list[Candidate]:
        """Return what is not recorded yet of a job, less what does the same as another."""
        done = self._done(job.workload)
        specs = {c: specialize(job.workload, c) for c in (*done, *job.configs)}
        keys = {s: artifact_key(s, self._dataset.target) for s in dict.fromkeys(specs.values())}
        found = dict(zip(keys, self._recorded.find([*keys.values()]), strict=True))
        found |= {s: self._compiled[key] for s, key in keys.items() if key in self._compiled}
        found |= compiled
        return _distinct(job.workload, done, {config: found[s] for config, s in specs.items()})

    def _measure(self, job: Job, candidates: Sequence[Candidate]) -> _Outcome:
        begin, runner, workload = monotonic(), self._runner, job.workload
        torch = runner.measure_torch(workload)
        if torch.no_room:
            return _Outcome([], [], torch, torch.error)
        measured = runner.measure(workload, candidates)
        records = [
            TuningRecord(workload, c.config, c.artifact.key if c.artifact else "", m)
            for c, m in zip(candidates, measured, strict=True)
        ]
        # The best few once more, in turn: their second measurement tells the noise.
        best = sorted((r for r in records if r.measurement.ok), key=_latency)[:_FINALISTS]
        again = [
            TuningRecord(workload, r.config, r.artifact_key, m)
            for r, m in zip(best, runner.compare(workload, [r.config for r in best]), strict=True)
        ]
        timed = (r.measurement for r in (*records, *again))
        no_room = next((m.error for m in timed if m.no_room), "")
        if not no_room:
            self._count(records, monotonic() - begin)
        return _Outcome(records, again, torch, no_room)

    def _record(self, job: Job, outcome: _Outcome) -> None:
        """Write what was measured: binaries first, so that no row names an unknown one."""
        keys = dict.fromkeys(r.artifact_key for r in outcome.records)
        self._dataset.append_artifacts(self._compiled[k] for k in keys if k in self._compiled)
        self._dataset.append_measurements(
            outcome.records, run=self._run, role=job.role, torch={job.workload: outcome.torch}
        )
        self._dataset.append_measurements(outcome.again, run=self._run, role="anchor")

    def _finish(self, recording: list[tuple[Job, Future[None]]], on_job: OnJob) -> None:
        """Wait until all is recorded; raise what kept it from being so."""
        while recording:
            job, future = recording.pop()
            future.result()
            self.progress.jobs_done += 1
            on_job(job, self.progress)

    def _count(self, records: Sequence[TuningRecord], timed_s: float) -> None:
        p = self.progress
        statuses = Counter[str](record.measurement.status for record in records)
        p.rows += len(records)
        p.ok_rows += statuses["ok"]
        p.statuses = dict(Counter(p.statuses) + statuses)
        p.timing_s += timed_s

    def _count_waiting(self, begin: float) -> None:
        done = [future.result() for future in self._futures.values() if future.done()]
        self.progress.compiled = len(done)
        self.progress.compile_failures = sum(not artifact.ok for artifact in done)
        self.progress.waiting_s += monotonic() - begin


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The measurements of a job; ``again`` are its finalists.

    A text in ``no_room`` says that the card was too full: then none of them is recorded, for as
    rows they would say that these configurations never run.
    """

    records: list[TuningRecord]
    again: list[TuningRecord]
    torch: Measurement
    no_room: str


def _pass_over(job: Job, reason: str, in_a_row: int, jobs: int) -> None:
    """Warn of a workload that may be too large for the card; several in a row say it is full.

    Raises:
        NoGpu: it is.
    """
    if in_a_row >= min(_NO_ROOM_IN_A_ROW, jobs):
        raise NoGpu(
            f"{job.workload} cannot be timed: {reason}. Nothing of it is recorded, nor of those "
            f"just before it: free the card's memory and run this again, which goes on here; "
            f"leave out what is too large for this card"
        )
    log.warning("%s is passed over: %s", job.workload, reason)


def _warn_of_roles(jobs: Sequence[Job], dataset: Dataset) -> None:
    """Warn of workloads to judge by that were recorded to learn from: they stay so."""
    to_judge = [job for job in jobs if job.role == "eval"]
    learned = set(dataset.workloads("train")) if to_judge else ()
    if twice := [job for job in to_judge if job.workload in learned]:
        log.warning(
            "%d workloads are in %s to learn from, %s among them, and stay so: record them to "
            "judge by in another dataset", len(twice), dataset.path, twice[0].workload,
        )  # fmt: skip


def _anchors(dataset: Dataset) -> dict[Job, float]:
    """Return a few workloads of earlier runs, each with the best that was found, and its latency.

    Only rows of the present kernels count: if another version was faster, the card is not slower.
    """
    table, _ = dataset.unchanged(dataset.measurements("train", "eval"), kernel_hashes())
    recorded = sorted(table.rows_of, key=Workload.key)
    large = [w for w in recorded if w.bytes() >= _ANCHOR_BYTES]
    found = {}
    for workload in large[:: max(len(large) // _ANCHOR_WORKLOADS, 1)][:_ANCHOR_WORKLOADS]:
        rows = table.rows_of[workload]
        ok = rows[table.ok[rows] & (table.config_index[rows] >= 0)]
        if len(ok):
            best = ok[np.argmin(table.latency_us[ok])]
            config = table.configs[table.config_index[best]]
            found[Job(workload, (config,), "anchor")] = float(table.latency_us[best])
    return found


def _merged(jobs: Sequence[Job]) -> list[Job]:
    """Return one job a workload and role, with the configurations of all."""
    configs: dict[tuple[Workload, Role], dict[GemmConfig, None]] = {}
    for job in jobs:
        configs.setdefault((job.workload, job.role), {}).update(dict.fromkeys(job.configs))
    return [Job(workload, tuple(found), role) for (workload, role), found in configs.items()]


def _latency(record: TuningRecord) -> float:
    return record.measurement.latency_us


def _distinct(
    workload: Workload,
    done: AbstractSet[GemmConfig],
    artifacts: Mapping[GemmConfig, Artifact | None],
) -> list[Candidate]:
    """Return the candidates that are not done yet, less those that do the same as another."""
    configs = sorted(artifacts, key=lambda config: config not in done)
    candidates = [Candidate(config, artifacts[config]) for config in configs]
    columns = Candidates.of(configs, [c.artifact for c in candidates])
    seen: set[int] = set()
    found = []
    for candidate, number in zip(candidates, identities(workload, columns).tolist(), strict=True):
        if number not in seen and candidate.config not in done:
            found.append(candidate)
        seen.add(number)
    return found
