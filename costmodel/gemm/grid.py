"""The points worth having on some workload or device, whether or not they may run on this one."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from costmodel.files import cached_fact
from costmodel.gemm.config import GemmConfig

__all__ = ["grid", "grid_hash"]


@functools.cache
def grid() -> tuple[GemmConfig, ...]:
    """Every point worth having on some workload or device; none twice."""
    points = (*_pointer(), *_pointer_split(), *_small(), *_tma_plain(), *_tma_split(),
              *_tma_persistent(), *_warp_specialized())  # fmt: skip
    points = (*points, *_group_variants(points), *_register_variants(points))
    return tuple(dict.fromkeys((*points, *_repack_variants(points))))


@functools.cache
def grid_hash() -> str:
    """Identity of the grid by the code that makes it: that takes a tenth of the time to read."""
    return cached_fact("grid", [Path(__file__)], lambda: {"hash": _hash()})["hash"]


def _hash() -> str:
    code = ast.unparse(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _tiles(rows: tuple[int, ...], columns: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return ((m, n) for m in rows for n in columns if 512 <= m * n <= 32768)


def _warps(area: int) -> tuple[int, ...]:
    """Warp counts that give a thread a sensible share of the tile."""
    return {512: (2, 4), 1024: (2, 4), 2048: (4,), 4096: (4,), 8192: (4, 8), 16384: (4, 8)}.get(
        area, (8,)
    )


def _splits(area: int) -> tuple[int, ...]:
    """Split-K factors; a small tile has few partial sums to add up, so it may have many splits."""
    return (2, 4, 8, 16, 32) if area <= 1024 else (2, 4, 8, 16)


def _pointer() -> Iterator[GemmConfig]:
    for m, n in _tiles((16, 32, 64, 128, 256), (16, 32, 64, 128, 256)):
        for k in (32, 64, 128):
            for warps in _warps(m * n):
                for stages in (2, 3, 4, 5) if k < 128 else (2, 3, 5):
                    yield GemmConfig("pointer", m, n, k, warps, stages)


def _pointer_split() -> Iterator[GemmConfig]:
    for m, n in _tiles((16, 32, 64, 128), (32, 64, 128)):
        for k in (64, 128):
            for stages in (3, 5):
                for split in _splits(m * n):
                    yield GemmConfig("pointer", m, n, k, 4, stages, split_k=split)


def _small() -> Iterator[GemmConfig]:
    """The rule for small sizes chooses among these."""
    for m, n in _tiles((16, 32, 64), (32, 64)):
        for k in (16, 32):
            for warps in (1, 2, 4):
                for stages in (1, 2):
                    yield GemmConfig("pointer", m, n, k, warps, stages)


def _tma_plain() -> Iterator[GemmConfig]:
    for m, n in _tiles((16, 32, 64, 128, 256), (16, 32, 64, 128, 256)):
        for k in (64, 128, 256):
            if n == 16 and k == 64:
                continue
            for warps in _warps(m * n):
                for stages in (3, 4, 5, 6, 8):
                    # A thin product wants all of its operands on the way at once.
                    if k == 256 and (m * n > 4096 or (stages > 5 and m * n > 1024)):
                        continue
                    for halves in (False, True) if m * n >= 16384 else (False,):
                        yield GemmConfig("tma", m, n, k, warps, stages, halves=halves)


def _tma_split() -> Iterator[GemmConfig]:
    for m, n in _tiles((16, 32, 64, 128), (16, 32, 64, 128, 256)):
        for k in (64, 128, 256) if m * n <= 2048 else (64, 128):
            if n == 16 and k == 64:
                continue
            for stages in (4, 6) if m * n <= 8192 else (3, 4):
                warps = 8 if m * n > 16384 else 4
                for split in _splits(m * n) if m * n <= 8192 else (2, 4, 8):
                    yield GemmConfig("tma", m, n, k, warps, stages, split_k=split)


def _tma_persistent() -> Iterator[GemmConfig]:
    for m, n in _tiles((64, 128, 256), (64, 128, 256)):
        for k in (64, 128):
            for warps in _warps(m * n):
                for stages in (3, 4, 5, 6):
                    for halves in (False, True) if m * n >= 16384 else (False,):
                        for flatten in (False, True):
                            yield GemmConfig(
                                "tma_persistent", m, n, k, warps, stages,
                                halves=halves, flatten=flatten,
                            )  # fmt: skip


def _warp_specialized() -> Iterator[GemmConfig]:
    """Two or three groups of four warps; widths between powers of two have two accumulators."""
    for m, warps in ((128, 8), (192, 12), (256, 8)):
        for n in (64, 96, 128, 160, 192, 256):
            for stages in range(3, 8):
                # One program has a multiprocessor to itself: a shallow ring would leave room idle.
                if (m + n) * 64 * 2 * stages < _RING_BYTES:
                    continue
                one_accumulator = not n & (n - 1)
                for halves in (False, True) if one_accumulator and n >= 128 else (False,):
                    yield GemmConfig("warp_specialized", m, n, 64, warps, stages, halves=halves)


_RING_BYTES = 96 * 1024


def _group_variants(points: tuple[GemmConfig, ...]) -> Iterator[GemmConfig]:
    """Other tile orders, for the large tiles that large problems want."""
    for point in points:
        large = min(point.block_m, point.block_n) >= 128 and point.block_k == 64
        depths = (3, 4, 5, 6) if point.kernel == "warp_specialized" else (3, 4)
        if large and point.split_k == 1 and point.num_stages in depths:
            for group in (1, 4, 16):
                yield replace(point, group_m=group)


def _register_variants(points: tuple[GemmConfig, ...]) -> Iterator[GemmConfig]:
    """Register limits, where they may buy another block per multiprocessor."""
    for point in points:
        area = point.block_m * point.block_n
        if point.split_k > 1 or point.halves or point.block_k != 64 or point.num_stages != 4:
            continue
        if point.kernel in ("tma_persistent", "warp_specialized") or area < 2048:
            continue
        for limit in (80, 96, 128, 160):
            yield replace(point, maxnreg=limit)


def _repack_variants(points: tuple[GemmConfig, ...]) -> Iterator[GemmConfig]:
    """The TMA kernels for operands that TMA cannot address as they are.

    They pay for large products, so the smallest tiles are left out.
    """
    for point in points:
        if point.kernel != "pointer" and point.block_m * point.block_n >= 2048:
            yield replace(point, repack=True)
