"""The model of scaled products: recorded lists, what it learns of them, and who asks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from autotune_fakes import Machine, machine_without_gpu
from made_up_products import call_of, entries, on_an_h200
from test_cli import run_json

import costmodel
from costmodel.autotune.dataset import KernelDataset
from costmodel.autotune.model import KernelModel, columns_of
from costmodel.autotune.prior import model_for
from costmodel.autotune.store import config_name
from costmodel.evaluation.heldout import eval_pairs, is_held_out
from costmodel.gemm.workload import Workload
from costmodel.kernels.scaled import scaled_tiles
from costmodel.scaled.configs import prune
from costmodel.scaled.launch import Kernels, tuned

ROOT = Path(__file__).resolve().parent.parent
SHAPES = [(n, k) for n in (1536, 4096, 10240) for k in (1024, 4096, 11008)]
PRODUCTS = [(form, m, n, k) for form in ("row", "block", "int8") for m in (16, 128, 1024)
            for n, k in SHAPES]  # fmt: skip
UNSEEN = [(form, m, 7168, 5120) for form, m, n, k in PRODUCTS if (n, k) == SHAPES[0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained by the command on made-up timings."""
    base = tmp_path_factory.mktemp("scaled")
    with pytest.MonkeyPatch.context() as patch:
        on_an_h200(patch)
        KernelDataset.of(entries(PRODUCTS)).write(base / "data")
    run_json("train", base / "data", "--out", base / "model")
    return base / "model"


def test_it_puts_what_is_fast_first_at_sizes_not_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_an_h200(monkeypatch)
    model, kept = KernelModel.load(folder), []
    for entry, product in zip(entries(UNSEEN, noise=0), UNSEEN, strict=True):
        names = [x for x in entry.measured if '"torch"' not in x]
        score, _ = model.predict("scaled", columns_of(names, entry.arguments, {}))
        us = np.array([entry.measured[x].latency_us for x in names])
        assert len(us) > 4, product
        kept.append(us.min() / us[np.argsort(score)[0]])
    assert np.exp(np.mean(np.log(kept))) > 0.93


def test_it_learns_torch_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_an_h200(monkeypatch)
    model = KernelModel.load(folder)
    (entry,) = entries([("row", 1024, 7168, 5120)], noise=0)
    names = [*entry.measured]
    score, _ = model.predict("scaled", columns_of(names, entry.arguments, {}))
    row = next(i for i, x in enumerate(names) if '"torch"' in x)
    us = np.array([entry.measured[x].latency_us for x in names])
    assert score[row] == pytest.approx(np.log(us[row] / np.median(us)), abs=0.15)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("COSTMODEL_CACHE_DIR", str(tmp_path))
    on_an_h200(monkeypatch)
    with machine_without_gpu(tmp_path / "kernels") as machine:
        machine.us = lambda launch: 1.0
        scaled_tiles.device_caches.clear()  # of another machine
        yield machine
        tuned.__dict__.pop("_costmodel", None)
        tuned.cache.clear()


def test_mode_predict_launches_what_it_ranks_first(
    folder: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KernelModel.load(folder)
    monkeypatch.setattr("costmodel.autotune.prior.model_for", lambda arch, head: model)
    call = call_of("block", 16, 1536, 1024, device="cpu")  # where torch refuses, unforeseen
    costmodel.set_mode("predict")
    try:
        tuned.run(*call, warmup=False)
    finally:
        costmodel.set_mode("auto")
    of_call = dict(zip(Kernels.arg_names, call, strict=True))
    names = [config_name(c) for c in prune(tuned.configs, of_call)]
    (entry,) = entries([("block", 16, 1536, 1024)])
    score, _ = model.predict("scaled", columns_of(names, entry.arguments, {}))
    order = [names[row] for row in score.argsort()]
    by_torch = next(name for name in names if '"torch"' in name)
    assert config_name(tuned.best_config) == next(x for x in order if x != by_torch)
    assert len(machine.launches) == 1
    assert not machine.jobs  # no other was compiled


# --- Recording ------------------------------------------------------------------------------------


def test_training_has_no_product_of_the_eval_list_and_judging_all(script: Any) -> None:
    record = script("record_scaled")
    drawn = record.training(600)
    assert len({*drawn}) == 600
    assert not {(p.n, p.k) for p in drawn} & eval_pairs()
    forms = [p.form for p in drawn]
    assert {forms.count(form) for form in record.FORMS} == {200}
    assert {p.n % 16 > 0 for p in drawn} == {False, True}
    assert drawn[:100] == record.training(100)
    judging = record.judging()
    assert {(p.n, p.k) for p in judging} == eval_pairs()
    assert {p.form for p in judging} == {*record.FORMS}


def test_what_is_recorded_is_a_dataset_to_train_on(
    script: Any, machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = script("record_scaled")
    costmodel.set_mode("exhaustive")
    made = [record.Scaled(form, m, 1536, 512, "cpu") for form in ("row", "int8") for m in (16, 48)]
    held = record.Scaled("row", 16, 4096, 4096, "cpu")
    refused = record.Scaled("row", 16, 256, 256, "nowhere")
    try:
        failures = [*record.record([*made, held, refused], 600.0)]
    finally:
        costmodel.set_mode("auto")
    assert len(failures) == 1
    assert "row 16 256 256" in failures[0]
    record.make_dataset(tmp_path, tmp_path / "train", False)
    rows = KernelDataset.read(tmp_path / "train").rows.to_pylist()
    assert {json.loads(row["arguments"])["m"] for row in rows} == {16, 48}
    assert {json.loads(row["arguments"])["n"] for row in rows} == {1536}
    assert len({row["list"] for row in rows}) == len(made)
    record.make_dataset(tmp_path, tmp_path / "judges", True)
    judges = KernelDataset.read(tmp_path / "judges").rows.to_pylist()
    assert {json.loads(row["arguments"])["n"] for row in judges} == {1536, 4096}
    study = script("bench_scaled_model")
    found = study.Lists.of(KernelDataset.read(tmp_path / "train"), "scaled")
    assert {*found.form} == {"row", "int8"}
    assert all(
        '"torch"' not in rows[found.table.row[i]]["config"] for i in np.flatnonzero(found.ours)
    )
    figures = found.figures(found.table.label)  # ranked by the truth
    assert (figures["first_1_pct"], figures["lists"]) == (100.0, len(made))


# --- What is shipped ------------------------------------------------------------------------------


def test_no_shape_of_the_eval_list_was_trained_on() -> None:
    rows = KernelDataset.read(ROOT / "datasets" / "scaled-h200-sxm").rows
    calls = [json.loads(each) for each in rows["arguments"].unique().to_pylist()]
    assert len(calls) > 700
    assert not any(is_held_out(Workload.dense(c["m"], c["n"], c["k"])) for c in calls)


def test_the_shipped_model_is_of_the_shipped_rows() -> None:
    model = model_for(90, "scaled")
    assert model is not None
    rows = KernelDataset.read(ROOT / "datasets" / "scaled-h200-sxm").rows
    assert model.card.trained_on["kernels"] == 1
    assert 0.98 * len(rows) < model.card.trained_on["rows"] <= len(rows)


def test_the_page_has_the_figures_of_the_models() -> None:
    page = " ".join((ROOT / "docs" / "low-precision.md").read_text().split())
    text = (ROOT / "benchmarks" / "results" / "scaled-model-h200-sxm.json").read_text()
    rows = json.loads(text)["rows"]
    for row in rows:
        if row["judge"] == "eval list":
            assert f"| {row['first_1_pct']:.1f} % | {row['first_8_pct']:.1f} % |" in page
            assert row["lists"] == 216
    own = rows[0]
    assert (own["model"], own["judge"]) == ("scaled products", "(n, k) left out")
    assert (
        f"has {own['first_1_pct']:.1f} % and {own['first_8_pct']:.1f} %, at worst "
        f"{own['worst_1_pct']:.0f} % with its first choice and {own['worst_8_pct']:.1f} % with"
    ) in page  # fmt: skip
