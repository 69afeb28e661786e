"""How fast data is collected: binaries compiled a second, and rows timed a second by GPU.

The two run at once in a collection; here one after the other, so that neither waits. The workloads
take under 200 us each. Where there are two GPUs, a process on each times all of it at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import Results, Row, announce, at_exit_code, parser, until, versions

from costmodel.collect import Job, collect
from costmodel.collect.sampling import RandomSampler
from costmodel.data.dataset import Dataset
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import compile_many, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.card import current_run
from costmodel.measure.device import DeviceRunner

SIZES = ((16, 5120, 5120), (256, 3072, 768), (1536, 2304, 768), (64, 640, 2560), (2048, 1280, 1280))
CONFIGS = 300


def jobs(target: Target, every: int) -> list[Job]:
    """A sample of each workload's space."""
    rng = np.random.default_rng(0)
    sampler = RandomSampler(CONFIGS)
    todo = [Workload.dense(*size) for size in SIZES[::every]]
    return [Job(w, tuple(sampler.sample(SearchSpace.of(w, target), rng))) for w in todo]


def summarize(rows: list[Row]) -> Row:
    """Rates over all workloads together."""
    compiled = next(row for row in rows if "compiled" in row)
    rates = {}
    for gpus in (1, 2):
        timed = [row for row in rows if row.get("gpus") == gpus]
        seconds = sum(row["seconds"] for row in timed)
        rates[gpus] = sum(row["timed"] for row in timed) / seconds if timed else None
    return {
        "rows_per_s_1gpu": rates[1],
        "rows_per_s_2gpu": rates[2],
        "compiles_per_s": compiled["compiled"] / compiled["seconds"],
        "cores": compiled["cores"],
    }


def timed_jobs(folder: Path, todo: list[Job], target: Target, deadline: float) -> Iterator[Row]:
    """Time every job on the first visible GPU; the binaries are in Triton's cache already."""
    with DeviceRunner() as runner:
        dataset = Dataset.create(folder, target, runner.protocol.to_dict())
        run = current_run()
        runner.measure_torch(Workload.dense(256, 256, 256))  # the timing process is up
        for job in until(deadline, todo):
            progress = collect([job], dataset, runner, run)
            yield {
                "what": f"timing {job.workload}", "timed": progress.rows, "ok": progress.ok_rows,
                "seconds": progress.timing_s,
            }  # fmt: skip


def at_once(folder: Path, every: int, gpus: int) -> Row:
    """Rows of a process on each GPU, over the seconds that the slower one timed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:gpus]
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--timing", str(folder / f"gpu-{i}"), "--every", str(every)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": device}, stdout=subprocess.PIPE, text=True,
        )
        for i, device in enumerate(visible)
    ]  # fmt: skip
    found = [json.loads(child.communicate()[0]) for child in children]
    rows = [row for part in found for row in part]
    return {
        "what": f"timing on {gpus} GPUs", "gpus": gpus, "timed": sum(r["timed"] for r in rows),
        "ok": sum(r["ok"] for r in rows),
        "seconds": max(sum(row["seconds"] for row in part) for part in found),
    }  # fmt: skip


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--timing", type=Path, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    target = Target.current()
    todo = jobs(target, args.every)
    if args.timing:
        print(json.dumps(list(timed_jobs(args.timing, todo, target, float("inf")))))
        return
    specs = list(dict.fromkeys(specialize(j.workload, c) for j in todo for c in j.configs))
    deadline = announce(args.budget_s, binaries=len(specs), timings=2 * CONFIGS * len(todo))
    results = Results("collection", target, args.results, versions(target), summarize)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # The processes that time, not started yet, find there what is compiled.
        os.environ["TRITON_CACHE_DIR"] = name
        start = time.perf_counter()
        artifacts = list(compile_many(specs, target, cache=folder))
        results.add({
            "what": "compiling", "compiled": len(artifacts),
            "failed": sum(not a.ok for a in artifacts), "cores": os.cpu_count(),
            "seconds": time.perf_counter() - start,
        })  # fmt: skip
        for row in timed_jobs(folder / "data", todo, target, deadline):
            results.add({"gpus": 1, **row})
        if gpu_count() > 1:
            results.add(at_once(folder, args.every, 2))
    results.show()


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
