"""Sound values that the tests of hostile input spoil: a result, and a dataset."""

from __future__ import annotations

from pathlib import Path

from costmodel.compile.artifact import Artifact
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.data.dataset import Dataset, RunInfo
from costmodel.data.measurement import Measurement, TuningRecord
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.tuning.tuning_result import Costs, TuningResult

__all__ = ["CONFIGS", "OK", "RESULT", "RUN", "TARGET", "A", "B", "write_dataset"]

TARGET = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
A, B = Workload.dense(1024, 4096, 1024), Workload.dense(64, 2048, 2048, bias=True)
CONFIGS = tuple(GemmConfig("pointer", 64, 64, 32, num_stages=s) for s in (2, 3, 4))
OK = Measurement("ok", 11.5, 11.0, 12.0, 9, 1755)
RUN = RunInfo("run-1", "GPU-a", "570.1", "2.11.0", "2026-11-27T12:00:00+00:00", 1980, 2619)
RESULT = TuningResult(
    workload=A, target=TARGET, model="xgb", model_hash="abc", caveat="", mode="auto", k=8,
    ranked=((CONFIGS[0], 12.0), (CONFIGS[1], None)),
    measured=((CONFIGS[0], OK), (CONFIGS[1], Measurement("timeout", error="over 60 s"))),
    torch=OK, config=CONFIGS[0], why="fastest", source="device (h100-sxm)", reliable=True,
    costs=Costs(0.1, 2.0, 0.3, 8, 2),
)  # fmt: skip


def artifact(config: GemmConfig) -> Artifact:
    spec = specialize(A, config)
    counts = {name: float(i) for i, name in enumerate(PTX_FEATURES)}
    return Artifact(
        artifact_key(spec, TARGET), spec, registers=96, spill_bytes=0, shared_bytes=65536,
        ptx_hash="ab", ptx=counts, compile_s=0.5,
    )  # fmt: skip


def write_dataset(path: Path) -> Dataset:
    """Rows and artifacts of two workloads."""
    data = Dataset.create(path, TARGET, {"repeats": 5})
    data.append_artifacts([artifact(c) for c in CONFIGS])
    for w in (A, B):
        records = [TuningRecord(w, c, artifact_key(specialize(w, c), TARGET), OK) for c in CONFIGS]
        data.append_measurements(records, run=RUN, torch={w: OK})
    return data
