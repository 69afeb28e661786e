"""Quality of models' choices for scaled products with (n, k) unseen; needs no GPU.

Each model is judged twice: by cross-validation over the (n, k) of the training dataset, and, after
learning from all of it, on the eval list. Torch's functions are in no ranking. The model of scaled
products is compared with three others, which have the columns of the model of all kernels: one is
trained on the same rows, one also on the rows of all other kernels, and one is the shipped model of
all kernels. Writes ``scaled-model-<target>.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xgboost
from bench_kernel_model import Floats, figures, lost
from common import Results, Row, at_exit_code, count, note, versions
from numpy.typing import NDArray

from costmodel.autotune.dataset import KernelDataset
from costmodel.autotune.model import KERNELS, KernelTable
from costmodel.autotune.prior import model_for
from costmodel.models.trees import DEFAULTS, XgbParams, train_booster

FOLDS = 6
LEAST = 4  # configurations of ours that work; for large m there are no more


@dataclass(frozen=True)
class Lists:
    """Timings of scaled products as one head sees them, with the form and (n, k) of each row.

    Attributes:
        table: all rows, torch's too.
        ours: for each row, True if it has a timing and its kernel is not torch's or DeepGEMM's.
        form: for each row, ``row``, ``block`` or ``int8``.
        pair: for each row, a number that stands for its (n, k).
    """

    table: KernelTable
    ours: NDArray[np.bool_]
    form: NDArray[Any]
    pair: NDArray[np.intp]

    @classmethod
    def of(cls, dataset: KernelDataset, head: str) -> Lists:
        table = KernelTable.of(dataset, head)
        columns = dataset.rows.take(pa.array(table.row))
        kernels = [json.loads(x)["kwargs"]["kernel"] for x in columns["config"].to_pylist()]
        calls = [json.loads(x) for x in columns["arguments"].to_pylist()]
        timed = np.isin(np.asarray(columns["status"]), ("ok", "too_slow"))
        pairs = [call["n"] << 32 | call["k"] for call in calls]
        return cls(
            table, timed & ~np.isin(kernels, ("torch", "deep_gemm")),
            np.array([_form(call) for call in calls]), np.unique(pairs, return_inverse=True)[1],
        )  # fmt: skip

    def parts(self) -> Iterator[NDArray[np.intp]]:
        """Yield our rows of each list that counts."""
        for number in np.unique(self.table.list):
            rows = np.flatnonzero((self.table.list == number) & self.ours)
            if len(rows) >= LEAST:
                yield rows

    def figures(self, score: Floats) -> Row:
        """Return the shares of the best's speed, of all lists and by form."""
        parts = [*self.parts()]
        forms = [str(self.form[rows[0]]) for rows in parts]
        each = [lost(self.table.label[rows], score[rows]) for rows in parts]
        found = figures(each, forms)
        for form in sorted({*forms}):
            some = [x for x, of in zip(each, forms, strict=True) if of == form]
            own = figures(some, [form] * len(some))
            found |= {f"{form}_{k}": own[k] for k in ("lists", "first_1_pct", "first_8_pct")}
        return found

    def unseen(self, params: XgbParams, nthread: int, more: KernelTable | None) -> Floats:
        """Predict each row by trees that have seen no product of its (n, k)."""
        found = np.zeros(len(self.pair))
        order = np.random.default_rng(0).permutation(self.pair.max() + 1)
        for fold in range(FOLDS):
            out = order[self.pair] % FOLDS == fold
            booster = trained(self.table, ~out, params, nthread, more)
            found[out] = booster.inplace_predict(self.table.values[out])
        return found


def _form(call: dict[str, Any]) -> str:
    if "int8" in str(call["a"]):
        return "int8"
    return "block" if call["recipe_a"] > 1 else "row"


def trained(
    table: KernelTable, rows: Any, params: XgbParams, nthread: int, more: KernelTable | None
) -> Any:
    """Train on some rows of a table, and on all of another; each kernel has the same weight."""
    if more is not None:
        parts = {x: [getattr(table, x)[rows], getattr(more, x)]
                 for x in ("values", "label", "kernel", "list", "row")}  # fmt: skip
        parts["list"][1] = parts["list"][1] + table.list.max() + 1
        table = replace(table, **{x: np.concatenate(each) for x, each in parts.items()})
        rows = slice(None)
    return train_booster(table.labelled(params, rows), params, nthread=nthread)


def study(
    train: KernelDataset, judges: KernelDataset, kernels: KernelDataset, nthread: int
) -> Iterator[Row]:
    """Yield a row for each model and judge."""
    shipped = model_for(train.identity.target.device.arch)
    for name, head, params, others in (
        ("scaled products", "scaled", DEFAULTS, None),
        ("columns of all kernels", "before", DEFAULTS, None),
        ("all kernels and these", "before", KERNELS, KernelTable.of(kernels, "before")),
    ):
        mine = Lists.of(train, head)
        yield {"model": name, "judge": "(n, k) left out",
               **mine.figures(mine.unseen(params, nthread, others))}  # fmt: skip
        theirs = Lists.of(judges, head)
        booster = trained(mine.table, slice(None), params, nthread, others)
        score = booster.inplace_predict(theirs.table.values).astype(np.float64)
        yield {"model": name, "judge": "eval list", **theirs.figures(score)}
    if shipped is not None:
        ranked = Lists.of(judges, "before")
        score = shipped.trees["before"].forest.predict(ranked.table.values)
        yield {"model": "all kernels, shipped", "judge": "eval list", **ranked.figures(score)}


def summarize(rows: list[Row]) -> Row:
    """Return what the first choice and the first eight keep, for each model and judge."""
    return {f"first_{k}_pct, {row['model']}, {row['judge']}": row[f"first_{k}_pct"]
            for row in rows for k in (1, 8)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    datasets = Path(__file__).parent.parent / "datasets"
    default = datasets / "kernels-h200-sxm"
    parser.add_argument("train", type=Path, nargs="*", default=[datasets / "scaled-h200-sxm"],
                        help="datasets of record_scaled.py")  # fmt: skip
    parser.add_argument("--judges", type=Path, default=datasets / "scaled-eval-h200-sxm",
                        help="that of the eval list")  # fmt: skip
    parser.add_argument("--kernels", type=Path, default=default, help="of all other kernels")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--nthread", type=count, default=2)
    args = parser.parse_args()
    train = KernelDataset.read_all(args.train)
    judges = KernelDataset.read(args.judges)
    target = train.identity.target
    software = versions(target, xgboost=xgboost.__version__)
    results = Results("scaled-model", target, args.results, software, summarize)
    for row in study(train, judges, KernelDataset.read(args.kernels), args.nthread):
        note(f"{row['model']}, {row['judge']}: first {row['first_1_pct']} %, of eight "
             f"{row['first_8_pct']} %")  # fmt: skip
        results.add(row)
    results.show()


if __name__ == "__main__":
    raise SystemExit(at_exit_code(main))
