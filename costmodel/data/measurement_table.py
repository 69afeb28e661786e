"""Measured rows as columns: 300,000 of them without 300,000 objects."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from statistics import median, median_low
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from costmodel.arrays import ArrowSchema, ArrowTable, Floats, Indices, Integers, Mask, Texts
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import Candidates
from costmodel.data.measurement import (
    Measurement,
    Measurements,
    Role,
    RunInfo,
    Status,
    TuningRecord,
)
from costmodel.data.rows import lay_out, number_rows, refused
from costmodel.data.shards import arrow_fields, text_type
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import CodeClass, Workload

WORKLOAD_FIELDS = ("m", "n", "k", *CodeClass.__dataclass_fields__)
CONFIG_FIELDS, _RUN_FIELDS, _OUTCOME = (
    tuple(cls.__dataclass_fields__) for cls in (GemmConfig, RunInfo, Measurement)
)
_TORCH = "torch"  # in the kernel column of rows of torch.matmul


@dataclass(frozen=True)
class Columns:
    """Timings as columns, one entry per row.

    Attributes:
        workloads: the distinct workloads.
        workload_index: int [rows], into ``workloads``.
        latency_us: float64 [rows]; NaN where nothing was timed, see ``status``.
        status: object array of str, [rows].
    """

    workloads: tuple[Workload, ...]
    workload_index: Integers
    latency_us: Floats
    status: Texts

    def __len__(self) -> int:
        return len(self.workload_index)

    @property
    def ok(self) -> Mask:
        """Rows with a correct, timed result, bool [rows]."""
        return np.asarray(self.status == "ok")

    def take(self, rows: NDArray[Any]) -> Self:
        """Return the rows of an index or a mask; indices go on pointing into the same tuples."""
        rows = np.arange(len(self))[rows]
        columns = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        taken: dict[str, Any] = {
            name: column.take(rows)
            for name, column in columns
            if isinstance(column, np.ndarray | Candidates)
        }
        return replace(self, **taken)

    def rows_by_workload(self) -> list[Indices]:
        """Return the rows of each of ``workloads``, in order."""
        order = np.argsort(self.workload_index, kind="stable")
        counts = np.bincount(self.workload_index, minlength=len(self.workloads))
        return np.split(order, np.cumsum(counts)[:-1])

    @functools.cached_property
    def rows_of(self) -> dict[Workload, Indices]:
        """The rows of each workload that has any, in order."""
        each = zip(self.workloads, self.rows_by_workload(), strict=False)
        return {workload: rows for workload, rows in each if len(rows)}

    def rows_for(self, workload: Workload) -> Indices:
        """Return the rows of a workload, in order; none if it has none."""
        return self.rows_of.get(workload, np.empty(0, dtype=np.intp))


@dataclass(frozen=True)
class Frame(Columns):
    """Rows with their features; each row is one configuration on one workload.

    Attributes:
        candidates: the configuration of each row, and what is known of its binary.
        dropped: how many rows were left out, by reason.
    """

    candidates: Candidates
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasurementTable(Columns):
    """Rows as they were recorded; they refer by number to objects that many of them share.

    Attributes:
        configs, artifact_keys, runs: the distinct ones.
        artifact_index, run_index: int [rows], into the tuples above.
        config_index: int [rows], into ``configs``; -1 where ``torch.matmul`` was timed.
        role: object array of str, [rows].
        arrow: the Arrow rows that this was read from.
        arrow_row: int [rows], into ``arrow``.
    """

    configs: tuple[GemmConfig, ...]
    config_index: Integers
    artifact_keys: tuple[str, ...]
    artifact_index: Integers
    runs: tuple[RunInfo, ...]
    run_index: Integers
    role: Texts
    arrow: ArrowTable
    arrow_row: Integers

    @staticmethod
    def schema() -> ArrowSchema:
        """Arrow columns, one for each field of the dataclasses."""
        import pyarrow as pa

        text = text_type()
        return pa.schema(
            [
                pa.field("workload", text, False),  # Workload.key(), to read and group by
                *workload_fields(),
                *arrow_fields(GemmConfig, nullable=True),  # kernel "torch" has no others
                pa.field("artifact_key", text, False),
                *arrow_fields(Measurement),
                *arrow_fields(RunInfo),
                pa.field("role", text, False),
            ]
        )

    @classmethod
    def rows(
        cls,
        records: Iterable[TuningRecord],
        torch: Mapping[Workload, Measurement],
        run: RunInfo,
        role: Role,
    ) -> ArrowTable:
        """Lay out records and timings of ``torch.matmul`` as an Arrow table of :meth:`schema`.

        An outcome due to a full card is left out: it says nothing about the configuration.
        """
        # Not asdict: its deep copies would take most of the time of recording.
        config_of, outcome_of = attrgetter(*CONFIG_FIELDS), attrgetter(*_OUTCOME)
        workload_of = functools.cache(Workload.to_dict)
        no_config = (_TORCH, *[None] * (len(CONFIG_FIELDS) - 1))
        shared = asdict(run) | {"role": role}
        measured = [
            *((r.workload, config_of(r.config), r.artifact_key, r.measurement) for r in records),
            *((workload, no_config, "", outcome) for workload, outcome in torch.items()),
        ]
        rows = [
            {
                "workload": workload.key(),
                **workload_of(workload),
                **dict(zip(CONFIG_FIELDS, config)),
                "artifact_key": key,
                **dict(zip(_OUTCOME, outcome_of(outcome))),
                **shared,
            }
            for workload, config, key, outcome in measured
            if not outcome.no_room
        ]
        return lay_out(rows, cls.schema(), cls.faults)

    @staticmethod
    def faults(rows: ArrowTable) -> dict[str, Mask]:
        """Mark rows that no release writes; see :data:`costmodel.data.rows.Faults`."""

        def has(name: str, texts: Iterable[str]) -> Mask:
            index, there = _numbered(rows, name)
            return np.array([text in texts for text in there], dtype=bool)[index]

        latency_us = rows.column("latency_us").to_numpy()
        is_time = np.isfinite(latency_us) & (latency_us > 0)
        return {
            "a status that is known": ~has("status", get_args(Status)),
            "a role that is known": ~has("role", get_args(Role)),
            "a latency_us over 0 if ok or too_slow": has("status", ("ok", "too_slow")) & ~is_time,
            "a workload that can be": refused(rows, WORKLOAD_FIELDS, Workload.from_dict),
            "a configuration that can be": ~has("kernel", (_TORCH,))
            & refused(rows, CONFIG_FIELDS, GemmConfig.from_dict),
        }

    @staticmethod
    def distinct(rows: ArrowTable) -> ArrowTable:
        """Keep one row per workload and configuration, and per run for anchors; in order.

        If a kernel's version (its artifact key) changes from row to row, the last change counts,
        and the first row from there on is kept. So a version that came back, since an edit was
        undone, is the last one.
        """
        config_index, _ = number_rows(rows, CONFIG_FIELDS)
        (workload, _), (artifact, _), (run, _) = (
            _numbered(rows, name) for name in ("workload", "artifact_key", "run_id")
        )
        anchor_run = np.where(_texts(rows, "role") == "anchor", run, -1)
        subjects = zip(workload.tolist(), config_index.tolist(), anchor_run.tolist())
        kept: dict[tuple[int, ...], tuple[int, int]] = {}
        for row, (subject, version) in enumerate(zip(subjects, artifact.tolist())):
            if subject not in kept or kept[subject][0] != version:
                kept[subject] = version, row
        return rows.take(np.array(sorted(row for _, row in kept.values()), dtype=np.int64))

    @classmethod
    def of(cls, table: ArrowTable) -> Self:
        """Read an Arrow table of :meth:`schema` without faults, whose dictionaries are unified."""
        workload_index, workloads = number_rows(table, WORKLOAD_FIELDS)
        config_index, configs = number_rows(table, CONFIG_FIELDS)
        run_index, runs = number_rows(table, _RUN_FIELDS)
        artifact_index, artifact_keys = _numbered(table, "artifact_key")
        # torch.matmul is no configuration and gets no number.
        is_config = np.array([row["kernel"] != _TORCH for row in configs], dtype=bool)
        number = np.where(is_config, np.cumsum(is_config) - 1, -1)
        return cls(
            workloads=tuple(map(Workload.from_dict, workloads)),
            workload_index=workload_index,
            latency_us=table.column("latency_us").to_numpy().astype(np.float64),
            status=_texts(table, "status"),
            configs=tuple(GemmConfig.from_dict(c) for c in configs if c["kernel"] != _TORCH),
            config_index=number[config_index],
            artifact_keys=artifact_keys,
            artifact_index=artifact_index,
            runs=tuple(RunInfo(**row) for row in runs),
            run_index=run_index,
            role=_texts(table, "role"),
            arrow=table,
            arrow_row=np.arange(len(table)),
        )

    def measurements(self, rows: NDArray[Any]) -> Measurements:
        """Return the outcomes of some rows."""
        found = self.arrow.select(_OUTCOME).take(self.arrow_row[rows]).to_pylist()
        return [Measurement(**row) for row in found]

    def twins(self) -> dict[str, float]:
        """Return by card (UUID) the factor of its time over that of the median card of its twins.

        The factor is the median over all workloads and binaries that several cards have timed. Of
        two cards the faster one counts as the median card; a card without twins is left out.
        """
        each: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        index = zip(self.workload_index, self.config_index, self.artifact_index)
        for row, subject in enumerate(index):
            if self.status[row] == "ok":
                card = self.runs[self.run_index[row]].device_uuid
                each[subject][card].append(float(self.latency_us[row]))
        factors = defaultdict[str, list[float]](list)
        for cards in each.values():
            usual = {card: median(us) for card, us in cards.items()}
            for card, us in usual.items() if len(usual) > 1 else ():
                factors[card].append(us / median_low(usual.values()))
        return {card: median(found) for card, found in sorted(factors.items())}

    def frame(self, artifacts: ArtifactTable, dropped: Mapping[str, int]) -> Frame:
        """Join rows, none of them torch's, with their artifacts."""
        # Features are laid out once per configuration and once per binary, then gathered.
        configs, binaries = self.config_index, self.artifact_index
        columns, hashes = artifacts.columns(self.artifact_keys)
        candidates = Candidates(
            tuple(self.configs[i] for i in configs.tolist()),
            Candidates.of(self.configs).config_columns[configs],
            columns[binaries],
            hashes[binaries],
        )
        present, index = np.unique(self.workload_index, return_inverse=True)
        workloads = tuple(self.workloads[i] for i in present.tolist())
        return Frame(workloads, index, self.latency_us, self.status, candidates, dropped)


def workload_fields() -> list[Any]:
    """Return the Arrow columns of a workload."""
    import pyarrow as pa

    sizes = [pa.field(name, pa.int32(), False) for name in ("m", "n", "k")]
    return sizes + arrow_fields(CodeClass)


def _numbered(table: ArrowTable, name: str) -> tuple[Integers, tuple[str, ...]]:
    """Return a column of texts as numbers, int64 [rows], and the distinct texts."""
    column = table.column(name).combine_chunks()
    return column.indices.to_numpy().astype(np.int64), tuple(column.dictionary.to_pylist())


def _texts(table: ArrowTable, name: str) -> Texts:
    """Return a column of texts, object [rows]; equal texts are one object."""
    index, texts = _numbered(table, name)
    return np.array(texts, dtype=object)[index]
