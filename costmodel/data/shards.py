"""The files of a dataset: written whole or not at all, and refused where they do not belong.

A shard is a Parquet file whose header (JSON in its metadata) repeats the dataset's identity, so a
file copied from another dataset is recognised. Reading runs no code: Parquet and JSON only.

Models and datasets use the same names of files. So each refuses a folder that holds the other: it
would replace a part of it, or be mistaken for it.
"""

import io
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal, Self, get_type_hints
from uuid import uuid4

from costmodel.arrays import ArrowSchema, ArrowTable
from costmodel.data.rows import Faults, leave_out
from costmodel.errors import CorruptFile, FileError, InvalidInput, MixedData, WrongVersion
from costmodel.files import Named, decode, encode, file_errors, read_json, replace_file
from costmodel.hardware.target import Target

SCHEMA = 2
"""Version of the columns and of the card; raised when either changes."""

CARD = "card.json"
"""File name of the card of a model or dataset."""

_HEADER = b"costmodel"


@dataclass(frozen=True)
class Identity:
    """Properties that all rows of a dataset share; rows of another identity are refused.

    Attributes:
        target: device and toolchain. Two cards of one product are the same device.
        protocol: how timings were taken, JSON-ready.
    """

    target: Target
    protocol: Named

    def to_dict(self) -> Named:
        """Return the fields of a card or header.

        Raises:
            InvalidInput: the protocol holds a number that JSON lacks, such as NaN.
        """
        fields = {"schema": SCHEMA, "target": self.target, "protocol": self.protocol}
        return decode(encode(fields), Named)  # as reading returns it: tuples become lists

    @classmethod
    def from_dict(cls, data: Any, path: Path) -> Self:
        """Read a card or header that was found at ``path``; other fields are ignored.

        Raises:
            CorruptFile: not written by costmodel. WrongVersion: by another release.
        """
        if isinstance(data, dict) and {"format", "features"} <= data.keys():
            raise CorruptFile(f"{path}: the card of a model, expected a dataset's; name another")
        schema = data.get("schema") if isinstance(data, dict) else None
        if type(schema) is not int:
            raise CorruptFile(f"{path}: expected costmodel's header, found {str(data)[:80]}")
        if schema != SCHEMA:
            raise WrongVersion(
                f"{path}: written with schema {schema}, this release reads {SCHEMA}: use the "
                f"release that wrote it"
            )
        try:
            protocol = decode(data.get("protocol"), Named)
            return cls(Target.from_dict(data.get("target")), protocol)
        except InvalidInput as error:
            raise CorruptFile(f"{path}: a header that cannot be read: {error}") from None

    def require_same(self, other: Self, path: Path) -> None:
        """Refuse ``other`` (found at, or offered to, ``path``) unless its rows may mix with ours.

        Raises:
            MixedData: names the first field that differs.
        """
        ours, theirs = self._comparable(), other._comparable()
        for name in sorted(ours | theirs):
            if ours.get(name) != theirs.get(name):
                raise MixedData(
                    f"{path}: {name} is {theirs.get(name)!r}, but this dataset has "
                    f"{ours.get(name)!r}: timings of both must not mix; keep them in two datasets"
                )

    def _comparable(self) -> Named:
        card = self.to_dict()
        device = {name: card["target"]["device"][name] for name in ("product", "arch", "sm_count")}
        groups = {
            "device": device, "toolchain": card["target"]["toolchain"], "protocol": card["protocol"]
        }  # fmt: skip
        return {f"{group}.{k}": v for group, values in groups.items() for k, v in values.items()}


def text_type() -> Any:
    """Return Arrow's type for columns of texts: it holds each distinct text once."""
    import pyarrow as pa

    return pa.dictionary(pa.int32(), pa.string())


def arrow_fields(cls: type, *, nullable: bool = False) -> list[Any]:
    """Return Arrow columns for the fields of a flat dataclass, with types by its annotations.

    Floats are single precision: they hold seven digits, and repeats of a timing agree in two or
    three.
    """
    import pyarrow as pa

    types = {int: pa.int32(), float: pa.float32(), bool: pa.bool_()}
    text = text_type()  # str and the Literal types
    hints = get_type_hints(cls).items()
    return [pa.field(name, types.get(hint, text), nullable) for name, hint in hints]


@contextmanager
def compaction_lock(directory: Path) -> Iterator[None]:
    """Let one process at a time merge: if two merged at once, the slower would drop rows.

    The lock is on the directory, and ends with the process that holds it, however that ends.
    """
    import fcntl

    with file_errors(directory):
        lock = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: there the user may start only one
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def new_shard_path(directory: Path, table: str) -> Path:
    """Return a name that no other process writes, ordered by time."""
    return directory / f"{table}-{time.time_ns():020d}-{uuid4().hex[:8]}.parquet"


def write_shard(path: Path, table: ArrowTable, identity: Identity, **header: object) -> None:
    """Write one Parquet file, compressed, whole or not at all.

    Raises:
        FileError: it cannot be written.
    """
    name = path.name.split(".")[0].split("-")[0]
    with file_errors(path):
        replace_file(path, shard_bytes(name, table, identity, **header))


def shard_bytes(name: str, table: ArrowTable, identity: Identity, **header: object) -> bytes:
    """Return the content of a file of the table ``name``."""
    import pyarrow as pa
    from pyarrow import parquet

    text = json.dumps({"table": name} | identity.to_dict() | header)
    table = table.replace_schema_metadata({_HEADER: text.encode()})
    # Nearly all timings differ: a dictionary would grow, but split by bytes the exponents compress.
    floats = [f.name for f in table.schema if f.type == pa.float32()]
    content = io.BytesIO()
    parquet.write_table(
        table,
        content,
        compression="zstd",
        compression_level=12,
        row_group_size=max(table.num_rows, 1),
        use_dictionary=[f.name for f in table.schema if f.name not in floats],
        dictionary_pagesize_limit=2**24,
        write_page_checksum=True,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
    )
    return content.getvalue()


def read_shards(
    paths: Sequence[Path], schema: ArrowSchema, identity: Identity, faults: Faults | None = None,
    **header: object,
) -> ArrowTable:  # fmt: skip
    """Read all rows of the given files, in their order; one dictionary per column.

    Args:
        faults: rows that it marks are left out, with one warning.

    Raises:
        CorruptFile: unreadable, foreign, or with other columns.
        WrongVersion: another schema, or another version in a field of ``header``.
        MixedData: of another device, toolchain or protocol than ``identity``.
        FileNotFoundError: a file was taken away meanwhile, as compacting does.
        FileError: a file that may not be read.
    """
    import pyarrow as pa

    tables = [_read_shard(path, schema, identity, header) for path in paths]
    rows = pa.concat_tables([schema.empty_table(), *tables]).unify_dictionaries().combine_chunks()
    return leave_out(rows, faults, paths, [*map(len, tables)]) if faults else rows


def _read_shard(
    path: Path, schema: ArrowSchema, identity: Identity, header: Mapping[str, object]
) -> ArrowTable:
    import pyarrow as pa
    from pyarrow import parquet

    again = "restore it from a copy, or delete it and collect its rows again"
    if path.exists() and not path.is_file():  # reading a pipe would wait
        raise CorruptFile(f"{path}: expected a file, found a directory, a pipe or a device")
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _check_header(path, file.schema_arrow.metadata or {}, identity, header)
            if not file.schema_arrow.equals(schema):
                names = sorted(set(file.schema_arrow.names) ^ set(schema.names))
                raise CorruptFile(f"{path}: other columns than expected ({names[:8]}); {again}")
            table = file.read()
            table.validate(full=True)  # texts are UTF-8, and indices point into dictionaries
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
    found = decode(metadata[_HEADER], Named)
    identity.require_same(Identity.from_dict(found, path), path)
    for name, value in header.items():
        if found.get(name) != value:
            raise WrongVersion(
                f"{path}: {name} is {found.get(name)!r}, this release reads {value!r}: "
                f"record it again with `costmodel collect`"
            )


# --- Places to write to ---------------------------------------------------------------------------


Kind = Literal["model", "dataset", "model of kernels", "dataset of kernels"]


def require_place(path: Path, kind: Kind) -> None:
    """Refuse a folder where a model or a dataset would destroy, or be taken for, something else.

    Raises:
        FileError: it holds the other kind, or another ``card.json``.
    """
    require_folder(path)
    found = content_of(path)
    if found not in ("", kind):
        raise FileError(
            f"{path} holds a {found}, which a {kind} would replace: name another folder for the "
            f"{kind}"
        )


def content_of(folder: Path) -> str:
    """Name the :data:`Kind` of a folder; empty without a card or the rows of a dataset."""
    file = folder / CARD
    if not os.path.lexists(file):
        return "dataset" if any(folder.glob("measurements*.parquet")) else ""
    try:
        card = read_json(file, Named)
    except (OSError, CorruptFile):
        card = {}
    if "schema" in card and "protocol" in card:
        return "dataset of kernels" if "kernel_schema" in card else "dataset"
    if "kernel_model" in card:
        return "model of kernels"
    return "model" if card.keys() >= {"format", "features"} else f"{CARD} of something else"


def require_folder(path: Path) -> None:
    """Refuse a path that neither is a folder nor can become one.

    Raises:
        FileError: a file is there, or in the place of a folder above it; or it cannot be written.
    """
    there = next((p for p in (path, *path.parents) if os.path.lexists(p)), None)
    if there is not None and not there.is_dir():
        above = "" if there == path else f"{path}: "
        raise FileError(f"{above}expected a folder, and {there} is a file: name another folder")
    _require_writable(path, there)


def _require_writable(path: Path, above: Path | None) -> None:
    """Write and remove a file in the folder above; make no folder: an error would leave it."""
    with file_errors(path):
        with suppress(FileNotFoundError):
            path.stat()  # raises if the name is too long
        with NamedTemporaryFile(dir=above, prefix=".probe") as file:
            file.write(b"x")


def require_file_place(path: Path) -> None:
    """Refuse a path where no file can be written.

    Raises:
        FileError: it is a folder, its folder is not there, or it cannot be written.
    """
    if path.is_dir():
        raise FileError(f"{path} is a folder: expected the name of a file to write")
    if not path.parent.is_dir():
        raise FileError(f"{path}: there is no folder {path.parent}: make it, or name another file")
    _require_writable(path, path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all.

    Raises:
        FileError: it cannot be written.
    """
    require_file_place(path)
    with file_errors(path):
        replace_file(path, data)
