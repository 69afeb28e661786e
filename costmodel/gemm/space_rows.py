"""The space of a workload as rows of the grid: what ranking asks, a hundred times as fast.

:class:`costmodel.gemm.space.SearchSpace` says why a point is not in the space; here it only counts
that it is not. Both are of the same rules, and a test holds them together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodel.gemm.config import GemmConfig
from costmodel.gemm.grid import grid
from costmodel.gemm.space import (
    MAX_GRID,
    WORKSPACE_LIMIT_BYTES,
    is_persistent,
    possible_configs,
    repack_elements,
)
from costmodel.gemm.workload import CodeClass, Workload
from costmodel.hardware.target import Target

__all__ = ["space_rows"]

_Integers = NDArray[np.int64]


def space_rows(workload: Workload, target: Target) -> NDArray[np.intp]:
    """Where ``SearchSpace.of(workload, target).configs`` are in ``grid()``, in the same order."""
    columns = _columns(workload.code, target)
    tiles_m = -(-workload.m // columns.block_m)
    tiles = tiles_m * -(-workload.n // columns.block_n)
    steps = np.maximum(-(-workload.k // columns.block_k), 1)
    busy = -(-steps // -(-steps // columns.split_k))
    blocks = tiles * columns.split_k + np.where(columns.persistent, target.device.sm_count, 0)
    # In floating point, since integers of 64 bits may not hold it; exact as far as the limit.
    area = 4.0 * columns.block_m * columns.block_n * columns.split_k
    partial = np.where(columns.split_k > 1, tiles * area, 0.0)
    copies = float(sum(repack_elements(workload)) * workload.code.itemsize)
    fits = partial + np.where(columns.repack, copies, 0) <= WORKSPACE_LIMIT_BYTES
    legal = np.flatnonzero(fits & (blocks <= MAX_GRID) & (columns.split_k <= busy))
    effective = np.minimum(columns.group_m, np.maximum(tiles_m, 1))
    same = columns.but_for_group * (int(columns.group_m.max(initial=0)) + 1) + effective
    first = np.unique(same[legal], return_index=True)[1]
    rows: NDArray[np.intp] = columns.row[legal[np.sort(first)]]
    return rows


@dataclass(frozen=True)
class _Columns:
    """The points of the grid that a class of code leaves, one row each.

    Attributes:
        row: where it is in the grid.
        but_for_group: equal for those that differ in ``group_m`` only.
    """

    row: NDArray[np.intp]
    block_m: _Integers
    block_n: _Integers
    block_k: _Integers
    group_m: _Integers
    split_k: _Integers
    repack: NDArray[np.bool_]
    persistent: NDArray[np.bool_]
    but_for_group: _Integers


@functools.lru_cache(maxsize=64)
def _columns(code: CodeClass, target: Target) -> _Columns:
    row_of = {config: row for row, config in enumerate(grid())}
    configs = possible_configs(code, target)
    numbers: dict[GemmConfig, int] = {}
    alike = [numbers.setdefault(replace(c, group_m=1), len(numbers)) for c in configs]

    def integers(name: str) -> _Integers:
        return np.array([getattr(c, name) for c in configs], dtype=np.int64)

    return _Columns(
        np.array([row_of[c] for c in configs], dtype=np.intp),
        integers("block_m"),
        integers("block_n"),
        integers("block_k"),
        integers("group_m"),
        integers("split_k"),
        np.array([c.repack for c in configs], dtype=bool),
        np.array([is_persistent(c) for c in configs], dtype=bool),
        np.array(alike, dtype=np.int64),
    )
