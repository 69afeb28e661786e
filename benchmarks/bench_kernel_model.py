"""Quality of a model's rankings of configurations for kernels never seen; needs no GPU.

The model is trained on those kernels of a dataset that may be learned from. It is judged twice: by
cross-validation with whole modules left out, and on the dataset's judges, from whose packages it
has seen nothing. A list counts if eight or more of its configurations work. A configuration that
does not compile or launch is left out of all rankings: nobody would time it. Writes
``kernel-model-<target>.json``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xgboost
from common import Results, Row, at_exit_code, count, note, versions
from numpy.typing import NDArray

from costmodel.autotune.dataset import KernelDataset
from costmodel.autotune.model import HEADS, KERNELS, KernelTable
from costmodel.models.baselines import HOPPER_WEIGHTS, PTX_WEIGHTS
from costmodel.models.trees import train_booster

Floats = NDArray[np.float64]
FIRST = (1, 2, 4, 8)
LEAST = 8  # configurations that work

KINDS = {
    "PTX": r"ptx_",
    "binary": r"registers|spill_|shared_|occupancy|_waves|fill|running",
    "TTIR": r"tt\.|arith\.|math\.|scf\.",
    "launch": r"grid_|programs|tensor|elements|widest|steps|waste|last_wave",
    "configuration": r"",
}
"""Kinds of columns: a column is of the first kind whose pattern is in its name."""


@dataclass(frozen=True)
class Setting:
    """A ranking by trees: the head of the model, and the kinds of columns that it is shown."""

    name: str
    head: str
    kinds: tuple[str, ...]

    def shown(self, table: KernelTable) -> KernelTable:
        """Return a table with these columns alone."""
        index = [i for i, name in enumerate(table.names) if kind_of(name) in self.kinds]
        values = np.ascontiguousarray(table.values[:, index])
        return replace(table, names=tuple(table.names[i] for i in index), values=values)


SETTINGS = (
    Setting("configuration", "before", ("configuration",)),
    Setting("before compiling", "before", ("configuration", "launch")),
    Setting("+ registers, shared memory", "after", ("configuration", "launch", "TTIR", "binary")),
    Setting("PTX and binary alone", "after", ("PTX", "binary")),
    Setting("after compiling", "after", tuple(KINDS)),
)


def kind_of(name: str) -> str:
    """Return the kind of a column."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


# --- Figures --------------------------------------------------------------------------------------


def lists_of(table: KernelTable, dataset: KernelDataset) -> Iterator[NDArray[np.intp]]:
    """Yield the rows of each list that counts, without failures."""
    status = np.asarray(dataset.rows["status"])[table.row]
    timed = np.isin(status, ("ok", "too_slow"))
    for number in np.unique(table.list):
        rows = np.flatnonzero((table.list == number) & timed)
        if np.sum(status[rows] == "ok") >= LEAST:
            yield rows


def lost(label: Floats, score: Floats) -> list[float]:
    """Return log(best of the first k by a score / best), for each k of FIRST."""
    ranked = label[np.argsort(score, kind="stable")]
    return [float(ranked[:k].min() - label.min()) for k in FIRST]


def lost_at_random(label: Floats) -> list[float]:
    """Return the mean of :func:`lost` over all orders."""
    ranked, n = np.sort(label), len(label)
    result = []
    for k in FIRST:
        left, total = 1.0, 0.0  # probability that no faster one is among the k
        for i in range(n):
            here = min(k / (n - i), 1.0)
            total += left * here * float(ranked[i])
            left *= 1 - here
        result.append(total - float(ranked[0]))
    return result


def figures(parts: Collection[list[float]], kernels: Collection[str]) -> Row:
    """Return shares of the best's speed in %: geometric means, and the worst list."""
    logs = np.array(parts)
    _, kernel = np.unique([*kernels], return_inverse=True)
    each = [logs[kernel == i].mean(axis=0) for i in range(kernel.max() + 1)]
    found = {f"first_{k}_pct": share(x) for k, x in zip(FIRST, logs.mean(axis=0), strict=True)}
    worst = {f"worst_{k}_pct": share(x) for k, x in zip(FIRST, logs.max(axis=0), strict=True)}
    by_kernel = {f"first_{k}_by_kernel_pct": share(np.mean(each, axis=0)[FIRST.index(k)])
                 for k in (1, 8)}  # fmt: skip
    return {"lists": len(logs), "kernels": len(each), **found, **worst, **by_kernel}


def share(log: float) -> float:
    return round(100 * float(np.exp(-log)), 2)


# --- Rankings -------------------------------------------------------------------------------------


class Study:
    """Tables to learn from and to judge by, laid out once."""

    def __init__(self, dataset: KernelDataset, nthread: int) -> None:
        self.dataset, self.nthread = dataset, nthread
        roles = {"modules left out": "train", "judges": "eval"}
        self.tables = {
            (judge, head): KernelTable.of(dataset, head, role)
            for judge, role in roles.items()
            for head in HEADS
        }

    def rows(self) -> Iterator[Row]:
        """Yield a row for each judge and ranking."""
        for judge in ("modules left out", "judges"):
            table = self.tables[judge, "after"]
            yield self._row(judge, "random", lambda label, _: lost_at_random(label))
            for name, weights in (("PTX score", PTX_WEIGHTS), ("with Hopper's", HOPPER_WEIGHTS)):
                columns = (self.dataset.rows[f"ptx_{counted}"] for counted in weights)
                counts = np.column_stack([*map(np.asarray, columns)])[table.row]
                yield self._by(judge, name, -counts @ np.array([*weights.values()]))
        for setting in SETTINGS:
            train = setting.shown(self.tables["modules left out", setting.head])
            unseen = train.unseen(KERNELS, self.nthread)
            yield self._by("modules left out", setting.name, unseen)
            rows = train.labelled(KERNELS)
            booster = train_booster(rows, KERNELS, nthread=self.nthread)
            judged = setting.shown(self.tables["judges", setting.head]).values
            score = booster.inplace_predict(judged).astype(np.float64)
            row = self._by("judges", setting.name, score)
            yield row | self._coverage(score, np.interp(score, *train.deviations(unseen)))
        yield from self._each_kernel(score)

    def _row(
        self, judge: str, name: str,
        lose: Callable[[Floats, NDArray[np.intp]], list[float]],
    ) -> Row:  # fmt: skip
        table = self.tables[judge, "after"]
        parts = [*lists_of(table, self.dataset)]
        kernels = [str(table.kernel[rows[0]]) for rows in parts]
        found = figures([lose(table.label[rows], rows) for rows in parts], kernels)
        return {"judge": judge, "ranking": name, **found}

    def _by(self, judge: str, name: str, score: Floats) -> Row:
        return self._row(judge, name, lambda label, rows: lost(label, score[rows]))

    def _coverage(self, mean: Floats, deviation: Floats) -> Row:
        """Return the share of latencies that are within one and two deviations, in %."""
        off: list[float] = []
        table = self.tables["judges", "after"]
        for rows in lists_of(table, self.dataset):
            error = table.label[rows] - mean[rows]
            off.extend(np.abs(error - error.mean()) / deviation[rows])
        return {f"within_{n}_deviations_pct": round(100 * float(np.mean(np.array(off) <= n)), 1)
                for n in (1, 2)}  # fmt: skip

    def _each_kernel(self, score: Floats) -> Iterator[Row]:
        """Yield a row for each judging kernel, with the scatter of its best timings."""
        table, columns = self.tables["judges", "after"], self.dataset.rows
        p10, p90, us = (
            np.asarray(columns[f"{x}_us"])[table.row] for x in ("p10", "p90", "latency")
        )
        parts = [*lists_of(table, self.dataset)]
        for kernel in sorted({str(table.kernel[rows[0]]) for rows in parts}):
            own = [rows for rows in parts if table.kernel[rows[0]] == kernel]
            best = [rows[np.argmin(us[rows])] for rows in own]
            noise = 100 * np.median((p90[best] - p10[best]) / us[best])
            losses = [lost(table.label[rows], score[rows]) for rows in own]
            yield {
                "judge": kernel,
                "ranking": SETTINGS[-1].name,
                "best_us": round(float(us[best].min()), 2),
                "scatter_of_best_pct": round(float(noise), 2),
                **figures(losses, [kernel] * len(own)),
            }


def summarize(rows: list[Row]) -> Row:
    """Return what the first choice and the first eight of each ranking keep, on the judges."""
    return {
        f"first_{k}_pct, {row['ranking']}": row[f"first_{k}_pct"]
        for row in rows if row["judge"] == "judges" for k in (1, 8)
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    checkout = Path(__file__).parent.parent
    default = checkout / "datasets" / "kernels-h200-sxm"
    parser.add_argument("--dataset", type=Path, default=default, help="a dataset of kernels")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--nthread", type=count, default=2)
    args = parser.parse_args()
    dataset = KernelDataset.read(args.dataset)
    target = dataset.identity.target
    results = Results(
        "kernel-model",
        target,
        args.results,
        versions(target, xgboost=xgboost.__version__),
        summarize,
    )
    for row in Study(dataset, args.nthread).rows():
        note(f"{row['judge']}, {row['ranking']}: first {row['first_1_pct']} %, of eight "
             f"{row['first_8_pct']} %")  # fmt: skip
        results.add(row)
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
