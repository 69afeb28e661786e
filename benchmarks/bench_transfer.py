"""Transfer of a model from one kind of product, or device, to another; needs no GPU.

Only recorded training rows are used. In these each workload has a sample of its configurations
(about 235), so the figures are not those of a whole space. Half of the workloads of the new kind
judge a model of the old kind. The model has seen none of their pairs (n, k), and none, a few or all
workloads of the other half. Then the halves change places. ``--other`` names the dataset of another
device, which is then a new kind as well. Writes ``transfer-<target>.json``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xgboost
from bench_ablation import PARAMS, Study, score
from common import Results, Row, at_exit_code, note, recorded_torch, versions
from numpy.typing import NDArray

from costmodel.data.dataset import Dataset
from costmodel.errors import MissingData
from costmodel.evaluation import metrics
from costmodel.evaluation.heldout import is_ragged
from costmodel.features.features import FEATURES
from costmodel.gemm.workload import Workload
from costmodel.models import TrainingTable, XgbParams
from costmodel.models.trees import LabelledRows, train_booster
from costmodel.tuning.shipped import recording

SHOTS = (0, 2, 5, 10, 20)
ALL, ALONE = "all there are", "all, and nothing of the old"
_ESTIMATE = FEATURES.index("estimate")

Part = tuple["Rows", NDArray[np.intp]]
"""Rows of a study, by workload."""


class Rows(Study):
    """A study with the label that the trees learn: log(latency / estimate)."""

    def __init__(self, table: TrainingTable, nthread: int) -> None:
        super().__init__(table, nthread)
        self.matrix = self.matrices[True]
        self.floor = np.log(self.matrix[:, _ESTIMATE].astype(np.float64))
        self.label = np.log(self.latency / table.roofline_us()) - self.floor

    def rows(self, workloads: Sequence[int] | NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the rows of some workloads that worked."""
        return np.flatnonzero(np.isin(self.table.workload_index, workloads) & self.ok)

    def lesson(self, rows: NDArray[np.intp]) -> LabelledRows:
        """Return what the PTX-aware head learns from these rows."""
        return LabelledRows(
            self.matrix[rows], self.label[rows], self.floor[rows], self.weight[rows],
            self.table.workload_index[rows],
        )  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Workloads of the old and of the new kind, from one study or from two.

    If ``held_out`` is given, its workloads judge, and all of the new kind may be learned from.
    """

    name: str
    old: Rows
    new: Rows
    of_old: NDArray[np.intp]
    of_new: NDArray[np.intp]
    held_out: Rows | None = None

    @property
    def judged(self) -> Rows:
        return self.held_out or self.new


def pairs(study: Rows, other: Rows | None, held_out: Rows | None = None) -> Iterator[Pair]:
    """Yield pairs of kinds in a recording, each way (ragged only as new), and of two devices."""
    workloads = study.table.workloads

    def split(left: str, right: str, is_right: Callable[[Workload], bool]) -> Iterator[Pair]:
        there = np.array([is_right(w) for w in workloads], dtype=bool)
        sides = np.flatnonzero(~there), np.flatnonzero(there)
        yield Pair(f"{left} → {right}", study, study, *sides)
        yield Pair(f"{right} → {left}", study, study, *sides[::-1])

    yield from split("float16", "bfloat16", lambda w: w.code.dtype == "bfloat16")
    yield from split("B row-major", "B column-major", lambda w: w.code.b_layout == "col")
    yield next(split("aligned", "ragged", is_ragged))
    if other is not None:
        name = f"{study.table.target.device.name} → {other.table.target.device.name}"
        each = (np.arange(len(s.table.workloads)) for s in (study, other))
        yield Pair(name, study, other, *each, held_out=held_out)


def halves(pair: Pair, seed: int) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Yield (judged, learned from) of the new workloads, both ways; no (n, k) is in both."""
    if pair.held_out is not None:
        yield np.arange(len(pair.held_out.table.workloads)), pair.of_new
        return
    workloads = pair.new.table.workloads
    shapes = sorted({workloads[w].nk for w in pair.of_new})
    np.random.default_rng(seed).shuffle(shapes)
    first = set(shapes[: len(shapes) // 2])
    inside = np.array([workloads[w].nk in first for w in pair.of_new])
    for judged in (inside, ~inside):
        yield pair.of_new[judged], pair.of_new[~judged]


def validate(
    pair: Pair, nthread: int, seed: int = 0, trees: XgbParams | None = None
) -> Iterator[Row]:
    """Yield a row for each number of new workloads that were learned from.

    Args:
        trees: parameters to use in place of the small ones; then no new workload is learned from.
    """
    found: dict[str, list[NDArray[np.float64]]] = {}
    learned: dict[str, list[int]] = {}
    both = list(halves(pair, seed))
    shots = [n for n in SHOTS if n < min(len(rest) for _, rest in both)]
    for judged, rest in both:
        taboo = {pair.judged.table.workloads[w].nk for w in judged}
        old = [w for w in pair.of_old if pair.old.table.workloads[w].nk not in taboo]
        source = (pair.old, pair.old.rows(old))
        drawn = np.random.default_rng(seed).permutation(rest)
        for n in (0,) if trees else (*shots, ALL, ALONE):
            chosen = drawn if isinstance(n, str) else drawn[:n]
            few = (pair.new, pair.new.rows(chosen))
            booster = learn([few] if n == ALONE else [source, few], nthread, trees or PARAMS)
            found.setdefault(str(n), []).append(judge(booster, pair.judged, judged))
            learned.setdefault(str(n), []).append(len(few[1]))
    for name, scores in found.items():
        top1, top8, tau = np.concatenate(scores).T
        yield {
            "group": "shipped" if trees else "ends" if name in ("0", ALL, ALONE) else "between",
            "pair": pair.name, "trees": "as in use" if trees else "small", "new_workloads": name,
            "new_rows": round(float(np.mean(learned[name]))), "workloads": len(top1),
            "top1_pct": round(100 * metrics.geomean(top1), 2),
            "top1_worst_pct": round(100 * float(top1.min()), 1),
            "top8_pct": round(100 * metrics.geomean(top8), 2),
            "top8_worst_pct": round(100 * float(top8.min()), 1),
            "kendall_tau": round(float(tau.mean()), 4),
        }  # fmt: skip


def learn(parts: Sequence[Part], nthread: int, trees: XgbParams) -> xgboost.Booster:
    """Train a PTX-aware head."""
    first = np.cumsum([0, *(len(s.table.workloads) for s, _ in parts)])
    lessons = [study.lesson(rows) for study, rows in parts]
    lesson = LabelledRows(
        np.concatenate([part.matrix for part in lessons]),
        np.concatenate([part.label for part in lessons]),
        np.concatenate([part.start for part in lessons]),
        np.concatenate([part.weight for part in lessons]),
        # Workloads of two studies have different numbers.
        np.concatenate([part.workload + n for part, n in zip(lessons, first[:-1], strict=True)]),
    )
    return train_booster(lesson, trees, nthread=nthread)


def judge(
    booster: xgboost.Booster, study: Rows, workloads: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Return kept at 1, kept at 8 and tau of each workload."""
    scores = []
    for w in workloads:
        rows = np.flatnonzero((study.table.workload_index == w) & study.fits)
        if study.ok[rows].any():
            cost = booster.inplace_predict(study.matrix[rows]) + study.floor[rows]
            scores.append(score(study.latency[rows], cost))
    return np.array(scores).reshape(-1, 3)


def studies_of(folder: Path, nthread: int) -> tuple[Rows, Rows | None]:
    """Return another device's training rows, and its held-out list's, if that was timed there.

    Raises:
        MissingData: no training rows.
    """
    dataset = Dataset.open(folder)
    tables = [TrainingTable.from_dataset(dataset, role) for role in ("train", "eval")]
    if not tables[0].ok.any():
        raise MissingData(f"{folder} holds no training rows: record them first")
    train, held_out = (Rows(table, nthread) if table.ok.any() else None for table in tables)
    assert train is not None
    return train, held_out


def summarize(rows: list[Row]) -> Row:
    """Return what is kept without any new workload, for each pair, with trees as shipped."""
    without = [row for row in rows if row["group"] == "shipped"]
    return {
        f"{top}_geomean_pct": {row["pair"]: row[f"{top}_pct"] for row in without}
        for top in ("top1", "top8")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="dataset; default: the checkout's of the H100")
    parser.add_argument("--other", type=Path, help="dataset of another device")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--nthread", type=int, default=2)
    args = parser.parse_args()
    dataset = Dataset.open(args.data or recording("h100-sxm", sample=False))
    study = Rows(TrainingTable.from_dataset(dataset), args.nthread)
    other = held_out = None
    if args.other is not None:
        other, held_out = studies_of(args.other, args.nthread)
    software = versions(dataset.target, torch=recorded_torch(dataset), xgboost=xgboost.__version__)
    results = Results("transfer", dataset.target, args.results, software, summarize)
    for pair in pairs(study, other, held_out):
        rows = list(validate(pair, args.nthread))
        results.add(*rows, *validate(pair, args.nthread, trees=XgbParams()))
        note(f"{pair.name}: top-1 {rows[0]['top1_pct']} % of none, {rows[-2]['top1_pct']} % of all")
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
