"""What a call costs the host, and what the first one costs in a fresh process.

Warm calls are of products so short that the GPU waits for the host. First calls are timed in
processes of their own, with CUDA and cuBLAS already started: with empty caches, tuning and
predicting, and with the caches that such a call has filled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from common import Results, Row, announce, at_exit_code, find_model, parser, versions

import costmodel
from costmodel.errors import CostModelError
from costmodel.target import Target

SMALL = ((256, 256, 256), (16, 1024, 1024))
LARGE = (4096, 4096, 4096)
_CALLS, _REPEATS = 300, 9


def host_us(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Host microseconds of a call: the median over repeats of many calls each."""
    for _ in range(_CALLS):
        call()
    synchronize()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter() - start) / _CALLS)
        synchronize()
    return 1e6 * median(times)


def warm_row(m: int, n: int, k: int, model: Path | None, *, into: bool) -> Row:
    """Host time of ``matmul`` and of ``torch.mm``, with or without an output that is there.

    The configuration is predicted, so that it is a Triton kernel whose launch is timed.
    """
    import torch

    a = torch.randn(m, k, dtype=torch.float16, device="cuda")
    b = torch.randn(k, n, dtype=torch.float16, device="cuda")
    out = torch.empty(m, n, dtype=torch.float16, device="cuda") if into else None
    costmodel.matmul(a, b, out=out, mode="predict", model=model)
    result = costmodel.result_for(a, b, out=out, mode="predict", model=model)
    if result is None or result.config is None:
        raise CostModelError(f"{m}x{n}x{k}: torch was chosen, which says nothing of a launch")
    matmul_us = host_us(
        lambda: costmodel.matmul(a, b, out=out, mode="predict", model=model),
        torch.cuda.synchronize,
    )
    torch_us = host_us(lambda: torch.mm(a, b, out=out), torch.cuda.synchronize)
    return {
        "group": "known", "workload": f"{m}x{n}x{k}", "out": into, "chosen": str(result.chosen),
        "matmul_us": matmul_us, "torch_mm_us": torch_us, "ratio": matmul_us / torch_us,
    }  # fmt: skip


def first_call_s(mode: str, model: Path | None, caches: Path) -> float:
    """Seconds of the first ``matmul`` in a fresh process that has only these caches."""
    command = [sys.executable, __file__, "--first-call", mode]
    command += ["--model", str(model)] if model else []
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "COSTMODEL_CACHE_DIR": str(caches / "costmodel"),
    }
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def time_first_call(mode: str, model: Path | None) -> float:
    """Seconds of the first call of this process."""
    import torch

    m, n, k = LARGE
    a = torch.randn(m, k, dtype=torch.float16, device="cuda")
    b = torch.randn(k, n, dtype=torch.float16, device="cuda")
    torch.mm(a, b)
    torch.cuda.synchronize()
    start = time.perf_counter()
    costmodel.matmul(a, b, mode=mode, model=model)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def summarize(rows: list[Row]) -> Row:
    """The first warm row stands for the others; first calls have one row each."""
    warm = next(row for row in rows if "matmul_us" in row)
    first = {row["first_call"]: row["seconds"] for row in rows if "first_call" in row}
    warm_process_s = first.get("warm caches")
    return {
        **{name: warm[name] for name in ("matmul_us", "torch_mm_us", "ratio")},
        "first_call_s": first.get("auto"),
        "predict_first_call_s": first.get("predict"),
        "warm_process_first_call_ms": 1e3 * warm_process_s if warm_process_s else None,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--first-call", help="only print the seconds of the first call")
    args = arguments.parse_args()
    if args.first_call:
        print(time_first_call(args.first_call, args.model))
        return
    target = Target.current()
    announce(args.budget_s, binaries=20, timings=40, seconds=60)
    model = find_model(args.model, target)
    software = versions(target, model=f"{model.name} {model.hash}")
    results = Results("dispatch", target, args.results, software, summarize)
    for size in SMALL:
        for into in (False, True):
            results.add(warm_row(*size, args.model, into=into))
    workload = "x".join(map(str, LARGE))
    for name, modes in (("auto", ("auto",)), ("predict", ("predict",)), ("warm", ("auto",) * 2)):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for mode in modes:
                seconds = first_call_s(mode, args.model, Path(folder))
            what = "warm caches" if name == "warm" else name
            results.add({
                "group": "first", "workload": workload, "first_call": what, "seconds": seconds,
            })  # fmt: skip
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
