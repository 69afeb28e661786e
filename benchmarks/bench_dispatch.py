"""Time of a warm call on the host (``dispatch``), and of a product's first (``first_calls``).

Warm calls are of products so short that the GPU waits for the host. First calls are timed in
processes of their own, with torch, Triton and costmodel imported and CUDA and cuBLAS started:

- ``auto`` and ``predict``: the second product of a process that began with empty caches. The
  first was another one, in the same mode: it has done what a process does once, but no binary that
  the second needs is there.
- ``first of all``: the first product of such a process, by ``auto``.
- ``warm caches``: the same in another fresh process, with the caches that ``first of all`` filled.

The very first process writes Python's byte code, where that may be written; the others find it.

Each kind is run a few times, each time with new caches. Its row is the run with the median time,
and also holds the least and the most of all runs. The row lists the stages of the call: when each
began and how long it took, in seconds. Stages overlap. ``costs`` are those of the tuning's result.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import Results, Row, announce, at_exit_code, find_model, parser, until, versions

import costmodel
from costmodel.errors import CostModelError
from costmodel.hardware.target import Target

SMALL = ((64, 64, 64), (256, 256, 256), (16, 1024, 1024))
LARGE = (4096, 4096, 4096)
OTHER = (64, 2048, 2048)
KINDS = (("auto",), ("predict",), ("first of all", "warm caches"))
_CALLS, _AT_A_TIME = 10_000, 250  # so few that the queue of launches never fills up


def host_us(
    calls: Sequence[Callable[[], object]],
    synchronize: Callable[[], None],
    total: int = _CALLS,
    at_a_time: int = _AT_A_TIME,
) -> list[float]:
    """Return the median host microseconds of each call, timed one by one; the calls take turns.

    A host that is slower for a while, as just after a first call, is then slower for all of them.
    """
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(total // at_a_time + 1):
        for call, measured in zip(calls, times, strict=True):
            for _ in range(at_a_time):
                start = time.perf_counter()
                call()
                if repeat:  # the first ones warm up
                    measured.append(time.perf_counter() - start)
            synchronize()
    return [1e6 * median(measured) for measured in times]


def warm_row(m: int, n: int, k: int, model: Path | None, *, into: bool) -> Row:
    """Return the host time of ``matmul`` and of ``torch.mm``, with or without a given output.

    The configuration is predicted, so that the launch of a Triton kernel is timed.
    """
    import torch

    a = torch.randn(m, k, dtype=torch.float16, device="cuda")
    b = torch.randn(k, n, dtype=torch.float16, device="cuda")
    out = torch.empty(m, n, dtype=torch.float16, device="cuda") if into else None
    costmodel.matmul(a, b, out=out, mode="predict", model=model)
    result = costmodel.result_for(a, b, out=out, mode="predict", model=model)
    if result is None or result.config is None:
        raise CostModelError(f"{m}x{n}x{k}: torch was chosen, which says nothing of a launch")
    calls = (
        lambda: costmodel.matmul(a, b, out=out, mode="predict", model=model),
        lambda: torch.mm(a, b, out=out),
    )
    matmul_us, torch_us = host_us(calls, torch.cuda.synchronize)
    return {
        "workload": f"{m}x{n}x{k}", "out": into, "chosen": str(result.chosen),
        "matmul_us": matmul_us, "torch_mm_us": torch_us, "ratio": matmul_us / torch_us,
    }  # fmt: skip


class Stages:
    """A record of functions: when each ran, counted from the start of the watch, and how long."""

    def __init__(self) -> None:
        self.found: list[Row] = []
        self._start = time.perf_counter()

    def watch(self, owner: Any, function: str, stage: str) -> None:
        """Note each run of a function of a module or class from now on."""
        original = getattr(owner, function)

        @functools.wraps(original)
        def watched(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                took = time.perf_counter() - begin
                if took > 1e-4:
                    at_s = round(begin - self._start, 4)
                    self.found.append({"stage": stage, "at_s": at_s, "took_s": round(took, 4)})

        setattr(owner, function, watched)

    def begin(self) -> None:
        """Start the watch anew."""
        self.found.clear()
        self._start = time.perf_counter()


def first_call_stages() -> list[tuple[Any, str, str]]:
    """List the stages of a first call: a function's owner and name, and the stage's name."""
    from costmodel import processes
    from costmodel.compile import compile_pool
    from costmodel.dispatch import loading
    from costmodel.hardware import nvidia, target
    from costmodel.launch import kernel
    from costmodel.measure import device
    from costmodel.tuning import search, tuner, tuning_key, winner_cache

    return [
        (target, "_probe", "device"),
        (nvidia, "ptxas_version", "toolchain"),
        (tuning_key.TuningKey, "on_disk", "key"),
        (winner_cache.WinnerCache, "get", "look up"),
        (compile_pool.CompilePool, "start", "start compilers"),
        (tuner, "rank_by", "rank"),
        (search.TopKSearch, "_try", "compile and time"),
        (search.TopKSearch, "remeasure_finalists", "time finalists"),
        (device.DeviceRunner, "measure_torch", "time torch"),
        (device.DeviceRunner, "measure", "time"),
        (device.DeviceRunner, "rest", "rest"),
        (processes.SupervisedWorker, "_await_setup", "wait for a child"),
        (kernel, "recalled", "binary"),
        (loading, "load", "load"),
    ]


def first_call(kind: str, mode: str, model: Path | None, caches: Path) -> Row:
    """The row of a first call in a fresh process that has only these caches."""
    command = [sys.executable, __file__, "--first-call", mode]
    command += ["--after-another"] if kind == mode else []
    command += ["--model", str(model)] if model else []
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "COSTMODEL_CACHE_DIR": str(caches / "costmodel"),
    }
    # If an image forbids byte code, each process would parse torch, Triton and xgboost anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    workload = "x".join(map(str, LARGE))
    return {"workload": workload, "first_call": kind,
            **json.loads(done.stdout.splitlines()[-1])}  # fmt: skip


def first_calls(kinds: Sequence[str], runs: int, model: Path | None) -> list[Row]:
    """Run the kinds one after another, so many times; return the median run of each kind."""
    done: list[list[Row]] = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            modes = ((kind, "predict" if kind == "predict" else "auto") for kind in kinds)
            done.append([first_call(kind, mode, model, Path(folder)) for kind, mode in modes])
    return [median_run(rows) for rows in zip(*done, strict=True)]


def median_run(rows: Sequence[Row]) -> Row:
    """Return the run of median time (the faster of two in the middle), with the least and most."""
    by_time = sorted(rows, key=lambda row: row["seconds"])
    seconds = [row["seconds"] for row in by_time]
    apart = {"runs": len(rows), "least_s": seconds[0], "most_s": seconds[-1]}
    return by_time[(len(rows) - 1) // 2] | apart


def time_first_call(mode: str, model: Path | None, *, after_another: bool) -> Row:
    """Seconds and stages of the first call of a product in this process."""
    import torch
    import triton  # noqa: F401 - a program that multiplies imports it

    def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(m, k, dtype=torch.float16, device="cuda")
        return a, torch.randn(k, n, dtype=torch.float16, device="cuda")

    a, b = operands(*LARGE)
    other = operands(*OTHER)
    torch.mm(a, b)
    matmul = costmodel.matmul
    stages = Stages()
    for owner, function, stage in first_call_stages():
        stages.watch(owner, function, stage)
    if after_another:
        matmul(*other, mode=mode, model=model)
    torch.cuda.synchronize()
    stages.begin()
    start = time.perf_counter()
    matmul(a, b, mode=mode, model=model)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    result = costmodel.result_for(a, b, mode=mode, model=model)
    assert result is not None
    return {
        "seconds": seconds, "chosen": str(result.chosen), "source": result.source,
        "xgboost": "xgboost" in sys.modules, "costs": result.to_dict()["costs"],
        "stages": stages.found,
    }  # fmt: skip


def summarize_known(rows: list[Row]) -> Row:
    """The first row stands for the others."""
    return {name: rows[0][name] for name in ("matmul_us", "torch_mm_us", "ratio")}


def summarize_first(rows: list[Row]) -> Row:
    """Return the time of each kind."""
    seconds = {row["first_call"]: row["seconds"] for row in rows}
    warm_process_s = seconds.get("warm caches")
    return {
        "first_call_s": seconds.get("auto"),
        "predict_first_call_s": seconds.get("predict"),
        "warm_process_first_call_ms": 1e3 * warm_process_s if warm_process_s else None,
        "first_of_all_s": seconds.get("first of all"),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=["known", "first"], help="default: both")
    arguments.add_argument("--runs", type=int, default=3, help="of each first call")
    arguments.add_argument("--first-call", help="only print the row of a first call in this mode")
    arguments.add_argument("--after-another", action="store_true", help="of a second product")
    args = arguments.parse_args()
    if args.first_call:
        row = time_first_call(args.first_call, args.model, after_another=args.after_another)
        print(json.dumps(row))
        return
    target = Target.current()
    deadline = announce(args.budget_s, seconds=10 + (args.only != "known") * 40 * args.runs)
    model = find_model(args.model, target)
    software = versions(target, model=f"{model.name} {model.hash}")
    if args.only != "first":
        known = Results("dispatch", target, args.results, software, summarize_known)
        for size in SMALL:
            for into in (False, True):
                known.add(warm_row(*size, args.model, into=into))
        known.show()
    if args.only != "known":
        first = Results("first_calls", target, args.results, software, summarize_first)
        for kinds in until(deadline, KINDS):
            first.add(*first_calls(kinds, args.runs, args.model))
        first.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
