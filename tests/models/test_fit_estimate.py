"""The fit of the estimate's constants: it mends what was put out of place, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from costmodel.features import estimate
from costmodel.features.analytic import analytic_columns
from costmodel.gemm.workload import Workload
from costmodel.models import TrainingTable


@pytest.fixture
def rows(
    script: Any,
    make_training_table: Callable[..., TrainingTable],
    make_workloads: Callable[[int, int], list[Workload]],
) -> Any:
    """Rows of a machine on which everything takes just what the estimate says."""
    table = make_training_table(make_workloads(6, 3), rows=20)
    for w, workload in enumerate(table.workloads):
        of_workload = np.flatnonzero(table.workload_index == w)
        candidates = table.candidates.take(of_workload)
        columns = analytic_columns(workload, candidates, table.target, binary=True)
        table.latency_us[of_workload] = np.exp(columns["log_estimate"])
    return script("fit_estimate").NearRows(table, 20)


@pytest.fixture
def undone(script: Any) -> Any:
    before = script("fit_estimate").constants()
    yield
    for name, value in before.items():
        setattr(estimate, name, value)


@pytest.mark.usefixtures("undone")
def test_what_is_right_stays(script: Any, rows: Any) -> None:
    fit = script("fit_estimate")
    before = fit.constants()
    assert rows.loss() < 1e-6
    fit.descend(rows, 1)
    assert fit.constants() == before


@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize("name", ["_EPILOGUE_US", "_FIRST_BYTES_US"])
def test_what_is_off_comes_nearer(script: Any, rows: Any, name: str) -> None:
    fit = script("fit_estimate")
    setattr(estimate, name, 1.3 * getattr(estimate, name))
    wrong = rows.loss()
    assert wrong > 1e-3
    assert fit.descend(rows, 2) == pytest.approx(rows.loss())
    assert rows.loss() < 0.5 * wrong


def test_it_names_each_number_once_and_leaves_capacities_alone(script: Any) -> None:
    fit = script("fit_estimate")
    names = [name for name, _, _ in fit.settings()]
    assert "_L2_SHARE" not in names
    assert "_EPILOGUE_US" in names
    assert names.count("_POINTER_STEP_US") == len(estimate._POINTER_STEP_US)
