"""The points worth having on some workload or device, whether or not they may run on this one."""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from costmodel.files import cached_fact
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import families, family

_Integers = NDArray[np.int64]
_Bools = NDArray[np.bool_]


@functools.cache
def grid() -> tuple[GemmConfig, ...]:
    """Every point worth having on some workload or device; none twice."""
    points = tuple(point for one in families().values() for point in one.points())
    points = (*points, *_group_variants(points), *_register_variants(points))
    return tuple(dict.fromkeys((*points, *_repack_variants(points))))


@dataclass(frozen=True)
class ConfigColumns:
    """Points of the grid of one family as columns, named as the fields of a configuration.

    Attributes:
        row: where they are in the grid.
        but_for_group: a number, equal for those that differ in ``group_m`` only.
    """

    row: NDArray[np.intp]
    but_for_group: _Integers
    block_m: _Integers
    block_n: _Integers
    block_k: _Integers
    num_warps: _Integers
    num_stages: _Integers
    maxnreg: _Integers
    group_m: _Integers
    split_k: _Integers
    halves: _Bools
    flatten: _Bools
    repack: _Bools

    def __len__(self) -> int:
        return len(self.row)

    def only(self, which: _Bools) -> ConfigColumns:
        """Return the rows that are True."""
        return ConfigColumns(*(getattr(self, f.name)[which] for f in fields(self)))


@functools.cache
def grid_columns() -> dict[str, ConfigColumns]:
    """The grid as columns, by family."""
    numbers: dict[tuple[object, ...], int] = {}
    but_for_group = attrgetter(*(f.name for f in fields(GemmConfig) if f.name != "group_m"))
    alike = [numbers.setdefault(but_for_group(c), len(numbers)) for c in grid()]
    found = {}
    for name in families():
        rows = [row for row, config in enumerate(grid()) if config.kernel == name]
        columns = [
            np.array([getattr(grid()[row], f.name) for row in rows])
            for f in fields(ConfigColumns)[2:]
        ]
        found[name] = ConfigColumns(
            np.array(rows, dtype=np.intp), np.array(alike, dtype=np.int64)[rows], *columns
        )
    return found


@functools.cache
def grid_hash() -> str:
    """Identity of the grid by the code that makes it: that takes a tenth of the time to read."""
    modules = (sys.modules[type(one).__module__] for one in families().values())
    files = [Path(__file__), *(Path(str(module.__file__)) for module in modules)]
    return cached_fact("grid", files, lambda: {"hash": _hash(files)})["hash"]


def _hash(files: list[Path]) -> str:
    code = "\n".join(ast.unparse(ast.parse(file.read_text(encoding="utf-8"))) for file in files)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def tiles(rows: tuple[int, ...], columns: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Pairs of sides of a tile that is neither too small nor too large."""
    return ((m, n) for m in rows for n in columns if 512 <= m * n <= 32768)


def warps(area: int) -> tuple[int, ...]:
    """Warp counts that give a thread a sensible share of the tile."""
    return {512: (2, 4), 1024: (2, 4), 2048: (4,), 4096: (4,), 8192: (4, 8), 16384: (4, 8)}.get(
        area, (8,)
    )


def splits(area: int) -> tuple[int, ...]:
    """Split-K factors; a small tile has few partial sums to add up, so it may have many splits."""
    return (2, 4, 8, 16, 32) if area <= 1024 else (2, 4, 8, 16)


def _group_variants(points: tuple[GemmConfig, ...]) -> Iterator[GemmConfig]:
    """Other tile orders, for the large tiles that large problems want."""
    for point in points:
        large = min(point.block_m, point.block_n) >= 128 and point.block_k == 64
        if (
            large and point.split_k == 1
            and point.num_stages in family(point.kernel).group_depths
        ):  # fmt: skip
            for group in (1, 4, 16):
                yield replace(point, group_m=group)


def _register_variants(points: tuple[GemmConfig, ...]) -> Iterator[GemmConfig]:
    """Register limits, where they may buy another block per multiprocessor."""
    for point in points:
        area = point.block_m * point.block_n
        if point.split_k > 1 or point.halves or point.block_k != 64 or point.num_stages != 4:
            continue
        if not family(point.kernel).limits_registers or area < 2048:
            continue
        for limit in (80, 96, 128, 160):
            yield replace(point, maxnreg=limit)


def _repack_variants(points: tuple[GemmConfig, ...]) -> Iterator[GemmConfig]:
    """The TMA kernels for operands that TMA cannot address as they are.

    They pay for large products, so the smallest tiles are left out.
    """
    for point in points:
        reads_by_descriptor = family(point.kernel).reads_by_descriptor
        if reads_by_descriptor and point.block_m * point.block_n >= 2048:
            yield replace(point, repack=True)
