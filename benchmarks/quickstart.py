"""The main job in small: on a GPU matmul beside torch, elsewhere a replay of recorded timings."""

from __future__ import annotations

import subprocess
import sys
import time

import torch

import costmodel
from costmodel.cli.doctor import diagnose, usable

SHAPES = [(1024, 4096, 4096), (64, 4096, 14336), (1000, 1000, 1000)]


def on_gpu() -> bool:
    """Multiply a few shapes and hold each product against torch's; whether all agree."""
    good = True
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
    print("every product agrees with torch in float64" if good else "A PRODUCT IS WRONG")
    return good


def replayed() -> bool:
    """Tune shapes that were recorded on an H100; whether that worked."""
    print("No NVIDIA GPU here: REPLAY of timings that were recorded on an H100.\n", flush=True)
    command = [sys.executable, "-m", "costmodel", "tune", "--replay", "--target", "h100-sxm"]
    codes = [
        subprocess.run([*command, *map(str, shape)], check=False).returncode for shape in SHAPES
    ]
    return not any(codes)


def main() -> int:
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
    sys.exit(main())
