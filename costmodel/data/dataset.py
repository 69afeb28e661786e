"""A recorded dataset: two tables on disk, appended to as a run goes, read as columns.

::

    datasets/h100-sxm/
      card.json                       schema, target, protocol; counts once compacted
      artifacts.parquet               one row per binary     (compacted)
      artifacts-<time>-<id>.parquet   one shard per append, until compacted
      measurements.parquet            one row per workload and configuration, and torch's
      measurements-<time>-<id>.parquet

Each append is one file, written whole or not at all under a name of its own. So a killed run loses
nothing that was appended, several processes may append at once, and reading needs no repair. Of
rows that were recorded twice the first counts, but a binary that compiled replaces a failure.
Append artifacts before the rows that refer to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from costmodel.compile.compiler import Artifact, ArtifactStatus, outweighs
from costmodel.compile.ptx import PTX_SCHEMA
from costmodel.data import shards
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.destination import CARD
from costmodel.data.measurement import Measurement, TuningRecord
from costmodel.data.measurement_table import Frame, MeasurementTable, Role, RunInfo
from costmodel.errors import CorruptFile, MissingData
from costmodel.files import file_errors, read_json, write_json
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.validation import as_path, require

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Dataset", "Frame", "Role", "RunInfo"]

_ARTIFACTS, _MEASUREMENTS = "artifacts", "measurements"
# Sorted like this, neighbours differ in little and the columns compress.
_ARTIFACT_ORDER = ("kernel", "key")
_MEASUREMENT_ORDER = ("role", "workload", *(f.name for f in fields(GemmConfig)))


class Dataset:
    """A dataset directory, open for reading and appending."""

    def __init__(self, path: Path, identity: shards.Identity, created: str) -> None:
        self.path = path
        self.identity = identity
        self.created = created
        self._artifacts: ArtifactTable | None = None
        # Of artifacts: appending must not read them all again.
        self._statuses: dict[str, ArtifactStatus] | None = None
        self._measurements: dict[tuple[Role, ...], MeasurementTable] = {}
        self._done: dict[Workload, set[GemmConfig]] | None = None
        self._done_hashes: dict[str, str] = {}

    @classmethod
    def create(cls, path: str | Path, target: Target, protocol: Mapping[str, Any]) -> Dataset:
        """Start a dataset, or go on with the one that is there.

        Raises:
            MixedData: the one that is there is of another device, toolchain or protocol.
            FileError: the directory cannot be made or written.
        """
        path = as_path("path", path)
        require("target", target, Target, "a Target, such as Target.current()")
        require("protocol", protocol, Mapping, "a mapping that is JSON-ready")
        identity = shards.Identity(target, protocol)
        with file_errors(path):
            there = (path / CARD).exists()
            path.mkdir(parents=True, exist_ok=True)
        if not there:
            cls(path, identity, datetime.now(UTC).isoformat(timespec="seconds"))._write_card()
        dataset = cls.open(path)
        dataset.identity.require_same(identity, path)
        return dataset

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Open a dataset. Its tables are read when they are first asked for.

        Raises:
            MissingData: no dataset there. CorruptFile: its card is not one.
            WrongVersion: written by a newer release. FileError: it cannot be read.
        """
        path = as_path("path", path)
        card = _card_of(path)
        try:
            with file_errors(card):
                data: Any = read_json(card)
        except CorruptFile as error:
            raise CorruptFile(f"{error}: restore it, or delete the dataset") from None
        identity = shards.Identity.from_dict(data, card)
        return cls(path, identity, str(data.get("created", "")))

    @property
    def target(self) -> Target:
        """Device and toolchain of all rows."""
        return self.identity.target

    @property
    def protocol(self) -> Mapping[str, Any]:
        """Timing protocol of all rows, JSON-ready."""
        return self.identity.protocol

    def append_measurements(
        self,
        records: Sequence[TuningRecord],
        *,
        run: RunInfo,
        role: Role = "train",
        torch: Mapping[Workload, Measurement] | None = None,
    ) -> None:
        """Record timings; once this returns they are on disk. Best called once a workload.

        Args:
            records: what was measured, failures too.
            run: the run and the card it was measured in.
            role: what the rows are for.
            torch: timings of ``torch.matmul``, by workload.
        """
        baseline = torch or {}
        if not records and not baseline:
            return
        rows = MeasurementTable.rows(records, baseline, run, role)
        self._append(_MEASUREMENTS, rows)
        self._measurements = {}
        if self._done is not None and role != "anchor":
            for record in records:
                self._done.setdefault(record.workload, set()).add(record.config)

    def append_artifacts(self, artifacts: Iterable[Artifact]) -> None:
        """Record compiled artifacts; once this returns they are on disk.

        Those that are there already are kept, but one that compiled replaces a failure.
        """
        if self._statuses is None:
            self._statuses = self.artifacts().statuses()
        there = self._statuses
        new = [a for a in artifacts if a.key not in there or outweighs(a.status, there[a.key])]
        if not new:
            return
        self._append(_ARTIFACTS, ArtifactTable.rows(new))
        there.update((a.key, a.status) for a in new)
        self._artifacts = None

    def measured(
        self, workload: Workload, kernel_hashes: Mapping[str, str] | None = None
    ) -> set[GemmConfig]:
        """Return the configurations whose outcome is recorded, which a resumed run skips.

        Args:
            kernel_hashes: as for :meth:`frame`: rows of a kernel that has changed do not count.
        """
        hashes = dict(kernel_hashes or {})
        if self._done is None or self._done_hashes != hashes:
            table = self.unchanged(self.measurements("train", "eval"), hashes)[0]
            self._done_hashes = hashes
            self._done = {
                w: {table.configs[i] for i in table.config_index[rows] if i >= 0}
                for w, rows in table.rows_of.items()
            }
        return set(self._done.get(workload, ()))

    def measurements(self, *roles: Role) -> MeasurementTable:
        """Return the rows of the given roles (default: all), each outcome once."""
        if not self._measurements:
            table = MeasurementTable.of(self._merged(_MEASUREMENTS), self.path)
            # A file that an earlier release compacted may hold more.
            self._measurements[()] = table.take(table.kept_rows())
        if roles not in self._measurements:
            table = self._measurements[()]
            wanted = np.logical_or.reduce([table.role == role for role in roles])
            self._measurements[roles] = table.take(wanted)
        return self._measurements[roles]

    def artifacts(self) -> ArtifactTable:
        """Return the compiled artifacts, by key."""
        if self._artifacts is None:
            self._artifacts = ArtifactTable(self._merged(_ARTIFACTS))
        return self._artifacts

    def workloads(self, *roles: Role) -> list[Workload]:
        """Return the workloads recorded in the given roles (default: train and eval)."""
        return list(self.measurements(*(roles or ("train", "eval"))).rows_of)

    def recorded(self, workload: Workload) -> dict[GemmConfig, Measurement]:
        """Return all outcomes of a workload; empty if it was not measured.

        Rows of a kernel that has changed since count too, but of one version of each kernel only:
        the one whose run started last.
        """
        table = self.measurements("train", "eval")
        rows = [r for r in table.rows_of.get(workload, ()) if table.config_index[r] >= 0]
        kernels = self.artifacts().kernels if rows else {}
        versions = [
            kernels.get(table.artifact_keys[table.artifact_index[r]], ("", "")) for r in rows
        ]
        started = [table.runs[table.run_index[r]].started for r in rows]
        last = {name: code for _, (name, code) in sorted(zip(started, versions, strict=True))}
        return {
            table.configs[table.config_index[r]]: table.measurement(r)
            for r, (name, code) in zip(rows, versions, strict=True)
            if code == last[name]
        }

    def torch(self, workload: Workload) -> Measurement | None:
        """Return the timing of ``torch.matmul``, or None if it was not timed."""
        table = self.measurements("train", "eval")
        rows = (r for r in table.rows_of.get(workload, ()) if table.config_index[r] < 0)
        return next((table.measurement(row) for row in rows), None)

    def frame(self, *roles: Role, kernel_hashes: Mapping[str, str] | None = None) -> Frame:
        """Return rows with features, without torch's; ``train`` if no role is given.

        Args:
            kernel_hashes: current hash of each kernel, by name: rows of a kernel that has changed
                since are dropped, and counted in :attr:`Frame.dropped`.
        """
        table = self.measurements(*(roles or ("train",)))
        table = table.take(table.config_index >= 0)
        table, dropped = self.unchanged(table, kernel_hashes or {})
        return Frame.of(table, self.artifacts(), dropped)

    def unchanged(
        self, table: MeasurementTable, kernel_hashes: Mapping[str, str]
    ) -> tuple[MeasurementTable, dict[str, int]]:
        """Return the rows of unchanged kernels, and how many others there are, by reason.

        Args:
            table: rows of this dataset.
            kernel_hashes: as for :meth:`frame`.
        """
        changed = self._changed_kernel(table, kernel_hashes)
        dropped = Counter(f"kernel {name} has changed" for name in changed if name)
        return table.take(changed == "") if dropped else table, dict(dropped)

    def compact(self) -> None:
        """Merge the shards into one file a table, sorted and compressed, and count in the card.

        A crash in between leaves rows twice, which reading drops; nothing is lost. Of several
        processes at once, each waits for the one before it.
        """
        with shards.compaction_lock(self.path):
            for table in (_ARTIFACTS, _MEASUREMENTS):
                old, rows = self._read(table)
                merged = self.path / f"{table}.parquet"
                self._write(merged, self._merge(table, rows))
                for path in old:
                    if path != merged:
                        with file_errors(path):
                            path.unlink()
            self._artifacts, self._measurements = None, {}
            self._write_card(self._counts())

    def extract(self, path: str | Path, workloads: Sequence[Workload]) -> Dataset:
        """Write the rows of some workloads, and their artifacts, as a dataset of its own."""
        import pyarrow as pa
        from pyarrow import compute

        part = Dataset.create(path, self.target, self.protocol)
        _, rows = self._read(_MEASUREMENTS)
        keys = pa.array([w.key() for w in workloads], pa.string())
        rows = rows.filter(compute.is_in(rows.column("workload").cast(pa.string()), keys))
        _, artifacts = self._read(_ARTIFACTS)
        used = rows.column("artifact_key").cast(pa.string()).unique()
        part._append(_ARTIFACTS, artifacts.filter(compute.is_in(artifacts.column("key"), used)))
        part._append(_MEASUREMENTS, rows)
        part.compact()
        return part

    def _changed_kernel(
        self, table: MeasurementTable, hashes: Mapping[str, str]
    ) -> NDArray[np.object_]:
        """Return the name of each row's kernel if it has changed, else empty; object [rows]."""
        kernels = self.artifacts().kernels if hashes else {}
        names = [
            name if name in hashes and hashes[name] != recorded else ""
            for name, recorded in (kernels.get(key, ("", "")) for key in table.artifact_keys)
        ]
        return np.array(names, dtype=object)[table.artifact_index]

    def _write_card(self, counts: Mapping[str, Any] | None = None) -> None:
        card = {"kind": "costmodel dataset", **self.identity.to_dict(), "created": self.created}
        with file_errors(self.path / CARD):
            write_json(self.path / CARD, card | dict(counts or {}))

    def _counts(self) -> dict[str, Any]:
        table = self.measurements()
        kernels = sorted(set(self.artifacts().kernels.values()))
        status = Counter(zip(table.role.tolist(), table.status.tolist(), strict=True))
        return {
            "compacted": datetime.now(UTC).isoformat(timespec="seconds"),
            "kernels": {name: [h for n, h in kernels if n == name] for name, _ in kernels},
            "counts": {
                "artifacts": len(self.artifacts()),
                "workloads": {r: len(self.workloads(r)) for r in get_args(Role)},
                "rows": {
                    role: {s: n for (r, s), n in sorted(status.items()) if r == role}
                    for role in get_args(Role)
                },
                "devices": sorted({run.device_uuid for run in table.runs}),
            },
        }

    def _append(self, table: str, rows: pa.Table) -> None:
        self._write(shards.new_shard_path(self.path, table), rows)

    def _write(self, path: Path, rows: pa.Table) -> None:
        shards.write_shard(path, rows, self.identity, **_header(path.name))

    def _read(self, table: str) -> tuple[list[Path], pa.Table]:
        """Return the files of a table and all their rows, in the order of the files."""
        schema = (ArtifactTable if table == _ARTIFACTS else MeasurementTable).schema()
        found = shards.read_all(self.path, table, schema, self.identity, **_header(table))
        _card_of(self.path)  # there would be no rows if the folder was moved meanwhile
        return found

    def _merged(self, table: str) -> pa.Table:
        """Return the rows of a table as compacting leaves them.

        Shards are merged for reading, too: a model must not depend on when they were compacted.
        """
        files, rows = self._read(table)
        compacted = all(path.name == f"{table}.parquet" for path in files)
        return rows if compacted else self._merge(table, rows)

    def _merge(self, table: str, rows: pa.Table) -> pa.Table:
        """Keep each artifact, and each outcome, once, and sort."""
        if table == _ARTIFACTS:
            return shards.sort_rows(ArtifactTable(rows).arrow(), _ARTIFACT_ORDER)
        kept = rows.take(MeasurementTable.of(rows, self.path).kept_rows())
        return shards.sort_rows(kept, _MEASUREMENT_ORDER)


def _header(table: str) -> dict[str, Any]:
    """Return what the files of a table say in their headers besides the identity."""
    return {"ptx_schema": PTX_SCHEMA} if table.startswith(_ARTIFACTS) else {}


def _card_of(path: Path) -> Path:
    """Return the card of a dataset's directory.

    Raises:
        MissingData: it is not there. FileError: that cannot be told.
    """
    card = path / CARD
    with file_errors(card):
        there = card.exists()
    if not there:
        raise MissingData(
            f"no dataset at {path} ({CARD} is not there): record one with "
            f"`costmodel collect`, or name the directory of one"
        )
    return card
