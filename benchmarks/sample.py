"""Writes the rows of some workloads, and their artifacts, as a dataset of its own.

    python benchmarks/sample.py datasets/h100-sxm models/h100-sxm/replay 1024x4096x4096 ...

The sample that the wheel carries is made like this. A workload is named by its key, or by the
beginning of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from common import at_exit_code
from pyarrow import compute

from costmodel.compile.ptx import PTX_SCHEMA
from costmodel.data.dataset import Dataset
from costmodel.data.shards import new_shard_path, write_shard
from costmodel.gemm.workload import Workload


def extract(dataset: Dataset, path: Path, workloads: Sequence[Workload]) -> Dataset:
    """Write the rows of some workloads to a new dataset."""

    def chosen(rows: Any, column: str, values: Any) -> Any:
        return rows.filter(compute.is_in(rows.column(column).cast(pa.string()), values))

    part = Dataset.create(path, dataset.target, dataset.protocol)
    keys = pa.array([workload.key() for workload in workloads], pa.string())
    rows = chosen(dataset.measurements().arrow, "workload", keys)
    used = rows.column("artifact_key").cast(pa.string()).unique()
    artifacts = chosen(dataset.artifacts().arrow(), "key", used)
    place = new_shard_path(path, "artifacts")
    write_shard(place, artifacts, dataset.identity, ptx_schema=PTX_SCHEMA)
    write_shard(new_shard_path(path, "measurements"), rows, dataset.identity)
    part.compact()
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("workloads", nargs="+")
    args = parser.parse_args()
    dataset = Dataset.open(args.dataset)
    named = [w for w in dataset.workloads() if w.key().startswith(tuple(args.workloads))]
    part = extract(dataset, args.out, named)
    print(f"{args.out}: {len(part.workloads())} workloads, {len(part.measurements())} rows")


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
