"""Goals for the trees to learn: latency, order, or what is near the best; needs no GPU.

Folds, features and small trees are those of ``bench ablation``. Regression learns the latency; the
shipped models also learn the order of rows near the best, in one ensemble. ``pairwise`` learns only
the order within a workload. The classifier learns which configurations are within 5 % of the best,
also from those that failed. A blend adds ``pairwise`` or the classifier to regression, each in
units of its own spread within the workload. Writes ``objectives-<target>.json``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import xgboost
from bench_ablation import PARAMS, figures, score
from bench_transfer import Rows
from common import Results, Row, at_exit_code, count, note, recorded_torch, versions
from numpy.typing import NDArray

from costmodel.data.dataset import Dataset
from costmodel.models import TrainingTable, XgbParams
from costmodel.models.confidence import folds_by_nk
from costmodel.models.trees import train_booster
from costmodel.tuning.shipped import recording

_NEAR_BEST = 1.05
_Floats = NDArray[np.float64]
Learned = Callable[[NDArray[np.intp]], _Floats]
"""A function that returns costs of rows: lower is better, on a scale of its own."""


def regression(study: Rows, seen: NDArray[np.bool_], seed: int) -> Learned:
    """Learn log(latency / estimate); rows near the best weigh most."""
    return _grown(study, seen, replace(PARAMS, seed=seed, pairs=0.0))


def regression_and_order(study: Rows, seen: NDArray[np.bool_], seed: int) -> Learned:
    """Learn the same, and which of two rows near the best is faster."""
    return _grown(study, seen, replace(PARAMS, seed=seed))


def _grown(study: Rows, seen: NDArray[np.bool_], params: XgbParams) -> Learned:
    rows = np.flatnonzero(seen & study.ok)
    booster = train_booster(study.lesson(rows), params, nthread=study.nthread)
    return lambda asked: booster.inplace_predict(study.matrix[asked]) + study.floor[asked]


def pairwise(study: Rows, seen: NDArray[np.bool_], seed: int) -> Learned:
    """Learn which of two configurations of a workload is faster; the estimate is the start."""
    rows = np.flatnonzero(seen & study.ok)
    rows = rows[np.argsort(study.table.workload_index[rows], kind="stable")]
    index = study.table.workload_index[rows]
    speed = study.table.best_us()[index] / study.latency[rows]
    options = {
        "objective": "rank:pairwise", "lambdarank_pair_method": "topk",
        "lambdarank_num_pair_per_sample": 32,
    }  # fmt: skip
    booster = _train(study, rows, seed, options, label=speed, qid=index)
    return lambda asked: -booster.inplace_predict(study.matrix[asked])


def classifier(study: Rows, seen: NDArray[np.bool_], seed: int) -> Learned:
    """Learn minus the log odds of being within 5 % of the best; a failure is not within them."""
    rows = np.flatnonzero(seen & (study.fits | study.ok))
    best_us = study.table.best_us()[study.table.workload_index[rows]]
    near = np.nan_to_num(study.latency[rows], nan=np.inf) <= _NEAR_BEST * best_us
    options = {"objective": "binary:logistic"}
    booster = _train(study, rows, seed, options, label=near.astype(np.float64))
    return lambda asked: -booster.inplace_predict(study.matrix[asked], predict_type="margin")


def _train(
    study: Rows, rows: NDArray[np.intp], seed: int, options: dict[str, object], **data: _Floats
) -> xgboost.Booster:
    params = PARAMS.booster(study.nthread) | {"seed": seed} | options
    matrix = xgboost.DMatrix(study.matrix[rows], nthread=study.nthread, **data)
    return xgboost.train(params, matrix, num_boost_round=PARAMS.rounds)


OBJECTIVES = {
    "regression": regression,
    "regression and order near the best": regression_and_order,
    "pairwise": pairwise,
    "classifier": classifier,
}
BLENDS = {
    **{name: {name: 1.0} for name in OBJECTIVES},
    **{
        f"regression + {weight:g} {name}": {"regression": 1.0, name: weight}
        for name in ("pairwise", "classifier")
        for weight in (0.25, 0.5, 1.0)
    },
}


def blended(costs: dict[str, _Floats], weights: dict[str, float]) -> _Floats:
    """Sum the weighted costs of one workload, each in units of its spread there."""
    total = np.zeros(len(next(iter(costs.values()))))
    for name, weight in weights.items():
        total += weight * costs[name] / max(float(np.std(costs[name])), 1e-12)
    return total


def validate(study: Rows, folds: int, seed: int) -> dict[str, _Floats]:
    """Return kept at 1, kept at 8 and tau of each workload, for each blend."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in BLENDS}
    of_workload = study.table.workload_index
    for held_out in folds_by_nk(study.table, folds, seed=seed):
        seen = ~np.isin(of_workload, held_out)
        learned = {name: fit(study, seen, seed) for name, fit in OBJECTIVES.items()}
        for w in held_out:
            rows = np.flatnonzero((of_workload == w) & study.fits)
            if not study.ok[rows].any():
                continue
            costs = {name: np.asarray(cost(rows), float) for name, cost in learned.items()}
            for name, weights in BLENDS.items():
                found[name].append(score(study.latency[rows], blended(costs, weights)))
    return {name: np.array(scores) for name, scores in found.items()}


def summarize(rows: list[Row]) -> Row:
    """Return top-1 of each objective."""
    return {f"top1_pct, {row['objective']}": row["top1_pct"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="dataset; default: the checkout's of the H100")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--folds", type=count, default=4)
    parser.add_argument("--seeds", type=count, default=2, help="how often the folds are drawn anew")
    parser.add_argument("--nthread", type=int, default=2)
    args = parser.parse_args()
    dataset = Dataset.open(args.data or recording("h100-sxm", sample=False))
    study = Rows(TrainingTable.from_dataset(dataset), args.nthread)
    software = versions(dataset.target, torch=recorded_torch(dataset), xgboost=xgboost.__version__)
    results = Results("objectives", dataset.target, args.results, software, summarize)
    runs = []
    for seed in range(args.seeds):
        runs.append(validate(study, args.folds, seed))
        note(f"seed {seed + 1} of {args.seeds} done")
    results.add(*({"objective": name, **figures([run[name] for run in runs])} for name in BLENDS))
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
