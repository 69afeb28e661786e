"""The tables of README and docs, and the plots: made from ``benchmarks/results/*.json`` alone.

A table in a page is a block that says what belongs in it::

    <!-- table: evaluate-h100-sxm | name=model | regret.1.geomean_pct=top-1, % -->
    …
    <!-- end -->

The name is that of a results file. Without columns the block shows its ``summary``; with columns it
shows its ``rows``, of each the values at these paths, under the name after ``=``. A name with
groups, ``strategies-h100-sxm/square``, shows only rows whose ``group`` (or ``part``) is among them.

Run it without arguments to write them, with ``--check`` to exit with 1 where one is out of date.

Plots go to ``benchmarks/plots/``, one for each results file of a bench in :data:`PLOTS`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from costmodel.errors import InvalidInput, MissingData
from costmodel.files import read_json
from costmodel.reports import shown
from costmodel.reports.plots import draw_plot, plot_kept


class Results(TypedDict):
    """A file of ``benchmarks/results/``."""

    bench: str
    target: str
    device: str
    date: str
    versions: dict[str, str]
    summary: dict[str, Any]
    rows: list[dict[str, Any]]


Rows = Sequence[Mapping[str, Any]]

_BLOCK = re.compile(r"<!-- table: (?P<spec>[^\n]*?) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


def write(readme: Path) -> list[str]:
    """Bring the tables of README, and of ``docs/*.md`` beside it, up to date and draw the plots.

    Returns:
        The names of the tables that changed, and of the plots.

    Raises:
        MissingData: a table names a results file that is not there; or matplotlib is not.
        CorruptFile, InvalidInput: a results file is not one, or has no such column.
    """
    pages = _pages(readme)
    drawn = _draw_plots(readme.parent / "benchmarks")  # may fail: before any page is written
    for page, (text, changed) in pages.items():
        if changed:
            page.write_text(text, encoding="utf-8")
    return [*(name for _, changed in pages.values() for name in changed), *drawn]


def outdated(readme: Path) -> list[str]:
    """The names of the tables that differ from their results files; changes nothing."""
    return [name for _, changed in _pages(readme).values() for name in changed]


def _pages(readme: Path) -> dict[Path, tuple[str, list[str]]]:
    """Return the text of each page as it should be, and the names of the tables that change."""
    results = readme.parent / "benchmarks" / "results"
    paths = [readme, *sorted((readme.parent / "docs").glob("*.md"))]
    return {path: _with_tables(path.read_text(encoding="utf-8"), results) for path in paths}


def read_results(path: Path) -> Results:
    """Read a results file.

    Raises:
        MissingData: no such file. CorruptFile: not a results file.
    """
    try:
        return read_json(path, Results)
    except FileNotFoundError:
        raise MissingData(f"no results at {path}: run its script in benchmarks/") from None


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
        parts = [column.partition("=") for column in columns]
        titles = [(title or path).strip() for path, _, title in parts]
        groups = group.split(",")
        rows = [r for r in results["rows"] if not group or r.get("group", r.get("part")) in groups]
        cells = [[_cell(_at(row, path.strip(), file)) for path, *_ in parts] for row in rows]
    else:
        titles = ["", "value"]
        cells = [[key, _cell(value)] for key, value in results["summary"].items()]
    lines = [titles, ["---"] * len(titles), *cells]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{_source(results, folder)}\n"


def _at(row: Mapping[str, Any], path: str, file: str) -> Any:
    """The value at a dotted path; None where a part of the path holds None."""
    value: Any = row
    for part in path.split("."):
        try:
            value = None if value is None else value[part]
        except (KeyError, TypeError):
            raise InvalidInput(f"{file}: no {path!r} in a row of {sorted(row)}") from None
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


# --- Plots ----------------------------------------------------------------------------------------


def _draw_plots(benchmarks: Path) -> list[str]:
    drawn = []
    for path in sorted((benchmarks / "results").glob("*.json")):
        results = read_results(path)
        plot = next((p for bench, p in PLOTS.items() if results["bench"].startswith(bench)), None)
        if plot is not None:
            drawn.append(f"{path.stem}.png")
            (benchmarks / "plots").mkdir(exist_ok=True)
            title = f"{results['device']}, {results['date']}"
            file = benchmarks / "plots" / drawn[-1]
            draw_plot(partial(plot, results["rows"]), file, (8, 4), title)
    return drawn


def _plot_relative(rows: Rows, axes: Any) -> None:
    """Speed relative to torch, for each choice in the order of its own speeds."""
    names = [n for n in ("triton_best", "model_top8", "default") if all(n in row for row in rows)]
    for name, style in zip(names, ("o-", ".-", "-"), strict=False):
        speeds = sorted(row[name] for row in rows)
        axes.plot(speeds, style, markersize=4, linewidth=1, label=name.replace("_", " "))
    axes.axhline(1, color="k", linewidth=0.8, linestyle=":", label="torch")
    axes.grid(alpha=0.3)
    # Twice as fast is as far from equal as half as fast.
    axes.set_yscale("log", base=2)
    ticks = (0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4)
    axes.set_yticks(ticks, ticks)
    axes.minorticks_off()
    axes.set(xlabel="workloads, slowest first (each choice by itself)",
             ylabel="speed relative to torch")  # fmt: skip


PLOTS: dict[str, Callable[[Rows, Any], None]] = {
    "evaluate": plot_kept,
    "kernels": _plot_relative,
}
"""How to draw the results of a bench whose name begins like this."""


def main() -> int:
    """Write the tables and plots, or with ``--check`` name the tables that are out of date."""
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(f"{' '.join(sys.argv[1:])}: expected --check, or nothing")
    readme = Path(__file__).resolve().parents[1] / "README.md"
    changed = outdated(readme) if check else write(readme)
    print("\n".join(changed) or "all parts are up to date")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
