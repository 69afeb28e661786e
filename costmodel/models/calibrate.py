"""Fits what a model knows of its own errors: to workloads that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.data.candidates import Candidates, CostModel
from costmodel.evaluation.coverage import Coverage
from costmodel.evaluation.duplicates import identities
from costmodel.evaluation.metrics import top_rows
from costmodel.evaluation.uncertainty import LIMIT, NEAR, LossLaw, Signals, Uncertainty
from costmodel.features.features import has_artifact
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models.folds import folds_by_nk, legal_rows
from costmodel.models.table import TrainingTable
from costmodel.models.xgb import XgbCostModel, XgbParams

__all__ = ["Outcome", "calibrate", "fit_law", "kept_curve", "outcomes", "power_law"]  # fmt: skip

_LEAST_WORKLOADS = 40
_MANY_WORKLOADS = 400
_LEAST_ROWS = 40
_FITTED_AT = (1, 2, 4, 8, 16, 32)
# A compound of a mass near zero and a long tail: many workloads lose nothing, a few lose much.
_TWEEDIE = {"power": 1.5, "alpha": 0.01, "max_iter": 1000}
_PERCENT = 100.0  # in which the penalty above is scaled
_CAUTION = 0.2  # signals count as so much less varied: what they tell is penalised more than k is
_LEAST_LOSS = 1e-4


@dataclass(frozen=True)
class Outcome:
    """How a ranking of one workload turned out that the model had not seen.

    Attributes:
        signals: what the ranking told beforehand.
        kept: the speed that the first 1, 2, … :data:`LIMIT` kept, float64 [LIMIT].
    """

    workload: Workload
    signals: Signals
    kept: NDArray[np.float64]


def calibrate(table: TrainingTable, params: XgbParams, *, nthread: int = 2) -> Uncertainty | None:
    """What a model that is trained on this table will know of its errors.

    Half of the workloads are ranked by a model of the other half, and the other way round: that
    takes as long as the training itself. A model of all of them errs a little less. Where they are
    few, and training is quick, they are ranked by quarters, so that it errs not much less.

    Returns:
        None where there are too few workloads with a row that worked to tell, or where all of
        those are in one part.
    """
    folds = 4 if len(table.workloads) < _MANY_WORKLOADS else 2
    if len(table.workloads) < _LEAST_WORKLOADS or len(np.unique(table.groups())) < folds:
        return None
    learned = np.unique(table.workload_index[table.ok()])
    held_outs = list(folds_by_nk(table, folds, seed=params.seed))
    # Each model needs rows that worked, and there must be enough workloads of such to rank.
    if len(learned) < _LEAST_WORKLOADS or any(np.isin(learned, h).all() for h in held_outs):
        return None
    found: dict[bool, list[Outcome]] = {True: [], False: []}
    for held_out in held_outs:
        rest = np.setdiff1d(np.arange(len(table.workloads)), held_out)
        model = XgbCostModel(params, nthread=nthread).fit(table.of_workloads(rest))
        model.with_threads(1)  # a few hundred rows at a time
        for ptx, part in found.items():
            part += outcomes(model, table.of_workloads(held_out), ptx=ptx)
    return Uncertainty(
        fit_law(found[True]),
        fit_law(found[False]),
        max((o.signals.disagreement for o in found[True]), default=0.0),
        Coverage.of(table.workloads[w] for w in learned),
    )


def outcomes(model: CostModel, table: TrainingTable, *, ptx: bool) -> Iterator[Outcome]:
    """Rank each workload of a table, and see what was kept.

    Args:
        model: has not seen these workloads; it has two heads.
        ptx: as the PTX-aware head ranks, else as the other does. Workloads with a row whose
            artifact is not known are left out of the first; of either those of a few rows, such as
            a tuning leaves: among those that were ranked first nothing is lost.
    """
    ok = table.ok()
    fits = table.candidates.fits(table.target.device) & legal_rows(table)
    order = np.argsort(table.workload_index, kind="stable")
    bounds = np.searchsorted(table.workload_index[order], np.arange(len(table.workloads) + 1))
    for w, workload in enumerate(table.workloads):
        rows = order[bounds[w] : bounds[w + 1]]
        rows = rows[fits[rows]]
        if len(rows) < _LEAST_ROWS or not ok[rows].any():
            continue
        candidates = table.candidates.take(rows)
        if ptx and not has_artifact(candidates).all():
            continue
        latency_us = np.where(ok[rows], table.latency_us[rows], np.nan)
        yield _outcome(model, workload, candidates, latency_us, table.target_of(w), ptx)


def _outcome(
    model: CostModel,
    workload: Workload,
    candidates: Candidates,
    latency_us: NDArray[np.float64],
    target: Target,
    ptx: bool,
) -> Outcome:
    blank = Candidates.of(candidates.configs)
    identity = identities(workload, candidates)
    cost = model.predict(workload, candidates if ptx else blank, target)
    ranked = top_rows(cost, identity, len(cost))
    near = ranked[:NEAR]
    other = model.predict(workload, blank.take(near), target) if ptx else None
    return Outcome(
        workload, Signals.of(cost[ranked], other), kept_curve(latency_us, identity, ranked)
    )


def kept_curve(
    latency_us: NDArray[np.float64], identity: NDArray[np.int64], ranked: NDArray[np.intp]
) -> NDArray[np.float64]:
    """The speed that the first 1, 2, … :data:`LIMIT` of a ranking keep, float64 [LIMIT].

    Args:
        latency_us: [n], NaN where failed; at least one is not.
        identity: int [n], equal for candidates that do the same: they share the least latency.
        ranked: rows, best first, no two of one identity.
    """
    best = np.full(int(identity.max()) + 1, np.nan)
    np.fmin.at(best, identity, latency_us)
    ordered = best[identity[ranked]]
    slowest = np.nanmax(latency_us)  # as in metrics.speed_kept: failing is as bad as being slow
    least = np.minimum.accumulate(np.where(np.isnan(ordered), slowest, ordered))
    index = np.minimum(np.arange(LIMIT), len(least) - 1)
    kept: NDArray[np.float64] = np.nanmin(latency_us) / least[index]
    return kept


def fit_law(found: Sequence[Outcome]) -> LossLaw | None:
    """The power law that describes outcomes best; None without enough of them."""
    if len(found) < _LEAST_WORKLOADS:
        return None
    logs = np.array([[o.signals.log_ratio] for o in found])
    used = np.isfinite(logs).all(axis=0)
    law = power_law(logs[:, used], np.array([o.kept for o in found])).tolist()
    return LossLaw(law[0], law[1] if used.all() else 0.0, min(law[-1], 0.0))


def power_law(logs: NDArray[np.float64], kept: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit ``log(1 - kept[:, k - 1]) = intercept + logs @ exponents + slope * log(k)``.

    Args:
        logs: float64 [workloads, c], logs of what the loss may depend on.
        kept: float64 [workloads, LIMIT].

    Returns:
        intercept, c exponents and the slope, float64 [c + 2].
    """
    from sklearn.linear_model import TweedieRegressor

    columns = np.concatenate(
        [np.column_stack([logs, np.full(len(logs), np.log(k))]) for k in _FITTED_AT]
    )
    lost = np.concatenate([1 - kept[:, k - 1] for k in _FITTED_AT])
    mean, scale = columns.mean(axis=0), columns.std(axis=0)
    scale[scale == 0] = 1.0
    scale[:-1] /= _CAUTION
    fitted = TweedieRegressor(**_TWEEDIE, link="log").fit(
        (columns - mean) / scale, _PERCENT * np.maximum(lost, 0) + _LEAST_LOSS
    )
    exponents = fitted.coef_ / scale
    intercept = fitted.intercept_ - exponents @ mean - np.log(_PERCENT)
    law: NDArray[np.float64] = np.concatenate([[intercept], exponents])
    return law
