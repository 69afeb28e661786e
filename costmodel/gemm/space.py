"""The search space: the grid of all points, and the rules of which may run where.

:func:`why_illegal` says why a point cannot run. :func:`space_rows` gives the grid without the
points that cannot run and those that would only repeat another point. :class:`SearchSpace` has a
reason for each point that is left out.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from costmodel.arrays import Indices, Mask
from costmodel.files import cached_fact, digest
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import Check, families, family
from costmodel.gemm.specialize import SOURCES, kernel_trouble
from costmodel.gemm.workload import CodeClass, Workload
from costmodel.hardware.target import Device, Target

Columns = SimpleNamespace
"""Points of the grid of one family, as columns: arrays that are named as in a configuration."""


@cache
def grid() -> tuple[GemmConfig, ...]:
    """Every point worth having on some workload or device; none twice."""
    found = [point for of in families().values() for point in of.points()]
    # Other tile orders, for the large tiles that large problems want.
    orders = [
        replace(c, group_m=group)
        for c in found
        if min(c.block_m, c.block_n) >= 128 and c.block_k == 64
        if c.split_k == 1 and c.num_stages in family(c.kernel).group_depths
        for group in (1, 4, 16)
    ]
    # Register limits, where they may buy another block per multiprocessor.
    limits = [
        replace(c, maxnreg=limit)
        for c in found
        if family(c.kernel).limits_registers and c.block_m * c.block_n >= 2048 and c.split_k == 1
        if not c.halves and c.block_k == 64 and c.num_stages == 4
        for limit in (80, 96, 128, 160)
    ]
    found += orders + limits
    # The TMA kernels with copies of operands that TMA cannot address as they are. Copies pay off
    # for large products only, so the smallest tiles are left out.
    repacked = (
        replace(c, repack=True)
        for c in found
        if family(c.kernel).reads_by_descriptor and c.block_m * c.block_n >= 2048
    )
    return tuple(dict.fromkeys((*found, *repacked)))


@cache
def grid_columns() -> dict[str, Columns]:
    """Return the grid as columns, by family.

    Besides the fields of a configuration, ``row`` is the place in the grid, and ``but_for_group`` a
    number that is equal for points that differ only in ``group_m``.
    """
    names = [*GemmConfig.__dataclass_fields__]
    but_for_group = attrgetter(*(name for name in names if name != "group_m"))
    numbers: dict[object, int] = {}
    alike = np.array([numbers.setdefault(but_for_group(c), len(numbers)) for c in grid()])
    found = {}
    for family_name in families():
        rows = np.array([i for i, c in enumerate(grid()) if c.kernel == family_name], dtype=int)
        columns = {name: np.array([getattr(grid()[i], name) for i in rows]) for name in names}
        if rows.size:
            found[family_name] = Columns(row=rows, but_for_group=alike[rows], **columns)
    return found


@cache
def grid_hash() -> str:
    """Return the identity of the grid: the hash of its points, which take 30 ms to make."""
    modules = (sys.modules[type(one).__module__] for one in families().values())
    files = {*SOURCES, *(Path(str(module.__file__)) for module in modules)}
    found = cached_fact("grid", files, lambda: {"hash": digest("\n".join(map(str, grid())))})
    return found["hash"]


@dataclass(frozen=True)
class SearchSpace:
    """The configurations that may run one workload on one target.

    Attributes:
        workload, target: those of the space.
        configs: legal and distinct, in the order of the grid.
    """

    workload: Workload
    target: Target
    configs: tuple[GemmConfig, ...]

    @classmethod
    def of(cls, workload: Workload, target: Target) -> Self:
        """Select the legal configurations of the grid. Compiles nothing and needs no GPU."""
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
        """Return the points that would do the same as another, and why."""
        return self._reasons[1]

    @cached_property
    def _reasons(self) -> tuple[dict[GemmConfig, str], dict[GemmConfig, str]]:
        workload, device, tools = self.workload, self.target.device, self.target.toolchain
        aligned = not any(workload.code.needs_repack())

        def effective(config: GemmConfig) -> GemmConfig:
            return replace(config, group_m=int(effective_group(config, workload)))

        found = {effective(config): config for config in self.configs}
        chosen = set(self.configs)
        rejected, redundant = {}, {}
        for config in grid():
            if config in chosen:
                continue
            if config.repack and aligned:
                redundant[config] = "repack: every operand is aligned as it is"
            elif reason := kernel_trouble(config.kernel, tools) or why_illegal(
                config, workload, device
            ):
                rejected[config] = reason
            elif same := found.get(effective(config)):
                redundant[config] = f"runs as {same} does"
            else:
                redundant[config] = _idle_splits(config, workload).reason()
        return rejected, redundant


def why_illegal(config: GemmConfig, workload: Workload, device: Device) -> str:
    """Return why this configuration cannot compile or launch; empty if it can.

    Spills are no reason: some spilling configurations win. The first reason found is given.
    """
    of = family(config.kernel)
    for check in chain(
        of.checks(config, workload.code, device), of.size_checks(config, workload, device)
    ):
        if check.broken:
            return check.reason()
    return ""


def space_rows(workload: Workload, target: Target) -> Indices:
    """Return the places in ``grid()`` of the configurations of the space, in ascending order."""
    # By place in the grid: a number that is equal for points that run alike; -1 if one cannot run.
    runs_as = np.full(len(grid()), -1)
    for name, c in _possible(workload.code, target).items():
        checks = family(name).size_checks(c, workload, target.device)
        legal = ~_broken((*checks, _idle_splits(c, workload)), c)
        same = c.but_for_group * (1 << 32) + effective_group(c, workload)
        runs_as[c.row[legal]] = same[legal]
    rows = np.flatnonzero(runs_as >= 0)
    return rows[np.sort(np.unique(runs_as[rows], return_index=True)[1])]


@lru_cache(maxsize=64)
def _possible(code: CodeClass, target: Target) -> dict[str, Columns]:
    """Return the points of the grid that may run this class of code if sizes allow, by family."""
    found = {}
    aligned = not any(code.needs_repack())
    for name, c in grid_columns().items():
        if not kernel_trouble(name, target.toolchain):
            legal = ~_broken(family(name).checks(c, code, target.device), c)
            legal &= ~(c.repack & aligned)
            found[name] = Columns(**{field: values[legal] for field, values in vars(c).items()})
    return found


def _broken(checks: Iterable[Check], c: Columns) -> Mask:
    broken = np.zeros(len(c.row), dtype=bool)
    for check in checks:
        broken |= check.broken
    return broken


def _idle_splits(c: Any, workload: Workload) -> Check:
    """Check that every split of K has a step to compute."""
    steps = np.maximum(-(-workload.k // c.block_k), 1)
    busy = -(-steps // -(-steps // c.split_k))
    text = "split-K: K has {} steps of {}, {} splits do the same"
    return Check(c.split_k > busy, text, (steps, c.block_k, busy))


def effective_group(c: Any, workload: Workload) -> Any:
    """Return ``group_m``, cut to the rows of tiles that there are."""
    return np.minimum(c.group_m, np.maximum(-(-workload.m // c.block_m), 1))
