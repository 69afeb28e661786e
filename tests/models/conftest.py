"""A made-up machine whose latencies are a known function, for models to learn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from costmodel.compile.compiler import Artifact
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.data.candidates import Candidates, CostModel
from costmodel.evaluation.metrics import geomean
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.models import TrainingTable, XgbCostModel, XgbParams
from costmodel.models.confidence import problems

H100 = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
FAST = XgbParams(rounds=120, max_depth=6, learning_rate=0.12)


@functools.cache
def space(workload: Workload) -> tuple[GemmConfig, ...]:
    return SearchSpace.of(workload, H100).configs


def fake_artifact(workload: Workload, config: GemmConfig) -> Artifact:
    """Counts as a compiler might give: one mma per 64x64x16, registers by the tile."""
    spec = specialize(workload, config)
    mma = max(config.block_m * config.block_n * config.block_k // (64 * 64 * 16), 1)
    registers = min(config.block_m * config.block_n // (32 * config.num_warps) + 40, 255)
    counts = dict.fromkeys(PTX_FEATURES, 1.0) | {
        "loop_wgmma": float(mma),
        "all_wgmma": float(mma),
        "loop_mma_sync": 0.0,
        "loop_mma_flops": 2.0 * config.block_m * config.block_n * config.block_k,
        "loop_instructions": 40.0 + 5 * mma,
        "all_instructions": 300.0 + 5 * mma,
        "score_mma_sync": 0.0,
        "score_cp_async": float(config.num_stages),
    }
    spills = 64 if registers == 255 else 0
    shared = config.num_stages * (config.block_m + config.block_n) * config.block_k * 2
    key = f"{config}/{spec.even_k}"
    return Artifact(key, spec, "ok", "", registers, spills, shared, "", counts)


def true_latency_us(workload: Workload, artifact: Artifact, config: GemmConfig) -> float:
    """The law of the made-up machine."""
    tiles = -(-workload.m // config.block_m) * -(-workload.n // config.block_n)
    steps = -(-workload.k // config.block_k) / config.split_k
    rounds = -(-tiles * config.split_k // H100.device.sm_count)
    side = config.block_m * config.block_n / (config.block_m + config.block_n)
    step_us = config.block_m * config.block_n * config.block_k / 2.5e6 / min(side / 60, 1.0)
    latency = 3.0 + rounds * (steps * (step_us + 0.05 / config.num_stages) + 1.0)
    latency += 2.0 * (config.split_k > 1) + 0.02 * config.split_k
    return latency * (1.3 if artifact.spill_bytes else 1.0)


def batch(workload: Workload, rows: int, seed: int = 0, *, artifacts: bool = True) -> Candidates:
    """Random legal candidates of a workload."""
    configs = space(workload)
    rng = np.random.default_rng(seed)
    chosen = [configs[i] for i in rng.choice(len(configs), rows, replace=rows > len(configs))]
    made = [fake_artifact(workload, c) for c in chosen] if artifacts else None
    return Candidates.of(chosen, made)


def workloads(count: int, seed: int) -> list[Workload]:
    rng = np.random.default_rng(seed)
    sizes = 2 ** rng.uniform(5, 13, (count, 3))
    return [Workload.dense(*(int(s) // 8 * 8 for s in row)) for row in sizes]


def make_table(
    chosen: Sequence[Workload],
    rows: int = 60,
    *,
    artifacts: bool = True,
    failures: bool = True,
    seed: int = 0,
) -> TrainingTable:
    """Measurements of the made-up machine; with ``failures`` every 20th row failed."""
    rng = np.random.default_rng(seed)
    configs, made, index, latency = [], [], [], []
    for w, workload in enumerate(chosen):
        part = batch(workload, rows, seed=seed + w)
        for config in part.configs:
            artifact = fake_artifact(workload, config)
            configs.append(config)
            made.append(artifact if artifacts else None)
            index.append(w)
            latency.append(true_latency_us(workload, artifact, config) * rng.normal(1, 0.005))
    status = np.full(len(configs), "ok", dtype=object)
    if failures:
        status[::20] = "timeout"
    return TrainingTable(
        workloads=tuple(chosen),
        workload_index=np.array(index, dtype=np.intp),
        latency_us=np.where(status == "ok", latency, np.nan),
        status=status,
        candidates=Candidates.of(configs, made),
        target=H100,
    )


def kept_of(model: CostModel, table: TrainingTable) -> tuple[float, float]:
    """The speed kept by the first 1 and the best of the first 8, geometric means."""
    kept = [
        problem.kept_at(model.predict(problem.workload, problem.candidates, target), (1, 8))
        for problem, target in problems(table)
    ]
    top1, top8 = map(geomean, zip(*kept, strict=True))
    return top1, top8


@pytest.fixture(scope="session")
def speed_kept() -> Callable[..., tuple[float, float]]:
    return kept_of


@pytest.fixture(scope="session")
def target() -> Target:
    return H100


@pytest.fixture(scope="session")
def make_artifact() -> Callable[..., Artifact]:
    return fake_artifact


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Candidates]:
    return batch


@pytest.fixture(scope="session")
def make_training_table() -> Callable[..., TrainingTable]:
    return make_table


@pytest.fixture(scope="session")
def make_workloads() -> Callable[[int, int], list[Workload]]:
    return workloads


@pytest.fixture(scope="session")
def fast_params() -> XgbParams:
    return FAST


@pytest.fixture(scope="session")
def table() -> TrainingTable:
    return make_table(workloads(40, seed=1))


@pytest.fixture(scope="session")
def trained(table: TrainingTable) -> XgbCostModel:
    return XgbCostModel(FAST).fit(table)
