"""Models that learn nothing, or next to nothing: a learned one must beat them."""

from collections import defaultdict
from typing import NamedTuple, Self

import numpy as np

from costmodel.arrays import Floats
from costmodel.data.candidates import ARTIFACT_COLUMNS, CONFIG_COLUMNS, Candidates, CostModel
from costmodel.features.analytic import analytic_columns
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models.table import TrainingTable


class StaticRank(CostModel):
    """One order for all workloads: the mean speed of each configuration in the training data.

    Speed is the best latency of a workload over the configuration's own. A mean of few samples
    is pulled towards the mean of all, so that one lucky workload does not win.
    """

    name = "static"

    _PRIOR_SAMPLES = 5

    def __init__(self) -> None:
        self.speed: dict[GemmConfig, float] = {}
        self._unseen = 0.0

    def fit(self, table: TrainingTable) -> Self:
        """Average over the measured rows of a table."""
        rows = np.flatnonzero(table.ok)
        speed = table.best_us()[table.workload_index[rows]] / table.latency_us[rows]
        mean = float(speed.mean()) if len(speed) else 0.0
        found = defaultdict(list)
        for row, value in zip(rows.tolist(), speed.tolist()):
            found[table.candidates.configs[row]].append(value)
        self.speed = {
            config: (sum(values) + mean * self._PRIOR_SAMPLES) / (len(values) + self._PRIOR_SAMPLES)
            for config, values in found.items()
        }
        self._unseen = 0.5 * mean
        return self

    def predict(self, workload: Workload, candidates: Candidates, target: Target) -> Floats:
        """Minus the mean speed, float64 [n]; a configuration never seen counts as half the mean."""
        return np.array([-self.speed.get(c, self._unseen) for c in candidates.configs], np.float64)


class AnalyticModel(CostModel):
    """The analytic estimate of :mod:`costmodel.features.analytic` as a model; it learns nothing."""

    name = "estimate"
    predicts_latency = True

    def predict(self, workload: Workload, candidates: Candidates, target: Target) -> Floats:
        """Microseconds, float64 [n]; registers and shared memory as compiled, where known."""
        columns = analytic_columns(workload, candidates, target, binary=True)
        return columns["estimate"] * columns["roofline_us"]


PTX_WEIGHTS = {
    "score_mma_sync": 10.0, "score_cp_async": 2.0, "score_bar_sync": -30.0, "score_bra": -5.0,
    "score_ret": -5.0,
}  # fmt: skip
"""Points for each instruction of the kernel. Blind on Hopper, where kernels lack ``mma.sync``."""

# wgmma counts as mma.sync, and mbarrier as bar.sync; bulk copies already count as cp.async.
HOPPER_WEIGHTS = PTX_WEIGHTS | {"all_wgmma": 10.0, "all_mbarrier": -30.0}
"""The same weights, with Hopper's instructions counted as their older relatives."""


class PtxScore(CostModel):
    """Cost = −score, and score = Σ weight × count over the whole kernel.

    It knows neither the workload nor the target. A candidate without an artifact has no PTX to
    score: it comes after all that have one.
    """

    name = "ptx-score"
    weights = PTX_WEIGHTS

    @classmethod
    def hopper(cls) -> Self:
        """The variant that also counts Hopper's instructions."""
        made = cls()
        made.name, made.weights = "ptx-score-hopper", HOPPER_WEIGHTS
        return made

    def predict(self, workload: Workload, candidates: Candidates, target: Target) -> Floats:
        """Minus the score, float64 [n]."""
        columns = [ARTIFACT_COLUMNS.index(name) for name in self.weights]
        cost = -candidates.artifact_columns[:, columns] @ np.array([*self.weights.values()])
        known = candidates.has_artifact
        return np.where(known, cost, cost[known].max(initial=0.0) + 1.0)


# --- Rules of thumb -------------------------------------------------------------------------------


class RuleHeuristic(CostModel):
    """Rules of thumb: the configuration that an experienced programmer would choose by hand.

    It answers where no learned model does. Small products (every side ≤ 512) want small tiles: 32
    to 64 a side, steps of 16 to 32, one to four warps, one or two stages. Large ones want 128 to
    256 a side, steps of 32 to 64, eight warps, four or five stages. A tile is never wider than the
    product, and where too few tiles are left to fill the GPU, K is split.

    These are for 16 bits. TF32 takes half the step along K, which is as many bytes. IEEE float32
    has no tensor cores. It takes tiles of at most 64 a side, since accumulators and fragments fill
    the registers, and the compiler unrolls every multiplication of a step.
    """

    name = "heuristic"

    def predict(self, workload: Workload, candidates: Candidates, target: Target) -> Floats:
        """Distance from what the rules want, in powers of two, float64 [n]."""
        want = wanted(workload, target)
        c = dict(zip(CONFIG_COLUMNS, candidates.config_columns.T))
        cost = np.zeros(len(candidates), dtype=np.float64)
        for name, weight in _WEIGHTS.items():
            cost += weight * np.abs(np.log2(c[name] / getattr(want, name)))
        # The rules know nothing of these: take them only if there is nothing else.
        cost += 0.5 * (c["maxnreg"] > 0) + 0.05 * c["halves"] + 0.05 * c["flatten"]
        cost += 0.5 * np.where(want.tma, c["is_pointer"], 1 - c["is_pointer"])
        cost += 0.1 * c["is_persistent"] + 0.1 * c["is_warp_specialized"]
        return cost


class Wanted(NamedTuple):
    """A configuration as the rules want it; ``tma`` is True if the copy engine is preferred."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int
    tma: bool
    group_m: int = 8


def wanted(workload: Workload, target: Target) -> Wanted:
    """Apply the rules, which know sizes, element types and the number of multiprocessors."""
    sm_count = target.device.sm_count
    code = workload.code
    if code.kind not in target.device.architecture.tensor_rates:
        return _without_tensor_cores(workload, sm_count)
    want = _small(workload) if workload.is_small() else _large(workload, sm_count)
    return want._replace(block_k=max(want.block_k * 2 // code.itemsize, 16))  # as many bytes


# A wrong tile or split costs more than a wrong depth.
_WEIGHTS = {
    "block_m": 1.0, "block_n": 1.0, "block_k": 0.5, "num_warps": 0.7, "num_stages": 0.7,
    "split_k": 1.0, "group_m": 0.1,
}  # fmt: skip


def _small(w: Workload) -> Wanted:
    block_m, block_n = _fit(64, w.m, least=32), _fit(64, w.n, least=32)
    if _tiles(w, 64, 64) < 32:  # too few tiles for a GPU: halve their sides
        block_m = block_n = 32
    return Wanted(block_m, block_n, _fit(32, w.k), block_m * block_n // 1024, 2, 1, tma=False)


def _large(w: Workload, sm_count: int) -> Wanted:
    block_m, block_n = _fit(128, w.m), _fit(256, w.n)
    if block_n <= 128:  # a narrow product takes its large side along M
        block_m = _fit(256, w.m)
    # Fewer tiles than multiprocessors: smaller ones, as long as they are worth loading.
    while _tiles(w, block_m, block_n) < sm_count and block_n > (32 if block_m <= 64 else 128):
        block_n //= 2
    split = _split(w, block_m, block_n, sm_count)
    area = block_m * block_n
    block_k = _fit(64 if area > 2048 else 128, w.k)
    return Wanted(block_m, block_n, block_k, 8 if area > 16384 else 4, 4, split, tma=True)


def _without_tensor_cores(w: Workload, sm_count: int) -> Wanted:
    block_m, block_n = _fit(64, w.m), _fit(64, w.n, least=32)
    if _tiles(w, block_m, block_n) < sm_count:
        block_m = min(block_m, 32)
    split = _split(w, block_m, block_n, sm_count)
    block_k = _fit(64 if split > 1 else 32, w.k)  # a split waits less often with longer steps
    return Wanted(block_m, block_n, block_k, 4, 3, split, tma=False)


def _split(w: Workload, block_m: int, block_n: int, sm_count: int) -> int:
    """Splits of K, a power of two, that occupy idle multiprocessors with 8 steps or more each."""
    idle = sm_count // max(_tiles(w, block_m, block_n), 1)
    steps = max(w.k // 64, 1)
    return 1 << (max(min(idle, steps // 8, 16), 1).bit_length() - 1)


def _tiles(w: Workload, block_m: int, block_n: int) -> int:
    return -(-w.m // block_m) * -(-w.n // block_n)


def _fit(block: int, side: int, least: int = 16) -> int:
    """Halve a block while half of it still covers the side."""
    while block > least and block // 2 >= side:
        block //= 2
    return block
