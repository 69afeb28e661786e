"""What the tests of datasets write: a target, two workloads, and rows and artifacts of them."""

from __future__ import annotations

from typing import Any

from costmodel.compile.compiler import Artifact
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.data.measurement import Measurement, RunInfo, TuningRecord
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain

__all__ = ["CONFIGS", "PROTOCOL", "RUN", "TARGET", "A", "B", "artifact", "ok", "record", "records"]

TARGET = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
PROTOCOL: dict[str, Any] = {"repeats": 5, "cold_cache": True, "pause_us": [20, 40]}
RUN = RunInfo("run-1", "GPU-aaaa", "570.1", "2.11.0", "2026-11-27T12:00:00+00:00", 1980, 2619)
CONFIGS = tuple(
    GemmConfig(kernel, m, 128, 64, num_warps=w, num_stages=s)
    for kernel in ("pointer", "tma")
    for m in (64, 128)
    for w in (4, 8)
    for s in (3, 4)
)
A, B = Workload.dense(64, 4000, 1024), Workload.dense(333, 779, 555, "bfloat16", bias=True)


def ok(latency_us: float) -> Measurement:
    return Measurement("ok", latency_us, latency_us - 0.25, latency_us + 0.25, 9, 1755)


def record(workload: Workload, config: GemmConfig, measurement: Measurement) -> TuningRecord:
    key = artifact_key(specialize(workload, config), TARGET)
    return TuningRecord(workload, config, key, measurement)


def records(workload: Workload, first_us: float = 10.0) -> list[TuningRecord]:
    return [record(workload, c, ok(first_us + i)) for i, c in enumerate(CONFIGS)]


def artifact(workload: Workload, config: GemmConfig, **changes: Any) -> Artifact:
    spec = specialize(workload, config)
    values = {
        "registers": 96, "spill_bytes": 8, "shared_bytes": 65536, "ptx_hash": "ab12",
        "ptx": {name: float(i) for i, name in enumerate(PTX_FEATURES)}, "compile_s": 0.7,
    }  # fmt: skip
    return Artifact(artifact_key(spec, TARGET), spec, **(values | changes))
