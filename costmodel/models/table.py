"""The rows that a model learns from: a frame of a dataset with target, artifacts, torch's times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodel.arrays import Floats, Floats32, Indices
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import Candidates
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Role
from costmodel.data.measurement_table import Frame
from costmodel.errors import InvalidInput
from costmodel.evaluation.heldout import HELD_OUT, is_held_out
from costmodel.features.features import CONFIG_FEATURES, FEATURES, design_matrix
from costmodel.files import digest
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.validation import log


@dataclass(frozen=True, kw_only=True)
class TrainingTable(Frame):
    """Measured rows of one target, or of several that run the same binaries.

    Attributes:
        workloads: distinct on each target.
        target: what they were measured on; of several the first.
        targets: what each workload was measured on; empty if it is the same for all.
        artifacts: the compiled artifacts by key, which a trained model keeps; None without.
        torch_us: latency of ``torch.matmul`` on each workload; NaN where it was not timed, empty if
            it was timed on none.
    """

    target: Target
    targets: tuple[Target, ...] = ()
    artifacts: ArtifactTable | None = None
    torch_us: tuple[float, ...] = ()

    @classmethod
    def from_dataset(cls, dataset: Dataset, role: Role = "train") -> TrainingTable:
        """Take the rows of one role, in the order of a dataset, whatever files it consists of.

        Rows of a kernel that has changed since are left out. So are training rows of workloads that
        are held out (:mod:`costmodel.evaluation.heldout`), however they came to be recorded in this
        role.
        """
        from costmodel.gemm.specialize import kernel_hashes

        frame = dataset.frame(role, kernel_hashes=kernel_hashes())
        dropped = Counter(frame.dropped)
        if role == "train":
            allowed = np.array([not is_held_out(w) for w in frame.workloads], dtype=bool)
            kept = allowed[frame.workload_index]
            if count := int((~kept).sum()):
                dropped[HELD_OUT] += count
                log.warning(
                    "%s: %d rows are left out, of workloads that are %s (docs/protocol.md)",
                    dataset.path, count, HELD_OUT,
                )  # fmt: skip
                frame = frame.take(kept)
        present, workload_index = np.unique(frame.workload_index, return_inverse=True)
        workloads = tuple(frame.workloads[w] for w in present)
        torch = [dataset.torch(workload) for workload in workloads]
        return cls(
            workloads=workloads,
            workload_index=workload_index,
            latency_us=frame.latency_us,
            status=frame.status,
            candidates=frame.candidates,
            dropped=dropped,
            target=dataset.target,
            artifacts=dataset.artifacts(),
            torch_us=tuple(t.latency_us if t is not None and t.ok else np.nan for t in torch),
        )

    @classmethod
    def joined(cls, tables: Sequence[TrainingTable]) -> TrainingTable:
        """Join the rows of several tables; the target of the first one is that of the whole.

        A workload that several tables have of one target is one workload of the whole.

        Raises:
            InvalidInput: a target does not run the binaries of the first one.
        """
        first, *others = tables
        for table in others:
            _check_sibling(table.target, first.target)
        number: dict[tuple[Workload, Target], int] = {}
        torch_us: dict[tuple[Workload, Target], float] = {}
        index = []
        for table in tables:
            pairs = [*zip(table.workloads, table.target_of_each())]
            places = [number.setdefault(pair, len(number)) for pair in pairs]
            index.append(np.array(places, dtype=np.intp)[table.workload_index])
            for pair, us in zip(pairs, table.torch_us, strict=False):
                if us > 0:
                    torch_us.setdefault(pair, us)
        known = [table.artifacts for table in tables if table.artifacts is not None]
        targets = tuple(target for _, target in number)
        return cls(
            workloads=tuple(workload for workload, _ in number),
            workload_index=np.concatenate(index),
            latency_us=np.concatenate([table.latency_us for table in tables]),
            status=np.concatenate([table.status for table in tables]),
            candidates=Candidates.joined([table.candidates for table in tables]),
            dropped=sum((Counter(table.dropped) for table in tables), Counter[str]()),
            target=first.target,
            targets=targets if len({*targets}) > 1 else (),
            artifacts=known[0].merged_with(known[1:]) if known else None,
            torch_us=tuple(torch_us.get(pair, np.nan) for pair in number),
        )

    def target_of_each(self) -> tuple[Target, ...]:
        """Return the target that each workload was measured on, [len(workloads)]."""
        return self.targets or (self.target,) * len(self.workloads)

    def parts(self) -> Iterator[tuple[Workload, Target, Indices]]:
        """Yield each workload, the target that it was measured on, and its rows in order."""
        rows = self.rows_by_workload()
        yield from zip(self.workloads, self.target_of_each(), rows, strict=False)

    def learned_on(self) -> tuple[Target, ...]:
        """Return the targets with rows to learn from, one of each device, that of the table first.

        Empty if no row is ok.
        """
        ok, own = self.ok, self.target.device.name
        each = {target.device.name: target for _, target, rows in self.parts() if ok[rows].any()}
        return tuple(each[name] for name in sorted(each, key=lambda name: name != own))

    def not_learned_from(self) -> dict[str, int]:
        """Count the rows that are not learned from, by status or reason."""
        return dict(Counter(self.status[~self.ok].tolist()) + Counter(self.dropped))

    def best_us(self) -> Floats:
        """Least latency of each workload, float64 [len(workloads)]; inf if none is ok."""
        best = np.full(len(self.workloads), np.inf)
        ok = self.ok
        np.minimum.at(best, self.workload_index[ok], self.latency_us[ok])
        return best

    def roofline_us(self) -> Floats:
        """Return the roofline of each row's workload, float64 [n]."""
        found = np.empty(len(self))
        for w, target, rows in self.parts():
            found[rows] = w.roofline_us(target.device)
        return found

    def design_matrix(self, *, ptx: bool) -> Floats32:
        """Compute the features of all rows, float32 [n, f]."""
        matrix = np.empty((len(self), len(FEATURES if ptx else CONFIG_FEATURES)), np.float32)
        for workload, target, rows in self.parts():
            matrix[rows] = design_matrix(workload, self.candidates.take(rows), target, ptx=ptx)
        return matrix

    def of_workloads(self, chosen: Sequence[int] | Indices) -> TrainingTable:
        """Take the rows of some workloads, in the given order of workloads."""
        renumber = np.full(len(self.workloads), -1)
        renumber[list(chosen)] = np.arange(len(chosen))
        part = self.take(renumber[self.workload_index] >= 0)
        return replace(
            part,
            workloads=tuple(self.workloads[w] for w in chosen),
            workload_index=renumber[part.workload_index],
            dropped={},
            targets=tuple(self.targets[w] for w in chosen) if self.targets else (),
            torch_us=tuple(self.torch_us[w] for w in chosen) if self.torch_us else (),
        )

    def content_hash(self) -> str:
        """Return 16 hex digits of all that a model learns from."""
        names = [f"{w.key()}\n" for w in self.workloads]
        names += [f"{target.device.name}\n" for target in self.targets]
        columns = [
            self.workload_index.astype(np.int64),
            self.candidates.config_columns,
            self.candidates.artifact_columns,
            self.latency_us,
        ]
        parts = [
            "".join(names).encode(),
            *(column.tobytes() for column in columns),
            "\n".join(self.status).encode(),
            np.array(self.torch_us).tobytes(),
        ]
        return digest(b"".join(parts))


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
