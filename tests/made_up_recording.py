"""A small made-up recording, with rows to train on and rows to judge by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from costmodel.compile.compiler import Artifact
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, RunInfo, TuningRecord
from costmodel.evaluation.heldout import eval_workloads
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain

__all__ = ["RECORDED", "RUN", "TARGET", "TRAINING", "latency_us", "record", "write_recording"]

TARGET = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
RUN = RunInfo("run-1", "GPU-aaaa", "570.1", "2.11.0", "2026-11-27T12:00:00+00:00")
TRAINING = [Workload.dense(m, n, k) for m in (64, 640, 2560) for n, k in ((2560, 640), (896, 3200))]
RECORDED = eval_workloads()[20]


def latency_us(workload: Workload, block_m: int, block_n: int, stages: int) -> float:
    """The law of the made-up machine: padding costs, and so do small tiles."""
    tiles = -(-workload.m // block_m) * -(-workload.n // block_n)
    return 2 + tiles * (block_m * block_n + 4000) * workload.k / 1e8 * (1 + 0.2 / stages)


def record(dataset: Dataset, workload: Workload, role: Any, count: int) -> None:
    configs = SearchSpace.of(workload, TARGET).configs
    chosen = [configs[i] for i in np.random.default_rng(0).choice(len(configs), count, False)]
    specs = {specialize(workload, c): c for c in chosen}
    artifacts = [
        Artifact(artifact_key(s, TARGET), s, registers=c.block_m, shared_bytes=4096 * c.num_stages,
                 ptx_hash=artifact_key(s, TARGET), ptx=dict.fromkeys(PTX_FEATURES, 1.0))
        for s, c in specs.items()
    ]  # fmt: skip
    rows = []
    for i, c in enumerate(chosen):
        us = latency_us(workload, c.block_m, c.block_n, c.num_stages)
        outcome = Measurement("ok", us, us, us, 5) if i else Measurement("timeout", error="over")
        key = artifact_key(specialize(workload, c), TARGET)
        rows.append(TuningRecord(workload, c, key, outcome))
    dataset.append_artifacts(artifacts)
    torch = {workload: Measurement("ok", 1e4, 1e4, 1e4, 5)}
    dataset.append_measurements(rows, run=RUN, role=role, torch=torch)


def write_recording(
    path: Path, target: Target = TARGET, protocol: dict[str, Any] | None = None
) -> Dataset:
    """Rows of all of TRAINING, and of two eval workloads, one of them ragged."""
    dataset = Dataset.create(path, target, protocol or {"repeats": 5})
    for workload in TRAINING:
        record(dataset, workload, "train", 40)
    for workload in (RECORDED, eval_workloads()[-9]):
        record(dataset, workload, "eval", 60)
    return dataset
