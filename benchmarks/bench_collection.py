"""How fast data is collected: binaries compiled a second, and rows timed a second on one GPU.

The two run at once in a collection; here one after the other, so that neither waits. The workloads
take under 200 us each.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from common import Results, Row, announce, at_exit_code, parser, until, versions

from costmodel.collect import Job, collect
from costmodel.compiler import compile_many
from costmodel.dataset import Dataset
from costmodel.runner.device import DeviceRunner
from costmodel.runner.identity import current_run
from costmodel.sampling import RandomSampler
from costmodel.space import SearchSpace
from costmodel.specialize import specialize
from costmodel.target import Target
from costmodel.workload import Workload

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
    timed = [row for row in rows if "timed" in row]
    seconds = sum(row["seconds"] for row in timed)
    return {
        "rows_per_s_1gpu": sum(row["timed"] for row in timed) / seconds if timed else None,
        "rows_per_s_2gpu": None,
        "compiles_per_s": compiled["compiled"] / compiled["seconds"],
        "cores": compiled["cores"],
    }


def main() -> None:
    args = parser(__doc__).parse_args()
    target = Target.current()
    todo = jobs(target, args.every)
    specs = list(dict.fromkeys(specialize(j.workload, c) for j in todo for c in j.configs))
    deadline = announce(args.budget_s, binaries=len(specs), timings=CONFIGS * len(todo))
    results = Results("collection", target, args.results, versions(target), summarize)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        # The process that times, not started yet, finds there what is compiled.
        os.environ["TRITON_CACHE_DIR"] = folder
        runner = stack.enter_context(DeviceRunner())
        start = time.perf_counter()
        artifacts = list(compile_many(specs, target, cache=Path(folder)))
        results.add({
            "what": "compiling", "compiled": len(artifacts),
            "failed": sum(not a.ok for a in artifacts), "cores": os.cpu_count(),
            "seconds": time.perf_counter() - start,
        })  # fmt: skip
        dataset = Dataset.create(Path(folder) / "data", target, runner.protocol.to_dict())
        dataset.append_artifacts(artifacts)
        run = current_run()
        runner.measure_torch(Workload.dense(256, 256, 256))  # the timing process is up
        for job in until(deadline, todo):
            progress = collect([job], dataset, runner, run, cache=Path(folder))
            results.add({
                "what": f"timing {job.workload}", "timed": progress.rows,
                "ok": progress.ok_rows, "seconds": progress.timing_s,
            })  # fmt: skip
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
