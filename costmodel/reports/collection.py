"""The tables about a collection: features that go with latency, failures by kind, noise."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from costmodel.arrays import Floats, Floats32, Mask
from costmodel.data.dataset import Dataset
from costmodel.data.measurement_table import Columns
from costmodel.evaluation.heldout import is_ragged
from costmodel.features.features import FEATURES
from costmodel.models import TrainingTable

ALL, FEATURES_TITLE = "all", "Features and latency"

_LEAST_ROWS = 8  # of a class on a workload: fewer tell nothing about an order


class Table(NamedTuple):
    """A table: numbers to the right and shortened, None and NaN as a dash."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def tables_of(dataset: Dataset) -> dict[str, Table]:
    """Return tables by their titles.

    Features are those of the training rows; of the eval rows if no training row worked.
    """
    data = TrainingTable.from_dataset(dataset)
    if not data.ok.any():
        data = TrainingTable.from_dataset(dataset, "eval")
    found = correlations(data)
    values = np.transpose([*found.values()]).tolist()
    rows = [[name, *row] for name, row in zip(FEATURES, values, strict=False)]
    rows.sort(key=lambda row: -abs(row[1]))
    features = Table(["feature", *found], rows)
    return {FEATURES_TITLE: features, "Failures and noise": _outcomes(dataset)}


def correlations(table: TrainingTable) -> dict[str, Floats]:
    """Correlate each feature with latency among the configurations of a workload.

    It is done within each workload, since between workloads the sizes decide all. The result is the
    mean over the workloads, weighted by their rows. A feature that is the same for all
    configurations of a workload counts as 0.

    Returns:
        For :data:`ALL` and each class, float64 [features] from -1 to 1. A class without enough rows
        is left out.
    """
    table = table.take(table.ok)
    matrix, found = table.design_matrix(ptx=True), {}

    @cache  # most classes have all rows of a workload, or none
    def correlated(rows: bytes) -> Floats:
        chosen = np.frombuffer(rows, dtype=np.intp)
        return _spearman(matrix[chosen], table.latency_us[chosen])

    for name, wanted in _classes(table, [c.kernel for c in table.candidates.configs]).items():
        parts = [rows[wanted[rows]] for *_, rows in table.parts()]
        parts = [rows for rows in parts if len(rows) >= _LEAST_ROWS]
        if parts:
            each = [correlated(rows.tobytes()) for rows in parts]
            found[name] = np.average(each, axis=0, weights=[*map(len, parts)])
    return found


def _classes(table: Columns, kernels: Sequence[str]) -> dict[str, Mask]:
    """Return the rows of all, of each kernel, and of each class of workloads, bool [rows]."""
    each = [
        (w.code.kind, "ragged" if is_ragged(w) else "aligned", "m > 64" if w.m > 64 else "m ≤ 64")
        for w in table.workloads
    ]
    of_rows = np.array(each, dtype=object).reshape(-1, 3)[table.workload_index]
    columns = np.array(kernels, dtype=object), *of_rows.T
    found = {name: column == name for column in columns for name in sorted({*column})}
    return {ALL: np.ones(len(table), dtype=bool), **found}


def _outcomes(dataset: Dataset) -> Table:
    """Count rows by status; say how far repeats scatter, and how far a second timing is off.

    Rows that are ok, but have an error text, are counted as doubtful.
    """
    table = dataset.measurements()
    table = table.take(table.config_index >= 0)
    arrow, again = table.arrow.take(table.arrow_row), table.role == "anchor"
    subjects = table.workload_index * len(table.configs) + table.config_index
    once = dict(zip(subjects[~again], table.latency_us[~again]))
    off = np.abs(table.latency_us / [once.get(subject, np.nan) for subject in subjects] - 1)
    scatter = np.subtract(arrow["p90_us"], arrow["p10_us"]) / table.latency_us
    percent = 100 * np.where(again, off, scatter)
    doubtful = table.ok & (np.array(arrow["error"].to_pylist(), dtype=object) != "")
    status = np.where(doubtful, "doubtful", table.status)
    rows, kinds = [], sorted({*status})
    for name, mask in _classes(table, arrow["kernel"].to_pylist()).items():
        first, second = mask & ~again, mask & again
        counts = (int((status[first] == kind).sum()) for kind in kinds)
        rows.append([name, *counts, *_spread(percent[first]), *_spread(percent[second])])
    return Table(["class", *kinds, "scatter %", "p95", "timed again: off %", "p95"], rows)


def _spread(percent: Floats) -> list[float]:
    """Return the median and the 95th percentile of the known values; NaN if there are none."""
    known = percent[np.isfinite(percent)]
    return np.percentile(known, (50, 95)).tolist() if len(known) else [np.nan] * 2


def _spearman(columns: Floats32, latency_us: Floats) -> Floats:
    """Spearman correlation of each column with latency.

    Constant columns give 0; missing values take the middle rank.
    """
    from scipy.stats import rankdata  # type: ignore[import-untyped]

    both = np.column_stack([columns, latency_us])
    ranks = rankdata(np.nan_to_num(both, nan=-np.inf), axis=0) - (len(both) + 1) / 2
    ranks[np.isnan(both)] = 0
    norms = np.linalg.norm(ranks, axis=0)
    return ranks[:, :-1].T @ ranks[:, -1] / np.maximum(norms[:-1] * norms[-1], 1e-9)
