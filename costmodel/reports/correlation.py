"""Spearman's rank correlation of features with latency."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from costmodel.features.features import FEATURES
from costmodel.models.table import TrainingTable

ALL_KERNELS = "all kernels"
_LEAST_ROWS = 8  # of a kernel on a workload: fewer order nothing

_Floats = NDArray[np.float64]
Correlations = tuple[tuple[str, ...], Mapping[str, _Floats]]


def correlations(table: TrainingTable, top: int = 25) -> Correlations:
    """The features that go along most with latency among the configurations of a workload.

    Within a workload, since between workloads the sizes decide all; mean over the workloads,
    weighted by their rows. What is the same for all configurations of a workload counts as 0.

    Returns:
        (features, columns): the ``top`` features of the largest correlation over all kernels, by
        size, and for :data:`ALL_KERNELS` and each kernel their correlations, from -1 to 1. A
        kernel without enough rows is left out.
    """
    ok = table.ok()
    kernels = np.array([config.kernel for config in table.candidates.configs], dtype=object)
    groups = {ALL_KERNELS: ok} | {name: ok & (kernels == name) for name in sorted(set(kernels))}
    matrix = table.design_matrix(ptx=True)
    found = {}
    for name, rows in groups.items():
        means = _mean_correlation(matrix, table.latency_us, table.workload_index, rows)
        if means is not None:
            found[name] = means
    if not found:
        return (), {}
    order = np.argsort(-np.abs(found[ALL_KERNELS]), kind="stable")[:top]
    return tuple(FEATURES[i] for i in order), {name: mean[order] for name, mean in found.items()}


def _mean_correlation(
    matrix: NDArray[np.float32],
    latency_us: _Floats,
    workload_index: NDArray[np.intp],
    wanted: NDArray[np.bool_],
) -> _Floats | None:
    """Over the workloads, float64 [features]; None where none has rows enough."""
    rows = np.flatnonzero(wanted)
    rows = rows[np.argsort(workload_index[rows], kind="stable")]
    starts = np.flatnonzero(np.diff(workload_index[rows])) + 1
    total, weight = np.zeros(matrix.shape[1]), 0
    for part in np.split(rows, starts):
        if len(part) >= _LEAST_ROWS:
            total += len(part) * _spearman(matrix[part], latency_us[part])
            weight += len(part)
    return total / weight if weight else None


def _spearman(columns: NDArray[np.float32], latency_us: _Floats) -> _Floats:
    """Spearman correlation of each column with latency.

    Constant columns give 0; missing values take the middle rank.
    """
    both = np.column_stack([columns, latency_us])
    centred = _ranks(both)
    missing = np.isnan(both)
    centred[missing] = 0
    norms = np.sqrt((centred**2).sum(axis=0))
    norms[norms == 0] = np.inf
    result: _Floats = (centred[:, :-1].T @ centred[:, -1]) / (norms[:-1] * norms[-1])
    return result


def _ranks(values: _Floats) -> _Floats:
    """Ranks of each column, ties shared, about their middle."""
    from scipy.stats import rankdata  # type: ignore[import-untyped]

    ranks: _Floats = rankdata(np.nan_to_num(values, nan=-np.inf), axis=0).astype(np.float64)
    return ranks - (len(values) + 1) / 2
