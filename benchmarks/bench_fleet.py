"""Cost of data for a fleet: rows of ten kinds of GPU on disk, as features, and in one training.

The rows are synthetic: rows of a recording, as those of other workloads, with noise. Each kind has
a dataset. The features of all rows lie in a mapped file, so that memory need not hold them. A few
trees are trained on all rows at once; each further tree takes as long. No GPU is needed.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from common import at_exit_code, note, print_table

import costmodel
from costmodel.data import shards
from costmodel.data.dataset import Dataset
from costmodel.features.features import CONFIG_FEATURES, FEATURES
from costmodel.files import write_json
from costmodel.models.table import TrainingTable
from costmodel.models.trees import DEFAULTS, LabelledRows, NearBest, train_booster
from costmodel.models.xgb import XgbCostModel

RECORDING = Path(__file__).parents[1] / "datasets" / "h200-sxm"
ESTIMATE = CONFIG_FEATURES.index("estimate")
HEADS = 2  # of a model; each is trained a second time to learn what its rankings keep


@contextmanager
def measured(row: dict[str, Any], what: str) -> Iterator[None]:
    """Put the seconds into a row, and the most memory used meanwhile, mapped files left out."""
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.2):
            lines = Path("/proc/self/status").read_text().splitlines()
            kib = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            most = max(most, kib * 1024)

    thread, start = threading.Thread(target=watch), time.perf_counter()
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    row[f"{what}_s"] = round(time.perf_counter() - start, 2)
    row[f"{what}_gb"] = round(most / 1e9, 2)


def synthetic(recording: Dataset, copies: int, seed: int) -> pa.Table:
    """Return the training rows of a recording as those of other workloads, with noise."""
    table, rng = recording.measurements("train"), np.random.default_rng(seed)
    rows = table.arrow.take(table.arrow_row)
    m = rows.column("m").to_numpy()
    found = []
    for copy in range(copies):
        shift = 16 * copy
        keys = [replace(w, m=w.m + shift).key() for w in table.workloads]
        index = pa.array(table.workload_index.astype(np.int32))
        noise = ((m + shift) / m * rng.lognormal(0, 0.02, len(m))).astype(np.float32)
        columns: dict[str, Any] = {
            "workload": pa.DictionaryArray.from_arrays(index, keys),
            "m": pa.array((m + shift).astype(np.int32)),
        }
        for name in ("latency_us", "p10_us", "p90_us"):
            columns[name] = pa.array(rows.column(name).to_numpy() * noise)
        part = rows
        for name, column in columns.items():
            place = part.schema.get_field_index(name)
            part = part.set_column(place, part.schema.field(name), column)
        found.append(part)
    return pa.concat_tables(found).unify_dictionaries()


def one_kind(recording: Dataset, folder: Path, copies: int, seed: int) -> tuple[Any, Any]:
    """Write, merge and read the rows of a kind; return the costs, and the rows as features."""
    row: dict[str, Any] = {"kind": seed}
    rows = synthetic(recording, copies, seed)
    with measured(row, "write"):
        out = Dataset.create(folder, recording.target, recording.protocol)
        out.append_artifacts(dict(recording.artifacts()).values())
        shards.write_shard(shards.new_shard_path(folder, "measurements"), rows, out.identity)
    del rows
    with measured(row, "compact"):
        out.compact()
    row["bytes"] = sum(file.stat().st_size for file in folder.iterdir())
    row["rows"] = len(out.measurements())
    with measured(row, "read"):
        table = TrainingTable.from_dataset(Dataset.open(folder))
        matrix = table.design_matrix(ptx=True)
    ok = table.ok
    start = np.log(matrix[ok, ESTIMATE].astype(np.float64))
    label = np.log(table.latency_us[ok] / table.roofline_us()[ok]) - start
    weight = XgbCostModel().row_weights(table)[ok]
    return row, LabelledRows(matrix[ok], label, start, weight, table.workload_index[ok])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments.add_argument("--recording", type=Path, default=RECORDING)
    arguments.add_argument("--kinds", type=int, default=10)
    arguments.add_argument("--copies", type=int, default=10, help="of the recording, for each kind")
    arguments.add_argument("--rounds", type=int, default=9, help="trees; a model has more")
    args = arguments.parse_args()
    recording, rows, parts = Dataset.open(args.recording), [], []
    most = args.kinds * args.copies * len(recording.measurements("train"))
    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(name), 0
        shape = most, len(FEATURES)
        matrix = np.memmap(folder / "features", dtype=np.float32, mode="w+", shape=shape)
        for kind in range(args.kinds):
            row, found = one_kind(recording, folder / "data", args.copies, kind)
            shutil.rmtree(folder / "data")
            matrix[size : size + len(found.label)] = found.matrix
            size += len(found.label)
            parts.append(replace(found, matrix=matrix[:0], workload=found.workload + kind * 10**6))
            rows.append(row)
            note(str(row))
            del found
            gc.collect()
        matrix.flush()
        columns = [
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("label", "start", "weight", "workload")
        ]
        every, training = LabelledRows(matrix[:size], *columns), {"rows": size}
        begun, gradients = [], NearBest.gradients

        def noted(self: NearBest, *values: Any) -> Any:
            begun.append(time.perf_counter())
            return gradients(self, *values)

        with measured(training, "training"), patch.object(NearBest, "gradients", noted):
            first = time.perf_counter()
            train_booster(every, replace(DEFAULTS, rounds=args.rounds), nthread=2)
    tree_s, bins_s, fits = float(np.median(np.diff(begun))), begun[0] - first, 2 * HEADS
    summary = {
        "rows": sum(row["rows"] for row in rows), "rows_to_train_on": size,
        "mb": round(sum(row["bytes"] for row in rows) / 1e6, 1),
        "write_s": round(sum(row["write_s"] for row in rows)),
        "compact_s": round(sum(row["compact_s"] for row in rows)),
        "compact_gb": max(row["compact_gb"] for row in rows),
        "read_s": round(sum(row["read_s"] for row in rows)),
        "read_gb": max(row["read_gb"] for row in rows),
        "bins_s": round(bins_s), "tree_s": round(tree_s, 2), "train_gb": training["training_gb"],
        "train_hours": round(fits * (DEFAULTS.rounds * tree_s + bins_s) / 3600, 2),
        "trees": fits * DEFAULTS.rounds, "cores": len(os.sched_getaffinity(0)),
        "rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 1),
    }  # fmt: skip
    write_json(args.results / "collection-fleet.json", {
        "bench": "collection", "target": "fleet", "device": "no GPU, synthetic rows",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"costmodel": costmodel.__version__}, "summary": summary, "rows": rows,
    })  # fmt: skip
    print_table("collection-fleet", ["", "value"], list(summary.items()))


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
