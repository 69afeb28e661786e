"""A model of any kernel: what it ranks by, what it is told of binaries, and its folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from dataset_examples import PROTOCOL, TARGET
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_datasets import ARGUMENTS, NAMES, SIZES, binary_of, dataset, entry, latency_us
from test_cli import run, run_json
from test_cli_faults import refused

from costmodel.autotune.dataset import KernelDataset
from costmodel.autotune.features import concept
from costmodel.autotune.model import KERNELS, KernelModel, columns_of
from costmodel.autotune.store import KernelStore
from costmodel.data.dataset import Dataset
from costmodel.errors import CorruptFile, FileError, MissingData, NoModel, SchemaMismatch
from costmodel.features.concepts import CONCEPTS, OTHER
from costmodel.models.trees import XgbParams

FEW = replace(KERNELS, rounds=25, max_depth=3)
BINARIES = {name: binary_of(*size) for name, size in zip(NAMES, SIZES, strict=True)}
GRIDS = {name: {k: known[k] for k in ("grid", "ttir")} for name, known in BINARIES.items()}


@pytest.fixture(scope="module")
def model() -> KernelModel:
    return KernelModel.train(dataset(), FEW)


def ranked(model: KernelModel, head: str = "after", names: list[str] = NAMES) -> list[str]:
    mean, _ = model.predict(head, columns_of(names, ARGUMENTS, BINARIES))
    return [names[i] for i in np.argsort(mean, kind="stable")]


@pytest.mark.parametrize("head", ["before", "after"])
def test_the_fastest_configurations_of_a_kernel_like_those_learned_from_come_first(
    model: KernelModel, head: str
) -> None:
    fastest = sorted(NAMES, key=lambda name: latency_us(*SIZES[NAMES.index(name)]))
    assert ranked(model, head)[0] in fastest[:3]  # as fast as each other
    assert ranked(model, head)[-1] == fastest[-1]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(len(NAMES))))
def test_the_order_of_a_list_does_not_count(model: KernelModel, order: list[int]) -> None:
    shuffled = columns_of([NAMES[i] for i in order], ARGUMENTS, BINARIES)
    for head in ("before", "after"):
        mean, deviation = model.predict(head, columns_of(NAMES, ARGUMENTS, BINARIES))
        assert np.array_equal(model.predict(head, shuffled), [mean[order], deviation[order]])


@settings(deadline=None, max_examples=3)
@given(scale=st.sampled_from([1 / 8, 3.0, 1024.0]), seed=st.integers(0, 9))
def test_neither_the_order_of_rows_nor_the_unit_of_latencies_counts(
    scale: float, seed: int
) -> None:
    whole = dataset()
    rows = whole.rows.take(np.random.default_rng(seed).permutation(len(whole.rows)))
    for name in ("latency_us", "p10_us", "p90_us"):
        scaled = pa.array(rows[name].to_numpy() * np.float32(scale))
        rows = rows.set_column(rows.column_names.index(name), rows.schema.field(name), scaled)
    first = KernelModel.train(whole, FEW)
    second = KernelModel.train(KernelDataset(whole.identity, rows), FEW)
    columns = columns_of(NAMES, ARGUMENTS, BINARIES)
    assert np.allclose(first.predict("after", columns), second.predict("after", columns), atol=1e-3)


def test_before_compiling_the_grid_and_ttir_are_enough(model: KernelModel) -> None:
    known = model.predict("before", columns_of(NAMES, ARGUMENTS, BINARIES))
    assert np.array_equal(model.predict("before", columns_of(NAMES, ARGUMENTS, GRIDS)), known)


@pytest.mark.parametrize("binaries", [{}, GRIDS, {NAMES[0]: BINARIES[NAMES[0]]}])
@pytest.mark.parametrize("head", ["before", "after"])
def test_what_is_not_known_is_no_error(
    model: KernelModel, head: str, binaries: dict[str, Any]
) -> None:
    mean, deviation = model.predict(head, columns_of(NAMES, {}, binaries))
    assert np.isfinite(mean).all()
    assert (deviation > 0).all()


def test_a_configuration_that_failed_comes_last() -> None:
    fastest = min(NAMES, key=lambda name: latency_us(*SIZES[NAMES.index(name)]))
    assert ranked(KernelModel.train(dataset(fail=fastest), FEW))[-1] == fastest


def test_the_deviation_tells_how_far_kernels_not_learned_from_are(model: KernelModel) -> None:
    times = np.log([latency_us(*size) for size in SIZES])
    mean, deviation = model.predict("after", columns_of(NAMES, ARGUMENTS, BINARIES))
    error = (times - np.median(times)) - mean
    assert np.abs(error - error.mean()).max() < 4 * deviation.max()
    assert deviation.max() < times.std()


def test_a_saved_model_predicts_the_same(model: KernelModel, tmp_path: Path) -> None:
    loaded = KernelModel.load(model.save(tmp_path / "model"))
    assert loaded.card == model.card
    columns = columns_of(NAMES, ARGUMENTS, BINARIES)
    for head in ("before", "after"):
        assert np.array_equal(loaded.predict(head, columns), model.predict(head, columns))


def test_a_save_replaces_the_model_that_is_there(model: KernelModel, tmp_path: Path) -> None:
    model.save(tmp_path)
    other = KernelModel.train(dataset(), replace(FEW, rounds=3))
    other.save(tmp_path)
    assert KernelModel.load(tmp_path).card == other.card
    assert len([*tmp_path.iterdir()]) == 3


@pytest.mark.parametrize("cut", [0, 40, -3])
def test_damaged_trees_are_one_clear_error(model: KernelModel, tmp_path: Path, cut: int) -> None:
    file = model.save(tmp_path) / model.card.heads["after"].file
    file.write_bytes(file.read_bytes()[:cut])
    loaded = KernelModel.load(tmp_path)
    with pytest.raises(CorruptFile, match=f"{file.name}: .*train the model again"):
        loaded.predict("after", columns_of(NAMES, ARGUMENTS, BINARIES))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kernel_model": 99}, SchemaMismatch),
        ({"ptx_schema": 0}, SchemaMismatch),
        ({"kernel_model": None}, CorruptFile),
        ({"heads": 3}, CorruptFile),
        ({"heads": {}}, CorruptFile),
        ({"trained_on": {"rows": "many"}}, CorruptFile),
        ({"target": {}}, CorruptFile),
    ],
)
def test_a_damaged_card_is_one_clear_error(
    model: KernelModel, tmp_path: Path, change: dict[str, Any], error: type[Exception]
) -> None:
    card = model.save(tmp_path) / "card.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | change))
    with pytest.raises(error, match=str(tmp_path)):
        KernelModel.load(tmp_path)


@pytest.mark.parametrize("head", ["before", "after"])
def test_a_model_of_other_columns_is_refused(model: KernelModel, tmp_path: Path, head: str) -> None:
    card = model.save(tmp_path) / "card.json"
    written = json.loads(card.read_text())
    written["heads"][head]["columns"][5] = "of another release"
    card.write_text(json.dumps(written))
    with pytest.raises(SchemaMismatch, match=r"of another release.*train the model again"):
        KernelModel.load(tmp_path)


def test_other_folders_are_refused(model: KernelModel, tmp_path: Path) -> None:
    with pytest.raises(NoModel, match="costmodel train"):
        KernelModel.load(tmp_path)
    dataset().write(tmp_path)
    with pytest.raises(CorruptFile, match="a model of kernels"):
        KernelModel.load(tmp_path)
    with pytest.raises(FileError, match="dataset of kernels"):
        model.save(tmp_path)


def test_without_lists_to_learn_from_there_is_no_model() -> None:
    whole = dataset()
    none = KernelDataset(whole.identity, whole.rows.slice(0, 1))
    with pytest.raises(MissingData, match="tune more kernels"):
        KernelModel.train(none, XgbParams())


# --- Commands -------------------------------------------------------------------------------------


def test_a_dataset_of_kernels_gives_a_model_of_kernels(tmp_path: Path) -> None:
    dataset().write(tmp_path / "data")
    found = run_json("train", tmp_path / "data", "--out", tmp_path / "model")
    assert found["training"] == {"kernels": 12, "lists": 12, "rows": 144}
    assert KernelModel.load(tmp_path / "model").card.trained_on == found["training"]
    both = run_json("train", tmp_path / "data", tmp_path / "data", "--out", tmp_path / "model")
    assert both["training"]["kernels"] == 12
    assert "kernels record" in refused("train", tmp_path / "data", "--out", "m", "--add-cache")


def test_datasets_of_kernels_and_products_do_not_mix(tmp_path: Path) -> None:
    dataset().write(tmp_path / "kernels")
    Dataset.create(tmp_path / "products", TARGET, PROTOCOL)
    said = refused("train", tmp_path / "kernels", tmp_path / "products", "--out", tmp_path / "m")
    assert "products" in said


@pytest.mark.parametrize("chosen", [0, 4, 9])
def test_what_a_model_makes_of_a_winner_multiplies_to_its_prediction(
    model: KernelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: int
) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "cache"))
    store, known = KernelStore(), entry("mine.kernel")
    store.describe(known.key, known.arguments)
    for name, measurement in known.measured.items():
        store.note(known.key, name, measurement)
        store.note_binary(known.key, name, **known.binaries[name])
    store.choose(known.key, NAMES[chosen], "timed all")
    folder = model.save(tmp_path / "model")
    winner, rival = run_json("kernels", "explain", "mine", "--model", folder)["explained"]
    assert winner["config"] == NAMES[chosen] != rival["config"]
    order = ranked(model)
    assert winner["place"] == order.index(NAMES[chosen]) + 1
    assert rival["place"] == (2 if winner["place"] == 1 else 1)
    for each in (winner, rival):
        assert np.prod([*each["factors"].values()]) == pytest.approx(each["predicted"], rel=1e-3)
        assert {*each["factors"]} <= {*CONCEPTS, "all alike"}
    shown = run("kernels", "explain", "mine", "--model", folder)
    assert "over the median" in shown.output
    monkeypatch.setattr("costmodel.autotune.prior.model_for", lambda *_: model)
    assert run("kernels", "explain", "mine").output == shown.output
    monkeypatch.setattr("costmodel.autotune.prior.model_for", lambda *_: None)
    assert "costmodel train" in refused("kernels", "explain", "mine")


def test_without_binaries_there_is_nothing_to_explain(
    model: KernelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path / "cache"))
    store, known = KernelStore(), entry("mine.kernel")
    for name, measurement in known.measured.items():
        store.note(known.key, name, measurement)
    store.choose(known.key, NAMES[0], "timed all")
    folder = model.save(tmp_path / "model")
    assert "fewer than two" in refused("kernels", "explain", "mine", "--model", folder)


def test_few_columns_are_of_no_concept(model: KernelModel) -> None:
    columns = model.card.heads["after"].columns
    assert sum(concept(name) == OTHER for name in columns) < len(columns) / 10
