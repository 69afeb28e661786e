"""Measured rows beside their features: what models are trained and judged on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import Candidates
from costmodel.data.measurement_table import MeasurementTable
from costmodel.gemm.workload import Workload

__all__ = ["Frame"]


@dataclass(frozen=True)
class Frame:
    """Rows of one configuration on one workload each, as columns.

    Attributes:
        workloads: the distinct workloads.
        workload_index: int [rows], into ``workloads``.
        candidates: configuration and artifact of each row, and their feature columns.
        latency_us: float64 [rows]; NaN where nothing was timed, see ``status``.
        status: object array of str, [rows].
        dropped: how many rows were left out, by reason.
    """

    workloads: tuple[Workload, ...]
    workload_index: NDArray[np.int64]
    candidates: Candidates
    latency_us: NDArray[np.float64]
    status: NDArray[np.object_]
    dropped: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, table: MeasurementTable, artifacts: ArtifactTable, dropped: Mapping[str, int]
    ) -> Frame:
        """Join measured rows (none of torch's) with their artifacts."""
        configs = Candidates.of(table.configs)
        # Features are laid out once per configuration and once per binary, then gathered.
        features = artifacts.columns(table.artifact_keys)[table.artifact_index]
        used = np.unique(table.artifact_index).tolist()
        found = artifacts.find([table.artifact_keys[i] for i in used])
        objects = dict(zip(used, found, strict=True))
        candidates = Candidates(
            tuple(table.configs[i] for i in table.config_index.tolist()),
            tuple(objects[i] for i in table.artifact_index.tolist()),
            configs.config_columns[table.config_index],
            features,
        )
        present, index = np.unique(table.workload_index, return_inverse=True)
        workloads = tuple(table.workloads[i] for i in present.tolist())
        return cls(workloads, index, candidates, table.latency_us, table.status, dropped)

    def __len__(self) -> int:
        return len(self.workload_index)

    @property
    def ok(self) -> NDArray[np.bool_]:
        """Rows with a correct, timed result, bool [rows]."""
        ok: NDArray[np.bool_] = self.status == "ok"
        return ok

    def of_workload(self, workload: Workload) -> Frame:
        """The rows of one workload."""
        return self.take(np.flatnonzero(self.workload_index == self.workloads.index(workload)))

    def take(self, rows: NDArray[np.intp]) -> Frame:
        """The rows of an index."""
        return Frame(
            self.workloads,
            self.workload_index[rows],
            self.candidates.take(rows),
            self.latency_us[rows],
            self.status[rows],
            self.dropped,
        )
