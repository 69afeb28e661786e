"""Little is said by default, nothing of it on stdout; on request a line for all that is skipped."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_dispatch
from made_up_recording import RUN, TARGET
from test_cli import run
from test_dispatch import H100, MODEL, SIZES, Bench, find, winners_of

from costmodel.compile.compiler import Artifact
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, TuningRecord
from costmodel.gemm.config import Specialization
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.replay import ReplayRunner
from costmodel.tuning.tuner import tune
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners

pytestmark = pytest.mark.fault("B66")

recording, bench = test_dispatch.recording, test_dispatch.bench  # fixtures

WORKLOAD = Workload.dense(1024, 1024, 1024)
LOUD = "first line\n" + "x" * 5000 + "\x1b[31m\nlast line"
FAILURES = ("compile_error", "crashed", "timeout", "wrong_result", "wrong_result")


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A recording in which half of the configurations have failed, with much to say."""
    data = Dataset.create(tmp_path_factory.mktemp("failing") / "data", TARGET, {"repeats": 5})
    configs = SearchSpace.of(WORKLOAD, TARGET).configs[:10]
    outcomes = [Measurement(status, error=LOUD) for status in FAILURES]  # type: ignore[arg-type]
    outcomes += [Measurement("ok", 50.0 + i) for i in range(5)]
    rows = [
        TuningRecord(WORKLOAD, config, "", outcome)
        for config, outcome in zip(configs, outcomes, strict=True)
    ]
    data.append_measurements(rows, run=RUN, torch={WORKLOAD: Measurement("ok", 99.0)})
    return data


def tuned(failing: Dataset) -> None:
    result = tune(WORKLOAD, runner=ReplayRunner(failing), model=MODEL, mode="exhaustive")
    assert len(result.measured) == 10


def test_each_that_is_skipped_is_one_bounded_line(
    failing: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "costmodel"):
        tuned(failing)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(FAILURES)
    assert all(len(line) < 400 and line.isprintable() for line in lines)
    assert all("first line" in line for line in lines)


def test_by_default_one_line_for_all_that_compute_wrong(
    failing: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "costmodel"):
        tuned(failing)
    (record,) = caplog.records
    assert "wrong" in record.getMessage()


def test_what_does_not_compile_is_told_where_nothing_is_timed_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = 0

    def compile_(specs: Sequence[Specialization], target: Target) -> Iterable[Artifact]:
        nonlocal refused
        refused += 1
        ok = refused > 3
        return [Artifact("", specs[0], status="ok" if ok else "compile_error", error=LOUD)]

    with caplog.at_level(logging.INFO, "costmodel"):
        tune(WORKLOAD, runner=None, target=H100, model=MODEL, mode="predict", compile_=compile_)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert all(len(line) < 400 and "compile_error" in line for line in lines)


def test_the_command_says_little_and_on_request_what_is_skipped(failing: Dataset) -> None:
    command = ("tune", 1024, 1024, 1024, "--replay", "--data", failing.path, "--mode", "exhaustive",
               "--json")  # fmt: skip
    quiet, loud = run(*command), run("-v", *command)
    assert quiet.exit_code == loud.exit_code == 0
    assert json.loads(quiet.stdout)["chosen"] == json.loads(loud.stdout)["chosen"]
    assert len(quiet.stderr.splitlines()) <= 4, quiet.stderr
    skipped = [line for line in loud.stderr.splitlines() if "first line" in line]
    assert len(skipped) == len(FAILURES)
    assert all(len(line) <= 400 for line in loud.stderr.splitlines())
    assert "\x1b" not in loud.stderr + quiet.stderr
    assert logging.getLogger("costmodel").handlers == [], "it is undone"


def test_a_tuning_that_goes_well_says_nothing(
    bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    winners = winners_of(bench, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in SIZES:
            find(winners, *size)
    assert capfd.readouterr() == ("", "")


def test_a_full_cache_of_bad_files_is_told_once_for_each_that_was_wanted(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in range(200):
        (tmp_path / f"{name}.json").write_text("{")
    winners: Winners = winners_of(bench, tmp_path)
    with caplog.at_level(logging.WARNING, "costmodel"):
        for _ in range(3):
            find(winners, *SIZES[0])
    assert caplog.records == []


def test_the_library_prints_nothing_by_itself() -> None:
    code = (
        "import warnings; warnings.simplefilter('error'); import costmodel\n"
        "costmodel.rank(costmodel.Workload.dense(4096, 4096, 4096), "
        "costmodel.Target.named('h100-sxm'), k=8)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_many_bad_entries_are_a_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in range(50):
        (tmp_path / f"{name}.json").write_text("{")
    cache: Any = WinnerCache(tmp_path)
    with caplog.at_level(logging.WARNING, "costmodel"):
        assert cache.entries() == []
    (record,) = caplog.records
    assert "50 files" in record.getMessage()


_ENDS_WHILE_A_JOB_IS_UNDER_WAY = """
import atexit, threading, time
atexit.register(time.sleep, 1)  # the last to run: the thread has time to say something
from costmodel.dispatch.background import Background
from costmodel.processes import SupervisedWorker

begun, tried = threading.Event(), []

def job():
    tried.append(1)
    worker = SupervisedWorker(time.sleep, limit_s=60)
    worker.start()
    begun.set()
    outcome = worker.run(60)  # its process is killed at the end, as all are
    raise RuntimeError(f"timed nothing: {outcome}")

background = Background()
background.submit("first", job)
background.submit("second", job)
assert begun.wait(60)
"""


def test_a_program_that_ends_says_nothing_of_what_it_was_tuning() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", _ENDS_WHILE_A_JOB_IS_UNDER_WAY],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
