"""Gain from each kind of feature, and from more data: cross-validation on training workloads.

It needs no GPU and uses no held-out workload. No pair (n, k) is in two folds. Writes
``ablation-<target>.json``. The trees are fewer and shallower than the shipped model's, so that it
takes minutes: compare the rows with each other only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xgboost
from common import Results, Row, at_exit_code, count, note, recorded_torch, versions
from numpy.typing import NDArray

from costmodel.data.candidates import ARTIFACT_COLUMNS, CONFIG_COLUMNS
from costmodel.data.dataset import Dataset
from costmodel.evaluation import metrics
from costmodel.features.analytic import ANALYTIC_FEATURES
from costmodel.features.features import CONFIG_FEATURES, FEATURES
from costmodel.gemm.space import why_illegal
from costmodel.models import TrainingTable, XgbCostModel, XgbParams
from costmodel.models.confidence import folds_by_nk
from costmodel.models.trees import LabelledRows, train_booster
from costmodel.tuning.shipped import recording

PARAMS = XgbParams(rounds=150, max_depth=6, learning_rate=0.12)
_BINARY = ("registers", "spill_bytes", "shared_bytes")
_WORKLOAD = tuple(n for n in CONFIG_FEATURES if n not in (*CONFIG_COLUMNS, *ANALYTIC_FEATURES))


def legal_rows(table: TrainingTable) -> NDArray[np.bool_]:
    """Mark the rows that may run, bool [n].

    Some configurations were recorded before a filter refused them: no ranking may choose them.
    """
    configs = zip(table.candidates.configs, table.workload_index.tolist(), strict=True)
    devices = [target.device for target in table.target_of_each()]
    return np.array(
        [not why_illegal(c, table.workloads[w], devices[w]) for c, w in configs], dtype=bool
    )


@dataclass(frozen=True)
class Setting:
    """Data that a model is shown: columns, and at most so many workloads and rows of each.

    Attributes:
        estimate: the target is log(latency / estimate), else log(latency / roofline).
        ptx: columns are taken from the artifacts where these are known.
    """

    group: str
    name: str
    columns: tuple[str, ...] = FEATURES
    estimate: bool = True
    ptx: bool = True
    workloads: int | None = None
    per_workload: int | None = None


SETTINGS = (
    Setting("columns", "configuration only", (*_WORKLOAD, *CONFIG_COLUMNS), False, False),
    Setting("columns", "+ analytic", CONFIG_FEATURES, ptx=False),
    Setting("columns", "+ binary", (*CONFIG_FEATURES, *_BINARY)),
    Setting("columns", "+ PTX", FEATURES),
    Setting("columns", "PTX without configuration", (*_WORKLOAD, *ARTIFACT_COLUMNS), False),
    *(Setting("workloads", f"{n} workloads", workloads=n) for n in (50, 100, 200, 400)),
    Setting("workloads", "all workloads"),
    *(Setting("configurations", f"{n} a workload", per_workload=n) for n in (30, 60, 120)),
    Setting("configurations", "all of them"),
)


class Study:
    """The training rows, laid out once."""

    def __init__(self, table: TrainingTable, nthread: int) -> None:
        self.table = table
        self.nthread = nthread
        self.ok = table.ok
        self.latency = np.where(self.ok, table.latency_us, np.nan)
        self.fits = table.candidates.fits(table.target.device) & legal_rows(table)
        self.weight = XgbCostModel(PARAMS).row_weights(table)
        self.matrices = {ptx: table.design_matrix(ptx=ptx) for ptx in (True, False)}
        self._known: dict[Setting, Row] = {}

    def row(self, setting: Setting, folds: int, seeds: int) -> Row:
        """Return the result of a setting: the means over seeds, and the worst of all seeds."""
        # The setting with all data is in all three groups, but is computed once.
        same = Setting("", "", setting.columns, setting.estimate, setting.ptx,
                       setting.workloads, setting.per_workload)  # fmt: skip
        if same not in self._known:
            runs = [self._validate(setting, folds, seed) for seed in range(seeds)]
            self._known[same] = figures(runs)
        return {
            "group": setting.group,
            "setting": setting.name,
            "columns": len(setting.columns),
            **self._known[same],
        }

    def _validate(self, setting: Setting, folds: int, seed: int) -> NDArray[np.float64]:
        """Return kept at 1, kept at 8 and tau of each workload, by models that did not see it."""
        names = FEATURES if setting.ptx else CONFIG_FEATURES
        index = [names.index(name) for name in setting.columns]
        matrix = self.matrices[setting.ptx]
        floor = np.zeros(len(self.latency))
        if setting.estimate:
            floor = np.log(matrix[:, names.index("estimate")].astype(np.float64))
        target = np.log(self.latency / self.table.roofline_us()) - floor
        of_workload = self.table.workload_index
        scores = []
        for held_out in folds_by_nk(self.table, folds, seed=seed):
            rows = self._train_rows(setting, held_out, np.random.default_rng(seed))
            lesson = LabelledRows(
                matrix[np.ix_(rows, index)], target[rows], floor[rows], self.weight[rows],
                of_workload[rows],
            )  # fmt: skip
            booster = train_booster(lesson, replace(PARAMS, seed=seed), nthread=self.nthread)
            for w in held_out:
                part = np.flatnonzero((of_workload == w) & self.fits)
                if self.ok[part].any():
                    cost = booster.inplace_predict(matrix[np.ix_(part, index)]) + floor[part]
                    scores.append(score(self.latency[part], cost))
        return np.array(scores)

    def _train_rows(
        self, setting: Setting, held_out: NDArray[np.intp], rng: np.random.Generator
    ) -> NDArray[np.intp]:
        """Draw rows to learn from: none of the fold, and no more than the setting allows."""
        seen = rng.permutation(np.setdiff1d(np.arange(len(self.table.workloads)), held_out))
        rows = []
        for w in seen[: setting.workloads]:
            part = np.flatnonzero((self.table.workload_index == w) & self.ok)
            rows.append(rng.permutation(part)[: setting.per_workload])
        return np.concatenate(rows)


def score(latency: NDArray[np.float64], cost: NDArray[np.float64]) -> tuple[float, float, float]:
    kept = (metrics.speed_kept(latency, cost, k) for k in (1, 8))
    return (*kept, metrics.kendall_tau(latency, cost))  # type: ignore[return-value]


def figures(runs: Sequence[NDArray[np.float64]]) -> Row:
    top1, top8 = ([100 * metrics.geomean(run[:, i]) for run in runs] for i in (0, 1))
    return {
        "top1_pct": round(float(np.mean(top1)), 2),
        "top1_spread": round(max(top1) - min(top1), 2),
        "top1_worst_pct": round(100 * min(float(run[:, 0].min()) for run in runs), 1),
        "top8_pct": round(float(np.mean(top8)), 2),
        "top8_worst_pct": round(100 * min(float(run[:, 1].min()) for run in runs), 1),
        "kendall_tau": round(float(np.mean([run[:, 2].mean() for run in runs])), 4),
    }


def summarize(rows: list[Row]) -> Row:
    """Top-1 of each kind of columns."""
    return {
        f"top1_pct, {row['setting']}": row["top1_pct"] for row in rows if row["group"] == "columns"
    }


def study(
    table: TrainingTable, results: Results, settings: Sequence[Setting], options: Mapping[str, int]
) -> None:
    """Cross-validate each setting, saving as it goes."""
    work = Study(table, options["nthread"])
    for setting in settings:
        row = work.row(setting, options["folds"], options["seeds"])
        note(
            f"{setting.group}, {setting.name}: top-1 {row['top1_pct']} %, tau {row['kendall_tau']}"
        )
        results.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="dataset; default: the checkout's of the H100")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--folds", type=count, default=4)
    parser.add_argument("--seeds", type=count, default=2, help="how often the folds are drawn anew")
    parser.add_argument("--nthread", type=int, default=2)
    args = parser.parse_args()
    dataset = Dataset.open(args.data or recording("h100-sxm", sample=False))
    table = TrainingTable.from_dataset(dataset)
    software = versions(dataset.target, torch=recorded_torch(dataset), xgboost=xgboost.__version__)
    results = Results("ablation", dataset.target, args.results, software, summarize)
    study(table, results, SETTINGS, vars(args))
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
