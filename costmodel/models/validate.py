"""Judges models by workloads that they were not trained on: folds that share no pair (n, k)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InvalidInput
from costmodel.evaluation import metrics
from costmodel.evaluation.evaluate import Problem
from costmodel.hardware.target import Target
from costmodel.models.confidence import KEPT_AT, Confidence, Coverage
from costmodel.models.table import TrainingTable
from costmodel.models.xgb import DEFAULTS, XgbCostModel, XgbParams

if TYPE_CHECKING:
    from costmodel.data.candidates import CostModel

_LEAST_WORKLOADS = 40
_MANY_WORKLOADS = 400
_LEAST_ROWS = 40  # a tuning leaves a few rows, the first of a ranking: among them nothing is lost


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


def folds_by_nk(table: TrainingTable, folds: int, *, seed: int = 0) -> Iterator[NDArray[np.intp]]:
    """Yield the workloads of each fold; no pair (n, k) lies in two.

    Raises:
        InvalidInput: fewer pairs than folds.
    """
    groups = table.groups()
    pairs = np.unique(groups)
    if not 2 <= folds <= len(pairs):
        raise InvalidInput(
            f"{folds} folds of {len(pairs)} pairs (n, k): expected at least 2 folds and as many "
            f"pairs as folds"
        )
    np.random.default_rng(seed).shuffle(pairs)
    for part in np.array_split(pairs, folds):
        yield np.flatnonzero(np.isin(groups, part))


def speed_kept(model: CostModel, table: TrainingTable) -> KeptReport:
    """Judge a model's first 1 and 8 against the best measured row of each workload."""
    kept = [
        problem.kept_at(model.predict(problem.workload, problem.candidates, target), (1, 8))
        for problem, target in _problems(table)
    ]
    return KeptReport(np.array(kept, dtype=np.float64).reshape(-1, 2))


def cross_validate(
    table: TrainingTable, *, folds: int = 5, params: XgbParams = DEFAULTS, nthread: int = 2
) -> KeptReport:
    """Measure the speed kept by models that saw no workload with the same (n, k)."""
    held_outs = folds_by_nk(table, folds, seed=params.seed)
    kept = [
        speed_kept(model, part).kept
        for model, part in _out_of_fold(table, held_outs, params, nthread)
    ]
    return KeptReport(np.concatenate(kept))


def calibrate(table: TrainingTable, params: XgbParams, *, nthread: int = 2) -> Confidence | None:
    """Measure what a model that is trained on this table may be expected to keep.

    Half of the workloads are ranked by a model of the other half, and the other way round: that
    takes as long as the training itself. A model of all of them errs a little less. Few workloads
    are ranked by quarters: training is quick then, and the models err not much more.

    Returns:
        None for too few workloads with a row that worked, or if all of these are in one part.
    """
    folds = 4 if len(table.workloads) < _MANY_WORKLOADS else 2
    if len(table.workloads) < _LEAST_WORKLOADS or len(np.unique(table.groups())) < folds:
        return None
    learned = np.unique(table.workload_index[table.ok()])
    held_outs = list(folds_by_nk(table, folds, seed=params.seed))
    if len(learned) < _LEAST_WORKLOADS or any(np.isin(learned, h).all() for h in held_outs):
        return None
    kept: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for model, part in _out_of_fold(table, held_outs, params, nthread):
        for problem, target in _problems(part):
            every = problem.candidates
            if len(every) < _LEAST_ROWS:
                continue
            heads = {False: every.without_artifacts()} | (
                {True: every} if every.has_artifact.all() else {}
            )
            for ptx, shown in heads.items():
                cost = model.predict(problem.workload, shown, target)
                kept[ptx].append(problem.kept_at(cost, KEPT_AT))
    tables = {
        ptx: dict(zip(map(str, KEPT_AT), np.mean(rows, axis=0).tolist(), strict=True))
        if len(rows) >= _LEAST_WORKLOADS
        else {}
        for ptx, rows in kept.items()
    }
    return Confidence(tables[True], tables[False], Coverage.of(table.workloads[w] for w in learned))


def _out_of_fold(
    table: TrainingTable, held_outs: Iterable[NDArray[np.intp]], params: XgbParams, nthread: int
) -> Iterator[tuple[XgbCostModel, TrainingTable]]:
    """Train a model without each part, and yield it with that part."""
    for held_out in held_outs:
        rest = np.setdiff1d(np.arange(len(table.workloads)), held_out)
        model = XgbCostModel(params, nthread=nthread).fit(table.of_workloads(rest))
        yield model, table.of_workloads(held_out)


def _problems(table: TrainingTable) -> Iterator[tuple[Problem, Target]]:
    """Yield the workloads of a table of which anything worked, and where they were measured."""
    latency_us = np.where(table.ok(), table.latency_us, np.nan)
    for w, rows in enumerate(table.rows_of_each()):
        target = table.target_of(w)
        candidates = table.candidates.take(rows)
        found = Problem.of(table.workloads[w], candidates, latency_us[rows], target.device)
        if found is not None:
            yield found, target
