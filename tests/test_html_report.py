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
from made_up_recording import TARGET, write_recording
from typer.testing import CliRunner

import costmodel
from costmodel.cli import app
from costmodel.data.dataset import Dataset
from costmodel.errors import MissingData
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
    assert titles == ["What this is of", "Speed kept", "Features and latency"]
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
