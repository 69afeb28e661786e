"""Measured rows as columns: 200,000 of them without 200,000 objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from costmodel.data.measurement import Measurement, Status, TuningRecord, says_no_room
from costmodel.data.shards import arrow_fields
from costmodel.errors import CorruptFile, CostModelError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import CodeClass, Workload

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["MeasurementTable", "Role", "RunInfo", "config_of_row", "workload_of_row"]

Role = Literal["train", "eval", "anchor"]
"""What a row is for. ``anchor`` rows time again what is recorded already, later in the same run or
in another: they tell the noise, are kept once per run, and are never trained on."""

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
                *(pa.field(name, pa.int32(), False) for name in ("m", "n", "k")),
                *arrow_fields(CodeClass),
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
        torch: Iterable[tuple[Workload, Measurement]],
        run: RunInfo,
        role: Role,
    ) -> pa.Table:
        """Records and timings of ``torch.matmul`` as an Arrow table of :meth:`schema`."""
        import pyarrow as pa

        no_config: dict[str, Any] = {f.name: None for f in fields(GemmConfig)} | {"kernel": _TORCH}
        measured = [
            (r.workload, r.config.to_dict(), r.artifact_key, r.measurement) for r in records
        ] + [(workload, no_config, "", measurement) for workload, measurement in torch]
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
        workload_index = _codes(table, "workload")
        run_index = _codes(table, "run_id")
        config_index, config_rows = _config_ids(table)
        status = _texts(table, "status")
        role = _texts(table, "role")
        for name, found, known in (
            ("status", status, get_args(Status)), ("role", role, get_args(Role)),
        ):  # fmt: skip
            if unknown := set(found) - set(known):
                raise CorruptFile(f"{path}: {name} {sorted(unknown)}: no release writes that")
        _require_times(table, status, path)
        _require_same(table, workload_index, ("m", "n", "k", *_names(CodeClass)), path)
        _require_same(table, run_index, _names(RunInfo), path)
        return cls(
            _objects(table, workload_index, workload_of_row, path),
            _build(table, config_rows, config_of_row, path),
            tuple(_dictionary(table, "artifact_key")),
            _objects(table, run_index, _run, path),
            _dense(workload_index),
            config_index,
            _codes(table, "artifact_key"),
            _dense(run_index),
            role,
            status,
            _texts(table, "error"),
            *(_numbers(table, n, np.float64) for n in ("latency_us", "p10_us", "p90_us")),
            *(_numbers(table, n, np.int64) for n in ("repeats", "clock_mhz")),
        )

    def __len__(self) -> int:
        return len(self.workload_index)

    @property
    def ok(self) -> NDArray[np.bool_]:
        """Rows with a correct, timed result, bool [rows]."""
        ok: NDArray[np.bool_] = self.status == "ok"
        return ok

    def take(self, rows: NDArray[Any]) -> MeasurementTable:
        """The rows of an index or a mask; what is numbered stays numbered as it was."""
        columns = {
            f.name: getattr(self, f.name)[rows]
            for f in fields(self)
            if isinstance(getattr(self, f.name), np.ndarray)
        }
        return replace(self, **columns)

    def kept_rows(self) -> NDArray[np.intp]:
        """One row per workload and configuration, and per run for anchors; in order.

        Of two versions of a kernel, the one that came last; of those rows that it gave in a row,
        the first. A version that came back, since an edit was taken back, came last.
        None of a full card, which says nothing of the configuration.
        """
        full = [says_no_room(*row) for row in zip(self.status, self.error, strict=True)]
        rows = np.flatnonzero(~np.array(full, dtype=bool))
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


def _differs(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which differ from the one before, bool [n]; the first does."""
    found: NDArray[np.bool_] = np.diff(values, prepend=values[:1] - 1) != 0
    return found


def _codes(table: pa.Table, name: str) -> NDArray[np.int64]:
    column = table.column(name).combine_chunks()
    return np.asarray(column.indices).astype(np.int64)


def _dictionary(table: pa.Table, name: str) -> list[str]:
    values: list[str] = table.column(name).combine_chunks().dictionary.to_pylist()
    return values


def _texts(table: pa.Table, name: str) -> NDArray[np.object_]:
    return np.array(_dictionary(table, name), dtype=object)[_codes(table, name)]


def _numbers(table: pa.Table, name: str, dtype: type) -> NDArray[Any]:
    return np.asarray(table.column(name).to_numpy()).astype(dtype)


def _dense(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Renumber by first appearance, leaving out what no row has."""
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def _objects(
    table: pa.Table, codes: NDArray[np.int64], make: Callable[[dict[str, Any]], _T], path: Path
) -> tuple[_T, ...]:
    """One object per code, from the first row that has it, in the order of :func:`_dense`."""
    return _build(table, np.sort(np.unique(codes, return_index=True)[1]), make, path)


def _config_ids(table: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Number the configurations (-1 for torch), and give a row of each."""
    kernel = table.column("kernel").combine_chunks()
    is_torch = np.asarray(kernel.to_numpy(zero_copy_only=False) == _TORCH)
    ids = _codes(table, "kernel")
    for field in fields(GemmConfig)[1:]:
        values = table.column(field.name).cast("int32").fill_null(-1).to_numpy().astype(np.int64)
        values = np.unique(values, return_inverse=True)[1]  # whatever the numbers, no two collide
        # Renumbered after each column, so that the product cannot overflow.
        ids = np.unique(ids * (values.max(initial=0) + 1) + values, return_inverse=True)[1]
    ids[is_torch] = -1
    first = np.unique(ids, return_index=True)[1]
    rows = np.sort(first[~is_torch[first]])
    numbered = np.full(len(ids), -1, dtype=np.int64)
    numbered[~is_torch] = _dense(ids[~is_torch])
    return numbered, rows


def _require_times(table: pa.Table, status: NDArray[np.object_], path: Path) -> None:
    """Refuse rows without the latency that their status promises: the least would win."""
    timed = np.isin(status.astype(str), ("ok", "too_slow"))
    latency_us = _numbers(table, "latency_us", np.float64)[timed]
    wrong = ~(np.isfinite(latency_us) & (latency_us > 0))
    if wrong.any():
        raise CorruptFile(
            f"{path}: latency_us {latency_us[wrong][0]} in {wrong.sum()} rows that were timed: "
            f"expected a time over 0; no release writes that"
        )


def _require_same(
    table: pa.Table, codes: NDArray[np.int64], names: Sequence[str], path: Path
) -> None:
    """Refuse rows that differ in a column which all rows of one code share."""
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    for name in names:
        values = table.column(name).combine_chunks()
        is_text = hasattr(values, "indices")
        values = values.indices if is_text else values.cast("int32")
        numbers = np.asarray(values)
        if not np.array_equal(numbers, numbers[first][inverse]):
            raise CorruptFile(f"{path}: rows of one workload or run differ in {name}")


def _names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


def _build(
    table: pa.Table, rows: NDArray[np.intp], make: Callable[[dict[str, Any]], _T], path: Path
) -> tuple[_T, ...]:
    try:
        return tuple(make(values) for values in table.take(rows).to_pylist())
    except CostModelError as error:
        raise CorruptFile(f"{path}: {error}: no release writes such a row") from None


def _pick(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in fields(cls)}


def workload_of_row(values: dict[str, Any]) -> Workload:
    """The workload of a row of any table that has its columns; others are not looked at."""
    return Workload.from_dict(
        {name: values[name] for name in ("m", "n", "k")} | _pick(CodeClass, values)
    )


def config_of_row(values: dict[str, Any]) -> GemmConfig:
    """The configuration of a row, as above."""
    return GemmConfig.from_dict(_pick(GemmConfig, values))


def _run(values: dict[str, Any]) -> RunInfo:
    return RunInfo(**_pick(RunInfo, values))
