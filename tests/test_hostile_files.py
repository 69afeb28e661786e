"""Whatever lies where a file of ours should: an error of ours, or a miss; never a hang."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hostile_examples import CONFIGS, RESULT, TARGET, A, write_dataset
from pyarrow import parquet

from costmodel.data.dataset import Dataset
from costmodel.data.shards import compaction_lock
from costmodel.errors import CorruptFile, FileError
from costmodel.tuning.winner_cache import WinnerCache


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_dataset(tmp_path / "data")


def read_all(path: Path) -> None:
    data = Dataset.open(path)
    data.frame()
    data.recorded(A)
    list(data.artifacts().values())


# --- what may stand in the place of a file ---------------------------------------------------


def put_directory(path: Path) -> None:
    path.mkdir()


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_dangling_link(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def put_circle(path: Path) -> None:
    path.symlink_to(path.name)


def put_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**33)  # sparse: takes no space


def put_endless_file(path: Path) -> None:
    """A regular file by its mode, of no size, that goes on for terabytes."""
    path.symlink_to("/proc/self/pagemap")


IN_THE_WAY = (
    put_directory, put_pipe, put_endless_device, put_dangling_link, put_circle, put_huge_file,
    put_endless_file,
)  # fmt: skip


@pytest.mark.fault("B13")
@pytest.mark.parametrize("put", IN_THE_WAY)
def test_what_is_no_file_is_no_cache_entry(tmp_path: Path, put: Callable[[Path], None]) -> None:
    cache = WinnerCache(tmp_path)
    cache.put({"name": "w"}, RESULT)
    (path,) = tmp_path.iterdir()
    path.unlink()
    put(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert cache.get({"name": "w"}) is None
        assert cache.entries() == []
        cache.put({"name": "w"}, RESULT)
    if put is not put_directory and put is not put_circle:
        assert cache.get({"name": "w"}) is not None, "it is replaced, as any bad entry"


@pytest.mark.parametrize("put", IN_THE_WAY)
@pytest.mark.parametrize("name", ["card.json", "artifacts-*", "measurements-*"])
def test_what_is_no_file_is_no_part_of_a_dataset(
    dataset: Dataset, name: str, put: Callable[[Path], None]
) -> None:
    path = next(dataset.path.glob(name))
    path.unlink()
    put(path)
    with pytest.raises(FileError, match=path.name):
        read_all(dataset.path)
    if name != "card.json":
        with pytest.raises(FileError, match=path.name):
            dataset.compact()


def test_a_place_where_no_dataset_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "data", tmp_path / ("x" * 500)):
        with pytest.raises(FileError, match=r"file|xxx"):
            Dataset.create(path, TARGET, {})


# --- values in tables ------------------------------------------------------------------------


def overwrite(dataset: Dataset, table: str, column: str, value: Any, row: int) -> None:
    """One value of one row, in a file that is sound otherwise."""
    path = min(dataset.path.glob(f"{table}-*"))  # the one of A
    rows = parquet.ParquetFile(path).read()
    field = rows.schema.field(column)
    values = rows.column(column).to_pylist()
    values[row] = value
    at = rows.schema.get_field_index(column)
    parquet.write_table(rows.set_column(at, field, pa.array(values, field.type)), path)


@pytest.mark.parametrize(
    ("column", "value"),
    [("latency_us", -1.0), ("latency_us", 0.0), ("latency_us", float("nan")),
     ("latency_us", float("inf")), ("num_stages", -1), ("maxnreg", None), ("m", -1),
     ("status", "fine"), ("role", "spare"), ("kernel", "../../etc/passwd"),
     ("block_m", 7), ("dtype", "int3")],
)  # fmt: skip
def test_one_wrong_value_costs_its_row_and_a_warning(
    dataset: Dataset, column: str, value: Any
) -> None:
    rows = len(Dataset.open(dataset.path).measurements())
    overwrite(dataset, "measurements", column, value, 1)
    with pytest.warns(RuntimeWarning, match=r"are left out: 1 of .*measurements-.*expected a"):
        assert len(Dataset.open(dataset.path).measurements()) == rows - 1
    with pytest.warns(RuntimeWarning):
        read_all(dataset.path)


@pytest.mark.parametrize(("column", "value"), [("status", "fine"), ("dtype", "int3")])
def test_one_wrong_value_costs_its_artifact_and_a_warning(
    dataset: Dataset, column: str, value: Any
) -> None:
    overwrite(dataset, "artifacts", column, value, 1)
    with pytest.warns(RuntimeWarning, match=r"are left out: 1 of .*artifacts-.*expected a"):
        assert len(Dataset.open(dataset.path).artifacts()) == len(CONFIGS) - 1
    with pytest.warns(RuntimeWarning):
        read_all(dataset.path)


def test_text_that_is_no_utf8_is_refused(dataset: Dataset) -> None:
    path = next(dataset.path.glob("measurements-*"))
    rows = parquet.ParquetFile(path).read()
    raw = pa.array([b"\xff\xfe"] * len(rows), pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(rows), raw.buffers()).dictionary_encode()
    at = rows.schema.get_field_index("error")
    parquet.write_table(rows.set_column(at, rows.schema.field("error"), text), path)
    with pytest.raises(CorruptFile, match=path.name):
        read_all(dataset.path)


# --- several at once -------------------------------------------------------------------------

COMPACT = (
    "import sys; from costmodel.data.dataset import Dataset; Dataset.open(sys.argv[1]).compact()"
)


@pytest.mark.fault("B21")
def test_compacting_waits_for_who_compacts_already(dataset: Dataset) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with compaction_lock(dataset.path):
        other = subprocess.Popen(
            [sys.executable, "-c", COMPACT, str(dataset.path)], env=environment
        )
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(5)
        assert list(dataset.path.glob("measurements-*")), "the other one has not waited"
    assert other.wait(120) == 0
    assert not list(dataset.path.glob("measurements-*"))
    assert set(Dataset.open(dataset.path).recorded(A)) == set(CONFIGS)


@pytest.mark.fault("B21")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compaction_while_the_files_are_listed_hides_no_row(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    rows, glob = len(Dataset.open(dataset.path).measurements()), Path.glob

    def compact_and_list(folder: Path, pattern: str) -> list[Path]:
        monkeypatch.undo()
        listed = list(glob(folder, pattern))
        Dataset.open(dataset.path).compact()
        return listed if when == "after" else list(glob(folder, pattern))

    reader = Dataset.open(dataset.path)
    monkeypatch.setattr(Path, "glob", compact_and_list)
    assert len(reader.measurements()) == rows > 0


def test_a_dataset_whose_folder_was_moved_is_not_empty_but_gone(dataset: Dataset) -> None:
    moved = dataset.path.with_name("moved")
    readers = [Dataset.open(dataset.path) for _ in range(3)]
    dataset.path.rename(moved)
    for reader, ask in zip(readers, ("measurements", "artifacts", "compact"), strict=True):
        with pytest.raises(FileError, match=r"is not there|No such file"):
            getattr(reader, ask)()
    assert len(Dataset.open(moved).measurements())
