"""Sound values that the tests of hostile input spoil: a result, and a dataset."""

from __future__ import annotations

from pathlib import Path

from dataset_examples import RUN, TARGET, artifact, record

from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.tuning.tuning_result import Costs, TuningResult

__all__ = ["CONFIGS", "OK", "RESULT", "RUN", "TARGET", "A", "B", "write_dataset"]

A, B = Workload.dense(1024, 4096, 1024), Workload.dense(64, 2048, 2048, bias=True)
CONFIGS = tuple(GemmConfig("pointer", 64, 64, 32, num_stages=s) for s in (2, 3, 4))
OK = Measurement("ok", 11.5, 11.0, 12.0, 9, 1755)
RESULT = TuningResult(
    workload=A, target=TARGET, model="xgb", model_hash="abc", caveat="", mode="auto", k=8,
    ranked=((CONFIGS[0], 12.0), (CONFIGS[1], None)),
    measured=((CONFIGS[0], OK), (CONFIGS[1], Measurement("timeout", error="over 60 s"))),
    torch=OK, config=CONFIGS[0], why="fastest", source="device (h100-sxm)", reliable=True,
    costs=Costs(0.1, 2.0, 0.3, 8, 2),
)  # fmt: skip


def write_dataset(path: Path) -> Dataset:
    """Rows and artifacts of two workloads."""
    data = Dataset.create(path, TARGET, {"repeats": 5})
    data.append_artifacts([artifact(A, c) for c in CONFIGS])
    for w in (A, B):
        data.append_measurements([record(w, c, OK) for c in CONFIGS], run=RUN, torch={w: OK})
    return data
