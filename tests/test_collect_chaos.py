"""A collection that is ended in all ways is at last what an undisturbed one is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_up_recording import TARGET, record
from test_collect_parts import rows_of

from costmodel.data.dataset import Dataset
from costmodel.gemm.workload import Workload

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("chaos_program.py")
WORKLOADS = 70


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many workloads of few configurations: many writes."""
    dataset = Dataset.create(tmp_path_factory.mktemp("recorded") / "data", TARGET, {"repeats": 5})
    for i in range(WORKLOADS):
        record(dataset, Workload.dense(16 * (i + 1), 512, 640), "train", 4)
    dataset.compact()
    return dataset.path


def run(recording: Path, out: Path, fault: str = "none", number: int = 0) -> tuple[int, str]:
    """Collect, with a fault at a moment; return the exit code and what was said."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), fault, str(number), "--replay", str(recording),
         "--out", str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.fault("B31")
def test_what_20_kills_leave_is_finished_by_one_more_run(recording: Path, tmp_path: Path) -> None:
    out, rng = tmp_path / "data", random.Random(7)
    faults = ["half"] * 8 + ["written"] * 5 + ["timing"] * 5
    rng.shuffle(faults)
    faults += ["removing"] * 2  # once all is measured
    killed, seen = dict.fromkeys(faults, 0), 0
    for fault in faults:
        # Files are flushed in turn with their folder.
        number = 2 * rng.randint(1, 5) - 1 if fault == "half" else rng.randint(1, 8)
        code, _ = run(recording, out, fault, number)
        killed[fault] += code == -9
        found = rows_of(out)
        assert set(found.values()) <= {1, 2}, "twice only where merging was ended"
        assert len(found) >= seen, "a row was lost"
        seen = len(found)
    assert sum(killed.values()) == 20
    assert run(recording, out)[0] == 0
    assert rows_of(out) == rows_of(recording), "each row once"
    assert len(Dataset.open(out).artifacts()) == len(Dataset.open(recording).artifacts())


@pytest.mark.fault("B31")
@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [("full", 2, "No space left on device"), ("bug", 1, "a bug"), ("SIGINT", 130, ""),
     ("SIGTERM", 143, "")],
)  # fmt: skip
def test_after_each_fault_the_rows_are_kept_and_a_rerun_goes_on(
    recording: Path, tmp_path: Path, fault: str, code: int, said: str
) -> None:
    out, start = tmp_path / "data", time.monotonic()
    found, told = run(recording, out, fault, 21)
    assert (found, said in told) == (code, True), told
    assert time.monotonic() - start < 60
    kept = rows_of(out)
    assert 0 < len(kept) < len(rows_of(recording))
    assert set(kept.values()) == {1}
    assert run(recording, out)[0] == 0
    assert rows_of(out) == rows_of(recording)
    assert not [path for path in out.iterdir() if path.suffix == ".tmp"]
