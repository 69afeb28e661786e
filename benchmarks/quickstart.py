"""A first look: on a GPU, matmul beside torch; elsewhere, a replay of recorded timings."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from common import at_exit_code

import costmodel
from costmodel.cli.doctor import diagnose, usable
from costmodel.data.dataset import Dataset
from costmodel.evaluation.metrics import geomean
from costmodel.tuning.shipped import recording
from costmodel.tuning.tuner import tune

SHAPES = [(1024, 4096, 4096), (64, 4096, 14336), (1000, 1000, 1000)]
NEXT = """
What to do next:
  your own products    c = costmodel.matmul(a, b), or costmodel.nn.replace_linear(model)
  your own kernels     @costmodel.autotune(configs, key=[...]) in place of @triton.autotune
  why this one         .venv/bin/costmodel explain 64 4096 14336 --target h100-sxm
  what is missing here .venv/bin/costmodel doctor
README.md leads on from there."""


def on_gpu() -> bool:
    """Multiply a few shapes and compare each product with torch's; return True if all agree."""
    good, gains = True, []
    print(f"{'m x n x k':>18}  {'worst error':>11}  {'allowed':>8}  {'first call':>10}  chosen")
    for m, n, k in SHAPES:
        torch.manual_seed(0)
        a = torch.randn(m, k, dtype=torch.float16, device="cuda")
        b = torch.randn(k, n, dtype=torch.float16, device="cuda")
        start = time.perf_counter()
        c = costmodel.matmul(a, b)
        torch.cuda.synchronize()
        first_s = time.perf_counter() - start
        expected = a.double() @ b.double()
        error = (c.double() - expected).abs().max().item()
        allowed = 2e-3 * expected.abs().max().item()
        good &= error <= allowed
        result = costmodel.result_for(a, b)
        assert result is not None
        print(f"{f'{m} x {n} x {k}':>18}  {error:>11.3g}  {allowed:>8.3g}  {first_s:>8.1f} s  "
              f"{result.chosen}")  # fmt: skip
        print(f"{'':>18}  by {result.model} {result.model_hash}: {result.why}")
        gains.append(gain_of(result))
    print("every product agrees with torch in float64" if good else "A PRODUCT IS WRONG")
    tell_gain(gains, "here")
    return good


def replayed() -> bool:
    """Tune shapes that were recorded on an H100."""
    print("No NVIDIA GPU here: REPLAY of timings that were recorded on an H100.\n", flush=True)
    gains = []
    runner = costmodel.ReplayRunner(Dataset.open(recording("h100-sxm")))
    for shape in SHAPES:
        result = tune(costmodel.Workload.dense(*shape), runner=runner)
        print(f"{' x '.join(map(str, shape)):>18}  {result.chosen}: {result.why}", flush=True)
        gains.append(gain_of(result))
    tell_gain(gains, "on the H100")
    return True


def gain_of(result: Any) -> float:
    """Return torch's time over that of the chosen configuration; 1 if torch was chosen."""
    if result.torch is None or result.config is None:
        return 1.0
    us = dict(result.measured).get(result.config)
    return result.torch.latency_us / us.latency_us if us is not None and us.ok else 1.0


def tell_gain(gains: list[float], where: str) -> None:
    """Say what tuning has gained, and what may come next."""
    print(f"\nGained {where}: {geomean(gains):.2f} times as fast as torch.matmul over these "
          f"{len(gains)} products, {max(gains):.2f} times at best; {gains.count(1.0)} by torch "
          f"itself. Eight configurations of each were timed, of more than a thousand.")  # fmt: skip
    print(NEXT)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not torch.cuda.is_available():
        return 0 if replayed() else 1
    checks = diagnose()
    if not usable(checks):
        for check in checks:
            if not check.ok:
                print(f"{check.name}: {check.found}. {check.advice}", file=sys.stderr)
        return 1
    return 0 if on_gpu() else 1


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
