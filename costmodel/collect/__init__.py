"""The loop that makes a dataset: space -> compile -> measure -> record.

Compiling runs ahead in worker processes while the GPU times what is ready. Each workload is
recorded as soon as it is timed, so a run may be killed at any moment and started again.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf, nan
from pathlib import Path
from time import monotonic

import numpy as np

from costmodel.compile.compile_pool import CompilePool
from costmodel.compile.compiler import Artifact
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import Candidates
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import (
    Batch,
    Candidate,
    Measurement,
    Role,
    RunInfo,
    Runner,
    TuningRecord,
)
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
from costmodel.validation import log

_FINALISTS = 6
_NO_ROOM_IN_A_ROW = 3  # jobs; after so many the card counts as full
_ANCHOR_WORKLOADS = 4
_SCATTER, _LOW_CLOCK, _DRIFT_LIMIT = 0.1, 0.9, 0.05
_DOUBT = "doubtful: repeats scatter, or the clock was lower than beside others"
_ANCHOR_BYTES = 2**24  # smaller workloads run too briefly to tell cards apart from noise


@dataclass(frozen=True)
class Job:
    """A workload, and the configurations of it to measure.

    A job of role ``anchor`` is timed in every run, so that cards can be compared.
    """

    workload: Workload
    configs: tuple[GemmConfig, ...]
    role: Role = "train"


Jobs = Sequence[Job]


@dataclass
class Progress:
    """Counts of what a collection has done so far."""

    jobs_done: int = 0
    jobs: int = 0
    rows: int = 0
    ok_rows: int = 0
    compiled: int = 0
    compile_failures: int = 0
    timing_s: float = 0.0
    best_us: float = nan  # of the last workload, as is the next one
    torch_us: float = nan
    statuses: dict[str, int] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)  # by workload: now / recorded - 1


OnJob = Callable[[Job, Progress], None]


def collect(
    jobs: Jobs,
    dataset: Dataset,
    runner: Runner,
    run: RunInfo,
    *,
    n_jobs: int | None = None,
    cache: Path | None = None,
    known: ArtifactTable | None = None,
    budget_s: float = inf,
    on_job: OnJob = lambda *_: None,
) -> Progress:
    """Measure what is not recorded yet.

    A job that the card has no room for is passed over with a warning, and not recorded.

    Args:
        jobs: in the order in which they are wanted.
        dataset: where rows go; what it holds already is not measured again.
        runner: times on the device.
        run: recorded with every row.
        n_jobs: compiling processes; default: all cores but two, which are left for timing.
        cache: the folder of Triton's cache through which binaries reach the timing process;
            default: Triton's own.
        known: the binaries of a bundle or a recording; then nothing is compiled.
        budget_s: begin no workload after so many wall seconds.
        on_job: called after each recorded job, in the thread that records.

    Raises:
        NoGpu: the card had no room for three jobs in a row, or for any if there are fewer.
    """
    from triton import knobs

    deadline = monotonic() + budget_s
    merged = merged_jobs(jobs)
    _warn_of_roles(merged, dataset)
    collection = _Collection(dataset, runner, run, on_job)
    given, others = split_anchors(merged)
    todo = collection.remaining(others)
    collection.progress.jobs = len(todo)
    anchors = dict.fromkeys(given, nan) | best_recorded(dataset) if todo else {}
    n_jobs = n_jobs or max((os.cpu_count() or 1) - 2, 1)
    with CompilePool(n_jobs, preload=import_kernels) as pool:
        wanted = [*anchors, *todo]
        if known is None:
            collection.compile(wanted, pool, cache or Path(knobs.cache.dir))
        else:
            collection.take(wanted, known)
        for anchor, first_us in anchors.items():
            collection.time_again(anchor, first_us)
        collection.work_through(todo, deadline, pool)
    return collection.progress


@dataclass(frozen=True)
class _Outcome:
    """The measurements of a job; ``again`` are its finalists."""

    records: list[TuningRecord]
    again: list[TuningRecord]
    torch: Measurement

    @property
    def no_room(self) -> str:
        """Say that the card was too full; empty if it was not.

        Outcomes of a full card are not recorded: rows of them would say that these configurations
        never run.
        """
        every = (self.torch, *(r.measurement for r in (*self.records, *self.again)))
        return next((m.error for m in every if m.no_room), "")


@dataclass
class _Collection:
    """One run of the collector on one GPU."""

    dataset: Dataset
    runner: Runner
    run: RunInfo
    on_job: OnJob

    def __post_init__(self) -> None:
        self._recorded = self.dataset.artifacts()
        self._done = self.dataset.measured(kernel_hashes())
        self._compiled: dict[str, Artifact] = {}
        self._futures: dict[Specialization, Future[Artifact]] = {}
        self.progress = Progress()

    def remaining(self, jobs: Jobs) -> list[Job]:
        """Return the jobs; leave out configurations that are recorded or known to repeat one."""
        found = []
        for job in jobs:
            done = self._done.get(job.workload)
            if done is None:
                found.append(job)  # configurations that repeat another are left out later
            elif not done.issuperset(job.configs) and (left := self._new(job)):
                found.append(replace(job, configs=tuple(c.config for c in left)))
        return found

    def compile(self, jobs: Jobs, pool: CompilePool, cache: Path) -> None:
        """Begin to compile what jobs need, in their order."""
        for job in jobs:
            for config in job.configs:
                spec = specialize(job.workload, config)
                if spec not in self._futures:
                    self._futures[spec] = submit(pool, spec, self.dataset.target, cache=cache)

    def take(self, jobs: Jobs, known: ArtifactTable) -> None:
        """Take the binaries that jobs need from those that are known."""
        specs = [*dict.fromkeys(specialize(j.workload, c) for j in jobs for c in j.configs)]
        keys = [artifact_key(spec, self.dataset.target) for spec in specs]
        for spec, key, artifact in zip(specs, keys, known.find(keys)):
            future = self._futures[spec] = Future()
            future.set_result(artifact or Artifact(key, spec, "crashed", "no binary is known"))

    def work_through(self, todo: Jobs, deadline: float, pool: CompilePool) -> None:
        """Time one job after the other; meanwhile prepare the next one and record the last one.

        Preparing and recording each take a tenth of the time of timing; the GPU must not wait.
        """
        with ThreadPoolExecutor(1, "preparing") as ahead, ThreadPoolExecutor(1, "recorder") as desk:
            ready = [ahead.submit(self._prepare, job) for job in todo[:1]]
            recording: list[Future[None]] = []
            without_room = 0
            try:
                for job, following in zip_longest(todo, todo[1:]):
                    if monotonic() > deadline:
                        break
                    left_s = None if deadline == inf else deadline - monotonic()
                    try:
                        candidates = ready.pop().result(left_s)
                    except TimeoutError:
                        break
                    if following is not None:
                        ready.append(ahead.submit(self._prepare, following))
                    outcome = self._measure(job, candidates)
                    if outcome.no_room:
                        without_room += 1
                        _pass_over(job, outcome.no_room, without_room, len(todo))
                        continue
                    without_room = 0
                    while recording:
                        recording.pop().result()
                    recording.append(desk.submit(self._record, job, outcome))
            finally:
                pool.close()  # so that no thread waits for a binary any longer
                for future in recording:
                    future.result()

    def time_again(self, job: Job, first_us: float) -> None:
        """Time an anchor, and say how far this card is from the recorded latency (NaN: none)."""
        (config,) = job.configs
        artifact = self._artifact(specialize(job.workload, config))
        (again,) = self.runner.measure(job.workload, [Candidate(config, artifact)])
        if not again.ok:
            log.warning("%s is not timed again: %s", job.workload, again.error)
            return
        record = TuningRecord(job.workload, config, artifact.key, again)
        self.dataset.append_artifacts([artifact])
        self.dataset.append_measurements([record], run=self.run, role="anchor")
        if first_us > 0:
            drift = again.latency_us / first_us - 1
            self.progress.drift[job.workload.key()] = drift
            if abs(drift) > _DRIFT_LIMIT:
                log.warning(
                    "%s took %.2f us, %.2f in an earlier run (%+.0f %%): another card, clocks or "
                    "load?", job.workload, again.latency_us, first_us, 100 * drift,
                )  # fmt: skip

    def _artifact(self, spec: Specialization) -> Artifact:
        """Wait for the binary of a specialization."""
        artifact = self._futures[spec].result()
        if artifact.key not in self._compiled:
            self._compiled[artifact.key] = artifact
            self.progress.compiled += 1
            self.progress.compile_failures += not artifact.ok
        return artifact

    def _prepare(self, job: Job) -> list[Candidate]:
        """Wait for the binaries of a job; return its candidates to time."""
        for config in job.configs:
            self._artifact(specialize(job.workload, config))
        return self._new(job)

    def _new(self, job: Job) -> list[Candidate]:
        """Return a job's candidates that are not recorded yet and do not repeat another."""
        done = self._done.get(job.workload, set())
        configs = [*done, *(config for config in job.configs if config not in done)]
        target = self.dataset.target
        keys = [artifact_key(specialize(job.workload, config), target) for config in configs]
        recorded = self._recorded.find(keys)
        artifacts = [self._compiled.get(k, old) for k, old in zip(keys, recorded)]
        numbers = identities(job.workload, Candidates.of(configs, artifacts))
        first = np.unique(numbers, return_index=True)[1]
        return [Candidate(configs[i], artifacts[i]) for i in np.sort(first[first >= len(done)])]

    def _measure(self, job: Job, candidates: Batch) -> _Outcome:
        begin, runner, workload = monotonic(), self.runner, job.workload
        torch = runner.measure_torch(workload)
        if torch.no_room:
            return _Outcome([], [], torch)
        measured = runner.measure(workload, candidates)
        low_mhz = _LOW_CLOCK * float(np.median([m.clock_mhz for m in measured if m.ok] or [0]))
        if at := [i for i, m in enumerate(measured) if _is_doubtful(m, low_mhz)]:
            once_more = runner.measure(workload, [candidates[i] for i in at])
            for i, m in zip(at, once_more, strict=True):
                measured[i] = replace(m, error=_DOUBT) if _is_doubtful(m, low_mhz) else m
            doubtful = sum(m.error == _DOUBT for m in measured)
            if doubtful > len(measured) / 2:
                why = "timings scatter, or were throttled: does another program use the GPU?"
                log.warning("%s: %d of %d %s", workload, doubtful, len(measured), why)
        records = [
            TuningRecord(workload, c.config, c.artifact.key if c.artifact else "", m)
            for c, m in zip(candidates, measured, strict=True)
        ]
        # Time the best few once more, in turn: their second measurement shows the noise.
        ok = (r for r in records if r.measurement.ok)
        best = sorted(ok, key=lambda r: r.measurement.latency_us)[:_FINALISTS]
        finals = runner.compare(workload, [r.config for r in best])
        self.progress.timing_s += monotonic() - begin
        anchors = [replace(r, measurement=m) for r, m in zip(best, finals, strict=True)]
        return _Outcome(records, anchors, torch)

    def _record(self, job: Job, outcome: _Outcome) -> None:
        """Write what was measured: binaries first, so that no row names an unknown one."""
        records, append = outcome.records, self.dataset.append_measurements
        keys = dict.fromkeys(r.artifact_key for r in records)
        self.dataset.append_artifacts(self._compiled[k] for k in keys if k in self._compiled)
        append(records, run=self.run, role=job.role, torch={job.workload: outcome.torch})
        append(outcome.again, run=self.run, role="anchor")
        self._done[job.workload] = self._done.get(job.workload, set()) | {r.config for r in records}
        statuses = Counter[str](r.measurement.status for r in records)
        progress = self.progress
        progress.jobs_done += 1
        progress.rows += len(records)
        progress.ok_rows += statuses["ok"]
        progress.statuses = dict(Counter(progress.statuses) + statuses)
        times = [r.measurement.latency_us for r in records if r.measurement.ok]
        progress.best_us = min(times, default=nan)
        progress.torch_us = outcome.torch.latency_us
        self.on_job(job, progress)


def _is_doubtful(measured: Measurement, low_mhz: float) -> bool:
    """Return True if repeats scatter, or if the clock was lower than for other rows."""
    scatters = measured.p90_us - measured.p10_us > _SCATTER * measured.latency_us
    return scatters or (measured.ok and measured.clock_mhz < low_mhz)


def _pass_over(job: Job, reason: str, in_a_row: int, jobs: int) -> None:
    """Warn of a workload that may be too large for the card.

    Raises:
        NoGpu: so many had no room in a row that the card itself is full.
    """
    if in_a_row >= min(_NO_ROOM_IN_A_ROW, jobs):
        raise NoGpu(
            f"{job.workload} cannot be timed: {reason}. Nothing of it is recorded, nor of those "
            f"just before it: free the card's memory and run this again, which goes on here; "
            f"leave out what is too large for this card"
        )
    log.warning("%s is passed over: %s", job.workload, reason)


def _warn_of_roles(jobs: Jobs, dataset: Dataset) -> None:
    """Warn of ``eval`` workloads that are recorded as ``train``: they stay ``train``."""
    to_judge = [job for job in jobs if job.role == "eval"]
    learned = set(dataset.workloads("train")) if to_judge else ()
    if twice := [job for job in to_judge if job.workload in learned]:
        log.warning(
            "%d workloads are in %s to learn from, %s among them, and stay so: record them to "
            "judge by in another dataset", len(twice), dataset.path, twice[0].workload,
        )  # fmt: skip


def best_recorded(dataset: Dataset) -> dict[Job, float]:
    """Return jobs of a few workloads of earlier runs, with the best configuration and its us.

    Only rows of the present kernels count: if an older version of a kernel was faster, that does
    not mean that this card is slower.
    """
    table, _ = dataset.unchanged(dataset.measurements("train", "eval"), kernel_hashes())
    found = {}
    for workload in anchor_workloads(table.rows_of):
        rows = table.rows_of[workload]
        ok = rows[table.ok[rows] & (table.config_index[rows] >= 0)]
        if len(ok):
            best = ok[np.argmin(table.latency_us[ok])]
            config = table.configs[table.config_index[best]]
            found[Job(workload, (config,), "anchor")] = float(table.latency_us[best])
    return found


def anchor_workloads(workloads: Iterable[Workload]) -> list[Workload]:
    """Return a few large workloads, always the same ones whatever the order."""
    large = sorted((w for w in workloads if w.bytes() >= _ANCHOR_BYTES), key=Workload.key)
    return large[:: max(len(large) // _ANCHOR_WORKLOADS, 1)][:_ANCHOR_WORKLOADS]


def split_anchors(jobs: Jobs) -> tuple[list[Job], list[Job]]:
    """Return the anchors among jobs, and the others."""
    return [j for j in jobs if j.role == "anchor"], [j for j in jobs if j.role != "anchor"]


def merged_jobs(jobs: Jobs) -> list[Job]:
    """Return one job per workload and role, with the configurations of all its jobs."""
    configs = defaultdict[tuple[Workload, Role], list[GemmConfig]](list)
    for job in jobs:
        configs[job.workload, job.role] += job.configs
    return [Job(w, tuple(dict.fromkeys(found)), role) for (w, role), found in configs.items()]
