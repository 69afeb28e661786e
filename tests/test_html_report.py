"""The page: it shows what it should, loads nothing from anywhere, and believes no text."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_up_recording import RUN, TARGET, TRAINING, record, write_recording
from typer.testing import CliRunner

import costmodel
from costmodel.cli import app
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, TuningRecord
from costmodel.errors import MissingData
from costmodel.features.features import FEATURES
from costmodel.gemm.workload import Workload
from costmodel.models import TrainingTable, XgbCostModel
from costmodel.reports.collection import ALL, Table, correlations, tables_of
from costmodel.reports.html_report import Section, figure, html_report, page

EVIL = (
    """<script>alert(1)</script>"'><img src=http://evil.example/x onerror=alert(2)> $\\frac{1}$"""
)
SECTIONS = ["What this is of", "Speed kept", "Predicted and measured", "The worst workloads",
            "Correlation", "Features and latency", "Failures and noise"]  # fmt: skip


class Tags(HTMLParser):
    """Collects what a browser would see of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def assert_harmless(text: str) -> None:
    """Only tags of ours, no attribute that runs or loads anything but pictures of the page's own,
    and no style that does."""
    tags = Tags(text)
    ours = {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "nav", "a", "p", "div",
        "table", "tr", "th", "td", "img",
    }  # fmt: skip
    assert tags.names <= ours
    for name, value in tags.attributes:
        assert not name.startswith("on")
        if name == "src":
            assert value.startswith("data:image/png;base64,")
        if name == "href":
            assert re.fullmatch(r"#s\d+", value)
    for style in re.findall(r"<style>.*?</style>", text, re.DOTALL):
        assert "url(" not in style
        assert "@import" not in style


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_recording(tmp_path_factory.mktemp("html") / "data")


@pytest.fixture(scope="module")
def model(data: Dataset) -> XgbCostModel:
    return costmodel.train(data, name="mine")


def test_the_page_has_its_sections_and_loads_nothing(data: Dataset, model: XgbCostModel) -> None:
    text, titles = html_report(data, model)
    assert titles == SECTIONS
    assert all(f">{title}</h2>" in text for title in titles)
    assert_harmless(text)
    assert len(text.encode()) < 5 * 2**20
    assert text.count("<img ") == 3
    assert f"{model.name} {model.hash}" in text


def test_without_a_model_the_baselines_stand_alone(data: Dataset) -> None:
    text, titles = html_report(data, None)
    assert titles == SECTIONS[:2] + SECTIONS[4:]
    assert "baselines only" in text


@pytest.mark.fault("B53")
def test_no_text_is_taken_for_html(model: XgbCostModel, tmp_path: Path) -> None:
    device = replace(TARGET.device, product=EVIL)
    hostile = write_recording(tmp_path / "data", replace(TARGET, device=device))
    hostile.created = EVIL
    evil_model = XgbCostModel(name=EVIL).fit(TrainingTable.from_dataset(hostile))
    evil_model.card.training[EVIL] = {EVIL: EVIL}
    text, _ = html_report(hostile, evil_model)
    assert_harmless(text)
    assert "<script" not in text
    assert EVIL in html.unescape(text)


def test_long_texts_are_cut_and_gaps_are_dashes() -> None:
    text = page("x", [Section("s", (Table(["a", "b"], [["y" * 10_000, None]]), "<b>"))])
    assert len(text) < 3000
    assert "<td>–</td>" in text
    assert "&lt;b&gt;" in text


@pytest.mark.fault("B53")
def test_a_formula_in_a_name_is_no_formula() -> None:
    picture = figure(lambda axes: axes.plot([1, 2], [1, 2], label=EVIL), EVIL)
    text = page("x", [Section("s", (picture,))])
    assert '<img src="data:image/png;base64,' in text
    assert_harmless(text)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingData, match="plots"):
        figure(lambda axes: None, "")


# --- What a collection holds ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Nothing to judge by. One timing scatters by a fifth; one is 10 % slower the second time."""
    dataset = Dataset.create(tmp_path_factory.mktemp("collected") / "data", TARGET, {})
    for workload in TRAINING:
        record(dataset, workload, "train", 40)
    ((config, first), *_) = (x for x in dataset.recorded(TRAINING[0]).items() if x[1].ok)
    us = 1.1 * first.latency_us
    again = TuningRecord(TRAINING[0], config, "", Measurement("ok", us, us, us, 5))
    dataset.append_measurements([again], run=RUN, role="anchor")
    scattered = Measurement("ok", 10.0, 9.0, 11.0, 5, error="repeats scatter")
    small = Workload.dense(32, 640, 640, "bfloat16")
    row = TuningRecord(small, config, "", scattered)
    dataset.append_measurements([row], run=RUN, role="train")
    return dataset


def test_correlations_find_what_goes_along(data: Dataset) -> None:
    table_ = TrainingTable.from_dataset(data)
    found = correlations(table_)
    assert {ALL, "pointer", "float16", "aligned", "m > 64", "m ≤ 64"} <= set(found)
    assert np.abs(found[ALL]).max() > 0.8
    assert all(np.abs(column).max() <= 1 + 1e-9 for column in found.values())
    assert np.array_equal(found["float16"], found[ALL]), "there is no other type"
    small = TrainingTable.of_workloads(
        table_, [i for i, w in enumerate(table_.workloads) if w.m <= 64]
    )
    assert 0 < len(small) < len(table_)
    assert np.array_equal(correlations(small)[ALL], found["m ≤ 64"])


def test_nothing_to_correlate_is_no_error(data: Dataset) -> None:
    assert correlations(TrainingTable.from_dataset(data).of_workloads([])) == {}


def test_every_feature_is_shown_the_largest_first(collected: Dataset) -> None:
    columns, rows = tables_of(collected)["Features and latency"]
    assert {row[0] for row in rows} == set(FEATURES)
    assert columns[:2] == ["feature", ALL]
    sizes = [abs(row[1]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0.8


def test_failures_are_counted_by_kind_and_noise_by_class(collected: Dataset) -> None:
    columns, rows = tables_of(collected)["Failures and noise"]
    found = {row[0]: dict(zip(columns[1:4], row[1:4], strict=True)) for row in rows}
    count = len(TRAINING)
    assert found[ALL] == {"doubtful": 1, "ok": 39 * count, "timeout": count}
    assert found["float16"] == {"doubtful": 0, "ok": 39 * count, "timeout": count}
    assert found["bfloat16"] == {"doubtful": 1, "ok": 0, "timeout": 0}
    for parts in (("aligned", "ragged"), ("m > 64", "m ≤ 64")):
        there = [found[name]["ok"] for name in parts if name in found]
        assert sum(there) == found[ALL]["ok"]
    noise = {row[0]: row[4:] for row in rows}
    assert noise["bfloat16"] == pytest.approx([20, 20, np.nan, np.nan], nan_ok=True)
    assert noise["float16"] == pytest.approx([0, 0, 10, 10])


def test_a_collection_without_rows_to_judge_by_has_a_page(
    collected: Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    arguments = ["report", "--html", str(out), "--data", str(collected.path), "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["sections"] == SECTIONS[:1] + SECTIONS[4:]
    text = out.read_text()
    assert_harmless(text)
    assert "<td>timeout</td>" in text.replace("th>", "td>")


def test_without_a_page_its_tables_are_shown(
    collected: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which needs no matplotlib."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    arguments = ["report", "--data", str(collected.path)]
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["Features and latency"]["rows"]) == len(FEATURES)
    assert found["Failures and noise"]["columns"][:2] == ["class", "doubtful"]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert "bfloat16" in shown
    assert "timeout" in shown


@pytest.mark.parametrize("role", ["train", "eval", None])
def test_an_empty_collection_and_one_of_one_kind_of_rows_are_no_error(
    role: str | None, tmp_path: Path
) -> None:
    dataset = Dataset.create(tmp_path / "data", TARGET, {})
    if role:
        record(dataset, TRAINING[0], role, 20)
    (_, features), (_, outcomes) = tables_of(dataset).values()
    assert len(features) == len(FEATURES) * (role is not None)
    assert outcomes[0][0] == ALL
    assert outcomes[0][1:3] == [19, 1] or role is None
    html_report(dataset, None)


def test_the_command_writes_the_page(data: Dataset, model: XgbCostModel, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    out = tmp_path / "page.html"
    arguments = ["report", "--html", out, "--data", data.path, "--model", tmp_path / "model"]
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bytes"] == len(out.read_bytes())
    assert found["sections"][: len(SECTIONS)] == SECTIONS
    assert_harmless(out.read_text())
