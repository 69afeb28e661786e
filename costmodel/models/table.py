"""Training data as columns."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costmodel.data.candidates import Candidates
from costmodel.errors import InvalidInput
from costmodel.evaluation.heldout import HELD_OUT, is_held_out
from costmodel.features.features import CONFIG_FEATURES, FEATURES, design_matrix
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target

if TYPE_CHECKING:
    from costmodel.data.artifact_table import ArtifactTable
    from costmodel.data.dataset import Dataset
    from costmodel.data.measurement import Measurement, Role
    from costmodel.data.measurement_table import Frame

log = logging.getLogger("costmodel")


@dataclass(frozen=True)
class TrainingTable:
    """Measured rows of one target, or of several that run the same binaries.

    Attributes:
        target: what they were measured on; of several the first.
        workloads: the workloads, distinct on each target.
        workload_index: which of them a row is of, intp [n].
        candidates: the configuration and artifact of each row.
        latency_us: float64 [n]; NaN where there is none.
        status: how measuring went, [n]; only ``ok`` rows are learned from.
        left_out: rows that did not come this far, by reason.
        artifacts: the compiled artifacts by key, which a model takes along; None without.
        torch_us: what ``torch.matmul`` took, float64 [len(workloads)]; NaN where not timed, None
            where nowhere.
        targets: what each workload was measured on; empty where it is one for all.
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
    targets: tuple[Target, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        lengths = {
            len(self.workload_index), len(self.candidates), len(self.latency_us), len(self.status),
        }  # fmt: skip
        if len(lengths) != 1:
            raise ValueError(f"columns of different lengths: {sorted(lengths)}")
        if self.targets and len(self.targets) != len(self.workloads):
            raise ValueError(f"{len(self.targets)} targets of {len(self.workloads)} workloads")

    @classmethod
    def from_dataset(cls, dataset: Dataset, role: Role = "train") -> TrainingTable:
        """Take the rows of one role, in an order that does not depend on the files they lie in.

        Rows of a kernel that has changed since are left out, and those to train on of workloads
        that are held out (:mod:`costmodel.evaluation.heldout`), however they came to be recorded as
        such.
        """
        from costmodel.gemm.specialize import kernel_hashes

        frame = dataset.frame(role, kernel_hashes=kernel_hashes())
        left_out = Counter(frame.dropped)
        order = _row_order(frame)
        if role == "train":
            held_out = np.array([is_held_out(w) for w in frame.workloads], dtype=bool)
            kept = ~held_out[frame.workload_index[order]]
            if not kept.all():
                left_out[HELD_OUT] += int((~kept).sum())
                log.warning(
                    "%s: %d rows are left out, of workloads that are %s (docs/protocol.md)",
                    dataset.path, left_out[HELD_OUT], HELD_OUT,
                )  # fmt: skip
            order = order[kept]
        if not np.array_equal(order, np.arange(len(frame.workload_index))):  # else a costly copy
            frame = frame.take(order)
        used = dict.fromkeys(frame.workload_index.tolist())
        number = {w: i for i, w in enumerate(used)}
        return cls(
            dataset.target,
            tuple(frame.workloads[w] for w in used),
            np.array([number[w] for w in frame.workload_index.tolist()], dtype=np.intp),
            frame.candidates,
            frame.latency_us,
            frame.status,
            dict(left_out),
            dataset.artifacts(),
            np.array([_latency_us(dataset.torch(frame.workloads[w])) for w in used]),
        )

    @classmethod
    def joined(cls, tables: Sequence[TrainingTable]) -> TrainingTable:
        """Join the rows of several targets; the target of the first table is that of the whole.

        Raises:
            InvalidInput: a target that does not run the binaries of the first one.
        """
        first = tables[0]
        for table in tables[1:]:
            _check_sibling(table.target, first.target)
        parts = [table.candidates for table in tables]
        before = np.cumsum([0, *(len(table.workloads) for table in tables)])
        known = [table.artifacts for table in tables if table.artifacts is not None]
        torch_us = [
            np.full(len(t.workloads), np.nan) if t.torch_us is None else t.torch_us for t in tables
        ]
        left_out = sum((Counter(table.left_out) for table in tables), Counter[str]())
        return cls(
            first.target,
            tuple(workload for table in tables for workload in table.workloads),
            np.concatenate(
                [t.workload_index + n for t, n in zip(tables, before[:-1], strict=True)]
            ),
            Candidates.joined(parts),
            np.concatenate([table.latency_us for table in tables]),
            np.concatenate([table.status for table in tables]),
            dict(left_out),
            known[0].merged_with(known[1:]) if known else None,
            np.concatenate(torch_us),
            tuple(target for table in tables for target in table.target_of_each()),
        )

    def __len__(self) -> int:
        return len(self.latency_us)

    def target_of(self, workload: int) -> Target:
        """Return the target that a workload was measured on."""
        return self.targets[workload] if self.targets else self.target

    def target_of_each(self) -> tuple[Target, ...]:
        """Return the target that each workload was measured on, [len(workloads)]."""
        return self.targets or (self.target,) * len(self.workloads)

    def learned_on(self) -> tuple[Target, ...]:
        """Return the targets with rows to learn from, one of each device, that of the table first.

        Empty if no row is ok.
        """
        workloads = np.unique(self.workload_index[self.ok()]).tolist()
        each = {self.target_of(w).device.name: self.target_of(w) for w in workloads}
        own = self.target.device.name
        return tuple(each[name] for name in sorted(each, key=lambda name: name != own))

    def ok(self) -> NDArray[np.bool_]:
        """Mark the rows to learn from, bool [n]: status ``ok`` and a positive latency."""
        good: NDArray[np.bool_] = (self.status == "ok") & (self.latency_us > 0)
        return good

    def dropped(self) -> dict[str, int]:
        """Count the rows that are not learned from, by status or reason."""
        return dict(Counter(str(s) for s in self.status[~self.ok()]) + Counter(self.left_out))

    def best_us(self) -> NDArray[np.float64]:
        """Least latency of each workload, float64 [len(workloads)]; inf if none is ok."""
        best = np.full(len(self.workloads), np.inf)
        ok = self.ok()
        np.minimum.at(best, self.workload_index[ok], self.latency_us[ok])
        return best

    def roofline_us(self) -> NDArray[np.float64]:
        """Return the roofline of each row's workload, float64 [n]."""
        each = np.array(
            [
                target.device.roofline_us(w.flops(), w.bytes(), w.code.kind)
                for w, target in zip(self.workloads, self.target_of_each(), strict=True)
            ]
        )
        return each[self.workload_index] if len(each) else np.empty(0)

    def groups(self) -> NDArray[np.intp]:
        """Number the workloads by their pair (n, k), intp [len(workloads)]."""
        pairs = {pair: i for i, pair in enumerate(dict.fromkeys(w.nk for w in self.workloads))}
        return np.array([pairs[w.nk] for w in self.workloads], dtype=np.intp)

    def rows_of_each(self) -> list[NDArray[np.intp]]:
        """Return the rows of each workload, in their order."""
        order = np.argsort(self.workload_index, kind="stable")
        counts = np.bincount(self.workload_index, minlength=len(self.workloads))
        return np.split(order, np.cumsum(counts))[: len(self.workloads)]

    def design_matrix(self, *, ptx: bool) -> NDArray[np.float32]:
        """Compute the features of all rows, float32 [n, f]."""
        width = len(FEATURES if ptx else CONFIG_FEATURES)
        matrix = np.empty((len(self), width), dtype=np.float32)
        for w, rows in enumerate(self.rows_of_each()):
            part, target = self.candidates.take(rows), self.target_of(w)
            matrix[rows] = design_matrix(self.workloads[w], part, target, ptx=ptx)
        return matrix

    def of_workloads(self, chosen: Sequence[int] | NDArray[np.intp]) -> TrainingTable:
        """Take the rows of some workloads, in the given order of workloads."""
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
            targets=tuple(self.targets[w] for w in chosen) if self.targets else (),
        )

    def content_hash(self) -> str:
        """Return 16 hex digits of all that a model learns from."""
        digest = hashlib.sha256()
        for workload in self.workloads:
            digest.update(workload.key().encode() + b"\n")
        for target in self.targets:
            digest.update(target.device.name.encode() + b"\n")
        for column in (
            self.workload_index.astype(np.int64),
            self.candidates.config_columns,
            self.candidates.artifact_columns,
            self.latency_us,
        ):
            digest.update(np.ascontiguousarray(column).tobytes())
        digest.update("\n".join(map(str, self.status)).encode())
        if self.torch_us is not None:
            digest.update(np.ascontiguousarray(self.torch_us).tobytes())
        return digest.hexdigest()[:16]


def _row_order(frame: Frame) -> NDArray[np.intp]:
    """Sort rows by workload and configuration, as compacting a dataset does, intp [n].

    Trees depend on the order of the rows: merging files must not make another model.
    """
    by_key = sorted(range(len(frame.workloads)), key=lambda w: frame.workloads[w].key())
    rank = np.empty(len(by_key), dtype=np.intp)
    rank[by_key] = np.arange(len(by_key))
    # Few configurations stand in many rows: each is compared once.
    configs = frame.candidates.configs
    place = {config: i for i, config in enumerate(sorted(set(configs)))}
    places = np.array([place[config] for config in configs], dtype=np.intp)
    order: NDArray[np.intp] = np.lexsort((places, rank[frame.workload_index]))
    return order


def _check_sibling(target: Target, first: Target) -> None:
    ours, theirs = target.device, first.device
    if ours.name != theirs.name and not ours.is_sibling(theirs):
        raise InvalidInput(
            f"{ours.name} does not run what was compiled for {theirs.name}: expected datasets of "
            f"devices that differ in clocks and memory only; train a model of each"
        )
    if target.toolchain != first.toolchain:
        raise InvalidInput(
            f"{ours.name} was measured with Triton {target.toolchain.triton} and ptxas "
            f"{target.toolchain.ptxas}, {theirs.name} with {first.toolchain.triton} and "
            f"{first.toolchain.ptxas}: expected one toolchain"
        )


def _latency_us(measurement: Measurement | None) -> float:
    return measurement.latency_us if measurement is not None and measurement.ok else np.nan
