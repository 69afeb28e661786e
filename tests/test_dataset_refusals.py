"""What a dataset refuses: what must not mix, broken and foreign files, and newer schemas."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dataset_examples import CONFIGS, PROTOCOL, RUN, TARGET, A, artifact, records
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from costmodel.data.dataset import Dataset
from costmodel.errors import CorruptFile, FileError, MissingData, MixedData, WrongVersion
from costmodel.hardware.target import Target


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset.create(tmp_path / "data", TARGET, PROTOCOL)


def other_target(**changes: Any) -> Target:
    device, toolchain = TARGET.device, TARGET.toolchain
    if set(changes) <= {"triton", "ptxas"}:
        return Target(device, dataclasses.replace(toolchain, **changes))
    return Target(dataclasses.replace(device, **changes), toolchain)


@pytest.mark.fault("B16")
@pytest.mark.parametrize(
    ("target", "protocol", "field"),
    [
        (other_target(product="NVIDIA H200"), PROTOCOL, "device.product"),
        (other_target(arch=100), PROTOCOL, "device.arch"),
        (other_target(sm_count=114), PROTOCOL, "device.sm_count"),
        (other_target(triton="3.7.0"), PROTOCOL, "toolchain.triton"),
        (other_target(ptxas="13.0"), PROTOCOL, "toolchain.ptxas"),
        (TARGET, PROTOCOL | {"repeats": 6}, "protocol.repeats"),
        (TARGET, PROTOCOL | {"new": 1}, "protocol.new"),
        (TARGET, {}, "protocol.cold_cache"),
    ],
)
def test_what_must_not_mix_is_refused_by_name(
    dataset: Dataset, tmp_path: Path, target: Target, protocol: dict[str, Any], field: str
) -> None:
    with pytest.raises(MixedData, match=field):
        Dataset.create(dataset.path, target, protocol)
    # Nor does a shard that was copied in.
    other = Dataset.create(tmp_path / "other", target, protocol)
    other.append_measurements(records(A), run=RUN)
    (shard,) = other.path.glob("measurements-*")
    shutil.copy(shard, dataset.path)
    with pytest.raises(MixedData, match=field):
        dataset.measurements()


def test_the_same_target_and_protocol_go_on(dataset: Dataset) -> None:
    dataset.append_measurements(records(A), run=RUN)
    again = Dataset.create(dataset.path, other_target(clock_mhz=1755), dict(PROTOCOL))
    assert again.measured()[A] == set(CONFIGS)


def test_missing_data_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"costmodel collect.*name the directory of one"):
        Dataset.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b'{"schema": "1"}', b'{"schema": 2}', b"\x00\xff\x80PAR1",
        b'{"schema": 1', b"[" * 200_000, b'{"schema": true}',
        b'{"schema": NaN}',
    ],
)  # fmt: skip
def test_a_card_that_is_none_is_refused(dataset: Dataset, content: bytes) -> None:
    (dataset.path / "card.json").write_bytes(content)
    with pytest.raises(CorruptFile, match=r"card\.json"):
        Dataset.open(dataset.path)


@pytest.mark.fault("B13")
@pytest.mark.parametrize("content", [b"", b"[]", b"\x00\xff\x80PAR1", "truncated", "cut in half"])
@pytest.mark.parametrize("table", ["measurements", "artifacts"])
def test_a_broken_shard_is_named(dataset: Dataset, table: str, content: bytes | str) -> None:
    dataset.append_measurements(records(A), run=RUN)
    dataset.append_artifacts([artifact(A, c) for c in CONFIGS])
    (shard,) = dataset.path.glob(f"{table}-*")
    whole = shard.read_bytes()
    if isinstance(content, str):
        content = whole[:-9] if content == "truncated" else whole[: len(whole) // 2]
    shard.write_bytes(content)
    with pytest.raises(CorruptFile, match=shard.name):
        getattr(Dataset.open(dataset.path), table)()


@pytest.mark.fault("B13")
@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=40, deadline=None)
def test_a_flipped_byte_gives_the_rows_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int
) -> None:
    data = Dataset.create(tmp_path_factory.mktemp("d"), TARGET, PROTOCOL)
    data.append_measurements(records(A), run=RUN)
    (shard,) = data.path.glob("measurements-*")
    content = bytearray(shard.read_bytes())
    content[at % len(content)] ^= flip
    shard.write_bytes(content)
    with contextlib.suppress(FileError):
        assert Dataset.open(data.path).recorded(A) == {r.config: r.measurement for r in records(A)}


def rewrite(path: Path, table: pa.Table | None = None, **header: Any) -> None:
    """Write a shard again with other rows, or with other fields in its header."""
    old = parquet.ParquetFile(path).read()
    found = json.loads(old.schema.metadata[b"costmodel"]) | header
    table = (old if table is None else table).replace_schema_metadata(
        {b"costmodel": json.dumps(found).encode()}
    )
    parquet.write_table(table, path)


@pytest.mark.fault("B34")
def test_other_schemas_are_refused(dataset: Dataset) -> None:
    dataset.append_artifacts([artifact(A, CONFIGS[0])])
    dataset.append_measurements(records(A), run=RUN)
    (shard,) = dataset.path.glob("measurements-*")
    for schema in (1, 99):
        rewrite(shard, schema=schema)
        with pytest.raises(WrongVersion, match=f"schema {schema}, this release reads 2"):
            dataset.measurements()
    (shard,) = dataset.path.glob("artifacts-*")
    rewrite(shard, ptx_schema=99)
    with pytest.raises(WrongVersion, match=r"ptx_schema.*costmodel collect"):
        Dataset.open(dataset.path).artifacts()
    card = json.loads((dataset.path / "card.json").read_text())
    (dataset.path / "card.json").write_text(json.dumps(card | {"schema": 99}))
    with pytest.raises(WrongVersion, match="99"):
        Dataset.open(dataset.path)


@pytest.mark.fault("B34")
def test_foreign_and_incomplete_parquet_is_refused(dataset: Dataset) -> None:
    dataset.append_measurements(records(A), run=RUN)
    (shard,) = dataset.path.glob("measurements-*")
    rewrite(shard, parquet.ParquetFile(shard).read().drop_columns(["latency_us"]))
    with pytest.raises(CorruptFile, match="latency_us"):
        dataset.measurements()
    parquet.write_table(pa.table({"a": [1]}), shard)
    with pytest.raises(CorruptFile, match=shard.name):
        dataset.measurements()
