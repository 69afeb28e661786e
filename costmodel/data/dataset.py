"""A recorded dataset: two tables on disk, appended to as a run goes, read as columns.

::

    datasets/h100-sxm/
      card.json                       schema, target, protocol; counts once compacted
      artifacts.parquet               one row per binary     (compacted)
      artifacts-<time>-<id>.parquet   one shard per append, until compacted
      measurements.parquet            one row per workload and configuration, and torch's
      measurements-<time>-<id>.parquet

Each append is one file, written whole or not at all under a name of its own. So a killed run loses
nothing that was appended, several processes may append at once, and reading needs no repair. If a
row was recorded twice, the first one counts; but a binary that compiled replaces a failure, and a
row of a changed kernel replaces that of the old one. Append artifacts before the rows that refer to
them.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import numpy as np

from costmodel.arrays import ArrowTable
from costmodel.compile.compiler import Artifact, ArtifactStatus, outweighs
from costmodel.compile.ptx import PTX_SCHEMA
from costmodel.data import shards
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.measurement import Measurement, Role, RunInfo, TuningRecord
from costmodel.data.measurement_table import CONFIG_FIELDS, Frame, MeasurementTable
from costmodel.data.rows import sort_rows
from costmodel.data.shards import CARD
from costmodel.errors import CorruptFile, MissingData
from costmodel.files import Named, file_errors, make_folder, read_json, time_now, write_json
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.validation import as_path, log, require

_APART = 0.05


class _Table(NamedTuple):
    """A table on disk.

    Attributes:
        name: begins the names of its files.
        of: the class of its rows: their columns, their faults, and which of them are distinct.
        order: columns to sort by; then neighbours differ little, and the columns compress.
        header: fields of its files' headers besides the identity.
    """

    name: str
    of: type[ArtifactTable | MeasurementTable]
    order: tuple[str, ...]
    header: Mapping[str, object]


_ARTIFACTS = _Table("artifacts", ArtifactTable, ("kernel", "key"), {"ptx_schema": PTX_SCHEMA})
_MEASUREMENTS = _Table("measurements", MeasurementTable, ("role", "workload", *CONFIG_FIELDS), {})


class Dataset:
    """A dataset directory, open for reading and appending.

    Attributes:
        identity: what all rows share: ``target`` and ``protocol``.
    """

    def __init__(self, path: Path, identity: shards.Identity, created: str):
        self.path = path
        self.identity = identity
        self.target, self.protocol = identity.target, identity.protocol
        self.created = created
        self._artifacts: ArtifactTable | None = None
        # Of artifacts, by key: appending must not read them all again.
        self._statuses: dict[str, ArtifactStatus] | None = None
        self._measurements: dict[tuple[Role, ...], MeasurementTable] = {}

    @classmethod
    def create(cls, path: str | Path, target: Target, protocol: Named) -> Self:
        """Start a dataset, or go on with the one that is there.

        Raises:
            MixedData: the one that is there is of another device, toolchain or protocol.
            FileError: the directory cannot be made or written.
        """
        path = as_path("path", path)
        require("target", target, Target, "a Target, such as Target.current()")
        require("protocol", protocol, Mapping, "a mapping that is JSON-ready")
        target.check_figures()
        identity = shards.Identity(target, protocol)
        with file_errors(path):
            there = (path / CARD).exists()
            make_folder(path)
        if not there:
            cls(path, identity, time_now())._write_card()
        dataset = cls.open(path)
        dataset.identity.require_same(identity, path)
        return dataset

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a dataset. Its tables are read when they are first asked for.

        Raises:
            MissingData: no dataset there. CorruptFile: its card is not one.
            WrongVersion: of a schema that this release does not read. FileError: it cannot be read.
        """
        path = as_path("path", path)
        card = _card_of(path)
        try:
            with file_errors(card):
                data: Any = read_json(card)
        except CorruptFile as error:
            raise CorruptFile(
                f"{error}: restore it from a copy; the Parquet files beside it have the same header"
            ) from None
        identity = shards.Identity.from_dict(data, card)
        if "kernel_schema" in data:
            raise MissingData(
                f"{path} is a dataset of kernels, expected one of products: "
                f"`costmodel train {path} --out DIR` makes a model of kernels"
            )
        return cls(path, identity, str(data.get("created", "")))

    def append_measurements(
        self,
        records: Sequence[TuningRecord],
        *,
        run: RunInfo,
        role: Role = "train",
        torch: Mapping[Workload, Measurement] | None = None,
    ) -> None:
        """Record timings; once this returns they are on disk. Best called once per workload.

        Args:
            records: what was measured, failures too.
            run: the run, and the card that it used.
            role: what the rows are for.
            torch: timings of ``torch.matmul``, by workload.

        Raises:
            InvalidInput: a value that reading would refuse; then none of the rows is recorded.
        """
        rows = MeasurementTable.rows(records, torch or {}, run, role)
        if len(rows):
            self._append(_MEASUREMENTS, rows)
            self._measurements = {}

    def append_artifacts(self, artifacts: Iterable[Artifact]) -> None:
        """Record compiled artifacts; once this returns they are on disk.

        Artifacts that were recorded before are kept, but one that compiled replaces a failure.
        """
        if self._statuses is None:
            self._statuses = dict(self.artifacts().statuses)
        there = self._statuses
        new = [a for a in artifacts if a.key not in there or outweighs(a.status, there[a.key])]
        if not new:
            return
        self._append(_ARTIFACTS, ArtifactTable.rows(new))
        there.update((a.key, a.status) for a in new)
        self._artifacts = None

    def measured(
        self, kernel_hashes: Mapping[str, str] | None = None
    ) -> dict[Workload, set[GemmConfig]]:
        """Return the configurations whose outcome is recorded, which a resumed run skips.

        Args:
            kernel_hashes: as for :meth:`frame`: rows of a kernel that has changed do not count.
        """
        table, _ = self.unchanged(self.measurements("train", "eval"), kernel_hashes or {})
        return {
            workload: {table.configs[i] for i in table.config_index[rows] if i >= 0}
            for workload, rows in table.rows_of.items()
        }

    def measurements(self, *roles: Role) -> MeasurementTable:
        """Return the rows of the given roles (default: all), each outcome once."""
        if not self._measurements:
            self._measurements[()] = MeasurementTable.of(self._read(_MEASUREMENTS))
        if roles not in self._measurements:
            table = self._measurements[()]
            self._measurements[roles] = table.take(np.isin(table.role, roles))
        return self._measurements[roles]

    def artifacts(self) -> ArtifactTable:
        """Return the compiled artifacts, by key."""
        if self._artifacts is None:
            self._artifacts = ArtifactTable(self._read(_ARTIFACTS))
        return self._artifacts

    def workloads(self, *roles: Role) -> list[Workload]:
        """Return the workloads recorded in the given roles (default: train and eval)."""
        return list(self.measurements(*(roles or ("train", "eval"))).rows_of)

    def recorded(self, workload: Workload) -> dict[GemmConfig, Measurement]:
        """Return all outcomes of a workload; empty if it was not measured.

        Rows of a kernel that has changed since then count too, but only those of one version of
        each kernel: the version whose run started last.
        """
        table = self.measurements("train", "eval")
        rows = table.rows_for(workload)
        rows = rows[table.config_index[rows] >= 0]
        kernels = self.artifacts().kernels if len(rows) else {}
        versions = [
            kernels.get(table.artifact_keys[i], ("", "")) for i in table.artifact_index[rows]
        ]
        started = [table.runs[i].started for i in table.run_index[rows]]
        last = {name: code for _, (name, code) in sorted(zip(started, versions))}
        configs = [table.configs[i] for i in table.config_index[rows]]
        return {
            config: measurement
            for config, measurement, (name, code) in zip(
                configs, table.measurements(rows), versions
            )
            if code == last[name]
        }

    def torch(self, workload: Workload) -> Measurement | None:
        """Return the timing of ``torch.matmul``, or None if it was not timed."""
        table = self.measurements("train", "eval")
        rows = table.rows_for(workload)
        found = table.measurements(rows[table.config_index[rows] < 0][:1])
        return found[0] if found else None

    def frame(self, *roles: Role, kernel_hashes: Mapping[str, str] | None = None) -> Frame:
        """Return rows with features, without torch's; of role ``train`` if none is given.

        Rows of a card whose times are over 5 % apart from those of its twins are dropped.

        Args:
            kernel_hashes: current hash of each kernel, by name: rows of a kernel that has changed
                since are dropped, and counted in :attr:`Frame.dropped`.
        """
        table = self.measurements(*(roles or ("train",)))
        table = table.take(table.config_index >= 0)
        table, dropped = self.unchanged(table, kernel_hashes or {})
        apart = self._apart()
        odd = np.array([r.device_uuid in apart for r in table.runs], dtype=bool)[table.run_index]
        if odd.any():
            dropped["of a card over 5 % apart from its twins"] = int(odd.sum())
        return table.take(~odd).frame(self.artifacts(), dropped)

    def unchanged(
        self, table: MeasurementTable, kernel_hashes: Mapping[str, str]
    ) -> tuple[MeasurementTable, dict[str, int]]:
        """Return the rows of unchanged kernels, and how many others there are, by reason.

        Args:
            table: rows of this dataset.
            kernel_hashes: as for :meth:`frame`.
        """
        kernels = self.artifacts().kernels if kernel_hashes else {}
        names = [
            name if kernel_hashes.get(name, recorded) != recorded else ""
            for name, recorded in (kernels.get(key, ("", "")) for key in table.artifact_keys)
        ]
        changed = np.array(names, dtype=object)[table.artifact_index]
        dropped = Counter(f"kernel {name} has changed" for name in changed if name)
        return table.take(changed == "") if dropped else table, dict(dropped)

    def compact(self) -> None:
        """Merge the shards into one sorted, compressed file per table; write counts to the card.

        A crash in between loses nothing: it leaves rows twice, and reading drops the copies. If
        several processes compact at once, each waits for the one before it.
        """
        with shards.compaction_lock(self.path):
            for table in (_ARTIFACTS, _MEASUREMENTS):
                with file_errors(self.path):
                    old, rows = self._files(table)
                merged = self.path / f"{table.name}.parquet"
                self._write(table, merged, sort_rows(table.of.distinct(rows), table.order))
                for path in old:
                    if path != merged:
                        with file_errors(path):
                            path.unlink()
            self._artifacts, self._measurements = None, {}
            self._write_card(self._counts())
        for card, factor in self._apart().items():
            log.warning(
                "%s: card %s takes %.2f times as long as its twins: no model learns from its rows; "
                "look at nvidia-smi, and collect them in another folder again",
                self.path, card, factor,
            )  # fmt: skip

    def _apart(self) -> dict[str, float]:
        """Return the cards that are over 5 % apart from their twins, with their factor of time."""
        every = self.measurements("anchor").twins().items()
        return {card: factor for card, factor in every if abs(factor - 1) > _APART}

    def absorb(self, path: Path) -> None:
        """Append the rows of another dataset.

        Raises:
            MixedData: it is of another device, toolchain or protocol.
        """
        part = self.open(path)
        self.identity.require_same(part.identity, part.path)
        for table in (_ARTIFACTS, _MEASUREMENTS):
            if len(rows := part._read(table)):
                self._append(table, rows)
        self._artifacts, self._statuses, self._measurements = None, None, {}

    def _write_card(self, counts: Named | None = None) -> None:
        card = {"kind": "costmodel dataset", **self.identity.to_dict(), "created": self.created}
        with file_errors(self.path / CARD):
            write_json(self.path / CARD, card | dict(counts or {}))

    def _counts(self) -> Named:
        table = self.measurements()
        kernels = sorted(set(self.artifacts().kernels.values()))
        status = Counter(zip(table.role.tolist(), table.status.tolist()))
        return {
            "compacted": time_now(),
            "kernels": {name: [h for n, h in kernels if n == name] for name, _ in kernels},
            "counts": {
                "artifacts": len(self.artifacts()),
                "workloads": {r: len(self.workloads(r)) for r in get_args(Role)},
                "rows": {
                    role: {s: n for (r, s), n in sorted(status.items()) if r == role}
                    for role in get_args(Role)
                },
                "devices": sorted({run.device_uuid for run in table.runs}),
                "twins": {c: round(x, 4) for c, x in self.measurements("anchor").twins().items()},
            },
        }

    def _append(self, table: _Table, rows: ArrowTable) -> None:
        self._write(table, shards.new_shard_path(self.path, table.name), rows)

    def _write(self, table: _Table, path: Path, rows: ArrowTable) -> None:
        shards.write_shard(path, rows, self.identity, **table.header)

    def _files(self, table: _Table) -> tuple[list[Path], ArrowTable]:
        """Return the files of a table and all their rows, in the order of the files."""
        # Compacting removes the shards once the compacted file is there, so list the shards first:
        # in the other order, compacting in between would hide both.
        files = sorted(self.path.glob(f"{table.name}-*.parquet"))
        compacted = self.path / f"{table.name}.parquet"
        if os.path.lexists(compacted):
            files.insert(0, compacted)
        rows = shards.read_shards(
            files, table.of.schema(), self.identity, table.of.faults, **table.header
        )
        _card_of(self.path)  # raises if the folder was moved meanwhile, which would look empty
        return files, rows

    def _read(self, table: _Table) -> ArrowTable:
        """Return the rows of a table as compacting leaves them.

        Shards are merged for reading, too: a model must not depend on when they were compacted.
        """
        try:
            files, rows = self._files(table)
        except FileNotFoundError:  # another process merges them, or a link leads nowhere
            with shards.compaction_lock(self.path), file_errors(self.path):
                files, rows = self._files(table)
        if all(path.name == f"{table.name}.parquet" for path in files):
            return rows
        return sort_rows(table.of.distinct(rows), table.order)


def _card_of(path: Path) -> Path:
    """Return the path of a dataset's card; MissingData if it is not there."""
    card = path / CARD
    with file_errors(card):
        there = card.exists()
    if not there:
        raise MissingData(
            f"no dataset at {path} ({CARD} is not there): record one with `costmodel collect`, or "
            f"name the directory of one"
        )
    return card
