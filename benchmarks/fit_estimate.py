"""Fit the constants of the estimate on paper to recorded rows, and show where it errs.

The fit is a coordinate descent on the absolute error of log(latency / estimate) over the near-best
training rows of each workload; all workloads weigh alike. The script prints the constants. They
are used only after they are written into ``costmodel/features/estimate.py``. No workload of the
held-out list is looked at.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from common import at_exit_code, count
from numpy.typing import NDArray

from costmodel.data.dataset import Dataset
from costmodel.features import estimate
from costmodel.features.analytic import ANALYTIC_FEATURES, analytic_columns
from costmodel.models import TrainingTable
from costmodel.tuning.shipped import recording

NEAR = 1.25
STEPS = (1.25, 0.8, 1.08, 0.93, 1.02, 0.98)
# Constants that are known and not fitted: capacities, and roundings of the formula itself.
FIXED = {"_L2_SHARE", "_WGMMA_SHARE"}


class NearRows:
    """Rows within a quarter of the best of their workload, at most so many of each."""

    def __init__(self, table: TrainingTable, each: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        ok, best = table.ok, table.best_us()
        self.parts = []
        for w, workload in enumerate(table.workloads):
            rows = np.flatnonzero((table.workload_index == w) & ok)
            rows = rows[table.latency_us[rows] <= NEAR * best[w]]
            rows = rng.choice(rows, min(each, len(rows)), replace=False)
            if len(rows):
                latency = np.log(table.latency_us[rows])
                self.parts.append((workload, table.candidates.take(rows), latency))
        self.target = table.target
        self.weight = np.concatenate([np.full(len(p[2]), 1 / len(p[2])) for p in self.parts])
        self.k = np.concatenate([np.full(len(p[2]), p[0].k) for p in self.parts])
        first = np.concatenate([p[1].config_columns[:, :4].argmax(axis=1) for p in self.parts])
        self.kernel = np.array(["pointer", "tma", "tma_persistent", "warp_specialized"])[first]

    def errors(self) -> NDArray[np.float64]:
        """log(latency / estimate) of each row, [n]."""
        found = []
        for workload, candidates, latency in self.parts:
            columns = analytic_columns(workload, candidates, self.target, binary=True)
            found.append(latency - columns["log_estimate"])
        return np.concatenate(found)

    def loss(self) -> float:
        errors = self.errors()
        # A few rows that are far off must not decide; errors of about a tenth matter most.
        return float(np.average(np.minimum(np.abs(errors), 0.5), weights=self.weight))


def constants() -> dict[str, float | tuple[float, ...]]:
    assert "log_estimate" in ANALYTIC_FEATURES
    named = {n: v for n, v in vars(estimate).items() if n.isupper() and n not in FIXED}
    return {n: v for n, v in named.items() if isinstance(v, float) or _is_numbers(v)}


def _is_numbers(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, float) for v in value)


def settings() -> Iterator[tuple[str, Callable[[float], object], float]]:
    """Yield each number: its name, a function that puts another in its place, and its value."""
    for name, value in constants().items():
        if isinstance(value, float):
            yield name, lambda new: new, value
        else:
            for i, part in enumerate(value):

                def put(new: float, i: int = i, name: str = name) -> object:
                    now = getattr(estimate, name)
                    return (*now[:i], new, *now[i + 1 :])

                yield name, put, part


def descend(rows: NearRows, passes: int) -> float:
    best = rows.loss()
    for turn in range(passes):
        for name, put, value in list(settings()):
            for step in STEPS[2 * min(turn, 2) :][:2]:
                before = getattr(estimate, name)
                setattr(estimate, name, put(value * step))
                loss = rows.loss()
                if loss < best - 1e-6:
                    best = loss
                    print(f"{turn} {name} {getattr(estimate, name)} {best:.5f}", file=sys.stderr)
                    break
                setattr(estimate, name, before)
    return best


def show(rows: NearRows) -> None:
    errors = rows.errors()
    print(f"mean |error| {rows.loss():.4f}; log error of near-best rows: mean, sd, by k and kernel")
    for low, high in ((1, 64), (64, 128), (128, 256), (256, 512), (512, 2048), (2048, 10**9)):
        line = f"k {low:5d}-{high:<10d}"
        for kernel in ("pointer", "tma", "tma_persistent", "warp_specialized"):
            part = errors[(rows.k >= low) & (rows.k < high) & (rows.kernel == kernel)]
            if len(part):
                line += f" {kernel} {len(part)}: {part.mean():+.3f} {part.std():.3f} "
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="dataset; default: the checkout's of the H100")
    parser.add_argument("--each", type=count, default=12, help="rows of each workload")
    parser.add_argument("--passes", type=int, default=0, help="0 only shows what it errs by")
    args = parser.parse_args()
    data = args.data or recording("h100-sxm", sample=False)
    rows = NearRows(TrainingTable.from_dataset(Dataset.open(data)), args.each)
    show(rows)
    if args.passes:
        descend(rows, args.passes)
        show(rows)
        for name, value in constants().items():
            print(f"{name} = {value}")


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
