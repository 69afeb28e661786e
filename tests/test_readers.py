"""Readers of files that others may write: any content is one clear error, or is read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_recording import TARGET, TRAINING, write_recording

from costmodel.autotune.store import KernelStore
from costmodel.cli.draw import read_shapes
from costmodel.collect import Job
from costmodel.collect.sampling import read_worklist, write_worklist
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement
from costmodel.data.shards import Identity
from costmodel.errors import CostModelError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import MOST

FOLDER = pytest.TempPathFactory
SETTINGS = settings(max_examples=80, deadline=None)
IDENTITY = Identity(TARGET, {"repeats": 5})


def damaged(content: bytes, at: int, new: bytes, cut: bool) -> bytes:
    """Put other bytes somewhere, or end there."""
    at %= len(content)
    return content[:at] + new + (b"" if cut else content[at + len(new) :])


def outcome(read: Callable[[], Any]) -> Any:
    """Return what was read, or costmodel's error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            return read()
        except CostModelError as error:
            return error


DAMAGE = {"at": st.integers(0, 10**6), "new": st.binary(max_size=9), "cut": st.booleans()}


# --- Shapes ---------------------------------------------------------------------------------------


@given(st.one_of(st.binary(max_size=300), st.text("mnk,0123456789-.\"'\n\r\0 ", max_size=200)))
@SETTINGS
def test_any_shapes_are_sizes_or_one_error(tmp_path_factory: FOLDER, content: bytes | str) -> None:
    file = tmp_path_factory.mktemp("shapes") / "shapes.csv"
    data = content if isinstance(content, bytes) else b"name,m,n,k\n" + content.encode()
    file.write_bytes(data)
    found = outcome(lambda: read_shapes(file))
    if isinstance(found, CostModelError):
        assert "\n" not in str(found)
        return
    assert found
    assert all(1 <= size <= MOST for sizes in found for size in sizes)


# --- Datasets and work lists ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: FOLDER) -> Path:
    dataset = write_recording(tmp_path_factory.mktemp("small") / "data")
    dataset.compact()
    return dataset.path


@pytest.mark.parametrize("name", ["card.json", "artifacts.parquet", "measurements.parquet"])
@given(**DAMAGE)
@settings(max_examples=15, deadline=None)
def test_any_damage_to_a_dataset_is_one_error_or_costs_rows(
    small: Path, tmp_path_factory: FOLDER, name: str, at: int, new: bytes, cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    for file in small.iterdir():
        content = file.read_bytes()
        changed = damaged(content, at, new, cut) if file.name == name else content
        (folder / file.name).write_bytes(changed)
    found = outcome(lambda: len(Dataset.open(folder).frame()))
    assert str(folder) in str(found) if isinstance(found, CostModelError) else found <= 240


@given(**DAMAGE)
@settings(max_examples=40, deadline=None)
def test_any_damage_to_a_work_list_is_one_error_or_none(
    tmp_path_factory: FOLDER, at: int, new: bytes, cut: bool
) -> None:
    file = tmp_path_factory.mktemp("list") / "work.parquet"
    jobs = [Job(w, (GemmConfig("pointer", 16, 16, 16, 1, 1),)) for w in TRAINING]
    write_worklist(file, jobs, IDENTITY)
    file.write_bytes(damaged(file.read_bytes(), at, new, cut))
    found = outcome(lambda: read_worklist(file, IDENTITY))
    assert str(file) in str(found) if isinstance(found, CostModelError) else found == jobs


# --- Timings of kernels ---------------------------------------------------------------------------

KEY = {"name": "a.kernel", "key": {"n": 5}, "device": "x"}
JSON: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


@given(st.lists(st.one_of(st.binary(max_size=60), JSON.map(lambda x: json.dumps(x).encode()))))
@SETTINGS
def test_any_line_beside_a_timing_costs_itself_only(
    tmp_path_factory: FOLDER, lines: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("kernels")
    KernelStore(folder).note(KEY, "config", Measurement("ok", 2.0))
    (file,) = folder.iterdir()
    with file.open("ab") as stream:
        stream.write(b"\n" + b"\n".join(line.replace(b"\n", b" ") for line in lines))
    KernelStore(folder).note(KEY, "other", Measurement("ok", 3.0))
    measured = KernelStore(folder).read(KEY).measured
    assert {name: measured[name].latency_us for name in ("config", "other")} == {
        "config": 2.0, "other": 3.0
    }  # fmt: skip


# --- Other tools ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", ["pandas", "polars", "duckdb"])
@pytest.mark.parametrize("compacted", [False, True])
def test_other_tools_open_a_dataset(
    small: Path, tmp_path: Path, tool: str, compacted: bool
) -> None:
    module: Any = pytest.importorskip(tool)
    dataset = write_recording(tmp_path / "data")
    if compacted:
        dataset.compact()
    files = sorted(map(str, dataset.path.glob("measurements*.parquet")))
    if tool == "pandas":
        table = module.concat([module.read_parquet(file) for file in files])
        best = table[table.status == "ok"].latency_us.min()
    elif tool == "polars":
        table = module.read_parquet(files)
        best = table.filter(module.col("status") == "ok")["latency_us"].min()
    else:
        table = module.sql(f"select * from read_parquet({files})").fetchall()
        query = f"select min(latency_us) from read_parquet({files}) where status = 'ok'"
        ((best,),) = module.sql(query).fetchall()
    measured = dataset.measurements()
    assert len(table) == len(measured)
    assert best == pytest.approx(float(measured.latency_us[measured.ok].min()))
