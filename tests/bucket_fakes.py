"""A made-up machine whose law a made-up model knows, and ``matmul`` on it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dispatch_fakes import H100, Machine, result_of
from numpy.typing import NDArray

import costmodel
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import Candidates, CostModel
from costmodel.data.measurement import Measurement
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models import XgbCostModel
from costmodel.tuning.ranking import rank
from costmodel.tuning.tuning_result import TuningResult

N, K = 1024, 2048
ROWS = (2049, 2560)
ROOT = Path(__file__).resolve().parents[1]


class Law(CostModel):
    """Whole waves of tiles, larger tiles being the more efficient: it knows all, if asked."""

    name = "law"
    kind = "learned"
    predicts_latency = True
    hash = "0" * 16
    directory: Path | None = ROOT / "models/h100-sxm"  # for the binaries that are known

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]:
        return np.array([law_us(workload, config) for config in candidates.configs])

    def artifacts_for(self, target: Target) -> ArtifactTable | None:
        return shipped(self.directory).artifacts_for(target) if self.directory else None

    def predict_torch(self, workload: Workload, target: Target) -> float:
        return 1.1 * law_us(workload, GemmConfig("pointer", 128, 128, 32))


@functools.cache
def shipped(directory: Path) -> XgbCostModel:
    return XgbCostModel.load(directory, parse=False)


LAW = Law()
"""One for all: a model reads the table of what is known to compile once."""


def law_us(workload: Workload, config: GemmConfig) -> float:
    tiles = -(-workload.m // config.block_m) * -(-workload.n // config.block_n)
    waves = -(-tiles * config.split_k // H100.device.sm_count)
    area = config.block_m * config.block_n
    split = 1 + 0.3 * (config.split_k > 1)
    own = 1 + len(str(config)) / 1e4 + config.group_m / 1e5  # so that no two are equal
    return 3 + split * own * waves * (area + 3000) * workload.k / config.split_k / 3e6


def tuned(m: int, k: int = 8, *, torch_us: float | None = None, timed: bool = True) -> TuningResult:
    """The top k, timed: all take 20 % longer than the law has it."""
    workload = Workload.dense(m, N, K)
    configs = rank(workload, H100, LAW, k).configs
    source = {"source": "device (h100-sxm)"} if timed else {}
    found = TuningResult.unranked(workload, H100, "auto", configs[0], "", **source)
    found = replace(found, model_hash=LAW.hash)
    if not timed:
        return found
    measured = tuple((c, Measurement("ok", 1.2 * law_us(workload, c))) for c in configs)
    return replace(
        found, measured=measured, reliable=True,
        torch=None if torch_us is None else Measurement("ok", torch_us),
    )  # fmt: skip


def is_timed(result: TuningResult) -> bool:
    """Return True if a choice for another m of the bucket rests on timings."""
    return any(s.latency_us is not None for s in (result.plan.segments if result.plan else ()))


@functools.cache
def best_us(workload: Workload) -> float:
    return float(rank(workload, H100, LAW, 1).cost[0])


def faked(patch: pytest.MonkeyPatch, folder: Path) -> Machine:
    """A machine of this law. Nothing is computed: in float16 a CPU takes seconds for a product."""
    patch.setattr("dispatch_fakes.FakeLaunch.__call__", lambda *_: None)
    for name in ("mm", "matmul"):
        patch.setattr(torch, name, lambda a, b, **_: a.new_empty(a.shape[0], b.shape[1]))
    machine = Machine(patch, folder)
    machine.bench.latency_us = timed_us
    return machine


def timed_us(workload: Workload, config: GemmConfig | None) -> float:
    """As the law has it, 20 % more; torch is far slower."""
    return 1.2 * law_us(workload, config) if config else 9 * best_us(workload)


def ask(m: int, mode: str = "auto") -> TuningResult:
    a, b = torch.empty(m, K, dtype=torch.float16), torch.empty(K, N, dtype=torch.float16)

    def call() -> TuningResult | None:
        costmodel.matmul(a, b, mode=mode, model=LAW)
        return costmodel.result_for(a, b, mode=mode, model=LAW)

    return result_of(call)
