"""A dataset of kernels' timings: made of the store, read as written, of allowed kernels only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib import metadata
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from autotune_fakes import add, configs, machine_without_gpu
from dataset_examples import PROTOCOL, TARGET, A, records
from dataset_examples import RUN as GEMM_RUN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from test_cli import run, run_json
from test_cli_faults import refused
from triton.tools.tensor_descriptor import TensorDescriptor

import costmodel
from costmodel.autotune.dataset import FEATURES, TTIR_OPERATIONS, KernelDataset, role_of
from costmodel.autotune.store import KernelStore, config_name
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement
from costmodel.errors import (
    CorruptFile,
    FileError,
    InvalidInput,
    MissingData,
    MixedData,
    NoGpu,
    WrongVersion,
)

ROOT = Path(__file__).resolve().parent.parent
KEY: dict[str, Any] = {
    "name": "fla.ops.gla.chunk.my_kernel", "source": "12ab", "key": {"T": 4096}, "specialized": [],
    "device": "NVIDIA H200", "arch": 90, "sm_count": 132, "driver": "570.1", "triton": "3.6.0",
    "triton_build": "x", "ptxas": "12.8",
}  # fmt: skip
SMALL = config_name(triton.Config({"BLOCK": 32}, num_warps=2, num_stages=1))
LARGE = config_name(triton.Config({"BLOCK": 512}, num_warps=8, maxnreg=96))


def ok(us: float) -> Measurement:
    return Measurement("ok", us, us - 0.5, us + 0.5, 9, 1980)


def rows_of(dataset: KernelDataset) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = dataset.rows.to_pylist()
    return rows


def latencies(dataset: KernelDataset) -> dict[tuple[str, str], float]:
    return {(r["kernel"], r["config"]): r["latency_us"] for r in rows_of(dataset)}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelStore:
    """The store of the cache, with one kernel: one configuration was timed, one failed."""
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "cache"))
    store = KernelStore()
    store.describe(KEY, {"x": ["torch.bfloat16", [64, 128]], "y": ["torch.bool", []], "n": 7})
    store.note(KEY, SMALL, ok(10.0))
    store.note_binary(
        KEY, SMALL, registers=40, spill_bytes=0, shared_bytes=1024, compile_s=0.25, grid=[8, 2],
        ptx={"all_instructions": 70.0}, ttir={"tt.load": 2, "tt.of_another_release": 1},
    )  # fmt: skip
    store.note(KEY, LARGE, Measurement("out_of_resources", error="shared memory"))
    store.choose(KEY, SMALL, "timed all")
    return store


@pytest.fixture
def folder(store: KernelStore, tmp_path: Path) -> Path:
    """A dataset of that store."""
    KernelDataset.of(store.entries(), {"fla": "fla-core 0.6.0"}).write(tmp_path / "data")
    return tmp_path / "data"


# --- What is in a row -----------------------------------------------------------------------------


def test_a_row_tells_all_that_the_store_knows(folder: Path) -> None:
    rows = {row["config"]: row for row in rows_of(KernelDataset.read(folder))}
    timed, failed = rows[SMALL], rows[LARGE]
    assert timed["list"] == failed["list"]
    assert json.loads(timed["key"]) == KEY
    expected = {
        "kernel": KEY["name"], "package": "fla-core 0.6.0", "role": "train", "widened": False,
        "status": "ok", "latency_us": 10.0, "p10_us": 9.5, "p90_us": 10.5, "repeats": 9,
        "num_warps": 2, "num_stages": 1, "num_ctas": 1, "registers": 40, "spill_bytes": 0,
        "shared_bytes": 1024, "compile_s": 0.25, "grid_0": 8, "grid_1": 2, "grid_2": 1,
        "ptx_all_instructions": 70, "ptx_loop_instructions": 0, "tt.load": 2, "tt.dot": 0,
        "tensors": 2, "tensor_bytes": 2 * 64 * 128 + 1, "largest_elements": 64 * 128,
        "widest_bytes": 2,
    }  # fmt: skip
    assert {name: timed[name] for name in expected} == expected
    assert isnan(timed["maxnreg"])
    assert (failed["status"], failed["num_warps"], failed["maxnreg"]) == ("out_of_resources", 8, 96)
    unknown = ("latency_us", "registers", "grid_0", "ptx_all_instructions", "tt.load")
    assert [name for name in unknown if not isnan(failed[name])] == []


def test_what_is_not_in_the_kernels_own_list_is_marked(store: KernelStore) -> None:
    dataset = KernelDataset.of(store.entries(), listed={KEY["name"]: {SMALL}})
    assert {r["config"]: r["widened"] for r in rows_of(dataset)} == {SMALL: False, LARGE: True}


def test_tuning_fills_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    with machine_without_gpu(tmp_path / "kernels"):
        kernel = costmodel.autotune(configs(32, 64, 4096), ["n"])(triton.jit(add))
        x = torch.zeros(64)
        kernel[(3,)](x, x, torch.zeros(64), 64)
    dataset = KernelDataset.of(KernelStore(tmp_path / "kernels").entries())
    assert dataset.identity.target.device.name == "h100-sxm"
    found = dataset.rows.select(["latency_us", "grid_0", "tt.load", "tt.store", "tensor_bytes"])
    assert sorted(tuple(row.values()) for row in found.to_pylist()) == [
        (us, 3, 2, 1, 3 * 64 * 4) for us in (32, 64, 4096)
    ]


def piece(x_desc, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add one to a block of what is behind a descriptor."""
    x_desc.store([0], x_desc.load([0]) + 1)


def test_a_tensor_behind_a_descriptor_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    with machine_without_gpu(tmp_path / "kernels"):
        kernel = costmodel.autotune(configs(16, 32), [])(triton.jit(piece))
        kernel[(1,)](TensorDescriptor(torch.zeros(256), [256], [1], [16]))
    (size,) = {
        row["tensor_bytes"]
        for row in rows_of(KernelDataset.of(KernelStore(tmp_path / "kernels").entries()))
    }
    assert size == 256 * 4


# --- Read as written ------------------------------------------------------------------------------

COUNTS = st.floats(0, 2**100, width=32)
BINARIES = st.none() | st.fixed_dictionaries(
    {
        "registers": st.integers(0, 255), "compile_s": st.floats(0, 1e6, width=32),
        "grid": st.lists(st.integers(1, 2**24), min_size=1, max_size=3),
        "ptx": st.dictionaries(st.sampled_from(PTX_FEATURES), COUNTS, max_size=5),
        "ttir": st.dictionaries(st.sampled_from(TTIR_OPERATIONS), COUNTS, max_size=5),
    },
)  # fmt: skip
MEASUREMENTS = st.builds(ok, st.floats(1, 2**60, width=32)) | st.sampled_from(
    ["crashed", "timeout", "wrong_result", "compile_error"]
).map(Measurement)  # type: ignore[arg-type]
ARGUMENTS = st.dictionaries(
    st.text(max_size=3),
    st.none() | st.integers(-(2**40), 2**40)
    | st.tuples(st.sampled_from(["torch.float32", "fp16", "torch.bool", "torch.float8_e4m3fn"]),
                st.lists(st.integers(0, 2**10), max_size=3)).map(list),
    max_size=4,
)  # fmt: skip
LISTS = st.dictionaries(
    st.tuples(st.sampled_from(["mine.kernel", "liger_kernel.ops.k", "__main__.k"]), st.text()),
    st.tuples(
        ARGUMENTS,
        st.dictionaries(st.integers(0, 2**70), st.tuples(MEASUREMENTS, BINARIES), max_size=3),
    ),
    min_size=1, max_size=3,
)  # fmt: skip


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lists=LISTS)
def test_any_timings_are_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, lists: dict[tuple[str, str], Any]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    store, expected = KernelStore(folder / "store"), {}
    for (name, value), (arguments, timed) in lists.items():
        key = KEY | {"name": name, "key": {"x": value}}
        store.describe(key, arguments)
        for block, (measurement, binary) in timed.items():
            config = config_name(triton.Config({"BLOCK": block}))
            store.note(key, config, measurement)
            if binary:
                store.note_binary(key, config, **binary)
            expected[name, value, config] = measurement, binary, arguments
    KernelDataset.of(store.entries()).write(folder / "data")
    read = KernelDataset.read(folder / "data")
    rows = {(r["kernel"], json.loads(r["key"])["key"]["x"], r["config"]): r for r in rows_of(read)}
    assert rows.keys() == expected.keys()
    for place, (measurement, binary, arguments) in expected.items():
        row = rows[place]
        assert row["role"] == ("eval" if "liger" in place[0] else "train")
        assert json.loads(row["arguments"]) == arguments
        assert (row["status"], row["repeats"]) == (measurement.status, measurement.repeats)
        np.testing.assert_equal(row["latency_us"], measurement.latency_us)
        assert isnan(row["registers"]) == isnan(row["grid_0"]) == isnan(row["tt.load"])
        if binary is None:
            assert isnan(row["registers"])
            continue
        for name in ("registers", "compile_s"):
            assert row[name] == binary[name]
        assert [row[f"grid_{i}"] for i in range(len(binary["grid"]))] == binary["grid"]
        assert [row[f"ptx_{x}"] for x in PTX_FEATURES] == [
            binary["ptx"].get(x, 0) for x in PTX_FEATURES
        ]
        assert [row[x] for x in TTIR_OPERATIONS] == [
            binary["ttir"].get(x, 0) for x in TTIR_OPERATIONS
        ]
    card = json.loads((folder / "data" / "card.json").read_text())
    assert sum(kernel["rows"] for kernel in card["kernels"]) == len(expected)
    assert sum(package["rows"] for package in card["packages"]) == len(expected)


def test_features_are_numbers_that_a_model_can_take(folder: Path) -> None:
    rows = KernelDataset.read(folder).rows
    columns = np.stack([rows.column(name).to_numpy() for name in FEATURES], axis=1)
    assert columns.dtype == np.float32
    assert columns.shape == (2, len(FEATURES))
    assert len(set(rows.column_names)) == len(rows.column_names)


# --- More than one store --------------------------------------------------------------------------


def test_a_dataset_grows_and_what_is_timed_again_replaces(store: KernelStore, folder: Path) -> None:
    other = KEY | {"name": "mine.kernel"}
    store.note(KEY, LARGE, ok(30.0))
    store.note(other, SMALL, ok(5.0))
    base = KernelDataset.read(folder)
    grown = KernelDataset.of(store.entries(), base=base)
    assert latencies(grown) == {
        (KEY["name"], SMALL): 10.0, (KEY["name"], LARGE): 30.0, ("mine.kernel", SMALL): 5.0
    }  # fmt: skip
    assert len(KernelDataset.of([], base=base).rows) == 2
    assert len(base.rows) == 2


def test_timings_of_another_device_or_compiler_are_left_out(
    store: KernelStore, folder: Path
) -> None:
    for name, value in (("device", "NVIDIA B200"), ("triton", "3.7.1"), ("ptxas", "13.0")):
        store.note(KEY | {name: value}, SMALL, ok(99.0))
    store.note(KEY | {"driver": "580.2"}, LARGE, ok(20.0))
    grown = KernelDataset.of(store.entries(), base=KernelDataset.read(folder))
    assert 99.0 not in latencies(grown).values()
    assert grown.card()["drivers"] == ["570.1", "580.2"]
    assert [k["lists"] for k in grown.card()["kernels"]] == [2]


def test_without_a_dataset_what_was_tuned_last_says_the_target(store: KernelStore) -> None:
    newer = KEY | {"triton": "3.7.1"}
    store.note(newer, SMALL, ok(99.0))
    entries = store.entries()
    for entry in entries:
        entry.when = entry.key["triton"]
    dataset = KernelDataset.of(entries)
    assert dataset.identity.target.toolchain.triton == "3.7.1"
    assert [*latencies(dataset).values()] == [99.0]


def test_a_device_that_is_in_no_table_must_be_there(tmp_path: Path) -> None:
    store = KernelStore(tmp_path)
    store.note(KEY | {"device": "NVIDIA Unheard Of"}, SMALL, ok(9.0))
    with pytest.raises((NoGpu, InvalidInput), match=r"GPU|Unheard Of"):
        KernelDataset.of(store.entries())
    with machine_without_gpu(tmp_path / "none"), pytest.raises(InvalidInput, match="Unheard Of"):
        KernelDataset.of(store.entries())


def test_an_installed_package_is_known_with_its_version(tmp_path: Path) -> None:
    store = KernelStore(tmp_path)
    for module in ("torch", "triton", "__main__"):
        store.note(KEY | {"name": f"{module}.k"}, SMALL, ok(9.0))
    kernels = KernelDataset.of(store.entries(), {"triton": "a fork 9"}).card()["kernels"]
    assert {k["kernel"]: k["package"] for k in kernels} == {
        "torch.k": f"torch {metadata.version('torch')}", "triton.k": "a fork 9", "__main__.k": "",
    }  # fmt: skip


def test_rows_keep_the_package_that_they_were_recorded_with(
    store: KernelStore, folder: Path
) -> None:
    store.note(KEY | {"key": {"T": 1}}, SMALL, ok(9.0))
    base = KernelDataset.read(folder)
    for told, expected in (({"fla": "fla-core 0.7.0"}, {"0.6.0", "0.7.0"}), ({}, {"0.6.0"})):
        kernels = KernelDataset.of(store.entries(), told, base=base).card()["kernels"]
        assert {k["package"].removeprefix("fla-core ") for k in kernels} == expected


# --- Damaged and foreign files --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["card.json", "timings.parquet"])
@pytest.mark.parametrize("content", [b"", b"[]", b"\x00\xffPAR1", b"{}", None, "half"])
def test_a_damaged_file_is_a_clear_error(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    with pytest.raises(FileError, match=str(path)):
        KernelDataset.read(folder)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0), flip=st.integers(1, 255))
def test_a_flipped_byte_gives_the_rows_or_a_clear_error(folder: Path, at: int, flip: int) -> None:
    path = folder / "timings.parquet"
    whole = path.read_bytes()
    expected = [str(row) for row in rows_of(KernelDataset.read(folder))]
    content = bytearray(whole)
    content[at % len(content)] ^= flip
    path.write_bytes(content)
    try:
        assert [str(row) for row in rows_of(KernelDataset.read(folder))] == expected
    except FileError:
        pass
    finally:
        path.write_bytes(whole)


def test_other_versions_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costmodel.autotune.dataset._HEADER", {"kernel_schema": 2})
    with pytest.raises(WrongVersion, match="kernel_schema"):
        KernelDataset.read(folder)


def test_rows_of_another_dataset_are_refused(
    folder: Path, store: KernelStore, tmp_path: Path
) -> None:
    store.note(KEY | {"device": "NVIDIA B200", "sm_count": 148}, SMALL, ok(3.0))
    entries = [e for e in store.entries() if e.key["device"] == "NVIDIA B200"]
    KernelDataset.of(entries).write(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "timings.parquet", folder)
    with pytest.raises(MixedData, match="device"):
        KernelDataset.read(folder)


def test_columns_of_another_kind_are_refused(folder: Path) -> None:
    path = folder / "timings.parquet"
    parquet.write_table(parquet.read_table(path).drop_columns(["tt.load"]), path)
    with pytest.raises(CorruptFile, match="columns"):
        KernelDataset.read(folder)


def test_the_two_kinds_of_dataset_do_not_overwrite_each_other(
    folder: Path, tmp_path: Path, store: KernelStore
) -> None:
    products = Dataset.create(tmp_path / "products", TARGET, PROTOCOL)
    products.append_measurements(records(A), run=GEMM_RUN)
    with pytest.raises(FileError, match="dataset of kernels"):
        KernelDataset.of(store.entries()).write(products.path)
    with pytest.raises(FileError):
        KernelDataset.read(products.path)
    assert "dataset of kernels" in refused("collect", "--out", folder)
    assert "dataset of kernels" in refused("kernels", "record", products.path)
    assert len(KernelDataset.read(folder).rows) == 2


# --- Which kernels may be learned from ------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "role"),
    [
        ("fla.ops.gla.chunk", "train"), ("fla.ops.common.chunk_h.kernel", "train"),
        ("fla.modules.layernorm", "train"), ("flag_gems.ops.mm.mm_kernel", "train"),
        ("torchao.kernel", "train"), ("my_company.kernels", "train"), ("__main__.k", "train"),
        ("flash", "train"), ("fla.ops.gsa.chunk", "eval"), ("fla.ops.abc", "eval"),
        ("liger_kernel.ops.rope", "eval"), ("gemlite.triton_kernels", "eval"),
        ("fla.ops.kda.chunk", None), ("fla.ops.attn.parallel", None), ("fla.ops.rwkv7", None),
        ("fla.ops.gdn2", None), ("fla.ops.glance", None), ("fla.layers.gla", None), ("fla", None),
        ("vllm.model_executor.layers", None), ("flag_gems.fused.FLA.chunk", None),
        ("flag_gems.fused.fused_moe.k", None), ("flag_gems.fused.moe_sum.k", "train"),
    ],
)  # fmt: skip
def test_every_module_has_a_role(module: str, role: str | None) -> None:
    assert role_of(module) == role


def test_a_kernel_that_may_not_be_learned_from_is_in_no_dataset(tmp_path: Path) -> None:
    store = KernelStore(tmp_path)
    store.note(KEY | {"name": "fla.ops.kda.chunk.k"}, SMALL, ok(9.0))
    with pytest.raises(InvalidInput, match=r"fla\.ops\.kda\.chunk\.k"):
        KernelDataset.of(store.entries())


def wrong_in(card: dict[str, Any]) -> list[str]:
    """Kernels of a card whose role is not theirs, or that come from no package."""
    kernels = card["kernels"]
    return [k["kernel"] for k in kernels if role_of(k["kernel"]) != k["role"] or not k["package"]]


def kernel_datasets() -> Iterator[Path]:
    """Folders of datasets of kernels in this repository."""
    for path in (ROOT / "datasets").glob("**/card.json"):
        if "kernel_schema" in json.loads(path.read_text()):
            yield path.parent


def test_recorded_datasets_hold_what_their_cards_say_and_nothing_forbidden() -> None:
    for path in kernel_datasets():
        card = json.loads((path / "card.json").read_text())
        assert wrong_in(card) == []
        assert KernelDataset.read(path).card() == card


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        ({}, False), ({"kernel": "fla.ops.kda.k"}, True), ({"package": ""}, True),
        ({"kernel": "liger_kernel.k", "role": "eval"}, False), ({"kernel": "liger_kernel.k"}, True),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_card_is_found(folder: Path, kernel: Any, wrong: bool) -> None:
    card = json.loads((folder / "card.json").read_text())
    card["kernels"][0] |= kernel
    assert bool(wrong_in(card)) is wrong


# --- The command ----------------------------------------------------------------------------------


def test_a_companys_own_use_becomes_a_dataset(store: KernelStore, tmp_path: Path) -> None:
    out = tmp_path / "a" / "data"
    found = run_json("kernels", "record", out, "--package", "fla=0.6.0")
    assert found["packages"] == [{"package": "fla 0.6.0", "kernels": 1, "lists": 1, "rows": 2}]
    store.note(KEY | {"key": {"T": 1}}, SMALL, ok(1.0))
    found = run_json("kernels", "record", out, "--package", "fla=0.6.0")
    assert [kernel["rows"] for kernel in found["kernels"]] == [3]
    assert len(KernelDataset.read(out).rows) == 3
    assert "fla 0.6.0" in run("kernels", "record", out).stdout


def test_what_no_model_may_learn_from_is_left_out_and_told(
    store: KernelStore, tmp_path: Path
) -> None:
    store.note(KEY | {"name": "fla.ops.kda.k"}, SMALL, ok(1.0))
    result = run("kernels", "record", tmp_path / "data")
    assert "1 tuned calls left out" in result.stderr
    assert latencies(KernelDataset.read(tmp_path / "data")).keys() == {
        (KEY["name"], SMALL), (KEY["name"], LARGE)
    }  # fmt: skip
    run("kernels", "clear", "fla.ops.kda")
    assert "left out" not in run("kernels", "record", tmp_path / "data").stderr


@pytest.mark.parametrize("text", ["fla", "=1", "fla=", ""])
def test_a_package_without_a_version_is_refused(
    store: KernelStore, tmp_path: Path, text: str
) -> None:
    assert "NAME=VERSION" in refused("kernels", "record", tmp_path / "data", "--package", text)
    assert not (tmp_path / "data").exists()


def test_an_empty_cache_makes_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "none"))
    assert "no timings" in refused("kernels", "record", tmp_path / "data")
    with pytest.raises(MissingData):
        KernelDataset.of([])
    assert not (tmp_path / "data").exists()


CARDS = sorted((Path(__file__).parents[1] / "datasets").glob("kernels-*/card.json"))


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.parent.name)
def test_a_dataset_holds_what_it_may(card: Path) -> None:
    found = json.loads(card.read_text())
    for line in found["kernels"]:
        assert role_of(line["kernel"]) == line["role"], line["kernel"]
        assert " " in line["package"], line["kernel"]  # with its version
    dataset = KernelDataset.read(card.parent)
    assert dataset.card() == found
    assert set(dataset.rows["kernel"].to_pylist()) == {line["kernel"] for line in found["kernels"]}
