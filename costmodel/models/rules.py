"""Rules of thumb: the configuration that a practised hand would write down for a workload.

Small products (every side ≤ 512) want small tiles: 32 to 64 a side, steps of 16 to 32, one to
four warps, one or two stages. Large ones want 128 to 256 a side, steps of 32 to 64, eight warps,
four or five stages. A tile is never wider than the product, and where too few tiles are left to
fill the GPU, K is split.

These are for 16 bits. TF32 takes half the step along K, which is as many bytes. IEEE float32 has no
tensor cores: tiles of at most 64 a side, since accumulators and fragments fill the registers, and
the compiler writes every multiplication of a step down.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodel.data.candidates import CONFIG_COLUMNS
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target


class Wanted(NamedTuple):
    """A configuration as the rules want it; ``tma`` is True if the copy engine is preferred."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int
    group_m: int
    tma: bool


def wanted(workload: Workload, target: Target) -> Wanted:
    """Apply the rules, which know sizes, element types and the number of multiprocessors."""
    sm_count = target.device.sm_count
    code = workload.code
    if code.kind not in target.device.architecture.tensor_rates:
        return _without_tensor_cores(workload, sm_count)
    want = _small(workload) if workload.is_small() else _large(workload, sm_count)
    return want._replace(block_k=max(want.block_k * 2 // code.itemsize, 16))  # as many bytes


def rule_cost(
    workload: Workload, config_columns: NDArray[np.float64], target: Target
) -> NDArray[np.float64]:
    """Distance of each configuration from the rules, in powers of two, float64 [n].

    Args:
        config_columns: [n, len(CONFIG_COLUMNS)], as :class:`Candidates` has them.
    """
    want = wanted(workload, target)
    c = dict(zip(CONFIG_COLUMNS, config_columns.T, strict=True))
    cost = np.zeros(len(config_columns), dtype=np.float64)
    for name, weight in _WEIGHTS.items():
        cost += weight * np.abs(np.log2(c[name] / getattr(want, name)))
    # The rules know nothing of these: leave them alone unless nothing else is on offer.
    cost += 0.5 * (c["maxnreg"] > 0) + 0.05 * c["halves"] + 0.05 * c["flatten"]
    cost += 0.5 * np.where(want.tma, c["is_pointer"], 1 - c["is_pointer"])
    cost += 0.1 * c["is_persistent"] + 0.1 * c["is_warp_specialized"]
    return cost


# A wrong tile or split costs more than a wrong depth.
_WEIGHTS = {
    "block_m": 1.0, "block_n": 1.0, "block_k": 0.5, "num_warps": 0.7, "num_stages": 0.7,
    "split_k": 1.0, "group_m": 0.1,
}  # fmt: skip


def _small(w: Workload) -> Wanted:
    block_m, block_n = _fit(64, w.m, least=32), _fit(64, w.n, least=32)
    if -(-w.m // 64) * -(-w.n // 64) < 32:  # too few tiles for a GPU: halve them
        block_m = block_n = 32
    warps = {4096: 4, 2048: 2, 1024: 1}[block_m * block_n]
    return Wanted(block_m, block_n, _fit(32, w.k), warps, 2, 1, 8, tma=False)


def _large(w: Workload, sm_count: int) -> Wanted:
    block_m, block_n = _fit(128, w.m), _fit(256, w.n)
    if block_n <= 128:  # a narrow product takes its large side along M
        block_m = _fit(256, w.m)
    # Fewer tiles than multiprocessors: smaller ones, as long as they are worth loading.
    while _tiles(w, block_m, block_n) < sm_count and block_n > (32 if block_m <= 64 else 128):
        block_n //= 2
    split = _split(w, _tiles(w, block_m, block_n), sm_count)
    area = block_m * block_n
    block_k = _fit(64 if area > 2048 else 128, w.k)
    return Wanted(block_m, block_n, block_k, 8 if area > 16384 else 4, 4, split, 8, tma=True)


def _without_tensor_cores(w: Workload, sm_count: int) -> Wanted:
    block_m, block_n = _fit(64, w.m), _fit(64, w.n, least=32)
    if _tiles(w, block_m, block_n) < sm_count:
        block_m = min(block_m, 32)
    split = _split(w, _tiles(w, block_m, block_n), sm_count)
    block_k = _fit(64 if split > 1 else 32, w.k)  # a split waits less often with longer steps
    return Wanted(block_m, block_n, block_k, 4, 3, split, 8, tma=False)


def _split(w: Workload, tiles: int, sm_count: int) -> int:
    """Splits of K, a power of two, that occupy idle multiprocessors with 8 steps or more each."""
    idle = sm_count // max(tiles, 1)
    steps = max(w.k // 64, 1)
    return 1 << (max(min(idle, steps // 8, 16), 1).bit_length() - 1)


def _tiles(w: Workload, block_m: int, block_n: int) -> int:
    return -(-w.m // block_m) * -(-w.n // block_n)


def _fit(block: int, side: int, least: int = 16) -> int:
    """Halve a block while half of it still covers the side."""
    while block > least and block // 2 >= side:
        block //= 2
    return block
