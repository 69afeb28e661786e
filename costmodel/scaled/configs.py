"""The configurations of scaled products: a list made by hand, and the part of it for a shape.

Up to m = 128 a product takes as long as B takes to be read: many small programs with deep
pipelines, and K split so that every multiprocessor has some. Above, the tensor cores limit it, and
the L2 cache that feeds them: large tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import torch
import triton

from costmodel.hardware.target import Target

STEP = 128
"""K that a scale of a block covers, and after which sums of fp8 products are promoted."""

_WAVES = (1.0, 2.0, 4.0)  # programs of a multiprocessor that splits of K aim at
_POINTER = {
    16: [(16, 64, 4, 4), (16, 64, 4, 8), (16, 128, 4, 4), (16, 128, 4, 8), (16, 128, 8, 6)],
    32: [(32, 64, 4, 4), (32, 64, 4, 8), (32, 128, 4, 4), (32, 128, 4, 6), (32, 128, 8, 6)],
    64: [(64, 64, 4, 3), (64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 8, 5)],
    128: [(64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 4, 5), (128, 128, 8, 4)],
    512: [(64, 128, 4, 3), (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 4)],
    1 << 62: [(128, 128, 4, 3), (128, 128, 8, 4), (128, 256, 8, 3)],
}
"""Up to which m: BLOCK_M, BLOCK_N, warps and stages of the kernel with plain loads."""

_WIDE_STEP = {16: [(64, 4, 4), (128, 4, 3)], 32: [(64, 4, 4), (128, 8, 3)], 64: [(64, 4, 3)]}
"""BLOCK_N, warps and stages with steps of 256, where no step of 128 has to be promoted."""

_WARPS = [(2, 64, 64, 6), (2, 64, 128, 4), (2, 64, 128, 6), (3, 64, 128, 5)]
_WARPS_ONE_SUM = [(2, 64, 256, 4), (2, 128, 128, 4)]
"""Groups, ROWS, BLOCK_N and stages of the warp-specialised kernel; those with one sum only need
the registers of a second one."""


def _pointer(rows: int, block_n: int, warps: int, stages: int, step: int, splits: int) -> Any:
    meta = {"kernel": "pointer", "block_m": rows, "block_n": block_n, "step": step}
    return triton.Config({**meta, "splits": splits}, num_warps=warps, num_stages=stages)


def configurations() -> list[triton.Config]:
    """Return all configurations; the first is torch."""
    found = [triton.Config({"kernel": "torch"})]
    points = {(*point, STEP) for points in _POINTER.values() for point in points}
    points |= {(m, *point, 2 * STEP) for m, points in _WIDE_STEP.items() for point in points}
    for point in sorted(points):
        found += [_pointer(*point, splits) for splits in (1, 2, 3, 4, 6, 8, 12, 16)]
    for groups, rows, block_n, stages in _WARPS + _WARPS_ONE_SUM:
        meta = {"kernel": "warps", "groups": groups, "rows": rows, "block_n": block_n}
        found.append(triton.Config(meta, num_warps=4, num_stages=stages))
    return found


def prune(configs: Sequence[triton.Config], named: Mapping[str, Any], **_: Any) -> list[Any]:
    """Return the configurations worth timing for a call: for ``early_config_prune``."""
    device = Target.current(torch.cuda.current_device()).device
    m, n, k = named["bucket"], named["n"], named["k"]
    is_int = named["a"].dtype == torch.int8
    promotes = not is_int and not named["fast"]
    bucket = next(most for most in _POINTER if m <= most)
    points = {(*point, STEP) for point in _POINTER[bucket]}
    if not promotes:
        points |= {(bucket, *point, 2 * STEP) for point in _WIDE_STEP.get(bucket, ())}
    found = []
    for config in configs:
        c = config.kwargs
        if c["kernel"] == "torch":
            if torch_may(named):
                found.append(config)
        elif c["kernel"] == "warps":
            second_sum = (c["groups"], c["rows"], c["block_n"], config.num_stages) in _WARPS_ONE_SUM
            aligned = all(named[x] * named[y].itemsize % 16 == 0 for x, y in _ROWS)
            based = all(named[x].data_ptr() % 16 == 0 for _, x in _ROWS)
            fits = device.architecture.instruction == "wgmma" and aligned and based
            too_wide = is_int and c["block_n"] > 128  # Triton has no such instruction
            if fits and m > 64 and not too_wide and not (promotes and second_sum):
                found.append(config)
        else:
            point = (c["block_m"], c["block_n"], config.num_warps, config.num_stages, c["step"])
            tiles = ceil(m / c["block_m"]) * ceil(n / c["block_n"])
            steps = ceil(k / c["step"])
            if point in points and c["splits"] in _splits(tiles, steps, device.sm_count):
                found.append(config)
    return found


_ROWS = (("lda", "a"), ("ldb", "b"), ("ldc", "out"))


def torch_may(named: Mapping[str, Any]) -> bool:
    """Return False where torch is known to refuse the call, for some m of its bucket."""
    m, n, k = named["m"], named["n"], named["k"]
    if named["a"].dtype == torch.int8:
        return m > 16 and k % 8 == 0 and n % 8 == 0
    # Its block scales take no m that is not a multiple of 4; 16 is what the key tells apart.
    return n % 16 == 0 and k % 16 == 0 and (named["recipe_a"] < 4 or m % 16 == 0)


def _splits(tiles: int, steps: int, sm_count: int) -> set[int]:
    """Return in how many parts K may be split: what comes nearest to so many waves."""
    choices = [s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s == 1 or 2 * s <= steps]
    wanted = [max(waves * sm_count / tiles, 1.0) for waves in _WAVES]
    return {min(choices, key=lambda s, w=w: max(s / w, w / s)) for w in wanted}  # type: ignore[misc]
