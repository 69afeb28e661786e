"""Folds of training workloads that share no pair (n, k), and which of their rows count as picks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InvalidInput
from costmodel.gemm.space import legality
from costmodel.models.table import TrainingTable

__all__ = ["folds_by_nk", "legal_rows"]


def folds_by_nk(table: TrainingTable, folds: int, *, seed: int = 0) -> Iterator[NDArray[np.intp]]:
    """Workloads of each fold; one pair (n, k) never lies in two.

    Raises:
        InvalidInput: fewer pairs than folds.
    """
    groups = table.groups()
    pairs = np.unique(groups)
    if not 2 <= folds <= len(pairs):
        raise InvalidInput(
            f"{folds} folds of {len(pairs)} pairs (n, k): expected at least 2 folds and as many "
            f"pairs as folds"
        )
    np.random.default_rng(seed).shuffle(pairs)
    for part in np.array_split(pairs, folds):
        yield np.flatnonzero(np.isin(groups, part))


def legal_rows(table: TrainingTable) -> NDArray[np.bool_]:
    """Which rows may run, bool [n]: what was recorded before a filter knew better is no pick."""
    configs = zip(table.candidates.configs, table.workload_index.tolist(), strict=True)
    devices = [target.device for target in table.target_of_each()]
    return np.array(
        [not legality(c, table.workloads[w], devices[w]) for c, w in configs], dtype=bool
    )
