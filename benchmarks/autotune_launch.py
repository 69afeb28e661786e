"""One process of the benchmark ``autotune``: the host time of a warm call of a tuned kernel.

``first`` tunes and times warm calls. ``second`` is a process that finds all caches filled.
``single`` is Triton's own tuner (stock) in such a process, with the winner as its only
configuration.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl
from autotune_worker import counters
from triton.runtime.autotuner import Autotuner

_BATCHES, _CALLS = 40, 100
_N = 4096


class StockTuner(Autotuner):
    """Triton's own tuner; it stays so when its ``run`` is replaced later."""

    run = Autotuner.run


@triton.jit
def of_8(x, y, n, a, b, c, d, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n)
    tl.store(y + at, ((value * a + b) * value + c) * value + d, at < n)


@triton.jit
def of_16(x, y, z, out, n, stride, a, b, c, d, e, f, g, h, SHIFT: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * stride
    value = tl.load(x + at, at < n) * a + tl.load(y + at, at < n) * b + tl.load(z + at, at < n) * c
    tl.store(out + at, value * (d + e + f + g + h) + SHIFT, at < n)


def arguments(name: str) -> tuple[Any, ...]:
    tensors = [torch.randn(_N, device="cuda") for _ in range(4)]
    if name == "of_8":
        return (*tensors[:2], _N, 1.5, 2.5, 3.5, 4.5)
    return (*tensors, _N, 1, *(i + 0.5 for i in range(8)), 2)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(_N, meta["BLOCK"]),)


def configurations() -> list[Any]:
    return [triton.Config({"BLOCK": b}, num_warps=w) for b in (256, 512, 1024) for w in (2, 4, 8)]


def warm_us(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median host us of each call, in turn; a batch begins with an empty GPU queue."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_BATCHES):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            found[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    return {name: median(us) for name, us in found.items()}


def first_call(tuner: Any, args: tuple[Any, ...], side: str) -> dict[str, Any]:
    """Seconds and counters of a tuner's first call."""
    torch.cuda.synchronize()
    before, start = counters(side, tuner), time.perf_counter()
    tuner[grid](*args)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    after = counters(side, tuner)
    return {"seconds": seconds, "compiled": after[0] - before[0], "timed": after[1] - before[1]}


def measure(mode: str, name: str, kernel: Any, winner: dict[str, Any] | None) -> dict[str, Any]:
    """Measure one kernel in one mode."""
    args = arguments(name)
    if mode == "single":
        assert winner is not None
        only = next(c for c in configurations() if c.all_kwargs() == winner)
        stock = StockTuner(kernel, kernel.arg_names, [only], ["n"], None, None)
        return first_call(stock, args, "single")
    ours = triton.autotune(configurations(), key=["n"])(kernel)
    found = first_call(ours, args, "ours")
    if mode == "second":
        return found
    stock = StockTuner(kernel, kernel.arg_names, configurations(), ["n"], None, None)
    stock[grid](*args)
    options = ours.best_config.all_kwargs()
    us = warm_us({
        "stock": lambda: stock[grid](*args),
        "ours": lambda: ours[grid](*args),
        "plain": lambda: kernel[grid](*args, **options),
    })  # fmt: skip
    return found | {"warm_us": us, "winner": options}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["first", "second", "single"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--winners", type=json.loads, default={})
    args = parser.parse_args()
    if args.mode != "single":
        from costmodel.autotune.replace import replace_triton_autotune

        replace_triton_autotune()
    torch.zeros(1, device="cuda")
    with args.out.open("a", buffering=1) as out:
        for name, kernel in (("of_8", of_8), ("of_16", of_16)):
            found = measure(args.mode, name, kernel, args.winners.get(name))
            out.write(json.dumps({"kernel": name} | found) + "\n")


if __name__ == "__main__":
    main()
