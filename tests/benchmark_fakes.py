"""What the tests of the benchmark scripts run on: a workload, configurations, a runner."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from costmodel.compile.compiler import Artifact
from costmodel.data.measurement import Candidate, Measurement, Runner
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import artifact_key
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain

__all__ = [
    "FAILED", "FOLDER", "H100", "ROOT", "WORKLOAD", "A", "B", "C", "FakeRunner", "compiled", "ok",
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"
H100 = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
WORKLOAD = Workload.dense(64, 4096, 1024)
A, B, C = (GemmConfig("tma", 64, 128, 64, num_stages=s) for s in (3, 4, 5))
FAILED = Measurement("crashed", error="gone")


def ok(us: float) -> Measurement:
    return Measurement("ok", us, us, us, 5)


class FakeRunner(Runner):
    """Latencies by configuration; torch is None. What is not named takes 50 us."""

    def __init__(self, us: dict[GemmConfig | None, float]) -> None:
        self.us = us
        self.compared: list[tuple[GemmConfig | None, ...]] = []

    def measure(
        self, workload: Workload, candidates: Sequence[Candidate], best_us: float = inf
    ) -> list[Measurement]:
        return [ok(self.us.get(c.config, 50.0)) for c in candidates]

    def measure_torch(self, workload: Workload) -> Measurement:
        return ok(self.us[None])

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> list[Measurement]:
        self.compared.append(tuple(configs))
        return [ok(self.us.get(c, 50.0)) for c in configs]


def compiled(specs: Sequence[Any], target: Target) -> list[Artifact]:
    return [Artifact(artifact_key(s, target), s, ptx_hash=artifact_key(s, target)) for s in specs]
