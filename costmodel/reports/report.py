"""The tables of README and docs, and the plots: made from ``benchmarks/results/*.json`` alone.

A table in a page is a block that says what belongs in it::

    <!-- table: evaluate-h100-sxm | name=model | regret.1.geomean_pct=top-1, % -->
    …
    <!-- end -->

The name is that of a results file. Without columns the block shows its ``summary``; with columns it
shows its ``rows``, of each the values at these paths, under the name after ``=``. A name with a
group, ``strategies-h100-sxm/square``, shows only rows whose ``group`` is that.

Plots go to ``benchmarks/plots/``, one for each results file of a bench in :data:`PLOTS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from costmodel.errors import CorruptFile, InvalidInput, MissingData
from costmodel.reports.html_page import new_figure
from costmodel.reports.numbers import shown

Results = dict[str, Any]

_FIELDS = ("bench", "target", "device", "date", "versions", "summary", "rows")
_BLOCK = re.compile(r"<!-- table: (?P<spec>[^\n]*?) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


def write(readme: Path) -> list[str]:
    """Bring the tables of README, and of ``docs/*.md`` beside it, up to date and draw the plots.

    Returns:
        The names of the tables that changed, and of the plots.

    Raises:
        MissingData: a table names a results file that is not there; or matplotlib is not.
        CorruptFile, InvalidInput: a results file is not one, or has no such column.
    """
    folder = readme.parent / "benchmarks"
    made = {page: _with_tables(_read(page), folder / "results") for page in _pages(readme)}
    drawn = _draw_plots(folder)  # may fail: before any page is written
    for page, (text, changed) in made.items():
        if changed:
            page.write_text(text, encoding="utf-8")
    return [*(name for _, changed in made.values() for name in changed), *drawn]


def outdated(readme: Path) -> list[str]:
    """The names of the tables that differ from their results files; changes nothing."""
    folder = readme.parent / "benchmarks/results"
    return [name for page in _pages(readme) for name in _with_tables(_read(page), folder)[1]]


def _pages(readme: Path) -> list[Path]:
    return [readme, *sorted((readme.parent / "docs").glob("*.md"))]


def read_results(path: Path) -> Results:
    """A results file: ``bench target device date versions summary rows``.

    Raises:
        MissingData: no such file. CorruptFile: not a results file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingData(f"no results at {path}: run `costmodel bench` for them") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptFile(f"{path}: not JSON ({error})") from None
    lacking = [name for name in _FIELDS if not isinstance(data, dict) or name not in data]
    if lacking:
        raise CorruptFile(f"{path}: not benchmark results, {', '.join(lacking)} not there")
    return dict(data)


def _read(readme: Path) -> str:
    if not readme.is_file():
        raise MissingData(f"no README at {readme}: expected the one of the repository")
    return readme.read_text(encoding="utf-8")


def _with_tables(text: str, folder: Path) -> tuple[str, list[str]]:
    changed = []

    def fill(block: re.Match[str]) -> str:
        name, *columns = (part.strip() for part in block["spec"].split("|"))
        body = _table(name, columns, folder)
        if body != block["body"]:
            changed.append(name)
        return f"<!-- table: {block['spec']} -->\n{body}<!-- end -->"

    return _BLOCK.sub(fill, text), changed


def _table(name: str, columns: Sequence[str], folder: Path) -> str:
    """The Markdown of a block: a table, and what it was measured on."""
    file, _, group = name.partition("/")
    results = read_results(folder / f"{file}.json")
    if columns:
        paths, titles = zip(*(_column(column) for column in columns), strict=True)
        rows = [row for row in results["rows"] if not group or row.get("group") == group]
        cells = [[_cell(_at(row, path, file)) for path in paths] for row in rows]
    else:
        titles = ("", "value")
        cells = [[key, _cell(value)] for key, value in results["summary"].items()]
    lines = [titles, ["---"] * len(titles), *cells]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{_source(results, folder)}\n"


def _column(column: str) -> tuple[str, str]:
    path, _, title = column.partition("=")
    return path.strip(), title.strip() or path.strip()


def _at(row: Mapping[str, Any], path: str, file: str) -> Any:
    """The value at a dotted path; None where a part of the path holds None."""
    value: Any = row
    for part in path.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or part not in value:
            raise InvalidInput(f"{file}: no {path!r} in a row of {sorted(row)}")
        value = value[part]
    return value


def _cell(value: Any) -> str:
    return shown(value).replace("|", "\\|")


def _source(results: Results, folder: Path) -> str:
    """Device, date and versions of a result; a model other than the one evaluated is marked."""
    versions = dict(results["versions"])
    evaluated = folder / f"evaluate-{results['target']}.json"
    if "model" in versions and evaluated.is_file():
        now = read_results(evaluated)["versions"].get("model")
        if versions["model"] != now:
            versions["an earlier model:"] = versions.pop("model")
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"<sub>{results['device']}, {results['date']}; {used}</sub>"


def _draw_plots(benchmarks: Path) -> list[str]:
    drawn = []
    for path in sorted((benchmarks / "results").glob("*.json")):
        results = read_results(path)
        plot = next((p for bench, p in PLOTS.items() if results["bench"].startswith(bench)), None)
        if plot is not None:
            (benchmarks / "plots").mkdir(exist_ok=True)
            _draw(plot, results, benchmarks / "plots" / f"{path.stem}.png")
            drawn.append(f"{path.stem}.png")
    return drawn


def _draw(plot: Callable[[Any, Results], None], results: Results, path: Path) -> None:
    figure = new_figure((8, 4))
    axes = figure.subplots()
    plot(axes, results)
    axes.grid(alpha=0.3)
    axes.set_title(f"{results['device']}, {results['date']}", fontsize=9)
    figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def _plot_kept(axes: Any, results: Results) -> None:
    """Speed kept by each model over the number of configurations that are timed."""
    for entry in results["rows"]:
        kept = {int(k): value["geomean_pct"] for k, value in entry["regret"].items()}
        style = {"learned": "o-", "oracle": "k:", "peer": "s-."}.get(entry["kind"], ".--")
        style = "k-." if entry["name"] == "noise ceiling" else style
        axes.plot([*kept], [*kept.values()], style, label=entry["name"])
    axes.set_xscale("log", base=2)
    axes.set_xticks([*kept], [*kept])
    axes.set_xlabel("configurations timed (top-k)")
    axes.set_ylabel("speed kept, geometric mean, %")


def _plot_relative(axes: Any, results: Results) -> None:
    """Speed relative to torch, for each choice in the order of its own speeds."""
    rows = results["rows"]
    names = [n for n in ("triton_best", "model_top8", "default") if all(n in row for row in rows)]
    for name, style in zip(names, ("o-", ".-", "-"), strict=False):
        speeds = sorted(row[name] for row in rows)
        axes.plot(speeds, style, markersize=4, linewidth=1, label=name.replace("_", " "))
    axes.axhline(1, color="k", linewidth=0.8, linestyle=":", label="torch")
    # Twice as fast is as far from equal as half as fast.
    axes.set_yscale("log", base=2)
    ticks = (0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4)
    axes.set_yticks(ticks, ticks)
    axes.minorticks_off()
    axes.set_xlabel("workloads, slowest first (each choice by itself)")
    axes.set_ylabel("speed relative to torch")


PLOTS: dict[str, Callable[[Any, Results], None]] = {
    "evaluate": _plot_kept,
    "kernels": _plot_relative,
}
"""How to draw the results of a bench whose name begins like this."""
