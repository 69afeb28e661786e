"""Made-up timings of scaled products: an analytic cost with noise, of the real configurations."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from costmodel.autotune.call import KernelCall
from costmodel.autotune.store import KernelEntry, config_name
from costmodel.data.measurement import Measurement
from costmodel.scaled.configs import prune
from costmodel.scaled.launch import Kernels, tuned
from costmodel.scaled.product import scaled_call

KEY: dict[str, Any] = {
    "name": "costmodel.scaled.launch.scaled_product", "source": "12ab", "specialized": [],
    "device": "NVIDIA H200", "arch": 90, "sm_count": 132, "driver": "570.1", "triton": "3.6.0",
    "triton_build": "x", "ptxas": "12.8",
}  # fmt: skip
_SMS = 132


def call_of(form: str, m: int, n: int, k: int, device: str = "meta") -> tuple[Any, ...]:
    """Return the arguments of a launch; by default without memory for them."""
    dtype = torch.int8 if form == "int8" else torch.float8_e4m3fn

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    a, b = empty(m, k, dtype=dtype), empty(n, k, dtype=dtype)
    if form == "block":
        blocks = ceil(k / 128)
        scale_b = empty(ceil(n / 128), ceil(blocks / 4) * 4).T
        return scaled_call(a, b.T, empty(blocks, m).T, 4, scale_b, 5)
    return scaled_call(a, b.T, empty(m, 1), 1, empty(1, n), 1)


def cost_us(call: dict[str, Any], config: Any) -> float:
    """Return what a launch may take: bytes, steps in turn, waves, and sums of splits."""
    m, n, k, c = call["m"], call["n"], call["k"], config.kwargs
    is_block, is_int = call["recipe_a"] > 1, call["a"].dtype == torch.int8
    if c["kernel"] in ("torch", "deep_gemm"):
        return 3 + max(n * k / 3.6e6, 2 * m * n * k / 1.35e9) * (1.4 if is_block else 1.1)
    rows, cols, step = c["block_m"], c["block_n"], c.get("step", 128)
    tiles, splits = ceil(m / rows) * ceil(n / cols), c.get("splits", 1)
    steps = ceil(k / step / splits)
    held = max(1, min(4, 230_000 // ((rows + cols) * step * config.num_stages)))
    waves = tiles * splits / _SMS
    together = min(held, max(waves, 1))
    arithmetic = max(rows, 64) * cols * step / 0.85e7 * (1.0 if is_int else 1.1)
    reading = (rows + cols) * step / 7.5e4
    waiting = 0.9 / (config.num_stages - 1) / together
    promoting = {"warps": 1.0}.get(c["kernel"], 1.2) if is_block else 1.0
    one = max(arithmetic * promoting, reading * (1.1 if c["kernel"] == "pointer" else 1), waiting)
    whole = ceil(waves / together) * together * steps * one
    whole = max(whole, (n + m) * k / 4e6)
    return float(3.5 + whole + (splits > 1) * (1.5 + tiles * splits * rows * cols * 8 / 5e6))


def entries(problems: Iterable[tuple[str, int, int, int]], noise: float = 0.01) -> list[Any]:
    """Return what a store would have of these products: (form, m, n, k)."""
    rng, found = np.random.default_rng(0), []
    for form, m, n, k in problems:
        call = call_of(form, m, n, k)
        named = dict(zip(Kernels.arg_names, call, strict=True))
        measured = {}
        for config in prune(tuned.configs, named):
            us = cost_us(named, config) * float(np.exp(noise * rng.standard_normal()))
            measured[config_name(config)] = Measurement("ok", us, us, us, 9)
        of_call = KernelCall(tuned, call, {})
        key = KEY | {"key": of_call.key()}
        path = Path(f"scaled_product-{form}-{m}-{n}-{k}.jsonl")
        found.append(KernelEntry(path, key, of_call.described(), measured))
    return found


def on_an_h200(monkeypatch: Any) -> None:
    """Let configurations be chosen as on that GPU."""
    from costmodel.hardware.target import Target

    target = Target.named("h200-sxm")
    monkeypatch.setattr(Target, "current", lambda index=0: target)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(multi_processor_count=_SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
