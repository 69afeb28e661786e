"""Compiled artifacts as a table: found by key, read as columns, stored as Parquet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property
from typing import Any, get_args

import numpy as np

from costmodel.arrays import ArrowSchema, ArrowTable, Floats, Mask, Texts
from costmodel.compile.compiler import Artifact, ArtifactStatus, outweighs
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.data.candidates import ARTIFACT_COLUMNS
from costmodel.data.rows import lay_out, refused
from costmodel.data.shards import arrow_fields, text_type
from costmodel.gemm.config import ConfigBinary, Specialization
from costmodel.gemm.specialize import kernel_hash
from costmodel.gemm.workload import CodeClass

_CODE = tuple(CodeClass.__dataclass_fields__)
_FIGURES = ("registers", "spill_bytes", "shared_bytes")
_RESULT = ("status", "error", *_FIGURES, "ptx_hash", "compile_s")
_OBJECT = ("key", *ConfigBinary._fields, *_CODE, "even_k", *_RESULT)
_PTX = "ptx_count_"


class ArtifactTable(Mapping[str, Artifact]):
    """Artifacts by key. Rows become objects only when they are asked for."""

    def __init__(self, table: ArrowTable):
        """Wrap an Arrow table of :meth:`schema` that has no faults and holds each key once."""
        keys, statuses = (table.column(name).to_pylist() for name in ("key", "status"))
        self.statuses = dict(zip(keys, statuses))
        self._row = {key: row for row, key in enumerate(keys)}
        self._table = table
        self._objects: dict[str, Artifact] = {}

    @staticmethod
    def schema() -> ArrowSchema:
        """Arrow columns: key, kernel hash, specialization, results, PTX counts."""
        import pyarrow as pa

        text, count = text_type(), pa.float64()
        own = {"key": pa.string(), "kernel_hash": text}
        results = {
            "even_k": pa.bool_(), "status": text, "error": text,
            **dict.fromkeys(_FIGURES, pa.int32()),
            "ptx_hash": pa.string(), "compile_s": pa.float64(),
            **{_PTX + name: count for name in PTX_FEATURES},
        }  # fmt: skip
        return pa.schema(
            [
                *(pa.field(name, kind, False) for name, kind in own.items()),
                *arrow_fields(ConfigBinary),
                *arrow_fields(CodeClass),
                *(pa.field(name, kind, False) for name, kind in results.items()),
            ]
        )

    @classmethod
    @cache
    def empty(cls) -> ArtifactTable:
        """Return a table without artifacts."""
        return cls(cls.schema().empty_table())

    @classmethod
    def rows(cls, artifacts: Iterable[Artifact]) -> ArrowTable:
        """Lay out artifacts as an Arrow table, each with the hash of its kernel."""
        hash_of, code_of = cache(kernel_hash), cache(asdict)
        rows = [
            {
                "key": a.key,
                "kernel_hash": hash_of(a.spec.kernel),
                **a.spec.config_binary._asdict(),
                **code_of(a.spec.code),
                "even_k": a.spec.even_k,
                **{name: getattr(a, name) for name in _RESULT},
                **{_PTX + name: a.ptx.get(name, np.nan) for name in PTX_FEATURES},
            }
            for a in artifacts
        ]
        return lay_out(rows, cls.schema(), cls.faults)

    @staticmethod
    def faults(rows: ArrowTable) -> dict[str, Mask]:
        """Mark rows that no release writes; see :data:`costmodel.data.rows.Faults`."""
        statuses = np.array(rows.column("status").to_pylist(), dtype=object)
        return {
            "a status that is known": ~np.isin(statuses, get_args(ArtifactStatus)),
            "a class of code that can be": refused(rows, _CODE, lambda code: CodeClass(**code)),
        }

    @staticmethod
    def distinct(rows: ArrowTable) -> ArrowTable:
        """Keep one row of each key: the first that no other outweighs."""
        keys, statuses = (rows.column(name).to_pylist() for name in ("key", "status"))
        kept: dict[str, int] = {}
        for row, key in enumerate(keys):
            other = kept.setdefault(key, row)
            if outweighs(statuses[row], statuses[other]):
                kept[key] = row
        return rows.take(np.array([*kept.values()])) if len(kept) < len(keys) else rows

    # By identity: a table is a key of caches, which need not find an equal one.
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __getitem__(self, key: str) -> Artifact:
        (artifact,) = self.find([key])
        if artifact is None:
            raise KeyError(key)
        return artifact

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    def find(self, keys: Sequence[str]) -> list[Artifact | None]:
        """Return the artifacts of the given keys, in order; None where a key is unknown."""
        known = (key for key in dict.fromkeys(keys) if key in self._row)
        if new := [key for key in known if key not in self._objects]:
            rows = [self._row[key] for key in new]
            made = self._table.select(_OBJECT).take(rows).to_pylist()
            counts = self._features[rows, len(_FIGURES) :].tolist()
            self._objects.update(zip(new, map(_artifact, made, counts)))
        return [self._objects.get(key) for key in keys]

    def columns(self, keys: Sequence[str]) -> tuple[Floats, Texts]:
        """Return the columns of :class:`Candidates` that describe the binaries of the given keys.

        Returns:
            (artifact_columns, ptx_hash): float64 [len(keys), len(ARTIFACT_COLUMNS)] and str
            [len(keys)]; NaN and empty where a key is unknown or did not compile.
        """
        known = np.array([self.statuses.get(key) == "ok" for key in keys], dtype=bool)
        rows = np.array([self._row.get(key, 0) for key in keys], dtype=np.intp)[known]
        features = np.full((len(keys), len(ARTIFACT_COLUMNS)), np.nan)
        features[known] = self._features[rows]
        hashes = np.full(len(keys), "", dtype=object)
        hashes[known] = self._table.column("ptx_hash").to_numpy()[rows]
        return features, hashes

    def refused(self, keys: Sequence[str]) -> Mask:
        """Mark the keys that the compiler refuses, and will refuse again, bool [len(keys)]."""
        return np.array([self.statuses.get(key) == "compile_error" for key in keys], dtype=bool)

    @cached_property
    def kernels(self) -> Mapping[str, tuple[str, str]]:
        """Kernel name and kernel hash of each key."""
        names, hashes = (self._table.column(n).to_pylist() for n in ("kernel", "kernel_hash"))
        return dict(zip(self._row, zip(names, hashes)))

    def arrow(self) -> ArrowTable:
        """Return the rows as an Arrow table."""
        return self._table

    def merged_with(self, others: Sequence[ArtifactTable]) -> ArtifactTable:
        """Return the rows of all tables; for each key the row that :meth:`distinct` keeps."""
        import pyarrow as pa

        if not others:
            return self
        tables = [self._table, *(other._table for other in others)]
        return ArtifactTable(self.distinct(pa.concat_tables(tables).unify_dictionaries()))

    @cached_property
    def _features(self) -> Floats:
        names = (*_FIGURES, *(_PTX + name for name in PTX_FEATURES))  # as in ARTIFACT_COLUMNS
        columns = [self._table.column(name).to_numpy() for name in names]
        return np.stack(columns, axis=1).astype(np.float64)


def _artifact(row: dict[str, Any], ptx: list[float]) -> Artifact:
    code = CodeClass(**{name: row[name] for name in _CODE})
    binary = ConfigBinary(*(row[name] for name in ConfigBinary._fields))
    spec = Specialization(binary, code, row["even_k"])
    counts = dict(zip(PTX_FEATURES, ptx)) if row["status"] == "ok" else {}
    return Artifact(key=row["key"], spec=spec, ptx=counts, **{name: row[name] for name in _RESULT})
