"""Artifact tables of further toolchains: one Parquet file each, found by its name.

A model brings the artifacts of the toolchain that its data was timed with. Other Tritons make
other binaries: their tables lie beside the model, or in the user's own folder, where ``costmodel
compile --table`` puts them. No GPU is needed to make one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.compile.artifact import PASSING, Artifact
from costmodel.compile.compile_pool import compile_many
from costmodel.compile.compiler import CompileFunction, compile_spec
from costmodel.compile.ptx import PTX_SCHEMA
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.shards import Identity, compaction_lock, read_shards, write_shard
from costmodel.errors import InvalidInput
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import Specialization, artifact_key, specialize
from costmodel.gemm.workload import CodeClass, Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.support.untrusted import file_errors

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "TableProgress", "class_specs", "extend_table", "read_tables", "table_path", "user_folder",
]  # fmt: skip

VARIABLE = "COSTMODEL_DATA_DIR"
"""Environment variable that names another folder for the user's own tables."""

_SAVE_EVERY_S = 60.0
_SIDE = 1024  # neither the grid nor split-K's workspace limits a product of this size
_K = (4096, 4095)  # every BLOCK_K divides the first, none the second


@dataclass(frozen=True, slots=True)
class TableProgress:
    """What :func:`extend_table` did.

    Attributes:
        path: the file.
        rows: artifacts in it, of all code classes.
        there: of those asked for, how many it already had, or another table has.
        compiled: how many were added, refused ones among them.
        refused: how many the compiler refused.
        left: how many are still missing: past the limit, or not compiled in time.
    """

    path: Path
    rows: int
    there: int
    compiled: int
    refused: int
    left: int


def user_folder(device: str) -> Path:
    """Where a user's own tables of a device lie: ``COSTMODEL_DATA_DIR``, else the user's data.

    Raises:
        InvalidInput: no home directory is known.
    """
    import platformdirs

    try:
        root = Path(
            os.environ.get(VARIABLE) or platformdirs.user_data_dir("costmodel", appauthor=False)
        ).expanduser()
    except RuntimeError as error:
        raise InvalidInput(f"{error}, or {VARIABLE}") from None
    if not root.is_absolute():
        raise InvalidInput(f"{root} is relative: set HOME, or {VARIABLE} to an absolute path")
    return root / "artifacts" / _plain(device)


def table_path(folder: Path, toolchain: Toolchain) -> Path:
    """The file of a toolchain in a folder, whether it is there or not."""
    names = f"triton-{_plain(toolchain.triton)}-ptxas-{_plain(toolchain.ptxas)}"
    return folder / f"artifacts-{names}.parquet"


def class_specs(code: CodeClass, target: Target) -> list[Specialization]:
    """All binaries that products of a code class may run, whatever their sizes."""
    found: dict[Specialization, None] = {}
    for k in _K:
        workload = Workload(_SIDE, _SIDE, k, code)
        space = SearchSpace.of(workload, target)
        found |= dict.fromkeys(specialize(workload, config) for config in space.configs)
    return list(found)


def read_tables(paths: list[Path], target: Target) -> pa.Table:
    """The rows of these files, which must be of the target's device and toolchain.

    Less what only tells how one compile went, a crash or a time limit: earlier releases kept it.

    Raises:
        CorruptFile, WrongVersion: unreadable, foreign, or of another PTX schema.
        MixedData: of another device or toolchain than their name says.
    """
    import pyarrow as pa
    from pyarrow import compute

    schema = ArtifactTable.schema()
    rows = read_shards(paths, schema, Identity(target, {}), ptx_schema=PTX_SCHEMA)
    status = rows.column("status").cast(pa.string())
    return rows.filter(compute.invert(compute.is_in(status, pa.array(PASSING))))


def extend_table(
    specs: list[Specialization],
    target: Target,
    folder: Path,
    *,
    known: Container[str] = (),
    limit: int | None = None,
    n_jobs: int | None = None,
    progress: bool = True,
    compile_function: CompileFunction = compile_spec,
) -> TableProgress:
    """Compile what the table in a folder lacks; saved every minute, and however it ends.

    Args:
        specs: what it is to hold; what it has is kept.
        known: keys that are in another table already, and need not be in this one.
        limit: at most so many now; default: all.
        n_jobs, progress, compile_function: as :func:`costmodel.compile.compile_pool.compile_many`
            has them.

    Raises:
        CorruptFile, WrongVersion, MixedData: the file there is no such table.
        FileError: it cannot be written.
    """
    path = table_path(folder, target.toolchain)
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    table = ArtifactTable(read_tables([path] if os.path.lexists(path) else [], target))
    keys = {spec: artifact_key(spec, target) for spec in specs}
    missing = [spec for spec, key in keys.items() if key not in table and key not in known]
    todo = missing[:limit]
    made = compile_many(
        todo, target, n_jobs=n_jobs, progress=progress, compile_function=compile_function
    )
    rows, kept, saved, begin = len(table), list[Artifact](), 0, time.monotonic()
    try:
        for artifact in made:
            # How long compiling took, or that a process died of it, is no property of the binary:
            # it may be tried again.
            if artifact.is_settled:
                kept.append(artifact)
            if saved < len(kept) and time.monotonic() - begin >= _SAVE_EVERY_S:
                rows = _add(path, kept[saved:], target)
                saved, begin = len(kept), time.monotonic()
    finally:  # whatever ended it: what is compiled need not be compiled again
        if saved < len(kept):
            rows = _add(path, kept[saved:], target)
    refused, there = sum(not artifact.ok for artifact in kept), len(keys) - len(missing)
    return TableProgress(path, rows, there, len(kept), refused, len(missing) - len(kept))


def _add(path: Path, artifacts: list[Artifact], target: Target) -> int:
    """Add rows to a file, which another process may be adding to as well; returns how many."""
    import pyarrow as pa

    with compaction_lock(path.parent):
        old = read_tables([path] if os.path.lexists(path) else [], target)
        rows = pa.concat_tables([old, ArtifactTable.rows(artifacts)]).unify_dictionaries()
        table = ArtifactTable(rows)
        write_shard(path, table.arrow(), Identity(target, {}), ptx_schema=PTX_SCHEMA)
    return len(table)


def _plain(name: str) -> str:
    """A version or a device's name as part of a path."""
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", name).lstrip(".") or "_"
