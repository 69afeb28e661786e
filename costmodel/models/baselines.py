"""Models that learn nothing, or next to nothing: a learned one must beat them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costmodel.data.candidates import Candidates, CostModel
from costmodel.features.analytic import analytic_columns
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models.rules import rule_cost

if TYPE_CHECKING:
    from costmodel.models.table import TrainingTable


class StaticRank(CostModel):
    """One order for all workloads: the mean speed of each configuration in the training data.

    Speed is the best latency of a workload over the configuration's own. A mean of few samples
    is pulled towards the mean of all, so that one lucky workload does not win.
    """

    name = "static"

    _PRIOR_SAMPLES = 5

    def __init__(self) -> None:
        self.speed_: dict[GemmConfig, float] = {}
        self.unseen_: float = 0.0

    def fit(self, table: TrainingTable) -> StaticRank:
        """Average over the measured rows of a table."""
        ok = table.ok()
        speed = table.best_us()[table.workload_index[ok]] / table.latency_us[ok]
        self.unseen_ = 0.5 * float(speed.mean()) if len(speed) else 0.0
        prior = float(speed.mean()) * self._PRIOR_SAMPLES if len(speed) else 0.0
        sums: dict[GemmConfig, list[float]] = {}
        for row, value in zip(np.flatnonzero(ok), speed, strict=True):
            sums.setdefault(table.candidates.configs[row], []).append(float(value))
        self.speed_ = {
            config: (sum(values) + prior) / (len(values) + self._PRIOR_SAMPLES)
            for config, values in sums.items()
        }
        return self

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]:
        """Minus the mean speed, float64 [n]; a configuration never seen counts as half the mean."""
        return np.array(
            [-self.speed_.get(config, self.unseen_) for config in candidates.configs],
            dtype=np.float64,
        )


class RuleHeuristic(CostModel):
    """The rules of :mod:`costmodel.models.rules` as a model: also what answers without one."""

    name = "heuristic"

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]:
        """Distance from what the rules want, float64 [n]."""
        return rule_cost(workload, candidates.config_columns, target)


class AnalyticModel(CostModel):
    """The analytic estimate of :mod:`costmodel.features.analytic` as a model; it learns nothing."""

    name = "estimate"
    predicts_latency = True

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]:
        """Microseconds, float64 [n]; registers and shared memory as compiled, where known."""
        columns = analytic_columns(workload, candidates, target, binary=True)
        microseconds: NDArray[np.float64] = columns["estimate"] * columns["roofline_us"]
        return microseconds
