"""The configurations of scaled products: a list made by hand, and the part of it for a shape.

Up to m = 128 a product takes as long as reading B. It needs many small programs with deep
pipelines, and K split so that every multiprocessor has some. A larger product is limited by the
tensor cores and by the L2 cache that feeds them. It needs large tiles.
"""

from importlib.util import find_spec
from math import ceil
from typing import Any

import torch
import triton

from costmodel.files import Named
from costmodel.hardware.target import Device, Target

STEP = 128
"""Length of K that a scale of a block covers, and after which sums of fp8 products are promoted."""

TENSOR, ROW, BY_ROW, BY_BLOCK = 0, 1, 4, 5
"""Kinds of scales, numbered as torch's ``ScalingType``; from ``BY_ROW`` on they are of blocks."""

_SPLITS = (*range(1, 9), 10, 12, 14, 16)
# By the largest m: the kernel, BLOCK_N, warps, stages, and BLOCK_M if it is not that m, or 128.
_TILES = {
    16: ["pointer 64 4 4", "pointer 64 4 8", "pointer 128 4 4", "tma 64 4 4", "tma 64 4 8",
         "tma 128 4 4", "tma 128 4 8", "tma 32 4 8 64"],
    32: ["pointer 64 4 4", "pointer 64 4 8", "pointer 128 4 4", "tma 64 4 4", "tma 64 4 8",
         "tma 128 4 6", "tma 32 4 8 64"],
    64: ["pointer 64 4 3", "pointer 64 4 6", "pointer 128 8 5", "tma 64 4 3", "tma 64 4 6",
         "tma 128 4 5", "tma 256 8 4", "tma 32 4 8"],
    128: ["pointer 128 8 4", "tma 64 4 3", "tma 64 4 5", "tma 64 8 5", "tma 128 8 3",
          "tma 128 8 5"],
    512: ["pointer 64 4 4", "pointer 128 8 3", "tma 64 4 4", "tma 128 4 3", "tma 128 8 4"],
    1 << 62: ["pointer 128 8 3", "tma 128 8 4", "tma 256 8 3"],
}  # fmt: skip

# The same with steps of 256, where scales do not change along K.
_WIDE_STEP = {16: ["tma 64 4 4", "tma 128 4 3"], 32: ["tma 64 4 4"], 64: ["tma 64 4 3"]}

# Groups, ROWS, BLOCK_N, PARTS and stages of the warp-specialised kernel: always; if sums are
# promoted; and if they are not, which leaves registers for larger tiles.
_WARPS = [(2, 64, 64, 1, 8), (2, 64, 128, 1, 6), (3, 64, 128, 1, 5)]
_WARPS_PROMOTED = [(2, 64, 128, 2, 4)]
_WARPS_ONE_SUM = [(2, 64, 256, 1, 4), (2, 128, 128, 1, 4)]


def _tiles(most_m: int, by_blocks: bool) -> list[Named]:
    """Return the options of the kernel of tiles for a bucket of ``_TILES``, without splits."""
    steps = [(STEP, point) for point in _TILES[most_m]]
    if not by_blocks:
        steps += [(2 * STEP, point) for point in _WIDE_STEP.get(most_m, ())]
    found = []
    for step, point in steps:
        kernel, *numbers = point.split()
        block_n, warps, stages, *rows = map(int, numbers)
        found.append({
            "kernel": kernel, "block_m": rows[0] if rows else min(most_m, 128),
            "block_n": block_n, "step": step, "num_warps": warps, "num_stages": stages,
        })  # fmt: skip
    return found


def _config(num_warps: int = 4, num_stages: int = 3, **meta: Any) -> triton.Config:
    return triton.Config(meta, num_warps=num_warps, num_stages=num_stages)


def _warps(point: tuple[int, ...]) -> triton.Config:
    groups, rows, columns, parts, stages = point
    return _config(
        kernel="warps", block_m=groups * rows, block_n=parts * columns, step=STEP, groups=groups,
        parts=parts, num_stages=stages,
    )  # fmt: skip


def prune(_configs: Any, named: Named, **_: Any) -> list[triton.Config]:
    """Return the configurations worth timing for a call, libraries last: ``early_config_prune``."""
    device = Target.current(torch.cuda.current_device()).device
    m, n, k = named["bucket"], named["n"], named["k"]
    is_int = named["a"].dtype == torch.int8
    has_tma = device.architecture.instruction == "wgmma" and _is_aligned(named, a="lda", b="ldb")
    found = []
    most_m = next(most for most in _TILES if m <= most)
    for tiles in _tiles(most_m, named["recipe_a"] >= BY_ROW):
        if tiles["kernel"] == "pointer" or has_tma:
            splits = sorted(_splits(tiles, m, n, k, device))
            found += [_config(**tiles, splits=split) for split in splits]
    # Up to m = 64 half the rows of these tiles are empty, but empty ones are not read, and copies
    # wait for nothing there.
    # The tuner tells other rows than torch's apart by whether 16 divides them.
    by_16 = named["torchs"] or named["ldc"] % 16 == 0
    if has_tma and m > 32 and by_16 and _is_aligned(named, out="ldc"):
        points = _WARPS + (_WARPS_ONE_SUM if is_int or named["fast"] else _WARPS_PROMOTED)
        if named["recipe_b"] == BY_ROW:  # a scale for each column: larger tiles lack the registers
            points = _WARPS[:2]
        # Triton has no instruction of 256 columns for int8.
        found += [_warps(point) for point in points if not is_int or point[2] <= 128]
    return found + [library for library, may in LIBRARIES.items() if may(named)]


def _is_aligned(named: Named, **strides: str) -> bool:
    """Return True if TMA can address these matrices, by the names of their strides."""
    return all(
        named[x].data_ptr() % 16 == 0 and named[stride] * named[x].itemsize % 16 == 0
        for x, stride in strides.items()
    )


def torch_may(named: Named) -> bool:
    """Return False where torch is known to refuse the call, for some m of its bucket."""
    is_int = named["a"].dtype == torch.int8
    of = 8 if is_int else 16
    fits = named["n"] % of == named["k"] % of == 0 and named["torchs"]
    return bool(fits and (named["m"] > 16 or not is_int))


def deep_gemm_may(named: Named) -> bool:
    """Return True if DeepGEMM is installed, and the call has the one form that is supported."""
    return (
        (named["recipe_a"], named["recipe_b"]) == (BY_ROW, BY_BLOCK)
        and named["bias"] is None
        and named["activation"] == "none"
        and named["out"].dtype == torch.bfloat16
        and find_spec("deep_gemm") is not None
    )


LIBRARIES = {_config(kernel="torch"): torch_may, _config(kernel="deep_gemm"): deep_gemm_may}
"""Candidates that are no kernels of this package, with functions that tell if they may be used."""


def _splits(tiles: Named, m: int, n: int, k: int, device: Device) -> set[int]:
    """Return the splits of K that give one, two and four programs to each multiprocessor.

    At most half of the programs may have to wait because the shared memory holds no more.
    """
    rows, columns, step = tiles["block_m"], tiles["block_n"], tiles["step"]
    count, steps = ceil(m / rows) * ceil(n / columns), ceil(k / step)
    held = device.sm_shared_bytes // ((rows + columns) * step * tiles["num_stages"])
    choices = [s for s in _SPLITS if s == 1 or 2 * s <= steps]
    found = set()
    for waves in (1, 2, 4):
        if waves <= 2 * max(held, 1):
            programs = waves * device.sm_count
            found.add(max([s for s in choices if s * count <= programs], default=1))
    return found
