"""The page: it shows what it should, loads nothing from anywhere, and believes no text."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_recording import TARGET, write_recording
from typer.testing import CliRunner

import costmodel
from costmodel.cli import app
from costmodel.data.dataset import Dataset
from costmodel.errors import CorruptFile, MissingData
from costmodel.models import TrainingTable, XgbCostModel
from costmodel.reports.html_report import (
    ALL_KERNELS,
    Section,
    Table,
    correlations,
    figure,
    html_report,
    page,
)

EVIL = (
    """<script>alert(1)</script>"'><img src=http://evil.example/x onerror=alert(2)> $\\frac{1}$"""
)
SECTIONS = ["What this is of", "Speed kept", "Predicted and measured", "The worst workloads",
            "Features and latency"]  # fmt: skip
KERNELS: dict[str, Any] = {
    "bench": "kernels-float16", "target": "h100-sxm", "device": "NVIDIA H100", "date": "2026-11-28",
    "versions": {"triton": "3.6.0"}, "summary": {"default_geomean": 1.0625},
    "rows": [{"workload": "a", "triton_best": 1.01, "model_top8": 0.99, "default": 1.0}],
}  # fmt: skip
CURVES: dict[str, Any] = KERNELS | {
    "bench": "ablation",
    "rows": [
        {"curve": "all features", "workloads": n, "top1_geomean_pct": 90.0 + n / 100}
        for n in (28, 114, 227)
    ]
    + [{"features": "without PTX", "top1_geomean_pct": 95.0}],
}


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


def results_folder(path: Path, **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / f"{name.replace('_', '-')}.json").write_text(json.dumps(content))
    return path


def test_the_page_has_its_sections_and_loads_nothing(
    data: Dataset, model: XgbCostModel, tmp_path: Path
) -> None:
    results = results_folder(tmp_path / "results", kernels_float16=KERNELS, ablation_x=CURVES)
    text, titles = html_report(data, model, results)
    assert titles == [
        *SECTIONS, "Learning curves: ablation-x", "Speed against torch: kernels-float16",
    ]  # fmt: skip
    assert all(f">{title}</h2>" in text for title in titles)
    assert_harmless(text)
    assert len(text.encode()) < 5 * 2**20
    assert text.count("<img ") == 5
    assert "1.062" in text
    assert f"{model.name} {model.hash}" in text


@pytest.mark.slow
def test_results_of_another_model_are_said_to_be(
    data: Dataset, model: XgbCostModel, tmp_path: Path
) -> None:
    """As the tables of the pages say it, whatever kind of section it is."""

    def told(
        used: str | None, page_of: XgbCostModel | None = model, date: str = "2026-11-28"
    ) -> str:
        versions = {"triton": "3.6.0"} | ({"model": used} if used else {})
        files = {
            name: content | {"versions": versions, "date": date}
            for name, content in (("kernels_x", KERNELS), ("ablation_x", CURVES))
        }
        text, _ = html_report(data, page_of, results_folder(tmp_path / "results", **files))
        found = re.findall(r"<p>Measured with ([^<]*)</p>", text)
        assert len(set(found)) <= 1
        assert len(found) in (0, 2), "each section says it"
        return html.unescape(found[0]) if found else ""

    assert told(None) == ""
    assert told(f"{model.name} {model.hash}") == ""
    assert told(f"renamed {model.hash}") == "", "the trees are what answers"
    other = f"{model.name} 0123456789abcdef"
    assert told(other) == f"another model: {other}; this page is of {model.name} {model.hash}."
    assert told(other, None) == f"another model: {other}; this page is of no model."
    assert told(EVIL).startswith(f"another model: {EVIL}")
    saved = costmodel.load(model.save(tmp_path / "model"))
    assert told(other, saved, "2000-01-01").startswith(f"an earlier model: {other}; ")


def test_what_nobody_measured_is_left_out(
    data: Dataset, model: XgbCostModel, tmp_path: Path
) -> None:
    assert html_report(data, model, None)[1] == SECTIONS
    elsewhere = KERNELS | {"target": "h200-sxm"}
    no_curve = CURVES | {"rows": CURVES["rows"][-1:]}
    folder = results_folder(tmp_path / "results", kernels_float16=elsewhere, ablation_x=no_curve)
    assert html_report(data, model, folder)[1] == SECTIONS


def test_without_a_model_the_baselines_stand_alone(data: Dataset) -> None:
    text, titles = html_report(data, None)
    assert titles == ["What this is of", "Speed kept", "Features and latency"]
    assert "baselines only" in text


@pytest.mark.fault("B53")
def test_no_text_is_taken_for_html(model: XgbCostModel, tmp_path: Path) -> None:
    device = replace(TARGET.device, product=EVIL)
    hostile = write_recording(tmp_path / "data", replace(TARGET, device=device))
    hostile.created = EVIL
    evil_model = XgbCostModel(name=EVIL).fit(TrainingTable.from_dataset(hostile))
    evil_model.card.training[EVIL] = {EVIL: EVIL}
    kernels = KERNELS | dict.fromkeys(("device", "date"), EVIL)
    kernels |= {"versions": {EVIL: EVIL}, "summary": {EVIL: EVIL}}
    curves = CURVES | {"rows": [row | {"curve": EVIL, EVIL: EVIL} for row in CURVES["rows"]]}
    folder = results_folder(tmp_path / "results", kernels_float16=kernels, ablation_x=curves)
    text, _ = html_report(hostile, evil_model, folder)
    assert_harmless(text)
    assert "<script" not in text
    assert EVIL in html.unescape(text)


@pytest.mark.parametrize("rows", ["x", [1], {"a": 1}, None], ids=str)
def test_malformed_rows_are_one_clear_error(data: Dataset, tmp_path: Path, rows: Any) -> None:
    folder = results_folder(tmp_path / "results", kernels_x=KERNELS | {"rows": rows})
    with pytest.raises(CorruptFile, match="rows"):
        html_report(data, None, folder)


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


def test_correlations_find_what_goes_along(data: Dataset) -> None:
    table_ = TrainingTable.from_dataset(data)
    found = correlations(table_)
    assert {ALL_KERNELS, "pointer"} <= set(found)
    assert np.abs(found[ALL_KERNELS]).max() > 0.8
    assert all(np.abs(column).max() <= 1 + 1e-9 for column in found.values())


def test_nothing_to_correlate_is_no_error(data: Dataset) -> None:
    assert correlations(TrainingTable.from_dataset(data).of_workloads([])) == {}


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
