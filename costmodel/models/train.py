"""Training, and the validation that hyper-parameters are chosen by."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costmodel.evaluation import metrics
from costmodel.models.calibrate import calibrate
from costmodel.models.folds import folds_by_nk, legal_rows
from costmodel.models.table import TrainingTable
from costmodel.models.xgb import DEFAULTS, XgbCostModel, XgbParams

if TYPE_CHECKING:
    from costmodel.data.candidates import CostModel
    from costmodel.data.dataset import Dataset

__all__ = [
    "KeptReport",
    "cross_validate",
    "speed_kept",
    "train",
    "tune_hyperparameters",
]


@dataclass(frozen=True, slots=True)
class KeptReport:
    """Speed kept on workloads that were not trained on, in percent.

    Attributes:
        kept: best latency of a workload / best in the model's first k, float64 [workloads, 2],
            for k = 1 and 8.
    """

    kept: NDArray[np.float64]

    @property
    def geomean_pct(self) -> tuple[float, float]:
        top1, top8 = self.kept.T
        return 100 * metrics.geomean(top1), 100 * metrics.geomean(top8)

    @property
    def worst_pct(self) -> tuple[float, float]:
        top1, top8 = 100 * self.kept.min(axis=0)
        return float(top1), float(top8)

    def __str__(self) -> str:
        (g1, g8), (w1, w8) = self.geomean_pct, self.worst_pct
        return (
            f"{len(self.kept)} workloads: kept@1 {g1:.2f} % (worst {w1:.1f}), "
            f"kept@8 {g8:.2f} % (worst {w8:.1f})"
        )


def train(
    data: Dataset | TrainingTable,
    *,
    params: XgbParams = DEFAULTS,
    name: str = "xgb",
    nthread: int = 2,
    calibrated: bool = True,
) -> XgbCostModel:
    """Train a model on the training workloads of a dataset.

    ``train(dataset).save(path)``, then ``costmodel.use(path)`` is all that it takes to use it.

    Args:
        data: a dataset, whose rows of role ``train`` are used, or a table.
        name: what results call the model.
        nthread: threads of the training; prediction uses one.
        calibrated: learn also how sure the model may be, which takes as long again; without, and
            with too few workloads to tell, ``k="auto"`` times a fixed number.

    Raises:
        InvalidInput: no row of status ok.
    """
    table = data if isinstance(data, TrainingTable) else TrainingTable.from_dataset(data)
    model = XgbCostModel(params, name=name, nthread=nthread).fit(table)
    if calibrated:
        model.uncertainty_ = calibrate(table, params, nthread=nthread)
    return model.with_threads(1)


def cross_validate(
    table: TrainingTable, *, folds: int = 5, params: XgbParams = DEFAULTS, nthread: int = 2
) -> KeptReport:
    """Speed kept by models that saw no workload with the same (n, k)."""
    kept = []
    for held_out in folds_by_nk(table, folds, seed=params.seed):
        rest = np.setdiff1d(np.arange(len(table.workloads)), held_out)
        model = XgbCostModel(params, nthread=nthread).fit(table.of_workloads(rest))
        kept.append(speed_kept(model, table.of_workloads(held_out)).kept)
    return KeptReport(np.concatenate(kept))


def speed_kept(model: CostModel, table: TrainingTable) -> KeptReport:
    """What the model's first 1 and 8 keep of each workload's best measured row."""
    ok = table.ok()
    latency = np.where(ok, table.latency_us, np.nan)
    fits = table.candidates.fits(table.target.device) & legal_rows(table)
    kept = []
    for w, workload in enumerate(table.workloads):
        rows = np.flatnonzero((table.workload_index == w) & fits)
        if ok[rows].any():
            cost = model.predict(workload, table.candidates.take(rows), table.target_of(w))
            kept.append([metrics.speed_kept(latency[rows], cost, k) for k in (1, 8)])
    return KeptReport(np.array(kept, dtype=np.float64).reshape(-1, 2))


def tune_hyperparameters(
    table: TrainingTable,
    *,
    grid: Iterable[XgbParams] | None = None,
    folds: int = 3,
    nthread: int = 2,
) -> list[tuple[XgbParams, KeptReport]]:
    """Cross-validate each candidate; best first, by the sum of kept@1 and kept@8.

    Run offline and on training data only: its winner is what :class:`XgbParams` defaults to.
    """
    tried = [
        (params, cross_validate(table, folds=folds, params=params, nthread=nthread))
        for params in (grid if grid is not None else _GRID)
    ]
    return sorted(tried, key=lambda pair: -sum(pair[1].geomean_pct))


_GRID = tuple(
    replace(DEFAULTS, max_depth=depth, nearness=nearness, min_child_weight=leaf)
    for depth, nearness, leaf in itertools.product((6, 8), (1.0, 2.0, 4.0), (1.0, 4.0))
)
