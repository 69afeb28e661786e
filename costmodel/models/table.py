"""Training data as columns: what a model is fitted on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costmodel.candidates import Candidates
from costmodel.features import CONFIG_FEATURES, FEATURES, design_matrix
from costmodel.target import Target
from costmodel.workload import Workload

if TYPE_CHECKING:
    from costmodel.artifact_table import ArtifactTable
    from costmodel.dataset import Dataset, Role
    from costmodel.measurement import Measurement

__all__ = ["TrainingTable"]


@dataclass(frozen=True)
class TrainingTable:
    """Measured rows of one target.

    Attributes:
        target: what they were measured on.
        workloads: the distinct workloads.
        workload_index: which of them a row is of, intp [n].
        candidates: the configuration and artifact of each row.
        latency_us: float64 [n]; NaN where there is none.
        status: how measuring went, [n]; only ``ok`` rows are learned from.
        left_out: rows that did not come this far, by reason.
        artifacts: the compiled artifacts by key, which a model takes along; None without.
        torch_us: what ``torch.matmul`` took, float64 [len(workloads)]; NaN where not timed, None
            where nowhere.
    """

    target: Target
    workloads: tuple[Workload, ...]
    workload_index: NDArray[np.intp] = field(repr=False)
    candidates: Candidates = field(repr=False)
    latency_us: NDArray[np.float64] = field(repr=False)
    status: NDArray[np.object_] = field(repr=False)
    left_out: Mapping[str, int] = field(default_factory=dict)
    artifacts: ArtifactTable | None = field(default=None, repr=False)
    torch_us: NDArray[np.float64] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        lengths = {
            len(self.workload_index), len(self.candidates), len(self.latency_us), len(self.status),
        }  # fmt: skip
        if len(lengths) != 1:
            raise ValueError(f"columns of different lengths: {sorted(lengths)}")

    @classmethod
    def from_dataset(cls, dataset: Dataset, role: Role = "train") -> TrainingTable:
        """The rows of one role; those of a kernel that has changed since are left out."""
        from costmodel.kernel_code import kernel_hashes

        hashes = kernel_hashes()
        frame = dataset.frame(role, kernel_hashes=hashes)
        used, index = np.unique(frame.workload_index, return_inverse=True)
        return cls(
            dataset.target,
            tuple(frame.workloads[w] for w in used),
            index.astype(np.intp),
            frame.candidates,
            frame.latency_us,
            frame.status,
            frame.dropped,
            dataset.artifacts(),
            np.array([_latency_us(dataset.torch(frame.workloads[w])) for w in used]),
        )

    def __len__(self) -> int:
        return len(self.latency_us)

    def ok(self) -> NDArray[np.bool_]:
        """Rows to learn from, bool [n]: status ``ok`` and a positive latency."""
        good: NDArray[np.bool_] = (self.status == "ok") & (self.latency_us > 0)
        return good

    def dropped(self) -> dict[str, int]:
        """How many rows are not learned from, by status or reason."""
        return dict(Counter(str(s) for s in self.status[~self.ok()]) + Counter(self.left_out))

    def best_us(self) -> NDArray[np.float64]:
        """The least latency of each workload, float64 [len(workloads)]; inf where none is ok."""
        best = np.full(len(self.workloads), np.inf)
        ok = self.ok()
        np.minimum.at(best, self.workload_index[ok], self.latency_us[ok])
        return best

    def roofline_us(self) -> NDArray[np.float64]:
        """The roofline of each row's workload, float64 [n]."""
        device = self.target.device
        each = np.array(
            [device.roofline_us(w.flops(), w.bytes(), w.code.kind) for w in self.workloads]
        )
        return each[self.workload_index] if len(each) else np.empty(0)

    def groups(self) -> NDArray[np.intp]:
        """The group of each workload, intp [len(workloads)]: one for each pair (n, k)."""
        pairs = {pair: i for i, pair in enumerate(dict.fromkeys(w.nk for w in self.workloads))}
        return np.array([pairs[w.nk] for w in self.workloads], dtype=np.intp)

    def design_matrix(self, *, ptx: bool) -> NDArray[np.float32]:
        """The features of all rows, float32 [n, f]."""
        width = len(FEATURES if ptx else CONFIG_FEATURES)
        matrix = np.empty((len(self), width), dtype=np.float32)
        order = np.argsort(self.workload_index, kind="stable")
        bounds = np.searchsorted(
            self.workload_index[order], np.arange(len(self.workloads) + 1), side="left"
        )
        for w, workload in enumerate(self.workloads):
            rows = order[bounds[w] : bounds[w + 1]]
            matrix[rows] = design_matrix(workload, self.candidates.take(rows), self.target, ptx=ptx)
        return matrix

    def of_workloads(self, chosen: Sequence[int] | NDArray[np.intp]) -> TrainingTable:
        """The rows of some workloads, in the given order of workloads."""
        chosen = np.asarray(chosen, dtype=np.intp)
        renumber = np.full(len(self.workloads), -1, dtype=np.intp)
        renumber[chosen] = np.arange(len(chosen))
        rows = np.flatnonzero(renumber[self.workload_index] >= 0)
        return TrainingTable(
            self.target,
            tuple(self.workloads[w] for w in chosen),
            renumber[self.workload_index[rows]],
            self.candidates.take(rows),
            self.latency_us[rows],
            self.status[rows],
            artifacts=self.artifacts,
            torch_us=None if self.torch_us is None else self.torch_us[chosen],
        )

    def content_hash(self) -> str:
        """16 hex digits of all that a model learns from."""
        digest = hashlib.sha256()
        for workload in self.workloads:
            digest.update(workload.key().encode() + b"\n")
        for column in (
            self.workload_index.astype(np.int64),
            self.candidates.config_columns,
            self.candidates.artifact_columns,
            self.latency_us,
        ):
            digest.update(np.ascontiguousarray(column).tobytes())
        digest.update("\n".join(map(str, self.status)).encode())
        return digest.hexdigest()[:16]


def _latency_us(measurement: Measurement | None) -> float:
    return measurement.latency_us if measurement is not None and measurement.ok else np.nan
