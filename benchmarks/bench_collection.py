"""Speed of collecting: binaries compiled a second, and rows timed a second by a GPU.

A collection compiles and times at once; here one follows the other, so that neither waits. The
workloads take under 200 us each. Each row says how long the parts of it took: torch with the making
of the operands, the first timings, those taken again (those of earlier workloads too), and the
finalists. Where there are two GPUs, a process on each times all rows, both at once. Then a session
in this process times some rows under Python's profiler, which says where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from common import Results, Row, announce, at_exit_code, parser, until, versions

from costmodel.collect import Job, collect
from costmodel.collect.sampling import RandomSampler
from costmodel.compile.triton_private import know_triton_key
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, Runner
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import compile_many, import_kernels, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.problem import GemmProblem
from costmodel.measure.card import current_run
from costmodel.measure.device import DeviceRunner
from costmodel.measure.protocol import TimingProtocol

SIZES = ((16, 5120, 5120), (256, 3072, 768), (1536, 2304, 768), (64, 640, 2560), (2048, 1280, 1280))
CONFIGS = 300
PROFILED = 100  # rows of each workload
SHOWN = 25  # functions


def jobs(target: Target, sizes: Sequence[tuple[int, int, int]], configs: int) -> list[Job]:
    """A sample of each workload's space."""
    rng = np.random.default_rng(0)
    sampler = RandomSampler(configs)
    todo = [Workload.dense(m, n, k) for m, n, k in sizes]
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


class Clocked(Runner):
    """Passes everything on to another runner, and adds up what takes how long.

    Attributes:
        parts: by part, its seconds, and how many timings are in it.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, self._torch_is_last = runner, False
        self.parts: dict[str, Row] = {}

    @contextmanager
    def _clocked(self, part: str, timings: int) -> Iterator[None]:
        row = self.parts.setdefault(part, {"seconds": 0.0, "timings": 0})
        begin = time.perf_counter()
        yield
        row["seconds"] += time.perf_counter() - begin
        row["timings"] += timings
        self._torch_is_last = part == "torch"

    def measure(self, workload: Workload, candidates: Any, best_us: float = inf) -> Any:
        with self._clocked("rows" if self._torch_is_last else "again", len(candidates)):
            return self._runner.measure(workload, candidates, best_us)

    def measure_torch(self, workload: Workload) -> Measurement:
        with self._clocked("torch", 1):
            return self._runner.measure_torch(workload)

    def compare(self, workload: Workload, configs: Any, rounds: int = 9) -> Any:
        with self._clocked("finalists", len(configs)):
            return self._runner.compare(workload, configs, rounds)


def timed_jobs(folder: Path, todo: list[Job], target: Target, deadline: float) -> Iterator[Row]:
    """Time every job on the first visible GPU; the binaries are in Triton's cache already."""
    with DeviceRunner() as runner:
        dataset = Dataset.create(folder, target, runner.protocol.to_dict())
        run = current_run()
        # A first workload starts the timing process and builds the launchers.
        collect(jobs(target, [(256, 256, 256)], 40), dataset, runner, run)
        for job in until(deadline, todo):
            clocked = Clocked(runner)
            progress = collect([job], dataset, clocked, run)
            yield {
                "what": f"timing {job.workload}", "timed": progress.rows, "ok": progress.ok_rows,
                "seconds": progress.timing_s, "parts": clocked.parts,
            }  # fmt: skip


def at_once(folder: Path, every: int, gpus: int) -> Row:
    """Time all rows on each GPU, at once; the seconds are those of the slower one."""
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


def profiled(session: Any, job: Job) -> Row:
    """Time some rows of a job again; return the functions that take longest, in ms a row.

    Args:
        session: a :class:`costmodel.measure.session.Session`.
    """
    problem, profile, best_us = GemmProblem(job.workload), cProfile.Profile(), inf
    session.measure(problem, None, inf)  # makes the operands
    begin = time.perf_counter()
    for config in job.configs[:PROFILED]:
        profile.enable()
        found = session.measure(problem, config, best_us)
        profile.disable()
        best_us = min(best_us, found.latency_us) if found.ok else best_us
    rows = len(job.configs[:PROFILED])
    return {
        "what": f"profile of {job.workload}", "profiled": rows,
        "ms": 1e3 * (time.perf_counter() - begin) / rows, "functions": by_function(profile, rows),
    }  # fmt: skip


def by_function(profile: cProfile.Profile, rows: int) -> list[Row]:
    """List the functions that take longest with what they call, in ms a row."""
    stats: Any = pstats.Stats(profile)
    found = [
        {"function": f"{Path(file).name}:{name}", "calls": calls / rows,
         "own_ms": 1e3 * own / rows, "ms": 1e3 * whole / rows}
        for (file, _, name), (_, calls, own, whole, _) in stats.stats.items()
    ]  # fmt: skip
    return sorted(found, key=lambda row: -row["ms"])[:SHOWN]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--timing", type=Path, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    target = Target.current()
    todo = jobs(target, SIZES[:: args.every], CONFIGS)
    if args.timing:
        print(json.dumps(list(timed_jobs(args.timing, todo, target, float("inf")))))
        return
    specs = list(dict.fromkeys(specialize(j.workload, c) for j in todo for c in j.configs))
    deadline = announce(args.budget_s, binaries=len(specs), timings=2 * CONFIGS * len(todo))
    results = Results("collection", target, args.results, versions(target), summarize)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # The timing processes start later, and find there what is compiled.
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
        from costmodel.measure.session import Session  # imports torch

        know_triton_key()
        import_kernels()
        session = Session(TimingProtocol(), 0)
        for job in until(deadline, todo):
            results.add(profiled(session, job))
    results.show()


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
