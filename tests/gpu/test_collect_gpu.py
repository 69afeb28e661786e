"""A collection on a GPU: wild and endless kernels cost their rows only; bundles are timed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch

from costmodel.collect import Job, Progress, collect
from costmodel.data.dataset import Dataset
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.card import current_run
from costmodel.measure.device import DeviceRunner
from costmodel.measure.protocol import TimingProtocol

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

GOOD = GemmConfig("pointer", 64, 64, 64, 4, 3)
HALF_WRITTEN, WILD, ENDLESS = (GemmConfig("pointer", 32, 32, k, 4, 2) for k in (16, 32, 128))
OUTCOMES = {GOOD: "ok", HALF_WRITTEN: "wrong_result", WILD: "crashed", ENDLESS: "timeout"}
JOBS = [
    Job(Workload.dense(1024, 1024, k), configs)
    for k, configs in ((512, (GOOD, WILD)), (1024, tuple(OUTCOMES)), (2048, (WILD, GOOD)))
]


class Interrupted(Exception):
    """Stands for Ctrl-C after a workload."""


def end_after_one(job: Job, progress: Progress) -> None:
    raise Interrupted


def run(jobs: list[Job], folder: Path, cache: Path, **options: Any) -> Dataset:
    """Collect with a time limit of 6 s for each row."""
    with DeviceRunner(protocol=TimingProtocol(limit_s=6.0)) as runner:
        dataset = Dataset.create(folder, Target.current(), runner.protocol.to_dict())
        with suppress(Interrupted):
            collect(jobs, dataset, runner, current_run(), cache=cache, **options)
    return Dataset.open(folder)


@pytest.mark.fault("B04", "B09", "B27", "B31")
def test_wild_and_endless_kernels_cost_their_rows_and_an_end_in_between_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        module = importlib.import_module("faulty_kernels")
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.syspath_prepend(str(module.copy_package(tmp_path / "copy", module.FAULTS)))
    run(JOBS, tmp_path / "data", cache, on_job=end_after_one)
    dataset = run(JOBS, tmp_path / "data", cache)
    for job in JOBS:
        found = {c: m.status for c, m in dataset.recorded(job.workload).items()}
        assert found == {config: OUTCOMES[config] for config in job.configs}
    assert len(dataset.measurements("train")) == sum(len(job.configs) + 1 for job in JOBS)


def command(*arguments: object, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "costmodel", *map(str, arguments), "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.alone  # as those below: a second collection on the card is refused
def test_a_bundle_is_timed(tmp_path: Path) -> None:
    name, file, out = Target.current().device.name, tmp_path / "work.zip", tmp_path / "data"
    planned = command("compile", 1024, 1024, 1024, "--limit", 24, "--bundle", file,
                      "--target", name)  # fmt: skip
    done = command("collect", "--bundle", file, "--out", out)
    assert 12 <= done["rows"] <= planned["rows"] - 1  # without torch, and what repeats another
    assert done["statuses"].get("ok", 0) >= 12
    print(done)


SCRIPT = """
import torch, triton, triton.language as tl

CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b in (256, 512, 1024) for w in (2, 4)]

@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def twice(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

def call():
    device = "cpu" if "ON_CPU" in __import__("os").environ else "cuda"
    x = torch.ones(1 << 20, device=device)
    twice[lambda m: (triton.cdiv(1 << 20, m["BLOCK"]),)](x, torch.empty_like(x), 1 << 20)
"""


@pytest.mark.alone
def test_a_users_bundle_of_cpu_tensors_is_found_by_the_call_on_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    name, place, file = Target.current().device.name, f"{tmp_path}/mine.py:call", tmp_path / "k.zip"
    planned = command("compile", "--bundle", file, "--kernel", place, "--target", name, ON_CPU="1")
    assert planned["binaries"] == 6
    out = tmp_path / "timings"
    command("collect", "--bundle", file, "--kernel", place, "--out", out)
    text = "".join(path.read_text() for path in out.glob("*.jsonl"))
    assert text.count('"status":"ok"') >= 6
    seconds = [float(x.split(",")[0]) for x in text.split('"compile_s":')[1:]]
    print("seconds to find each binary", seconds)
    assert max(seconds) < 1.0


@pytest.mark.alone
@pytest.mark.skipif(which("ncu") is None, reason="needs Nsight Compute")
def test_counters_of_the_best_rows_are_what_the_card_counts(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("name,m,n,k\na,4096,2560,2560\nb,2048,10240,2560\n")
    try:
        command("collect", "--out", tmp_path / "data", "--shapes", shapes, "--configs", 8,
                "--counters")  # fmt: skip
    except AssertionError as error:
        if "ERR_NVGPUCTRPERM" in str(error):
            pytest.skip("this user may not read the counters")
        raise
    rows = json.loads((tmp_path / "data" / "counters.json").read_text())
    assert len(rows) == 2
    for row in rows:
        assert row["dram__bytes_read.sum"] > 0
        assert 0.5 < row["gpu__time_duration.sum"] / 1e3 / row["latency_us"] < 3
        assert row["all_instructions"] > 0
