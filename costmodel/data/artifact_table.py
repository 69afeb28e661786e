"""Compiled artifacts as a table: found by key, read as columns, stored as Parquet."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from costmodel.compile.compiler import Artifact, ArtifactStatus, outweighs
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.data.candidates import ARTIFACT_COLUMNS
from costmodel.data.shards import arrow_fields
from costmodel.errors import CorruptFile, CostModelError
from costmodel.gemm.config import ConfigBinary, Specialization
from costmodel.gemm.family import families
from costmodel.gemm.specialize import kernel_hash
from costmodel.gemm.workload import CodeClass

if TYPE_CHECKING:
    import pyarrow as pa

_BINARY = ConfigBinary._fields
_CODE = tuple(f.name for f in fields(CodeClass))
_RESULT = (
    "status", "error", "registers", "spill_bytes", "shared_bytes", "ptx_hash", "compile_s",
)  # fmt: skip
_PTX = "ptx_count_"
_LARGEST = 2**53  # a model refuses what single precision does not hold


class ArtifactTable(Mapping[str, Artifact]):
    """Artifacts by key. Rows become objects only when they are asked for."""

    def __init__(self, table: pa.Table) -> None:
        """Take over an Arrow table of :meth:`schema`.

        Of rows with one key the first counts that no other outweighs.

        Raises:
            CorruptFile: a status, kernel or figure that no release writes.
        """
        for name, known in (("status", get_args(ArtifactStatus)), ("kernel", families())):
            if unknown := set(table.column(name).unique().to_pylist()) - set(known):
                raise CorruptFile(f"artifacts of {name} {sorted(unknown)}: no release writes that")
        keys: list[str] = table.column("key").to_pylist()
        statuses: list[ArtifactStatus] = table.column("status").to_pylist()
        first: dict[str, int] = {}
        for row, (key, status) in enumerate(zip(keys, statuses, strict=True)):
            other = first.setdefault(key, row)
            if other != row and outweighs(status, statuses[other]):
                first[key] = row
        if len(first) < len(keys):
            table = table.take(np.array([*first.values()], dtype=np.int64))
        self._table = table
        self._row = {key: row for row, key in enumerate(first)}
        self._objects: dict[int, Artifact] = {}
        ok = table.column("status").to_numpy() == "ok"
        figures = self._features[ok]
        # NaN is a count that the compiler's release does not give.
        if ((figures < 0) | (figures > _LARGEST)).any():
            raise CorruptFile(
                f"artifacts with figures that are not from 0 to {_LARGEST}: no release writes that"
            )
        self._ok = ok

    @staticmethod
    def schema() -> pa.Schema:
        """Arrow columns: key, kernel hash, specialization, results, PTX counts."""
        import pyarrow as pa

        text, i32 = pa.dictionary(pa.int32(), pa.string()), pa.int32()
        kinds = {"kernel": text, "halves": pa.bool_(), "flatten": pa.bool_(), "split": pa.bool_()}
        result_kinds = {"status": text, "error": text, "ptx_hash": pa.string()}
        return pa.schema(
            [
                pa.field("key", pa.string(), False),
                pa.field("kernel_hash", text, False),
                *(pa.field(n, kinds.get(n, i32), False) for n in _BINARY),
                *arrow_fields(CodeClass),
                pa.field("even_k", pa.bool_(), False),
                *(
                    pa.field(
                        n, result_kinds.get(n, pa.float64() if n == "compile_s" else i32), False
                    )
                    for n in _RESULT
                ),
                *(pa.field(_PTX + n, pa.float64(), False) for n in PTX_FEATURES),
            ]
        )

    @classmethod
    def empty(cls) -> ArtifactTable:
        """Return a table without artifacts."""
        return cls(cls.schema().empty_table())

    @classmethod
    def rows(cls, artifacts: Iterable[Artifact]) -> pa.Table:
        """Lay out artifacts as an Arrow table, with the hash of the kernel of each."""
        import pyarrow as pa

        hash_of = functools.cache(kernel_hash)
        rows: list[dict[str, Any]] = [
            {
                "key": a.key,
                "kernel_hash": hash_of(a.spec.kernel),
                **dict(zip(_BINARY, a.spec.config_binary, strict=True)),
                **asdict(a.spec.code),
                "even_k": a.spec.even_k,
                **{name: getattr(a, name) for name in _RESULT},
                **{_PTX + name: a.ptx.get(name, np.nan) for name in PTX_FEATURES},
            }
            for a in artifacts
        ]
        return pa.Table.from_pylist(rows, schema=cls.schema())

    # By identity: a table is a key of caches, and equal ones are not looked for.
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __getitem__(self, key: str) -> Artifact:
        (artifact,) = self._at([self._row[key]])
        return artifact

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    def find(self, keys: Sequence[str]) -> list[Artifact | None]:
        """Return the artifacts of the given keys, in order; None where a key is unknown."""
        found = [key for key in keys if key in self._row]
        artifacts = dict(zip(found, self._at([self._row[key] for key in found]), strict=True))
        return [artifacts.get(key) for key in keys]

    def columns(self, keys: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.object_]]:
        """Return the columns that :class:`Candidates` have of the binaries of the given keys.

        Returns:
            (artifact_columns, ptx_hash): NaN and empty where a key is unknown or did not compile.
        """
        index = np.array([self._row.get(key, -1) for key in keys], dtype=np.intp)
        known = index >= 0
        known[known] = self._ok[index[known]]
        features = np.full((len(keys), len(ARTIFACT_COLUMNS)), np.nan)
        features[known] = self._features[index[known]]
        hashes = np.full(len(keys), "", dtype=object)
        hashes[known] = self._table.column("ptx_hash").to_numpy()[index[known]]
        return features, hashes

    def refused(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Mark the keys that the compiler refuses, and will refuse again, bool [len(keys)]."""
        statuses = self.statuses()
        return np.array([statuses.get(key) == "compile_error" for key in keys], dtype=bool)

    def statuses(self) -> dict[str, ArtifactStatus]:
        """Return the status of each key."""
        return dict(zip(self._row, self._table.column("status").to_pylist(), strict=True))

    @functools.cached_property
    def kernels(self) -> Mapping[str, tuple[str, str]]:
        """Kernel name and kernel hash of each key."""
        names, hashes = (self._table.column(n).to_pylist() for n in ("kernel", "kernel_hash"))
        return dict(zip(self._row, zip(names, hashes, strict=True), strict=True))

    def arrow(self) -> pa.Table:
        """Return the rows as an Arrow table, each key once."""
        return self._table

    def merged_with(self, others: Sequence[ArtifactTable]) -> ArtifactTable:
        """Return the rows of all tables; of equal keys the one that :meth:`__init__` would take."""
        import pyarrow as pa

        tables = [self._table, *(other._table for other in others)]
        return ArtifactTable(pa.concat_tables(tables).unify_dictionaries()) if others else self

    @functools.cached_property
    def _features(self) -> NDArray[np.float64]:
        counts = {*PTX_FEATURES}
        columns = [
            self._table.column(_PTX + n if n in counts else n).to_numpy() for n in ARTIFACT_COLUMNS
        ]
        return np.stack(columns, axis=1).astype(np.float64)

    def _at(self, rows: Sequence[int]) -> list[Artifact]:
        """Return rows as objects, each made once."""
        if new := [row for row in rows if row not in self._objects]:
            made = self._table.select(_FIELDS).take(new).to_pylist()
            counts = self._features[new, -len(PTX_FEATURES) :].tolist()
            self._objects.update(zip(new, map(_from_row, made, counts), strict=True))
        return [self._objects[row] for row in rows]


_FIELDS = ("key", *_BINARY, *_CODE, "even_k", *_RESULT)


def _from_row(values: dict[str, Any], ptx: list[float]) -> Artifact:
    try:
        code = CodeClass(**{name: values[name] for name in _CODE})
    except CostModelError as error:
        raise CorruptFile(f"artifact {values['key']}: {error}") from None
    spec = Specialization(ConfigBinary(*(values[name] for name in _BINARY)), code, values["even_k"])
    counts = dict(zip(PTX_FEATURES, ptx, strict=True)) if values["status"] == "ok" else {}
    return Artifact(
        key=values["key"], spec=spec, ptx=counts, **{name: values[name] for name in _RESULT}
    )
