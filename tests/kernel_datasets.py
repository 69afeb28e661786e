"""Datasets of made-up kernels, whose latency follows from their configuration and binary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import triton

from costmodel.autotune.dataset import KernelDataset
from costmodel.autotune.store import KernelEntry, config_name
from costmodel.data.measurement import Measurement

KEY: dict[str, Any] = {
    "source": "12ab", "key": {"N": 4096}, "specialized": [], "device": "NVIDIA H200", "arch": 90,
    "sm_count": 132, "driver": "570.1", "triton": "3.6.0", "triton_build": "x", "ptxas": "12.8",
}  # fmt: skip
NAMES = [
    config_name(triton.Config({"BLOCK": block}, num_warps=warps, num_stages=2))
    for block in (64, 256, 1024, 4096)
    for warps in (1, 4, 16)
]
ARGUMENTS = {"N": 4096, "x": ["torch.float32", [4096, 4096]]}


def latency_us(block: int, warps: int, scale: float = 1.0) -> float:
    """Return a time: 8 elements a thread are best; fewer cost less than more, which spill."""
    off = np.log2(block / (32 * warps) / 8)
    return float(scale * (20 + off**2 * (4 if off > 0 else 2)))


def binary_of(block: int, warps: int) -> dict[str, Any]:
    """Return what a store keeps of a binary."""
    each = max(block // (32 * warps), 1)
    return {
        "registers": min(16 + 2 * each, 255), "spill_bytes": max(2 * each - 239, 0) * 4,
        "shared_bytes": 0, "grid": [4096 * 4096 // block],
        "ptx": {"all_instructions": 20 + 9 * each, "all_ld_global": each},
        "ttir": {"tt.load": 1, "tt.store": 1},
    }  # fmt: skip


def entry(
    kernel: str, scale: float = 1.0, *, fail: str = "", without: Callable[[str], bool] | None = None
) -> KernelEntry:
    """Return the timings of one kernel.

    Args:
        fail: the name of a configuration that does not fit the device.
        without: of these configurations no binary is known.
    """
    measured, binaries = {}, {}
    for name, (block, warps) in zip(NAMES, SIZES, strict=True):
        us = latency_us(block, warps, scale)
        measured[name] = Measurement("ok", us, us, us, 9)
        if name == fail:
            measured[name] = Measurement("out_of_resources", error="shared memory")
        if not (without and without(name)):
            binaries[name] = binary_of(block, warps)
    return KernelEntry(
        Path(f"{kernel}-1.jsonl"), KEY | {"name": kernel}, ARGUMENTS, measured, binaries
    )


SIZES = [(block, warps) for block in (64, 256, 1024, 4096) for warps in (1, 4, 16)]


def dataset(**options: Any) -> KernelDataset:
    """Return timings of a dozen kernels of two packages."""
    names = [f"{package}.ops.k{i}.kernel" for package in ("one", "two") for i in range(6)]
    entries = [entry(name, 1 + i, **options) for i, name in enumerate(names)]
    return KernelDataset.of(entries, {"one": "one 1.0", "two": "two 1.0"})
