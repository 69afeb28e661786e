"""Inductor's max-autotune on one product after the other, timed in turn with torch.

``bench_strategies.py`` starts it. Each line on stdin has the sizes of a product as JSON; a line on
stdout answers it. Inductor chooses among cuBLAS and its Triton templates, as it does by default.
The very first product is not timed: it pays for imports and worker processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import environ
from time import perf_counter
from typing import Any

from common import Row, us_or_none

from costmodel.gemm.workload import Workload
from costmodel.validation import one_line

_FIRST = Workload.dense(192, 192, 192)


def answers(workloads: Sequence[Workload]) -> Iterator[Row]:
    """Ask a new process with empty caches; if it dies, the answers end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {name: f"{folder}/{name.lower()}"
                  for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}  # fmt: skip
        with _process(caches) as process:
            for workload in workloads:
                print(json.dumps([workload.m, workload.n, workload.k]), file=process.stdin)
                process.stdin.flush()
                if not (line := process.stdout.readline()):
                    return
                yield json.loads(line)


@contextmanager
def _process(environment: dict[str, str]) -> Iterator[Any]:
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**environ, **environment},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def timed(workload: Workload, session: Any) -> Row:
    """Return the seconds of the first call, and both latencies in us."""
    import torch

    from costmodel.launch.problem import GemmProblem

    torch._dynamo.reset()  # else another shape of the same function would become a dynamic one
    a = torch.randn(workload.m, workload.k, dtype=torch.float16, device="cuda")
    b = torch.randn(workload.k, workload.n, dtype=torch.float16, device="cuda")
    start = perf_counter()
    product = torch.compile(torch.mm, mode="max-autotune-no-cudagraphs", dynamic=False)
    product(a, b)
    torch.cuda.synchronize()
    tuning_s = perf_counter() - start
    choices = [lambda operands: product(*operands[:2]), None]
    theirs, baseline = session.compare(GemmProblem(workload), choices, rounds=9)
    return {"tuning_s": tuning_s, "us": us_or_none(theirs), "torch_us": us_or_none(baseline)}


def main() -> None:
    from costmodel.measure.protocol import TimingProtocol
    from costmodel.measure.session import Session

    told, sys.stdout = sys.stdout, sys.stderr  # Inductor prints tables
    session = Session(TimingProtocol(), 0)
    timed(_FIRST, session)
    for line in sys.stdin:
        try:
            found = timed(Workload.dense(*json.loads(line)), session)
        except Exception as error:
            found = {"error": one_line(error)}
        print(json.dumps(found), file=told, flush=True)


if __name__ == "__main__":
    main()
