"""The files of a dataset: written whole or not at all, and refused where they do not belong.

A shard is a Parquet file whose header (JSON in its metadata) repeats the dataset's identity, so a
file copied from another dataset is recognised. Reading runs no code: Parquet and JSON only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, get_type_hints
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import CorruptFile, FileError, InvalidInput, MixedData, WrongVersion
from costmodel.files import decode, encode, file_errors, replace_file
from costmodel.hardware.target import Target

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = 2
"""Version of the columns and of the card; raised when either changes. Older ones are read too."""

_ADDED: dict[str, object] = {"tf32": False}
"""Columns that came after schema 1, and what all rows from before them would have there."""

_HEADER = b"costmodel"
_ATTEMPTS, _PAUSE_S = 8, 0.02  # 5 s in all


@dataclass(frozen=True)
class _Header:
    """The identity as a card and each shard hold it, beside other fields."""

    schema: int
    target: dict[str, Any]
    protocol: dict[str, Any]


@dataclass(frozen=True)
class Identity:
    """Properties that all rows of a dataset share; rows of another identity are refused.

    Attributes:
        target: device and toolchain. Two cards of one product are the same device.
        protocol: how timings were taken, JSON-ready.
    """

    target: Target
    protocol: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a card or header.

        Raises:
            InvalidInput: the protocol holds a number that JSON lacks, such as NaN.
        """
        header = _Header(SCHEMA, self.target.to_dict(), dict(self.protocol))
        return decode(encode(header), dict[str, Any])  # as it is read again: tuples are lists

    @classmethod
    def from_dict(cls, data: Any, path: Path) -> Identity:
        """Read a card or header that was found at ``path``; other fields are ignored.

        Raises:
            CorruptFile: not written by costmodel. WrongVersion: by a newer release.
        """
        if isinstance(data, dict) and {"format", "features"} <= data.keys():
            raise CorruptFile(f"{path}: the card of a model, expected a dataset's; name another")
        schema = data.get("schema") if isinstance(data, dict) else None
        if type(schema) is not int:
            raise CorruptFile(f"{path}: expected costmodel's header, found {str(data)[:80]}")
        if not 1 <= schema <= SCHEMA:
            raise WrongVersion(
                f"{path}: written with schema {schema}, this release reads 1 to {SCHEMA}: "
                f"use the release that wrote it, or a newer one"
            )
        try:
            header = decode(data, _Header)
            return cls(Target.from_dict(header.target), header.protocol)
        except InvalidInput as error:
            raise CorruptFile(f"{path}: a header that cannot be read: {error}") from None

    def require_same(self, other: Identity, path: Path) -> None:
        """Refuse ``other`` (found at, or offered to, ``path``) unless its rows may mix with ours.

        Raises:
            MixedData: with the first field that differs.
        """
        ours, theirs = self._comparable(), other._comparable()
        for name in sorted(ours | theirs):
            if ours.get(name) != theirs.get(name):
                raise MixedData(
                    f"{path}: {name} is {theirs.get(name)!r}, but this dataset has "
                    f"{ours.get(name)!r}: timings of both must not mix; keep them in two datasets"
                )

    def _comparable(self) -> dict[str, Any]:
        card = self.to_dict()
        device = {name: card["target"]["device"][name] for name in ("product", "arch", "sm_count")}
        groups = {
            "device": device, "toolchain": card["target"]["toolchain"], "protocol": card["protocol"]
        }  # fmt: skip
        return {f"{group}.{k}": v for group, values in groups.items() for k, v in values.items()}


def arrow_fields(cls: type, nullable: bool = False) -> list[pa.Field]:
    """Return the columns of a flat dataclass, by its annotations: the dataclass is the row.

    Floats are single precision: seven digits, where repeats of a timing agree within two or three.
    """
    import pyarrow as pa

    types = {int: pa.int32(), float: pa.float32(), bool: pa.bool_()}
    text = pa.dictionary(pa.int32(), pa.string())  # str and the Literal types
    hints = get_type_hints(cls)
    return [pa.field(f.name, types.get(hints[f.name], text), nullable) for f in fields(cls)]


def shard_paths(directory: Path, table: str) -> list[Path]:
    """List the files of a table: the compacted one, then shards in the order of writing."""
    # Shards go once the compacted file is there. Asked for before them, it may come in between, and
    # neither would be seen.
    shards = sorted(directory.glob(f"{table}-*.parquet"))
    compacted = directory / f"{table}.parquet"
    return [p for p in (compacted,) if os.path.lexists(p)] + shards


def read_all(
    directory: Path, table: str, schema: pa.Schema, identity: Identity, **header: object
) -> tuple[list[Path], pa.Table]:
    """Read the files of a table and all their rows; again if another process compacts them.

    Raises:
        As :func:`read_shards`.
        FileError: a file that is listed is not there: a link that leads nowhere, or it goes on.
    """
    for attempt in range(_ATTEMPTS):
        files = shard_paths(directory, table)
        try:
            return files, read_shards(files, schema, identity, **header)
        except FileNotFoundError as error:
            missing = error
        for path in files:
            if path.is_symlink() and not path.exists():
                raise FileError(f"{path}: a link that leads nowhere: take it away")
        time.sleep(_PAUSE_S * 2**attempt)  # thousands of shards take a while to remove
    raise FileError(
        f"{missing}: files of {directory} go while they are read, {_ATTEMPTS} times in a row: "
        f"another process merges them; try again once it has"
    )


@contextmanager
def compaction_lock(directory: Path) -> Iterator[None]:
    """Let one process at a time merge: of two at once, the slower would drop rows.

    The lock is the directory's, and ends with its process, however that ends.
    """
    import fcntl

    with file_errors(directory):
        lock = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: there only one may compact
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def number_rows(
    table: pa.Table, names: Sequence[str]
) -> tuple[NDArray[np.int64], list[dict[str, Any]]]:
    """Number the distinct values of some columns, in the order in which they first appear.

    Returns:
        (index, values): int64 [rows], and the columns of each number.
    """
    import pyarrow as pa

    rows = table.select(names).append_column("row", pa.array(np.arange(len(table))))
    groups = rows.group_by(names).aggregate([("row", "list"), ("row", "min")]).sort_by("row_min")
    members = groups.column("row_list").combine_chunks()
    index = np.empty(len(table), dtype=np.int64)
    numbers = np.arange(len(groups))
    index[members.flatten().to_numpy()] = np.repeat(numbers, members.value_lengths().to_numpy())
    return index, groups.select(names).to_pylist()


def sort_rows(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Sort rows by the given columns, ascending."""
    import pyarrow as pa
    from pyarrow import compute

    columns = (table.column(name) for name in names)
    keys = {  # Arrow does not sort by a dictionary
        name: column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        for name, column in zip(names, columns, strict=True)
    }
    order = [(name, "ascending") for name in names]
    return table.take(compute.sort_indices(pa.table(keys), sort_keys=order))


def new_shard_path(directory: Path, table: str) -> Path:
    """Return a name that no other process writes, ordered by time."""
    return directory / f"{table}-{time.time_ns():020d}-{uuid4().hex[:8]}.parquet"


def write_shard(path: Path, table: pa.Table, identity: Identity, **header: object) -> None:
    """Write one Parquet file, compressed, whole or not at all.

    Raises:
        FileError: it cannot be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    text = json.dumps(
        {"table": path.name.split(".")[0].split("-")[0]} | identity.to_dict() | header
    )
    table = table.replace_schema_metadata({_HEADER: text.encode()})
    # Timings are nearly all distinct: split by byte, their exponents compress; a dictionary grows.
    floats = [f.name for f in table.schema if f.type == pa.float32()]

    def write(file: BinaryIO) -> None:
        parquet.write_table(
            table,
            file,
            compression="zstd",
            compression_level=12,
            row_group_size=max(table.num_rows, 1),
            use_dictionary=[f.name for f in table.schema if f.name not in floats],
            dictionary_pagesize_limit=2**24,
            write_page_checksum=True,
            column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
        )

    with file_errors(path):
        replace_file(path, write)


def read_shards(
    paths: Sequence[Path], schema: pa.Schema, identity: Identity, **header: object
) -> pa.Table:
    """Read all rows of the given files, in their order; one dictionary per column.

    Raises:
        CorruptFile: unreadable, foreign, or with other columns.
        WrongVersion: a newer schema, or another version in a field of ``header``.
        MixedData: of another device, toolchain or protocol than ``identity``.
        FileNotFoundError: a file was taken away meanwhile, as compacting does.
        FileError: a file that may not be read.
    """
    import pyarrow as pa

    tables = [_read_shard(path, schema, identity, header) for path in paths]
    return pa.concat_tables([schema.empty_table(), *tables]).unify_dictionaries().combine_chunks()


def _read_shard(
    path: Path, schema: pa.Schema, identity: Identity, header: Mapping[str, object]
) -> pa.Table:
    import pyarrow as pa
    from pyarrow import parquet

    again = "delete it and collect again: only its own rows are lost"
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise CorruptFile(f"{path}: expected a file, found a directory, a pipe or a device")
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _check_header(path, file.schema_arrow.metadata or {}, identity, header)
            added = [n for n in _ADDED if n in schema.names and n not in file.schema_arrow.names]
            if not file.schema_arrow.equals(pa.schema([f for f in schema if f.name not in added])):
                names = sorted(set(file.schema_arrow.names) ^ set(schema.names))
                raise CorruptFile(f"{path}: other columns than expected ({names[:8]}); {again}")
            table = file.read()
            table.validate(full=True)  # that texts are UTF-8 and indices point into dictionaries
            for name in added:
                column = pa.array([_ADDED[name]] * table.num_rows, schema.field(name).type)
                table = table.add_column(schema.get_field_index(name), schema.field(name), column)
    except (FileError, FileNotFoundError):
        raise
    except PermissionError as error:
        raise FileError(f"{path}: {error.strerror}: ask its owner for read permission") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFile(f"{path}: unreadable ({error!s:.200}); {again}") from None
    return table.replace_schema_metadata(None)


def _check_header(
    path: Path, metadata: Mapping[bytes, bytes], identity: Identity, header: Mapping[str, object]
) -> None:
    if _HEADER not in metadata:
        raise CorruptFile(f"{path}: a Parquet file, but none of costmodel's; take it away")
    found = decode(metadata[_HEADER], dict[str, Any])
    identity.require_same(Identity.from_dict(found, path), path)
    for name, value in header.items():
        if found.get(name) != value:
            raise WrongVersion(
                f"{path}: {name} is {found.get(name)!r}, this release reads {value!r}: "
                f"compile again with `costmodel compile`"
            )
