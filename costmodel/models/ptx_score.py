"""The hand-weighted PTX score: the seed of this project, kept as a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from costmodel.data.candidates import ARTIFACT_COLUMNS, Candidates, CostModel
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target

PTX_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {
        "score_mma_sync": 10.0,
        "score_cp_async": 2.0,
        "score_bar_sync": -30.0,
        "score_bra": -5.0,
        "score_ret": -5.0,
    }
)
"""Points for each instruction of the kernel. Blind on Hopper, which has no ``mma.sync``."""

HOPPER_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {
        **PTX_WEIGHTS,
        "all_wgmma": 10.0,  # as mma.sync; bulk copies already count as cp.async
        "all_mbarrier": -30.0,  # as bar.sync
    }
)
"""The same weights, with Hopper's instructions counted as their older relatives."""


class PtxScore(CostModel):
    """Cost = −score, and score = Σ weight × count over the whole kernel.

    It knows neither the workload nor the target. A candidate without an artifact has no PTX to
    score: it comes after all that have one.
    """

    def __init__(
        self, weights: Mapping[str, float] = PTX_WEIGHTS, *, name: str = "ptx-score"
    ) -> None:
        self.weights = weights
        self.name = name

    @classmethod
    def hopper(cls) -> PtxScore:
        """The variant that also counts Hopper's instructions."""
        return cls(HOPPER_WEIGHTS, name="ptx-score-hopper")

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]:
        """Minus the score, float64 [n]."""
        columns = [ARTIFACT_COLUMNS.index(name) for name in self.weights]
        weights = np.array(list(self.weights.values()), dtype=np.float64)
        cost: NDArray[np.float64] = -(candidates.artifact_columns[:, columns] * weights).sum(axis=1)
        known = candidates.has_artifact
        worst = cost[known].max(initial=0.0) + 1.0
        return np.where(known, cost, worst)
