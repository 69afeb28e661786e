"""README's tables come from results files, and from nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from costmodel.errors import CorruptFile, InvalidInput, MissingData

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from tables import outdated, read_results, write

KEPT = {str(k): {"geomean_pct": 90.0 + k / 2, "worst_pct": 80.0} for k in (1, 4, 8, 16)}
RESULTS: dict[str, Any] = {
    "bench": "evaluate", "target": "h100-sxm", "device": "NVIDIA H100", "date": "2026-11-28",
    "versions": {"triton": "3.6.0"}, "summary": {"ratio": 0.98765, "count": 3},
    "rows": [
        {"name": "xgb", "kind": "learned", "group": "a", "regret": KEPT, "mape_pct": 3.14159},
        {"name": "static", "kind": "baseline", "group": "b", "regret": KEPT, "mape_pct": None},
    ],
}  # fmt: skip
ROWS = "<!-- table: evaluate-h100-sxm | name=model | regret.1.geomean_pct=top-1 | mape_pct -->"


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    results_file(tmp_path).write_text(json.dumps(RESULTS))
    return tmp_path / "README.md"


def results_file(root: Path) -> Path:
    return root / "benchmarks" / "results" / "evaluate-h100-sxm.json"


def lines_of(readme: Path, spec: str) -> list[str]:
    readme.write_text(f"# Title\n\n{spec}\nold\n<!-- end -->\n\nrest\n")
    write(readme)
    text = readme.read_text()
    assert text.startswith(f"# Title\n\n{spec}\n")
    assert text.endswith("<!-- end -->\n\nrest\n")
    return text.split(spec)[1].split("<!-- end -->")[0].strip().splitlines()


def test_a_table_of_rows(readme: Path) -> None:
    assert lines_of(readme, ROWS) == [
        "| model | top-1 | mape_pct |",
        "| --- | --- | --- |",
        "| xgb | 90.5 | 3.142 |",
        "| one fixed order | 90.5 | – |",
        "",
        "<sub>NVIDIA H100, 2026-11-28; triton 3.6.0</sub>",
    ]


def test_names_of_figures_in_a_summary_become_words(readme: Path) -> None:
    summary = {"cold: timed_pct (goal 45.0)": 48.5, "not in random order": 1, "other_pct": 2}
    results_file(readme.parent).write_text(json.dumps(RESULTS | {"summary": summary}))
    assert lines_of(readme, "<!-- table: evaluate-h100-sxm -->")[2:5] == [
        "| cold: timed, % of a list (goal 45.0) | 48.5 |",
        "| not in random order | 1 |",
        "| other_pct | 2 |",
    ]


def test_without_matplotlib_nothing_is_half_done(
    readme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{ROWS}\nold\n<!-- end -->\n"
    readme.write_text(text)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingData, match="pip install matplotlib"):
        write(readme)
    assert readme.read_text() == text


def test_a_table_of_one_group(readme: Path) -> None:
    lines = lines_of(readme, "<!-- table: evaluate-h100-sxm/b | name -->")
    assert lines[2:-2] == ["| one fixed order |"]


def test_a_table_of_the_summary(readme: Path) -> None:
    lines = lines_of(readme, "<!-- table: evaluate-h100-sxm -->")
    assert lines[2:4] == ["| ratio | 0.9877 |", "| count | 3 |"]


def test_a_table_of_some_values_of_the_summary(readme: Path) -> None:
    lines = lines_of(readme, "<!-- table: evaluate-h100-sxm | summary.ratio=how much -->")
    assert lines[:-2] == ["|  | value |", "| --- | --- |", "| how much | 0.9877 |"]


@pytest.mark.parametrize(
    ("evaluated", "marked"),
    [("xgb 1", "model xgb 1"), ("xgb 2", "an earlier model: xgb 1"), (None, "model xgb 1")],
)
def test_results_of_another_model_than_the_one_evaluated_are_marked(
    readme: Path, evaluated: str | None, marked: str
) -> None:
    file = results_file(readme.parent)
    file.write_text(json.dumps(RESULTS | {"versions": {"model": evaluated}}))
    if evaluated is None:
        file.unlink()
    kernels = RESULTS | {"bench": "kernels", "versions": {"triton": "3.6.0", "model": "xgb 1"}}
    file.with_name("kernels-h100-sxm.json").write_text(json.dumps(kernels))
    lines = lines_of(readme, "<!-- table: kernels-h100-sxm | name -->")
    assert lines[-1] == f"<sub>NVIDIA H100, 2026-11-28; triton 3.6.0, {marked}</sub>"


def test_what_is_out_of_date_is_named_and_left_alone(readme: Path) -> None:
    lines_of(readme, ROWS)
    assert outdated(readme) == []
    changed = RESULTS | {"date": "2026-11-29"}
    results_file(readme.parent).write_text(json.dumps(changed))
    before = readme.read_text()
    assert outdated(readme) == ["evaluate-h100-sxm"]
    assert readme.read_text() == before
    assert write(readme)[0] == "evaluate-h100-sxm"
    assert outdated(readme) == []


def test_tables_of_the_docs_are_made_too(readme: Path) -> None:
    readme.write_text("")
    page = readme.parent / "docs" / "model.md"
    page.parent.mkdir()
    page.write_text(f"{ROWS}\nold\n<!-- end -->\n")
    assert outdated(readme) == ["evaluate-h100-sxm"]
    assert write(readme)[0] == "evaluate-h100-sxm"
    assert "| xgb | 90.5 | 3.142 |" in page.read_text()
    assert outdated(readme) == []


def test_plots_are_drawn_for_the_benches_that_have_one(readme: Path) -> None:
    readme.write_text("")
    relative = [{"workload": "1x4096x4096", "model_top8": 0.99, "default": 1.0}]
    kernels = RESULTS | {"bench": "kernels-float16", "rows": relative}
    folder = readme.parent / "benchmarks"
    (folder / "results" / "kernels-float16-h100-sxm.json").write_text(json.dumps(kernels))
    dispatch = RESULTS | {"bench": "dispatch", "rows": []}
    (folder / "results" / "dispatch-h100-sxm.json").write_text(json.dumps(dispatch))
    timed = {"group": "eval", "workload": "1x4096x4096"}
    timed |= {name: {"steady_ms": 1.0, "speedup": 1.0} for name in ("autotune", "model_top8")}
    strategies = RESULTS | {"bench": "strategies", "rows": [timed]}
    (folder / "results" / "strategies-h100-sxm.json").write_text(json.dumps(strategies))
    settings = [{"group": g, "setting": g, "top1_pct": 90.0, "top8_pct": 99.0} for g in "ab"]
    ablation = RESULTS | {"bench": "ablation", "rows": settings}
    (folder / "results" / "ablation-h100-sxm.json").write_text(json.dumps(ablation))
    names = [
        "ablation-h100-sxm.png",
        "evaluate-h100-sxm.png",
        "kernels-float16-h100-sxm.png",
        "gain-h100-sxm.png",
        "strategies-h100-sxm.png",
    ]
    assert write(readme) == names
    drawn = {p.name: p.read_bytes()[:4] for p in (folder / "plots").iterdir()}
    assert drawn == dict.fromkeys(names, b"\x89PNG")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("<!-- table: nothing -->", MissingData, "no results at"),
        ("<!-- table: evaluate-h100-sxm | speed -->", InvalidInput, "no 'speed' in a row"),
    ],
)
def test_a_table_that_cannot_be_made_changes_nothing(
    readme: Path, spec: str, error: type[Exception], message: str
) -> None:
    text = f"{spec}\nold\n<!-- end -->\n"
    readme.write_text(text)
    with pytest.raises(error, match=message):
        write(readme)
    assert readme.read_text() == text


@pytest.mark.parametrize("content", ["", "[]", "{", '{"bench": 1}', "\xff"])
def test_what_is_no_results_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(CorruptFile, match=r"x\.json"):
        read_results(path)
