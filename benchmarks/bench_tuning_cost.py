"""Cost of a tuning: the model's top 8 against the whole space, and against Inductor.

The wall seconds of a tuning are those of ranking, compiling from an empty compiler cache, timing,
and timing the finalists in turn. Both ways have the same compile workers, as many as a top 8 can
use, and a timing process. All of them are started before, since a process pays for their start only
once, in either way. Results with another number of workers (``--workers``) have a file of their
own.

Binaries do not depend on the sizes, so that products of one kind share nearly all. For the whole
space each binary is compiled once, for the first workload that needs it. For later workloads
``exhaustive_s`` is at least the compile seconds of all their binaries, divided by the workers
(``--full`` compiles them anew).

The two winners are timed in turn. Inductor searches its Triton templates in a process of its own,
from an empty cache; imports do not count. Then its kernel is timed in turn with ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import joblib
from common import (
    Results,
    Row,
    announce,
    at_exit_code,
    drawn,
    find_model,
    in_turn,
    note,
    parser,
    until,
    us_or_none,
    versions,
)

from costmodel.cli.common import print_table
from costmodel.compile.compile_pool import CompilePool
from costmodel.compile.compiler import Artifact
from costmodel.evaluation.metrics import geomean
from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import compile_for_device, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.device import DeviceRunner
from costmodel.models import XgbCostModel
from costmodel.tuning.ranking import rank
from costmodel.tuning.tuner import tune
from costmodel.tuning.tuning_result import TuningResult

SIZES = (
    (16, 4096, 4096), (4096, 4096, 4096), (1000, 1000, 1000), (1024, 4096, 14336),
    (256, 1024, 8192),
)  # fmt: skip
_OTHER = (64, 2048, 2048)
_TOP = 8
_INDUCTOR_LIMIT_S = 120
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@contextmanager
def empty_caches() -> Iterator[None]:
    """Give this process, and those that it starts, empty compiler caches."""
    before = {name: os.environ.get(name) for name in _CACHES}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update({name: f"{folder}/{name.lower()}" for name in _CACHES})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


@dataclass
class Compiler:
    """Compiles into Triton's cache, each binary once, and keeps how long each took.

    Attributes:
        took_s: seconds that a worker spent on each.
        reused: how many were asked for again after they were compiled.
    """

    pool: CompilePool
    took_s: dict[Specialization, float] = field(default_factory=dict)
    reused: int = 0
    _made: dict[Specialization, Artifact] = field(default_factory=dict)

    def __call__(self, specs: Sequence[Specialization], target: Target) -> Iterator[Artifact]:
        missing = [spec for spec in specs if spec not in self._made]
        for spec in specs:
            if spec in self._made:
                self.reused += 1
                yield self._made[spec]
        for artifact in compile_for_device(missing, target, self.pool):
            self._made[artifact.spec] = artifact
            self.took_s[artifact.spec] = artifact.compile_s
            yield artifact


@contextmanager
def started_runner() -> Iterator[DeviceRunner]:
    """Start a timing process with the present compiler cache, and wait until it is ready."""
    with DeviceRunner() as runner:
        runner.measure_torch(Workload.dense(*_OTHER))
        yield runner


def timed_tuning(
    workload: Workload,
    target: Target,
    model: XgbCostModel,
    mode: str,
    runner: DeviceRunner,
    compiler: Compiler,
) -> tuple[TuningResult, float]:
    """Tune without torch; return the result and the wall seconds."""
    start = time.perf_counter()
    result = tune(
        workload, runner=runner, target=target, model=model, mode=mode, k=_TOP,
        include_torch=False, compile_=compiler,
    )  # fmt: skip
    return result, time.perf_counter() - start


def compile_s(workload: Workload, target: Target, compiler: Compiler, workers: int) -> float:
    """Return the least wall seconds in which so many workers compile a workload's space."""
    specs = {specialize(workload, config) for config in SearchSpace.of(workload, target).configs}
    return sum(compiler.took_s.get(spec, 0.0) for spec in specs) / workers


def row_of(
    workload: Workload,
    topk: tuple[TuningResult, float],
    exhaustive: tuple[TuningResult, float],
    final_us: dict[str, float | None],
    inductor: Row,
) -> Row:
    """Make a workload's row."""
    row: Row = {"workload": f"{workload.m}x{workload.n}x{workload.k}"}
    for name, (result, seconds) in (("topk", topk), ("exhaustive", exhaustive)):
        row[f"{name}_s"] = seconds
        row[f"{name}_compiled"] = result.costs.compiled
        row[f"{name}_timed"] = result.costs.timed
        row[f"{name}_stages"] = {
            stage: getattr(result.costs, stage) for stage in ("rank_s", "compile_s", "measure_s")
        }
    row["ratio"] = row["exhaustive_s"] / row["topk_s"]
    best, kept = final_us["exhaustive"], final_us["topk"]
    row["speed_kept_pct"] = 100 * best / kept if best and kept else None
    return row | {"inductor_s": None, "inductor_us": None, "beside_inductor_us": None} | inductor


def summarize(rows: list[Row]) -> Row:
    """Means over the workloads; ratios are of the top 8's seconds, and of kernels' speed."""
    kept = [row["speed_kept_pct"] for row in rows if row["speed_kept_pct"]]
    by_inductor = [row for row in rows if row["inductor_s"]]
    inductor = [row["inductor_s"] for row in by_inductor]
    beside = [row for row in by_inductor if row["inductor_us"] and row["beside_inductor_us"]]
    topk_s = mean(row["topk_s"] for row in rows)
    summary: Row = {"workloads": len(rows)}
    for name in ("exhaustive", "topk"):
        for what in ("s", "compiled", "timed"):
            summary[f"{name}_{what}"] = mean(row[f"{name}_{what}"] for row in rows)
    return summary | {
        "ratio": summary["exhaustive_s"] / topk_s,
        "speed_kept_pct": geomean(kept) if kept else None,
        "inductor_s": mean(inductor) if inductor else None,
        "inductor_ratio": (
            mean(inductor) / mean(row["topk_s"] for row in by_inductor) if inductor else None
        ),
        "faster_than_inductor": (
            geomean([row["inductor_us"] / row["beside_inductor_us"] for row in beside])
            if beside else None
        ),
    }  # fmt: skip


def inductor(workload: Workload, ours: GemmConfig | None) -> Row:
    """Return the seconds of Inductor's first call, in a process of its own, and its kernel's us.

    A part that fails is left out.
    """
    command = [sys.executable, __file__, "--inductor"]
    command += [str(x) for x in (workload.m, workload.n, workload.k)]
    if ours is not None:
        command += ["--beside", json.dumps(ours.to_dict())]
    try:
        with empty_caches():
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_INDUCTOR_LIMIT_S, check=False
            )
    except subprocess.TimeoutExpired:
        note(f"inductor left out: over {_INDUCTOR_LIMIT_S} s")
        return {}
    row: Row = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row |= json.loads(line)
    if done.returncode:
        what = "inductor's kernel" if row else "inductor"
        note(f"{what} left out: {done.stderr.strip().splitlines()[-1:]}")
    return row


def print_inductor(m: int, n: int, k: int, ours: GemmConfig | None) -> None:
    """Print how long Inductor searches its Triton templates, imports not counted; then both
    kernels' latencies, timed in turn."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch._inductor.config as settings

    config: Any = settings
    config.max_autotune_gemm_backends = "TRITON"
    a = torch.randn(m, k, dtype=torch.float16, device="cuda")
    b = torch.randn(k, n, dtype=torch.float16, device="cuda")
    torch.mm(a, b)
    torch.cuda.synchronize()
    start = time.perf_counter()
    product = torch.compile(torch.mm, mode="max-autotune-no-cudagraphs")
    product(a, b)
    torch.cuda.synchronize()
    print(json.dumps({"inductor_s": time.perf_counter() - start}), flush=True)

    from costmodel.launch.problem import GemmProblem
    from costmodel.measure.protocol import TimingProtocol
    from costmodel.measure.session import Session

    session = Session(TimingProtocol(), 0)
    theirs, beside = session.compare(
        GemmProblem(Workload.dense(m, n, k)),
        [lambda operands: product(*operands[:2]), ours],
        rounds=9,
    )
    print(json.dumps({
        "inductor_us": us_or_none(theirs), "beside_inductor_us": us_or_none(beside),
    }))  # fmt: skip


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--inductor", type=int, nargs=3, metavar=("M", "N", "K"),
                           help="only print what Inductor's first call takes")  # fmt: skip
    arguments.add_argument("--beside", help="a configuration, as JSON, to time beside Inductor's")
    arguments.add_argument("--workers", type=int, help="compile processes of either way; "
                           f"default: {_TOP}, or the number of cores")  # fmt: skip
    arguments.add_argument("--full", action="store_true",
                           help="compile the whole space anew for each workload")  # fmt: skip
    args = arguments.parse_args()
    if args.inductor:
        ours = GemmConfig.from_dict(json.loads(args.beside)) if args.beside else None
        m, n, k = args.inductor
        print_inductor(m, n, k, ours)
        return
    workers = args.workers or min(joblib.cpu_count(), _TOP)
    target = Target.current()
    model = find_model(args.model, target)
    todo = [Workload.dense(*size) for size in drawn(SIZES, args)]
    spaces = [len(SearchSpace.of(w, target)) for w in todo]
    binaries = sum(spaces) if args.full else 1.3 * max(spaces)
    deadline = announce(
        args.budget_s, binaries=binaries * joblib.cpu_count() / workers,
        timings=sum(spaces), seconds=20 * len(todo),
    )  # fmt: skip
    software = versions(
        target, model=f"{model.name} {model.hash}", compile_workers=str(workers),
        exhaustive="compiled anew" if args.full else "binaries shared",
    )  # fmt: skip
    own = f"-{workers}-workers" if args.workers else ""
    results = Results(f"tuning_cost{own}", target, args.results, software, summarize)
    rank(Workload.dense(*_OTHER), target, model)  # so that what a process does once is done before
    with CompilePool(workers) as pool:
        pool.start(workers)
        topk = {}
        for workload in until(deadline, todo):
            with empty_caches(), started_runner() as runner:
                topk[workload] = timed_tuning(
                    workload, target, model, "auto", runner, Compiler(pool)
                )
        for group in [[w] for w in topk] if args.full else [[*topk]]:
            with empty_caches(), started_runner() as runner:
                compiler = Compiler(pool)
                for workload in until(deadline, group):
                    result, wall_s = timed_tuning(
                        workload, target, model, "exhaustive", runner, compiler
                    )
                    seconds = max(wall_s, compile_s(workload, target, compiler, workers))
                    winners = {"topk": topk[workload][0].config, "exhaustive": result.config}
                    final = in_turn(runner, workload, winners)
                    final_us = {name: us_or_none(m) for name, m in final.items()}
                    beside = inductor(workload, winners["topk"])
                    row = row_of(workload, topk[workload], (result, seconds), final_us, beside)
                    results.add(row | {"exhaustive_wall_s": wall_s, "reused": compiler.reused})
                    compiler.reused = 0
    columns = ["workload", "topk_s", "exhaustive_s", "ratio", "speed_kept_pct", "inductor_s"]
    print_table("seconds", columns, [tuple(row[name] for name in columns) for row in results.rows])
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
