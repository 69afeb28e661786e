"""The search space: rules of the kernel families, asked of one configuration or of the grid.

:func:`why_illegal` says why one cannot run; :func:`space_rows` is the grid less what cannot run and
what would only repeat another point; :class:`SearchSpace` has a reason for whatever is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import (
    Check,
    at_least,
    at_most,
    families,
    family,
    is_wide,
    partial_bytes,
    repack_elements,
)
from costmodel.gemm.grid import ConfigColumns, grid, grid_columns
from costmodel.gemm.kernel_code import kernel_trouble
from costmodel.gemm.workload import CodeClass, Workload
from costmodel.hardware.target import Device, Target

__all__ = [
    "SearchSpace",
    "is_wide",
    "launch_blocks",
    "repack_elements",
    "space_rows",
    "why_illegal",
    "workspace_bytes",
]  # fmt: skip


@dataclass(frozen=True)
class SearchSpace:
    """The configurations that may run one workload on one target.

    Attributes:
        workload, target: what the space is of.
        configs: legal and distinct, in the order of the grid.
    """

    workload: Workload
    target: Target
    configs: tuple[GemmConfig, ...]

    @classmethod
    def of(cls, workload: Workload, target: Target) -> SearchSpace:
        """Sort the whole grid. Nothing is compiled, no GPU is asked."""
        configs = grid()
        return cls(workload, target, tuple(configs[row] for row in space_rows(workload, target)))

    def __len__(self) -> int:
        return len(self.configs)

    @property
    def rejected(self) -> dict[GemmConfig, str]:
        """Return why the other points of the grid cannot run."""
        return self._reasons[0]

    @property
    def redundant(self) -> dict[GemmConfig, str]:
        """Return the points that would do the same as another, and which."""
        return self._reasons[1]

    @functools.cached_property
    def _reasons(self) -> tuple[dict[GemmConfig, str], dict[GemmConfig, str]]:
        workload, device = self.workload, self.target.device
        aligned = not any(workload.code.needs_repack())
        trouble = {name: kernel_trouble(name, self.target.toolchain) for name in families()}
        found = {_effective(config, workload): config for config in self.configs}
        chosen = set(self.configs)
        rejected, redundant = {}, {}
        for config in grid():
            if config in chosen:
                continue
            if config.repack and aligned:
                redundant[config] = "repack: every operand is aligned as it is"
            elif reason := trouble[config.kernel] or why_illegal(config, workload, device):
                rejected[config] = reason
            elif same := found.get(_effective(config, workload)):
                redundant[config] = f"runs as {same} does"
            else:
                redundant[config] = _idle_splits(config, workload).reason()
        return rejected, redundant


def why_illegal(config: GemmConfig, workload: Workload, device: Device) -> str:
    """Return why this configuration cannot compile or launch; empty if it can.

    Spills are no reason: some spilling configurations win. The first reason found is given.
    """
    of = family(config.kernel)
    for checks in (
        of.checks(config, workload.code, device),
        of.size_checks(config, workload, device),
    ):
        for check in checks:
            if check.broken:
                return check.reason()
    return ""


def space_rows(workload: Workload, target: Target) -> NDArray[np.intp]:
    """Return where the configurations of the space are in ``grid()``, in ascending order."""
    rows, same = [], []
    for name, c in _possible(workload.code, target).items():
        checks = family(name).size_checks(c, workload, target.device)
        legal = ~_broken((*checks, _idle_splits(c, workload)), len(c))
        rows.append(c.row[legal])
        same.append((c.but_for_group * (1 << 32) + _effective_group(c, workload))[legal])
    order = np.argsort(np.concatenate(rows))
    first = np.unique(np.concatenate(same)[order], return_index=True)[1]
    found: NDArray[np.intp] = np.concatenate(rows)[order][np.sort(first)]
    return found


@functools.lru_cache(maxsize=64)
def _possible(code: CodeClass, target: Target) -> dict[str, ConfigColumns]:
    """Return the points of the grid that may run products of some sizes, by family."""
    found = {}
    aligned = not any(code.needs_repack())
    for name, c in grid_columns().items():
        left = c.only(np.full(len(c), not kernel_trouble(name, target.toolchain)))
        broken = _broken(family(name).checks(left, code, target.device), len(left))
        found[name] = left.only(~(broken | (left.repack & aligned)))
    return found


def _broken(checks: Iterable[Check], rows: int) -> NDArray[np.bool_]:
    broken = np.zeros(rows, dtype=bool)
    for check in checks:
        broken |= check.broken
    return broken


def launch_blocks(config: GemmConfig, m: int, n: int, sm_count: int) -> int:
    """Return how many programs a launch has."""
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    return family(config.kernel).blocks(config, tiles, sm_count)


def workspace_bytes(config: GemmConfig, m: int, n: int) -> int:
    """Return the bytes of the partial sums of split-K (float32), 0 without a split."""
    return int(partial_bytes(config, m, n))


def _idle_splits(c: Any, workload: Workload) -> Check:
    """Check that every split of K has a step to compute."""
    steps = at_least(-(-workload.k // c.block_k), 1)
    busy = -(-steps // -(-steps // c.split_k))
    text = "split-K: K has {} steps of {}, {} splits do the same"
    return Check(c.split_k > busy, text, (steps, c.block_k, busy))


def _effective_group(c: Any, workload: Workload) -> Any:
    """Return ``group_m``, cut to the rows of tiles that there are."""
    return at_most(c.group_m, at_least(-(-workload.m // c.block_m), 1))


def _effective(config: GemmConfig, workload: Workload) -> GemmConfig:
    group_m = _effective_group(config, workload)
    return config if group_m == config.group_m else replace(config, group_m=group_m)
