"""A cost model without sense: an arbitrary order."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from costmodel.data.candidates import Candidates, CostModel
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target


class RandomModel(CostModel):
    """An arbitrary order, the same each time for one workload, seed and set of configurations."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.name = seed, f"random-{seed}"

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]:
        """Costs uniform in [0, 1), float64 [n]: a hash of workload, seed and configuration."""
        digest = hashlib.sha256(f"{workload.key()}/{self.seed}".encode()).digest()
        state = np.full(len(candidates), int.from_bytes(digest[:8], "little"), dtype=np.uint64)
        for column in candidates.config_columns.T:
            state = _mix(state ^ column.astype(np.uint64))
        return state.astype(np.float64) / 2.0**64


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One round of splitmix64 (Steele, Lea and Flood 2014)."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
