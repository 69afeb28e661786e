"""The files of a dataset: compacting and a kill lose and double nothing, and they stay small."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dataset_examples import CONFIGS, PROTOCOL, RUN, TARGET, A, B, artifact, ok, record, records
from pyarrow import parquet

from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, TuningRecord
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import kernel_hash
from costmodel.gemm.workload import Workload


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset.create(tmp_path / "data", TARGET, PROTOCOL)


# --- compacting -----------------------------------------------------------------------------


def test_compacting_leaves_one_file_a_table_and_a_card_that_counts(dataset: Dataset) -> None:
    dataset.append_artifacts([artifact(A, CONFIGS[0])])
    dataset.append_measurements(records(A), run=RUN, torch={A: ok(1.0)})
    dataset.append_measurements(
        [record(B, CONFIGS[0], Measurement("timeout"))], run=RUN, role="eval"
    )
    dataset.compact()
    names = sorted(p.name for p in dataset.path.iterdir())
    assert names == ["artifacts.parquet", "card.json", "measurements.parquet"]
    card = json.loads((dataset.path / "card.json").read_text())
    assert card["counts"]["rows"]["train"] == {"ok": len(CONFIGS) + 1}
    assert card["counts"]["rows"]["eval"] == {"timeout": 1}
    assert card["counts"]["workloads"] == {"train": 1, "eval": 1, "anchor": 0}
    assert card["counts"]["devices"] == ["GPU-aaaa"]
    assert card["kernels"] == {"pointer": [kernel_hash("pointer")]}
    assert card["protocol"] == PROTOCOL
    dataset.append_measurements(records(B, 30.0), run=RUN)
    assert len(Dataset.open(dataset.path).measured()[B]) == len(CONFIGS)


@pytest.mark.fault("B31")
def test_a_crash_while_compacting_doubles_nothing(dataset: Dataset) -> None:
    dataset.append_measurements(records(A), run=RUN)
    dataset.append_measurements(records(B), run=RUN)
    shards = {p.name: p.read_bytes() for p in dataset.path.glob("measurements-*")}
    dataset.compact()
    for name, content in shards.items():  # as if killed before the old shards were removed
        (dataset.path / name).write_bytes(content)
    assert len(Dataset.open(dataset.path).measurements()) == 2 * len(CONFIGS)


def test_an_extract_is_a_dataset_of_the_chosen_workloads(
    dataset: Dataset, tmp_path: Path, script: Any
) -> None:
    dataset.append_artifacts([artifact(w, c) for w in (A, B) for c in CONFIGS])
    dataset.append_measurements(records(A), run=RUN, torch={A: ok(1.0)})
    dataset.append_measurements(records(B), run=RUN)
    part = script("sample").extract(dataset, tmp_path / "sample", [A])
    assert part.workloads() == [A]
    assert part.recorded(A) == dataset.recorded(A)
    assert part.torch(A) == ok(1.0)
    assert set(part.artifacts()) == {artifact(A, c).key for c in CONFIGS}


# --- killed writers -------------------------------------------------------------------------

_WRITER = textwrap.dedent(
    """
    import os, signal, sys
    from costmodel.gemm.config import GemmConfig
    from costmodel.data.dataset import Dataset
    from costmodel.data.measurement import Measurement, RunInfo, TuningRecord
    from costmodel.hardware.target import Target, Toolchain
    from costmodel.gemm.workload import Workload

    path, die = sys.argv[1:]
    target = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
    data = Dataset.create(path, target, {"repeats": 5, "cold_cache": True, "pause_us": [20, 40]})
    run = RunInfo(str(os.getpid()), "GPU-aaaa", "570.1", "2.11.0", "2026-11-27")
    configs = [GemmConfig("tma", 128, 128, 64, num_stages=s) for s in range(1, 9)]
    replace = os.replace
    def kill_around(source, to):
        if die == "after":
            replace(source, to)
        os.kill(os.getpid(), signal.SIGKILL)
    for m in range(1, 13):
        workload = Workload.dense(m, 4000, 1024)
        todo = [c for c in configs if c not in data.measured().get(workload, ())]
        if m == 5 and die in ("before", "after"):
            os.replace = kill_around
        for half in (todo[:4], todo[4:]):
            rows = [TuningRecord(workload, c, "k", Measurement("ok", 1.0 * m)) for c in half]
            data.append_measurements(rows, run=run)
            print(m, len(half), flush=True)
    """
)


def run_writer(path: Path, die: str = "never", kill_after_s: float | None = None) -> Counter[int]:
    """Run a writing process; the rows per m that it said were written before it ended."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path), die], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            process.kill()
        lines += process.stdout.readlines()
    expected = 0 if die == "never" and kill_after_s is None else -signal.SIGKILL
    assert process.returncode == expected
    written: Counter[int] = Counter()
    for m, rows in (map(int, line.split()) for line in lines if line.endswith("\n")):
        written[m] += rows
    return written


@pytest.mark.fault("B31")
@pytest.mark.parametrize(
    ("die", "kill_after_s"), [("before", None), ("after", None), ("never", 0.0), ("never", 0.02)]
)
def test_a_killed_writer_loses_and_doubles_nothing(
    tmp_path: Path, die: str, kill_after_s: float | None
) -> None:
    written = run_writer(tmp_path / "d", die, kill_after_s)
    assert written
    data = Dataset.open(tmp_path / "d")
    for m, rows in written.items():
        assert len(data.measured()[Workload.dense(m, 4000, 1024)]) >= rows
    if die == "before":
        assert list(data.path.glob(".*.tmp"))  # a half-written file was left, and did no harm
    run_writer(tmp_path / "d")
    rows = parquet_rows(tmp_path / "d")
    assert Counter(rows) == {(m, s): 1 for m in range(1, 13) for s in range(1, 9)}


def parquet_rows(path: Path) -> list[tuple[int, int]]:
    tables = [parquet.ParquetFile(p).read() for p in path.glob("measurements-*.parquet")]
    return [
        (row["m"], row["num_stages"])
        for table in tables
        for row in table.select(["m", "num_stages"]).to_pylist()
    ]


@pytest.mark.fault("B21")
def test_two_writers_at_once_are_both_kept(dataset: Dataset) -> None:
    other = Dataset.create(dataset.path, TARGET, PROTOCOL)
    for i, config in enumerate(CONFIGS):
        writer = dataset if i % 2 else other
        writer.append_measurements([record(A, config, ok(10.0 + i))], run=RUN)
    assert Dataset.open(dataset.path).measured()[A] == set(CONFIGS)


# --- budgets --------------------------------------------------------------------------------


def test_50_000_rows_stay_small_and_load_fast(dataset: Dataset) -> None:
    rng = random.Random(0)
    space = [
        GemmConfig(k, m, n, b, num_warps=w, num_stages=s, group_m=g, split_k=p)
        for k in ("pointer", "tma")
        for m in (64, 128, 256)
        for n in (64, 128, 256)
        for b in (32, 64, 128)
        for w in (4, 8)
        for s in (3, 4, 5)
        for g in (4, 8)
        for p in (1, 4)
    ]
    keys = [f"{rng.getrandbits(96):024x}" for _ in range(5_000)]
    shapes = [
        Workload.dense(m, 8 * rng.randint(2, 16_000), 8 * rng.randint(2, 4_000)) for m in range(125)
    ]
    for i in range(5):
        batch = [
            TuningRecord(
                workload,
                config,
                rng.choice(keys),
                Measurement(
                    "ok", (us := rng.lognormvariate(4, 1)), us * rng.uniform(0.98, 1),
                    us * rng.uniform(1, 1.02), rng.randint(5, 20), rng.randint(1400, 1980),
                ),
            )
            for workload in shapes[25 * i : 25 * i + 25]
            for config in rng.sample(space, 400)
        ]  # fmt: skip
        dataset.append_measurements(batch, run=RUN)
    dataset.compact()
    assert (dataset.path / "measurements.parquet").stat().st_size < 2e6
    start = time.process_time()
    table = Dataset.open(dataset.path).measurements()
    assert time.process_time() - start < 2, "some 0.1 s; row by row it is ten times as long"
    assert len(table) == 50_000
