"""Speed of a collection by its workers: rows a second of eight over eight times those of one.

Each worker replays a part of a recording, waits for every row as long as a GPU takes for one, and
writes a folder of its own. At the end all folders are merged. No GPU is needed: the benchmark
measures the cost of the loop, of the records on disk and of the merging. Every worker has the same
amount of work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

from common import at_exit_code, note, print_table

import costmodel
from costmodel.collect import collect
from costmodel.collect.parts import merge, part_of, recorded_jobs
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Candidate, Measurement
from costmodel.files import write_json
from costmodel.gemm.workload import Workload
from costmodel.measure.replay import ReplayRunner, replayed_run

RECORDING = Path(__file__).parents[1] / "datasets" / "h200-sxm"


class WaitingRunner(ReplayRunner):
    """Answers from a recording, as late as a GPU would."""

    wait_s = 0.0

    def measure(
        self, workload: Workload, candidates: Sequence[Candidate], best_us: float = inf
    ) -> list[Measurement]:
        time.sleep(self.wait_s * len(candidates))
        return super().measure(workload, candidates, best_us)


def work(args: argparse.Namespace) -> None:
    """Be one worker: get ready, wait for the signal to start, then work."""
    number, workers = map(int, args.worker.split("/"))
    recording = Dataset.open(args.recording)
    large = [job for job in recorded_jobs(recording) if len(job.configs) >= args.configs]
    equal = [replace(job, configs=job.configs[: args.configs]) for job in large]
    jobs = part_of(equal[: args.workloads * workers], number, workers)
    runner, known = WaitingRunner(recording), recording.artifacts()
    runner.wait_s = args.wait_ms / 1e3
    out = Dataset.create(args.folder, recording.target, recording.protocol)
    runner.measure(jobs[0].workload, [])  # reads the rows into memory
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.time()
    progress = collect(jobs, out, runner, replayed_run(), known=known)
    print(json.dumps({"start": start, "end": time.time(), "rows": progress.rows}))


def run_workers(workers: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run so many workers at once, then merge."""
    options = [f"--recording={args.recording}", f"--workloads={args.workloads}",
               f"--configs={args.configs}", f"--wait-ms={args.wait_ms}"]  # fmt: skip
    folders = [folder / f"{workers}-{i}" for i in range(workers)]
    children = [
        subprocess.Popen(
            [sys.executable, __file__, *options, f"--worker={i + 1}/{workers}", f"--folder={path}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for i, path in enumerate(folders)
    ]  # fmt: skip
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    found = [json.loads(child.communicate()[0]) for child in children]
    seconds = max(x["end"] for x in found) - min(x["start"] for x in found)
    rows, start = sum(x["rows"] for x in found), time.perf_counter()
    merged = merge(folder / f"merged-{workers}", folders)
    return {
        "workers": workers, "rows": rows, "seconds": round(seconds, 3),
        "rows_per_s": round(rows / seconds, 1),
        "merged_rows": len(merged.measurements("train", "eval")),
        "merge_s": round(time.perf_counter() - start, 3),
    }  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments.add_argument("--recording", type=Path, default=RECORDING)
    arguments.add_argument("--workers", type=int, default=8)
    arguments.add_argument("--workloads", type=int, default=12, help="of each worker")
    arguments.add_argument("--configs", type=int, default=200, help="of each workload")
    arguments.add_argument("--wait-ms", type=float, default=5.0, help="for each row")
    arguments.add_argument("--worker", help=argparse.SUPPRESS)
    arguments.add_argument("--folder", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.worker:
        work(args)
        return
    with tempfile.TemporaryDirectory() as name:
        rows = [run_workers(n, args, Path(name)) for n in (1, args.workers)]
    one, many = rows
    summary = {
        "rows_per_s_1": one["rows_per_s"], f"rows_per_s_{args.workers}": many["rows_per_s"],
        "efficiency_pct": round(100 * many["rows_per_s"] / one["rows_per_s"] / args.workers, 1),
        "wait_ms": args.wait_ms, "cores": len(os.sched_getaffinity(0)),
    }  # fmt: skip
    path = args.results / "collection-scaling.json"
    write_json(path, {
        "bench": "collection", "target": "scaling", "device": "workers that wait, no GPU",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"costmodel": costmodel.__version__}, "summary": summary, "rows": rows,
    })  # fmt: skip
    print_table("collection-scaling", ["", "value"], list(summary.items()))
    note(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
