"""The collection loop: killed at any moment it loses nothing, doubles nothing, leaves no orphan.

Kernels are compiled for real; timing is by a runner of the tests' own.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyarrow import parquet

from costmodel.collect import Job, Progress, collect
from costmodel.compile.compiler import Artifact
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import NO_ROOM, Candidate, Measurement, RunInfo, TuningRecord
from costmodel.errors import NoGpu
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import kernel_hash, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.protocol import TimingProtocol

pytestmark = pytest.mark.slow

MARK = "COSTMODEL_TEST_MARK"
RUN = RunInfo("run", "GPU-0", "570", "2.11", "2026-11-27T00:00:00+00:00")
GOOD = tuple(
    GemmConfig("pointer", 16, n, k, warps, 1)
    for n in (16, 32)
    for k in (16, 32)
    for warps in (1, 2)
)
REFUSED = GemmConfig("pointer", 64, 64, 16, 4, 2, maxnreg=24)  # too few for its wgmma


class FakeRunner:
    """Says that all compiled configurations take some time."""

    protocol = TimingProtocol()

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.asked: Counter[tuple[Workload, GemmConfig]] = Counter()

    def measure(
        self, workload: Workload, candidates: Sequence[Candidate], best_us: float = inf
    ) -> list[Measurement]:
        time.sleep(self.pause_s)
        self.asked.update((workload, c.config) for c in candidates)
        return [self.outcome(c) for c in candidates]

    def outcome(self, candidate: Candidate) -> Measurement:
        artifact = candidate.artifact
        assert artifact is not None
        if not artifact.ok:
            return Measurement(artifact.status, error=artifact.error)
        return Measurement("ok", 10.0 + artifact.registers, 9.0, 11.0, 5, 1980)

    def measure_torch(self, workload: Workload) -> Measurement:
        return Measurement("ok", 10.0, 9.0, 11.0, 5, 1980)

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> list[Measurement]:
        return [Measurement("ok", 10.0, 9.0, 11.0, rounds, 1980) for _ in configs]


def jobs_of(count: int) -> list[Job]:
    """Workloads of one class of code, each with two configurations that only it has."""
    return [
        Job(
            Workload.dense(16, 64, 64 * (i + 1)),
            (GOOD[(2 * i) % 8], GOOD[(2 * i + 1) % 8], REFUSED),
        )
        for i in range(count)
    ]


def create(folder: Path) -> Dataset:
    return Dataset.create(folder, Target.named("h100-sxm"), FakeRunner.protocol.to_dict())


def rows_on_disk(folder: Path) -> Counter[tuple[str, str]]:
    """(workload, configuration) of each row as it is in the files, anchors left out."""
    found: Counter[tuple[str, str]] = Counter()
    fields = list(GOOD[0].to_dict())
    for path in folder.glob("measurements*.parquet"):
        for row in parquet.read_table(path).to_pylist():
            if row["role"] != "anchor":
                found[row["workload"], str([row[f] for f in fields])] += 1
    return found


def expected_rows(jobs: Sequence[Job]) -> set[tuple[str, str]]:
    torch = str(["torch"] + [None] * (len(GOOD[0].to_dict()) - 1))
    rows = {(j.workload.key(), str(list(c.to_dict().values()))) for j in jobs for c in j.configs}
    return rows | {(j.workload.key(), torch) for j in jobs}


def marked(mark: str) -> set[int]:
    """Running processes that inherited a mark in their environment."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
        except OSError:  # another user's, or gone
            continue
    return {p for p in found if _state(p) not in ("Z", "X", "")}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A mark that all processes started from here on inherit."""
    monkeypatch.setenv(MARK, found := uuid4().hex)
    return found


def soon(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# --- what a run does -----------------------------------------------------------------------------


def run(jobs: Sequence[Job], dataset: Dataset, runner: Any, **options: Any) -> Progress:
    return collect(jobs, dataset, runner, RUN, n_jobs=2, cache=dataset.path / "cache", **options)


@pytest.mark.fault("B12")
def test_everything_is_measured_and_failures_are_rows(tmp_path: Path) -> None:
    jobs, seen = jobs_of(2), []
    dataset = create(tmp_path / "data")
    progress = run(
        jobs, dataset, FakeRunner(), on_job=lambda job, p: seen.append((job, p.jobs_done))
    )
    assert seen == [(jobs[0], 1), (jobs[1], 2)]
    assert (progress.jobs_done, progress.rows, progress.ok_rows) == (2, 6, 4)
    assert progress.statuses == {"ok": 4, "compile_error": 2}
    assert (progress.compiled, progress.compile_failures) == (5, 1)
    again = Dataset.open(dataset.path)
    for job in jobs:
        outcomes = again.recorded(job.workload)
        assert set(outcomes) == set(job.configs)
        assert outcomes[REFUSED].status == "compile_error"
        assert "Insufficient registers" in outcomes[REFUSED].error
        torch = again.torch(job.workload)
        assert torch is not None
        assert torch.ok
    assert len(again.artifacts()) == 5
    assert set(rows_on_disk(dataset.path).values()) == {1}
    anchors = again.measurements("anchor")
    assert sorted(anchors.latency_us) == [10.0] * 4, "the best few once more, in turn"


@pytest.mark.fault("B31")
def test_a_second_run_measures_only_what_is_new(tmp_path: Path) -> None:
    jobs = jobs_of(2)
    dataset = create(tmp_path / "data")
    run(jobs[:1], dataset, FakeRunner())
    more = [Job(jobs[0].workload, (*jobs[0].configs, GOOD[5])), jobs[1]]
    runner = FakeRunner()
    run(more, Dataset.open(dataset.path), runner)
    assert runner.asked == Counter(
        [(more[0].workload, GOOD[5]), *((more[1].workload, c) for c in more[1].configs)]
    )
    idle = FakeRunner()
    progress = run(more, Dataset.open(dataset.path), idle)
    assert (progress.jobs, progress.compiled, idle.asked) == (0, 0, Counter())


def test_equal_programs_are_measured_once_also_by_later_runs(tmp_path: Path) -> None:
    """Operands aligned to 2 bytes have no pipeline: its depth makes no difference."""
    workload = Workload.dense(33, 77, 55)
    shallow, deep, deeper = (GemmConfig("pointer", 32, 32, 32, 2, s) for s in (2, 3, 4))
    dataset = create(tmp_path / "data")
    runner = FakeRunner()
    run([Job(workload, (shallow, deep))], dataset, runner)
    hashes = {a.ptx_hash for a in dict(dataset.artifacts()).values()}
    assert len(hashes) == 1, "if this fails, the test wants two other configurations"
    assert runner.asked == Counter([(workload, shallow)])
    for later in ((deep, deeper), (shallow, deep, deeper)):
        run([Job(workload, later)], Dataset.open(dataset.path), runner)
    assert sum(runner.asked.values()) == 1
    # A launch that differs is another matter.
    again = GemmConfig("pointer", 32, 32, 32, 2, 4, group_m=1)
    run([Job(workload, (deep, again))], Dataset.open(dataset.path), runner)
    assert runner.asked == Counter([(workload, shallow), (workload, again)])


@pytest.mark.fault("B61")
def test_a_budget_ends_the_run_between_workloads(tmp_path: Path, mark: str) -> None:
    jobs = jobs_of(4)
    dataset = create(tmp_path / "data")
    assert run(jobs, dataset, FakeRunner(), budget_s=0.0).jobs_done == 0
    start = time.monotonic()
    progress = run(jobs, dataset, FakeRunner(pause_s=6.0), budget_s=6.0)
    assert progress.jobs_done == 1
    assert time.monotonic() - start < 60
    assert not marked(mark)
    run(jobs, Dataset.open(dataset.path), FakeRunner())
    assert rows_on_disk(dataset.path) == Counter(expected_rows(jobs))


class Breaks(FakeRunner):
    """Fails as a bug would, from the second workload on."""

    def measure(
        self, workload: Workload, candidates: Sequence[Candidate], best_us: float = inf
    ) -> list[Measurement]:
        if self.asked:
            raise ZeroDivisionError("a bug")
        return super().measure(workload, candidates, best_us)


def test_a_bug_of_the_runner_is_not_hidden(tmp_path: Path, mark: str) -> None:
    jobs = jobs_of(3)
    dataset = create(tmp_path / "data")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(jobs, dataset, Breaks())
    assert soon(lambda: not marked(mark))
    assert rows_on_disk(dataset.path) == Counter(expected_rows(jobs[:1]))


# --- the end of the process ----------------------------------------------------------------------


def main(folder: str, count: str) -> None:
    """What the child of the tests below runs."""
    # A shell starts what it runs in the background with SIGINT ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dataset = Dataset.open(folder)
    print("ready", flush=True)
    run(
        jobs_of(int(count)), dataset, FakeRunner(pause_s=0.05),
        on_job=lambda job, _: print(job.workload, flush=True),
    )  # fmt: skip


def start_child(dataset: Dataset, count: int, first_path: str = "") -> Any:
    code = "import sys, test_collect; test_collect.main(*sys.argv[1:])"
    path = os.pathsep.join([first_path, *sys.path, str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-c", code, str(dataset.path), str(count)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=dataset.path,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_rows_of_a_kernel_that_has_changed_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    copy_package = importlib.import_module("faulty_kernels").copy_package
    edit = ("acc = tl.dot(a, b, acc, ", "acc += tl.dot(a, b, None, ")
    before = copy_package(tmp_path / "before", {"kernels/pointer.py": edit})
    dataset, jobs = create(tmp_path / "data"), jobs_of(2)
    with start_child(dataset, 1, str(before)) as process:
        assert process.wait(timeout=60) == 0
    now = {"pointer": kernel_hash("pointer")}
    assert Dataset.open(dataset.path).frame(kernel_hashes=now).dropped
    runner = FakeRunner()
    run(jobs, Dataset.open(dataset.path), runner)
    assert set(runner.asked) == {(j.workload, c) for j in jobs for c in j.configs}
    assert not Dataset.open(dataset.path).frame(kernel_hashes=now).dropped


@pytest.mark.fault("B64")
def test_anchors_are_of_the_kernels_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That a kernel has become slower is not the card's doing."""
    changed, kept = (Job(Workload.dense(m, 4096, 1024), GOOD[:2]) for m in (1024, 2048))
    dataset = create(tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr("costmodel.data.artifact_table.kernel_hash", lambda name: "of another day")
        spec = specialize(changed.workload, GOOD[0])
        dataset.append_artifacts([Artifact("edited", spec)])
    row = TuningRecord(changed.workload, GOOD[0], "edited", Measurement("ok", 1.0))
    dataset.append_measurements([row], run=RUN)
    run([kept], dataset, FakeRunner())
    again = run(jobs_of(1), Dataset.open(dataset.path), FakeRunner())
    assert again.drift == {kept.workload.key(): 0.0}
    assert "in an earlier run" not in caplog.text


@pytest.mark.fault("B64")
def test_the_binary_of_an_anchor_is_recorded(tmp_path: Path) -> None:
    large = Job(Workload.dense(1024, 4096, 1024), GOOD[7:])  # of which no job has the binary
    dataset = create(tmp_path / "data")
    row = TuningRecord(large.workload, GOOD[7], "of an earlier release", Measurement("ok", 1.0))
    dataset.append_measurements([row], run=RUN)
    run(jobs_of(1), dataset, FakeRunner())
    anchors = Dataset.open(dataset.path).measurements("anchor")
    (timed,) = anchors.rows_of[large.workload]
    assert anchors.artifact_keys[anchors.artifact_index[timed]] in dataset.artifacts()


@pytest.fixture
def started(tmp_path: Path, mark: str) -> Iterator[tuple[subprocess.Popen[str], Path, str]]:
    """A collection in a process of its own that has just recorded its first workload."""
    dataset = create(tmp_path / "data")
    with start_child(dataset, 4) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == f"{jobs_of(1)[0].workload}\n"
        yield process, dataset.path, mark
        process.kill()


@pytest.mark.fault("B31")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_leaves_no_process_and_loses_no_row(
    started: tuple[subprocess.Popen[str], Path, str], number: signal.Signals
) -> None:
    process, folder, mark = started
    assert len(marked(mark)) >= 2, "compiling goes on"
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    assert soon(lambda: not marked(mark)), "orphans"

    jobs = jobs_of(4)
    before = rows_on_disk(folder)
    assert set(before) >= expected_rows(jobs[:1])
    assert set(before.values()) == {1}
    runner = FakeRunner()
    run(jobs, Dataset.open(folder), runner)
    assert rows_on_disk(folder) == Counter(expected_rows(jobs))
    assert not {(j.workload, c) for j in jobs[:1] for c in j.configs} & set(runner.asked)


# --- a long run ----------------------------------------------------------------------------------


class FailsOften(FakeRunner):
    """Every tenth workload is one that no configuration survives, with a lot to say."""

    def outcome(self, candidate: Candidate) -> Measurement:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls // 3 % 10 == 0:
            return Measurement("crashed", error="x" * 500)
        return super().outcome(candidate)


@pytest.mark.fault("B41")
def test_memory_does_not_grow_with_the_workloads(tmp_path: Path) -> None:
    resident_mib: list[float] = []

    def note(*_: object) -> None:
        resident_mib.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20)

    progress = run(jobs_of(300), create(tmp_path / "data"), FailsOften(), on_job=note)
    assert progress.jobs_done == len(resident_mib) == 300
    assert progress.statuses["crashed"] >= 60
    assert progress.statuses["compile_error"] >= 200
    assert max(resident_mib[250:]) - max(resident_mib[50:100]) < 8


class SlowerRunner(FakeRunner):
    """Another card: everything takes a fifth longer."""

    def outcome(self, candidate: Candidate) -> Measurement:
        first = super().outcome(candidate)
        return replace(first, latency_us=1.2 * first.latency_us)


@pytest.mark.fault("B64")
def test_a_later_run_times_anchors_again_and_tells_the_drift(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The best of a large workload of an earlier run; small ones are too short to tell."""
    large = Job(Workload.dense(1024, 4096, 1024), GOOD[:2])
    dataset = create(tmp_path / "data")
    assert run([large, *jobs_of(1)], dataset, FakeRunner()).drift == {}
    recorded = dataset.recorded(large.workload)
    best = min(recorded, key=lambda c: recorded[c].latency_us)
    later = replace(RUN, run_id="later")
    progress = collect(
        jobs_of(2), dataset, SlowerRunner(), later, n_jobs=2, cache=dataset.path / "cache"
    )
    assert progress.drift == pytest.approx({large.workload.key(): 0.2}, abs=1e-6)
    assert "in an earlier run" in caplog.text
    anchors = dataset.measurements("anchor")
    again = [
        anchors.latency_us[row]
        for row in anchors.rows_of[large.workload]
        if anchors.configs[anchors.config_index[row]] == best
    ]
    assert max(again) == pytest.approx(1.2 * recorded[best].latency_us)
    assert run(jobs_of(2), dataset, SlowerRunner()).drift == {}, "nothing to do, nothing timed"


# --- a card that is full --------------------------------------------------------------------------

FULL = Measurement("out_of_resources", error=f"{NO_ROOM}: 9 MiB needed, 1 MiB are free")


class Full(FakeRunner):
    """From the second workload on, some of what is asked finds no room on the card."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def full(self, workload: Workload, what: str) -> bool:
        return what == self.what and workload != jobs_of(1)[0].workload

    def measure(
        self, workload: Workload, candidates: Sequence[Candidate], best_us: float = inf
    ) -> list[Measurement]:
        *first, last = super().measure(workload, candidates, best_us)
        return [*first, FULL if self.full(workload, "rows") else last]

    def measure_torch(self, workload: Workload) -> Measurement:
        return FULL if self.full(workload, "torch") else super().measure_torch(workload)

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> list[Measurement]:
        if self.full(workload, "finalists"):
            return [FULL] * len(configs)
        return super().compare(workload, configs, rounds)


@pytest.mark.fault("B31")
@pytest.mark.parametrize("what", ["torch", "rows", "finalists"])
def test_a_full_card_ends_the_run_which_goes_on_once_there_is_room(
    tmp_path: Path, what: str
) -> None:
    jobs, dataset = jobs_of(4), create(tmp_path / "data")
    with pytest.raises(NoGpu, match=r"16x64x256.*1 MiB are free.*run this again"):
        run(jobs, dataset, Full(what))
    assert rows_on_disk(dataset.path) == Counter(expected_rows(jobs[:1])), "none of the others"
    run(jobs, Dataset.open(dataset.path), FakeRunner())
    assert rows_on_disk(dataset.path) == Counter(expected_rows(jobs))


def test_what_alone_is_too_large_for_the_card_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs, dataset = jobs_of(3), create(tmp_path / "data")
    runner = Full("rows")
    runner.full = lambda workload, what: (  # type: ignore[method-assign]
        what == "rows" and workload == jobs[1].workload
    )
    run(jobs, dataset, runner)
    assert rows_on_disk(dataset.path) == Counter(expected_rows([jobs[0], jobs[2]]))
    assert f"{jobs[1].workload} is passed over: " in caplog.text


def test_what_was_recorded_to_learn_from_is_not_silently_no_row_to_judge_by(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs, dataset = jobs_of(2), create(tmp_path / "data")
    run(jobs, dataset, FakeRunner())
    to_judge = [Job(job.workload, job.configs, "eval") for job in jobs]
    run(to_judge, Dataset.open(dataset.path), FakeRunner())
    assert "2 workloads are in" in caplog.text
    assert "another dataset" in caplog.text


def test_a_card_too_full_for_an_anchor_is_no_anchor_row(tmp_path: Path) -> None:
    large = Job(Workload.dense(1024, 4096, 1024), GOOD[:2])
    dataset = create(tmp_path / "data")
    run([large], dataset, FakeRunner())
    anchors = [*dataset.measurements("anchor").rows_of[large.workload]]
    run([large, *jobs_of(1)], Dataset.open(dataset.path), Full("rows"))
    again = Dataset.open(dataset.path).measurements("anchor").rows_of[large.workload]
    assert len(again) == len(anchors)


# --- timings to doubt -----------------------------------------------------------------------------


WORKLOAD = Workload.dense(16, 64, 64)


class Unsteady(FakeRunner):
    """One configuration scatters, another is timed while the card is throttled."""

    def outcome(self, candidate: Candidate) -> Measurement:
        found = super().outcome(candidate)
        if candidate.config == GOOD[0]:
            return replace(found, p90_us=2 * found.latency_us)
        return replace(found, clock_mhz=900) if candidate.config == GOOD[1] else found


@pytest.mark.fault("B43", "N6")
def test_what_scatters_or_was_throttled_is_flagged_and_the_rest_is_not(tmp_path: Path) -> None:
    job = Job(jobs_of(1)[0].workload, (*GOOD[:5], REFUSED))
    dataset = create(tmp_path / "data")
    run([job], dataset, Unsteady())
    found = Dataset.open(dataset.path).recorded(job.workload)
    doubtful = {config for config, m in found.items() if m.ok and m.error}
    assert doubtful == {GOOD[0], GOOD[1]}
    assert found[GOOD[1]].clock_mhz == 900
    assert all("scatter" in found[config].error for config in doubtful)
    assert "Insufficient registers" in found[REFUSED].error


class UnsteadyOnce(Unsteady):
    """The second timing of each is as it should be."""

    def outcome(self, candidate: Candidate) -> Measurement:
        again = self.asked[WORKLOAD, candidate.config] > 1
        return FakeRunner().outcome(candidate) if again else super().outcome(candidate)


@pytest.mark.fault("B43", "N6")
def test_what_is_doubtful_is_timed_again_and_kept_if_it_is_steady_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, runner = create(tmp_path / "data"), UnsteadyOnce()
    run([Job(WORKLOAD, (*GOOD[:5], REFUSED))], dataset, runner)
    found = Dataset.open(dataset.path).recorded(WORKLOAD)
    assert not [m for m in found.values() if m.ok and (m.error or m.clock_mhz < 1980)]
    assert {config for (_, config), times in runner.asked.items() if times == 2} == {*GOOD[:2]}
    assert "another program" not in caplog.text


@pytest.mark.fault("B43", "N6")
def test_a_gpu_that_others_use_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run([Job(WORKLOAD, GOOD[:3])], create(tmp_path / "data"), Unsteady())
    assert "16x64x64" in caplog.text
    assert "2 of 3 timings scatter" in caplog.text
    assert "another program use the GPU?" in caplog.text
