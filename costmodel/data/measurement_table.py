"""Measured rows as columns: 200,000 of them without 200,000 objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import Candidates
from costmodel.data.measurement import Measurement, Status, TuningRecord, says_no_room
from costmodel.data.shards import arrow_fields, number_rows
from costmodel.errors import CorruptFile, CostModelError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import CodeClass, Workload

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "CONFIG_FIELDS", "WORKLOAD_FIELDS", "Frame", "MeasurementTable", "Role", "RunInfo",
    "config_of_row", "workload_fields", "workload_of_row",
]  # fmt: skip

Role = Literal["train", "eval", "anchor"]
"""Purpose of a row. ``anchor`` rows time again what is recorded already, later in the same run or
in another: they show the noise, are kept once per run, and are never trained on."""

_TORCH = "torch"  # stands in the kernel column of the rows that torch.matmul gave
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run of the collector on one card, recorded with each of its rows.

    Attributes:
        run_id: unique, such as a UUID.
        device_uuid: the card, as the driver names it.
        driver: version of the driver.
        torch: version of torch, whose cuBLAS is timed beside the kernels.
        started: UTC, ISO 8601.
        sm_clock_mhz, memory_clock_mhz: clocks that the card was set to; 0 where unknown.
    """

    run_id: str
    device_uuid: str
    driver: str
    torch: str
    started: str
    sm_clock_mhz: int = 0
    memory_clock_mhz: int = 0


_SIZES = ("m", "n", "k")
_CODE, CONFIG_FIELDS, _RUN = (
    tuple(f.name for f in fields(cls)) for cls in (CodeClass, GemmConfig, RunInfo)
)
WORKLOAD_FIELDS = (*_SIZES, *_CODE)


@dataclass(frozen=True)
class MeasurementTable:
    """Columns of one entry per row; objects that many rows share are held once and numbered.

    Attributes:
        workloads, configs, artifact_keys, runs: the distinct ones.
        workload_index, artifact_index, run_index: int [rows], into the tuples above.
        config_index: int [rows], into ``configs``; -1 where ``torch.matmul`` was timed.
        role, status, error: object arrays of str, [rows].
        latency_us, p10_us, p90_us: float64 [rows], NaN where there is none.
        repeats, clock_mhz: int [rows].
    """

    workloads: tuple[Workload, ...]
    configs: tuple[GemmConfig, ...]
    artifact_keys: tuple[str, ...]
    runs: tuple[RunInfo, ...]
    workload_index: NDArray[np.int64]
    config_index: NDArray[np.int64]
    artifact_index: NDArray[np.int64]
    run_index: NDArray[np.int64]
    role: NDArray[np.object_]
    status: NDArray[np.object_]
    error: NDArray[np.object_]
    latency_us: NDArray[np.float64]
    p10_us: NDArray[np.float64]
    p90_us: NDArray[np.float64]
    repeats: NDArray[np.int64]
    clock_mhz: NDArray[np.int64]

    @staticmethod
    def schema() -> pa.Schema:
        """Arrow columns, from the dataclasses whose fields they are."""
        import pyarrow as pa

        text = pa.dictionary(pa.int32(), pa.string())
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
    ) -> pa.Table:
        """Lay out records and timings of ``torch.matmul`` as an Arrow table of :meth:`schema`."""
        import pyarrow as pa

        no_config: dict[str, Any] = dict.fromkeys(CONFIG_FIELDS) | {"kernel": _TORCH}
        measured = [
            (r.workload, r.config.to_dict(), r.artifact_key, r.measurement) for r in records
        ] + [(workload, no_config, "", measurement) for workload, measurement in torch.items()]
        rows = [
            {
                "workload": workload.key(),
                **workload.to_dict(),
                **config,
                "artifact_key": key,
                **asdict(measurement),
                **asdict(run),
                "role": role,
            }
            for workload, config, key, measurement in measured
        ]
        return pa.Table.from_pylist(rows, schema=cls.schema())

    @classmethod
    def of(cls, table: pa.Table, path: Path) -> MeasurementTable:
        """Read an Arrow table of :meth:`schema`, whose dictionaries are unified.

        Raises:
            CorruptFile: values that no release writes; ``path`` is named.
        """
        text: dict[str, Any] = {name: _texts(table, name) for name in ("role", "status", "error")}
        for name, known in (("status", get_args(Status)), ("role", get_args(Role))):
            if unknown := set(text[name]) - set(known):
                raise CorruptFile(f"{path}: {name} {sorted(unknown)}: no release writes that")
        numbers: dict[str, Any] = {
            name: table.column(name).to_numpy().astype(kind)
            for name, kind in (
                ("latency_us", np.float64), ("p10_us", np.float64), ("p90_us", np.float64),
                ("repeats", np.int64), ("clock_mhz", np.int64),
            )
        }  # fmt: skip
        _require_times(text["status"], numbers["latency_us"], path)
        workload_index, workloads = number_rows(table, ("workload", *WORKLOAD_FIELDS))
        run_index, runs = number_rows(table, _RUN)
        config_index, configs = number_rows(table, CONFIG_FIELDS)
        _require_unique(workloads, path)
        _require_unique(runs, path)
        # torch.matmul is no configuration: the others close its place up.
        is_config = np.array([row["kernel"] != _TORCH for row in configs], dtype=bool)
        number = np.where(is_config, np.cumsum(is_config) - 1, -1)
        artifact_keys = table.column("artifact_key").combine_chunks()
        return cls(
            workloads=_objects(workloads, workload_of_row, path),
            configs=_objects([c for c in configs if c["kernel"] != _TORCH], config_of_row, path),
            artifact_keys=tuple(artifact_keys.dictionary.to_pylist()),
            runs=_objects(runs, lambda row: RunInfo(**row), path),
            workload_index=workload_index,
            config_index=number[config_index],
            artifact_index=artifact_keys.indices.to_numpy().astype(np.int64),
            run_index=run_index,
            **text,
            **numbers,
        )

    def __len__(self) -> int:
        return len(self.workload_index)

    @property
    def ok(self) -> NDArray[np.bool_]:
        """Rows with a correct, timed result, bool [rows]."""
        ok: NDArray[np.bool_] = self.status == "ok"
        return ok

    def take(self, rows: NDArray[Any]) -> MeasurementTable:
        """Return the rows of an index or a mask; indices go on pointing into the same tuples."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{
            name: column[rows] for name, column in columns.items() if isinstance(column, np.ndarray)
        })  # fmt: skip

    def kept_rows(self) -> NDArray[np.intp]:
        """Find one row per workload and configuration, and per run for anchors; in order.

        Of two versions of a kernel, the one that came last; of those rows that it gave in a row,
        the first. A version that came back, since an edit was taken back, came last.
        A row of a full card is left out: it says nothing of the configuration.
        """
        kept = np.ones(len(self), dtype=bool)
        for row in np.flatnonzero(self.status == "out_of_resources").tolist():
            kept[row] = not says_no_room(self.status[row], self.error[row])
        rows = np.flatnonzero(kept)
        return rows[self.take(rows)._of_last_version()]

    def _of_last_version(self) -> NDArray[np.intp]:
        anchor_run = np.where(self.role == "anchor", self.run_index, -1)
        subject = (self.workload_index * (len(self.configs) + 1) + self.config_index + 1) * (
            len(self.runs) + 1
        ) + (anchor_run + 1)
        order = np.argsort(subject, kind="stable")
        subject, version = subject[order], self.artifact_index[order]
        begins = np.flatnonzero(_differs(subject) | _differs(version))  # of a version in a row
        is_last = _differs(subject[begins][::-1])[::-1]
        return np.sort(order[begins[is_last]])

    def measurement(self, row: int) -> Measurement:
        """Return the outcome of a row."""
        return Measurement(
            self.status[row],
            float(self.latency_us[row]),
            float(self.p10_us[row]),
            float(self.p90_us[row]),
            int(self.repeats[row]),
            int(self.clock_mhz[row]),
            self.error[row],
        )

    @functools.cached_property
    def rows_of(self) -> dict[Workload, NDArray[np.intp]]:
        """The rows of each workload, in order."""
        order = np.argsort(self.workload_index, kind="stable")
        counts = np.bincount(self.workload_index, minlength=len(self.workloads))
        parts = np.split(order, np.cumsum(counts)[:-1]) if len(counts) else []
        return {w: rows for w, rows in zip(self.workloads, parts, strict=True) if len(rows)}


@dataclass(frozen=True)
class Frame:
    """Rows of one configuration on one workload each, beside their features.

    Attributes:
        workloads: the distinct workloads.
        workload_index: int [rows], into ``workloads``.
        candidates: the configuration of each row, and what is known of its binary.
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
        # Features are laid out once per configuration and once per binary, then gathered.
        configs, binaries = table.config_index, table.artifact_index
        columns, hashes = artifacts.columns(table.artifact_keys)
        candidates = Candidates(
            tuple(table.configs[i] for i in configs.tolist()),
            Candidates.of(table.configs).config_columns[configs],
            columns[binaries],
            hashes[binaries],
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
        """Return the rows of one workload."""
        return self.take(np.flatnonzero(self.workload_index == self.workloads.index(workload)))

    def take(self, rows: NDArray[np.intp]) -> Frame:
        """Return the rows of an index."""
        return replace(
            self,
            workload_index=self.workload_index[rows],
            candidates=self.candidates.take(rows),
            latency_us=self.latency_us[rows],
            status=self.status[rows],
        )


def workload_fields() -> list[pa.Field]:
    """Return the Arrow columns of a workload."""
    import pyarrow as pa

    return [*(pa.field(name, pa.int32(), False) for name in _SIZES), *arrow_fields(CodeClass)]


def workload_of_row(values: Mapping[str, Any]) -> Workload:
    """Make the workload of a row of any table that has its columns."""
    return Workload.from_dict({name: values[name] for name in WORKLOAD_FIELDS})


def config_of_row(values: Mapping[str, Any]) -> GemmConfig:
    """Make the configuration of a row of any table that has its columns."""
    return GemmConfig.from_dict({name: values[name] for name in CONFIG_FIELDS})


def _differs(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark entries that differ from the one before, bool [n]; the first does."""
    found: NDArray[np.bool_] = np.diff(values, prepend=values[:1] - 1) != 0
    return found


def _texts(table: pa.Table, name: str) -> NDArray[np.object_]:
    """Return a column of texts, object [rows]; equal texts are one object."""
    column = table.column(name).combine_chunks()
    texts = np.array(column.dictionary.to_pylist(), dtype=object)
    found: NDArray[np.object_] = texts[column.indices.to_numpy()]
    return found


def _require_unique(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Refuse rows that are equal in their first column and differ in another."""
    first: dict[object, Mapping[str, Any]] = {}
    for row in rows:
        key, *_ = row.values()
        other = first.setdefault(key, row)
        if other is not row:
            name = next(name for name in row if row[name] != other[name])
            raise CorruptFile(f"{path}: rows of one {next(iter(row))} differ in {name}")


def _require_times(status: NDArray[np.object_], latency_us: NDArray[Any], path: Path) -> None:
    """Refuse rows without the latency that their status promises: the least would win."""
    latency_us = latency_us[(status == "ok") | (status == "too_slow")]
    wrong = ~(np.isfinite(latency_us) & (latency_us > 0))
    if wrong.any():
        raise CorruptFile(
            f"{path}: latency_us {latency_us[wrong][0]} in {wrong.sum()} rows that were timed: "
            f"expected a time over 0; no release writes that"
        )


def _objects(
    rows: Iterable[dict[str, Any]], make: Callable[[dict[str, Any]], _T], path: Path
) -> tuple[_T, ...]:
    try:
        return tuple(make(row) for row in rows)
    except CostModelError as error:
        raise CorruptFile(f"{path}: {error}: no release writes such a row") from None
