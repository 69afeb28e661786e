"""Whether the model knows how sure it is: expected speed kept against what was kept; needs no GPU.

On training workloads out of fold (no pair (n, k) is in two; of each about 235 configurations were
recorded), by models that were trained and calibrated without them, and on the held-out ones by the
model in use. Writes ``calibration-<target>.json``: reliability, timings saved, and what each signal
tells.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import Results, Row, at_exit_code, find_model, note, recorded_torch, versions
from numpy.typing import NDArray

from costmodel.data.dataset import Dataset
from costmodel.evaluation.coverage import kind_of
from costmodel.evaluation.metrics import geomean
from costmodel.evaluation.uncertainty import LIMIT, PRICE, Confidence
from costmodel.models import TrainingTable, XgbCostModel, train
from costmodel.models.calibrate import Outcome, outcomes, power_law
from costmodel.models.folds import folds_by_nk
from costmodel.tuning.shipped import recording

_BINS = 4
_AT = (1, 4, 8, 16)
_PRICES = (2e-3, 1e-3, 5e-4, PRICE, 2e-4, 1e-4)
_TARGETS = (0.99, 0.995, 0.997)
_FIXED = (1, 2, 4, 8, 12, 16, 24, 32)
_KS = np.arange(1, LIMIT + 1)
OUT_OF_FOLD, HELD_OUT = "out of fold", "held out"


@dataclass(frozen=True)
class Judged:
    """A ranking that was made without its workload: what was expected, and what was kept.

    Attributes:
        fold: which fold it is of; -1 of the held-out ones.
        seen: training workloads of its kind.
        distance: to the nearest training workload, in octaves of m, n and k.
    """

    outcome: Outcome
    confidence: Confidence
    fold: int
    seen: int
    distance: float


def judge(
    model: XgbCostModel, learned: TrainingTable, asked: TrainingTable, fold: int = -1
) -> Iterator[Judged]:
    """Rank the workloads of a table by the PTX-aware head, each as the tuner would."""
    known = model.uncertainty_
    if known is None:
        return
    sizes = np.log2([(w.m, w.n, w.k) for w in learned.workloads])
    for outcome in outcomes(model, asked, ptx=True):
        w = outcome.workload
        confidence = known.confidence(outcome.signals, known.coverage.doubt(w))
        assert confidence is not None
        away = np.linalg.norm(sizes - np.log2([w.m, w.n, w.k]), axis=1).min()
        seen = sum(kind_of(other) == kind_of(w) for other in learned.workloads)
        yield Judged(outcome, confidence, fold, seen, float(away))


def out_of_fold(table: TrainingTable, folds: int, nthread: int) -> list[Judged]:
    """Every training workload, by a model that was trained and calibrated on other pairs (n, k)."""
    found: list[Judged] = []
    for fold, held_out in enumerate(folds_by_nk(table, folds)):
        rest = table.of_workloads(np.setdiff1d(np.arange(len(table.workloads)), held_out))
        found += judge(train(rest, nthread=nthread), rest, table.of_workloads(held_out), fold)
        note(f"fold {fold + 1} of {folds}: {len(found)} workloads")
    return found


def reliability(where: str, judged: Sequence[Judged]) -> Iterator[Row]:
    """Expected and achieved, for workloads of like expectation."""
    for k in _AT:
        expected = np.array([j.confidence.kept_at(k) for j in judged])
        kept = np.array([j.outcome.kept[k - 1] for j in judged])
        for part in np.array_split(np.argsort(expected, kind="stable"), _BINS):
            yield {
                "group": "reliability", "where": where, "k": k, "workloads": len(part),
                "expected_pct": round(100 * float(expected[part].mean()), 2),
                "kept_pct": round(100 * float(kept[part].mean()), 2),
                "worst_pct": round(100 * float(kept[part].min()), 1),
            }  # fmt: skip


def timings(where: str, judged: Sequence[Judged]) -> Iterator[Row]:
    """What each way to set k keeps, and how many each workload would need for as much."""
    kept = np.array([j.outcome.kept for j in judged])
    fixed = np.array([100 * geomean(column) for column in kept.T])

    def row(rule: str, ks: Sequence[int]) -> Row:
        part = kept[np.arange(len(kept)), np.array(ks) - 1]
        same = float(np.interp(100 * geomean(part), *_increasing(fixed)))
        return {
            "group": "timings", "where": where, "rule": rule,
            "mean_k": round(float(np.mean(ks)), 2),
            "kept_pct": round(100 * geomean(part), 2), "worst_pct": round(100 * min(part), 1),
            "fixed_k": round(same, 1),
            "expected_pct": round(100 * float(np.mean(
                [j.confidence.kept_at(k) for j, k in zip(judged, ks, strict=True)])), 2),
        }  # fmt: skip

    for k in _FIXED:
        yield row(f"k = {k}", [k] * len(judged))
    yield row("auto", [j.confidence.k for j in judged])
    for price in _PRICES:
        yield row(f"price {100 * price:.2g} %", [j.confidence.worth(price) for j in judged])
    for target in _TARGETS:
        yield row(f"target {100 * target:g} %", [_reaching(j.confidence, target) for j in judged])


def _increasing(fixed: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """The least k of each speed kept; what is kept never falls with k."""
    values, first = np.unique(fixed, return_index=True)
    return values, _KS[first]


def _reaching(confidence: Confidence, target: float) -> int:
    return next((k for k in range(1, LIMIT) if confidence.kept_at(k) >= target), LIMIT)


_SIGNALS: Mapping[str, Callable[[Judged], float]] = {
    "disagreement": lambda j: np.log(j.outcome.signals.disagreement + 0.003),
    "spread": lambda j: np.log(j.outcome.signals.spread + 0.01),
    "their ratio": lambda j: j.outcome.signals.log_ratio,
    "seen of its kind": lambda j: np.log(j.seen + 1),
    "distance": lambda j: np.log(j.distance + 0.1),
}
_SETS = (
    (), ("disagreement",), ("spread",), ("seen of its kind",), ("distance",),
    ("disagreement", "spread"), ("their ratio",), ("their ratio", "seen of its kind"),
    ("their ratio", "distance"), ("their ratio", "seen of its kind", "distance"),
)  # fmt: skip


def signals(judged: Sequence[Judged]) -> Iterator[Row]:
    """The deviance of power laws of some signals, fitted without the fold they are judged on."""
    from scipy.stats import spearmanr
    from sklearn.metrics import mean_tweedie_deviance

    kept = np.array([j.outcome.kept for j in judged])
    fold = np.array([j.fold for j in judged])
    for names in _SETS:
        logs = np.array([[_SIGNALS[name](j) for name in names] for j in judged])
        logs = logs.reshape(len(judged), len(names))
        lost = np.empty_like(kept)
        for held_out in np.unique(fold):
            law = power_law(logs[fold != held_out], kept[fold != held_out])
            first = law[0] + logs[fold == held_out] @ law[1:-1]
            lost[fold == held_out] = np.exp(first[:, None] + law[-1] * np.log(_KS))
        columns = [k - 1 for k in _AT]
        deviance = [
            mean_tweedie_deviance(100 * (1 - kept[:, c]), 100 * lost[:, c], power=1.5)
            for c in columns
        ]
        rho = spearmanr(lost[:, 7], -kept[:, 7]).statistic if names else 0.0
        yield {
            "group": "signals", "signals": ", ".join(names) or "none",
            "deviance": round(float(np.mean(deviance)), 3),
            "rank_correlation_8": round(float(rho), 2),
        }  # fmt: skip


def summarize(rows: list[Row]) -> Row:
    """Timings of ``auto`` beside a fixed number that keeps as much, and the largest miss."""
    summary: Row = {}
    for where in (OUT_OF_FOLD, HELD_OUT):
        name = where.replace(" ", "_")
        for row in rows:
            if row.get("where") == where and row.get("rule") == "auto":
                summary[f"{name}_auto_mean_k"] = row["mean_k"]
                summary[f"{name}_auto_kept_pct"] = row["kept_pct"]
                summary[f"{name}_auto_expected_pct"] = row["expected_pct"]
                summary[f"{name}_fixed_k_of_the_same"] = row["fixed_k"]
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="dataset; default: the checkout's of the H100")
    parser.add_argument("--model", type=Path, help="folder of a model; default: the shipped one")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--nthread", type=int, default=2)
    args = parser.parse_args()
    dataset = Dataset.open(args.data or recording("h100-sxm", sample=False))
    table = TrainingTable.from_dataset(dataset)
    model = find_model(args.model, dataset.target)
    if model.uncertainty_ is None:
        note(f"{model.name} {model.hash} was not calibrated: training one of the same data")
        model = train(table, name=model.name, nthread=args.nthread)
    software = versions(
        dataset.target, torch=recorded_torch(dataset), model=f"{model.name} {model.hash}"
    )
    results = Results("calibration", dataset.target, args.results, software, summarize)
    judged = out_of_fold(table, args.folds, args.nthread)
    results.add(*reliability(OUT_OF_FOLD, judged), *timings(OUT_OF_FOLD, judged), *signals(judged))
    held_out = list(judge(model, table, TrainingTable.from_dataset(dataset, "eval")))
    results.add(*reliability(HELD_OUT, held_out), *timings(HELD_OUT, held_out))
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
