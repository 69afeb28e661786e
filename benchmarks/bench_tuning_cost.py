"""What tuning costs: the model's top 8 against the whole space, each from an empty compiler cache.

For each workload a fresh timing process and a fresh cache: the seconds of one first call. How fast
the two winners are is then timed in turn. Inductor's Triton search is timed beside them, where it
works.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

from common import (
    Results,
    Row,
    announce,
    at_exit_code,
    find_model,
    in_turn,
    note,
    parser,
    until,
    us_or_none,
    versions,
)

from costmodel.metrics import geomean
from costmodel.models import XgbCostModel
from costmodel.runner.device import DeviceRunner
from costmodel.space import SearchSpace
from costmodel.target import Target
from costmodel.tuner import tune
from costmodel.tuning_result import TuningResult
from costmodel.workload import Workload

SIZES = ((16, 4096, 4096), (4096, 4096, 4096), (1000, 1000, 1000), (1024, 4096, 14336))
_INDUCTOR_LIMIT_S = 120
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@contextmanager
def empty_caches() -> Iterator[None]:
    """Compilers of this process, and of those it starts, find nothing that was there before."""
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


def timed_tuning(
    workload: Workload, target: Target, model: XgbCostModel, mode: str
) -> tuple[TuningResult, float]:
    """A tuning without torch, and its wall seconds: ranking, compiling, starting the timer."""
    with empty_caches():
        start = time.perf_counter()
        with DeviceRunner() as runner:
            result = tune(
                workload, runner=runner, target=target, model=model, mode=mode, include_torch=False
            )
            return result, time.perf_counter() - start


def row_of(
    workload: Workload,
    topk: tuple[TuningResult, float],
    exhaustive: tuple[TuningResult, float],
    final_us: dict[str, float | None],
    inductor_s: float | None,
) -> Row:
    """A workload's row."""
    row: Row = {"workload": f"{workload.m}x{workload.n}x{workload.k}"}
    for name, (result, seconds) in (("topk", topk), ("exhaustive", exhaustive)):
        row[f"{name}_s"] = seconds
        row[f"{name}_compiled"] = result.costs.compiled
        row[f"{name}_timed"] = result.costs.timed
    row["ratio"] = row["exhaustive_s"] / row["topk_s"]
    best, kept = final_us["exhaustive"], final_us["topk"]
    row["speed_kept_pct"] = 100 * best / kept if best and kept else None
    row["inductor_s"] = inductor_s
    return row


def summarize(rows: list[Row]) -> Row:
    """Means over the workloads; ratios are of the top 8's seconds."""
    kept = [row["speed_kept_pct"] for row in rows if row["speed_kept_pct"]]
    by_inductor = [row for row in rows if row["inductor_s"]]
    inductor = [row["inductor_s"] for row in by_inductor]
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
    }


def inductor_s(workload: Workload) -> float | None:
    """Seconds of Inductor's first call, in a process of its own; None where that fails."""
    sizes = [str(x) for x in (workload.m, workload.n, workload.k)]
    try:
        with empty_caches():
            done = subprocess.run(
                [sys.executable, __file__, "--inductor", *sizes], capture_output=True, text=True,
                timeout=_INDUCTOR_LIMIT_S, check=False,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        note(f"inductor left out: over {_INDUCTOR_LIMIT_S} s")
        return None
    if done.returncode:
        note(f"inductor left out: {done.stderr.strip().splitlines()[-1:]}")
        return None
    return float(done.stdout.split()[-1])


def first_inductor_call(m: int, n: int, k: int) -> float:
    """Seconds in which Inductor searches its Triton templates for a product; imports apart."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch._inductor.config as inductor

    config: Any = inductor
    config.max_autotune_gemm_backends = "TRITON"
    a = torch.randn(m, k, dtype=torch.float16, device="cuda")
    b = torch.randn(k, n, dtype=torch.float16, device="cuda")
    torch.mm(a, b)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.compile(torch.mm, mode="max-autotune-no-cudagraphs")(a, b)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--inductor", type=int, nargs=3, metavar=("M", "N", "K"),
                           help="only print the seconds of Inductor's first call")  # fmt: skip
    args = arguments.parse_args()
    if args.inductor:
        print(first_inductor_call(*args.inductor))
        return
    target = Target.current()
    model = find_model(args.model, target)
    todo = [Workload.dense(*size) for size in SIZES[:: args.every]]
    space = sum(len(SearchSpace.of(w, target)) for w in todo)
    deadline = announce(args.budget_s, binaries=space, timings=space, seconds=40 * len(todo))
    software = versions(target, model=f"{model.name} {model.hash}")
    results = Results("tuning_cost", target, args.results, software, summarize)
    for workload in until(deadline, todo):
        topk = timed_tuning(workload, target, model, "auto")
        exhaustive = timed_tuning(workload, target, model, "exhaustive")
        winners = {"topk": topk[0].config, "exhaustive": exhaustive[0].config}
        with DeviceRunner() as runner:
            final = in_turn(runner, workload, winners)
        final_us = {name: us_or_none(m) for name, m in final.items()}
        results.add(row_of(workload, topk, exhaustive, final_us, inductor_s(workload)))
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
