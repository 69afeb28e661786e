"""The tables of README and docs, and the plots: made from ``benchmarks/results/*.json`` alone.

A table in a page is a block that says what belongs in it::

    <!-- table: evaluate-h100-sxm | name=model | regret.1.geomean_pct=top-1, % -->
    …
    <!-- end -->

The name is that of a results file. Without columns the block shows the file's ``summary``. With
columns it shows its ``rows``: a column is the path of a value in a row, and its title comes after
``=``. If all paths begin with ``summary.``, the block shows these values of the summary, one a
line. A name with groups, ``strategies-h100-sxm/square``, shows only rows whose ``group`` (or
``part``) is among them. Keys of :data:`WORDS` are written as the words there.

Run it without arguments to write tables and plots, or with ``--check`` to exit with 1 if a table is
out of date.

Plots go to ``benchmarks/plots/``, one for each results file of ``evaluate``, ``ablation``,
``kernels`` and ``strategies``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from costmodel.errors import InvalidInput, MissingData
from costmodel.evaluation.metrics import geomean
from costmodel.files import read_json
from costmodel.reports import shown
from costmodel.reports.plots import draw_plot


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
    drawn = _draw_plots(readme.parent / "benchmarks")  # may fail, so before any page
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
    parts = [column.partition("=") for column in columns]
    titles = [(title or path).strip() for path, _, title in parts]
    if columns and all(column.startswith("summary.") for column in columns):
        values = [_cell(_at(results, path.strip(), file)) for path, *_ in parts]
        cells = [list(line) for line in zip(titles, values, strict=True)]
        titles = ["", "value"]
    elif columns:
        groups = group.split(",")
        rows = [r for r in results["rows"] if not group or r.get("group", r.get("part")) in groups]
        cells = [[_cell(_at(row, path.strip(), file)) for path, *_ in parts] for row in rows]
    else:
        titles = ["", "value"]
        cells = [[_line(key), _cell(value)] for key, value in results["summary"].items()]
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
    return WORDS.get(shown(value), shown(value)).replace("|", "\\|")


def _line(key: str) -> str:
    """Put words in place of the figures' names in a key of a summary."""
    return re.sub(r"\w+_\w+", lambda name: WORDS.get(name[0], name[0]), key)


WORDS = {
    "autotune": "triton.autotune",
    "ptx_top8": "PTX score, best of 8",
    "nvmmh_top1": "nvMatmulHeuristics' first",
    "nvmmh_top8": "nvMatmulHeuristics' best of 8",
    "inductor": "Inductor",
    "model_top1": "the model's first",
    "model_top8": "the model's best of 8",
    "xgb-h100-sxm": "the model",
    "xgb-h100-sxm config-only": "the model, configuration only",
    "static": "one fixed order",
    "heuristic": "rules of thumb",
    "estimate": "estimate on paper",
    "ptx-score": "PTX score",
    "ptx-score-hopper": "PTX score, with Hopper's instructions",
    "random": "random order",
    "timed_pct": "timed, % of a list",
    "kept_pct": "kept on average, % of the best speed",
    "worst_pct": "kept at worst, % of the best speed",
}
"""How readers call the strategies, rankings and figures of the results files."""


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
    """Draw a plot for each results file that has one; return the names of the pictures."""
    found = {path.stem: read_results(path) for path in (benchmarks / "results").glob("*.json")}
    (benchmarks / "plots").mkdir(exist_ok=True)
    drawn = []
    for stem, results in sorted(found.items()):
        strategies = found.get(f"strategies-{results['target']}")
        for name, draw in _plots_of(stem, results, strategies).items():
            drawn.append(f"{name}.png")
            title = f"{results['device']}, {results['date']}"
            draw_plot(draw, benchmarks / "plots" / drawn[-1], (8, 4), title)
    return drawn


def _plots_of(
    stem: str, results: Results, strategies: Results | None
) -> dict[str, Callable[[Any], None]]:
    """Return what draws each plot of a results file, by the name of the picture."""
    rows, bench = results["rows"], results["bench"]
    if bench.startswith("evaluate"):
        return {stem: partial(_plot_lost, rows)}
    if bench == "strategies":
        return {stem: partial(_plot_strategies, rows)}
    if bench == "ablation":
        return {stem: partial(_plot_ablation, rows)}
    if not bench.startswith("kernels"):
        return {}
    plots: dict[str, Callable[[Any], None]] = {}
    if not any("default" in row for row in rows):
        return plots
    plots[stem] = partial(_plot_speeds, _relative_speeds(rows))
    if bench == "kernels-float16" and strategies is not None:
        gains = _gains(rows, strategies["rows"])
        plots[f"gain-{results['target']}"] = partial(_plot_speeds, gains)
    return plots


Speeds = Mapping[tuple[str, str], Mapping[str, float]]
"""By (one, other): how many times as fast the one is as the other, in each workload."""


def _relative_speeds(rows: Rows) -> Speeds:
    names = {"model_top8": "the best of the model's first 8", "default": "what matmul launches"}
    return {
        (words, "torch.matmul"): {row["workload"]: row[name] for row in rows}
        for name, words in names.items()
    }


def _gains(kernels: Rows, strategies: Rows) -> Speeds:
    """Return speeds of ``matmul`` over torch, and of the model's best of 8 over Triton's tuner."""
    return {
        ("costmodel.matmul", "torch.matmul"): {r["workload"]: r["default"] for r in kernels},
        ("the best of the model's first 8", "what triton.autotune finds"): {
            row["workload"]: row["autotune"]["steady_ms"] / row["model_top8"]["steady_ms"]
            for row in strategies
            if row["group"] == "eval" and row["autotune"] and row["model_top8"]
        },
    }


def _plot_lost(rows: Rows, axes: Any) -> None:
    """Plot the share of the best speed that each ranking loses, over how many of it are timed."""
    for row in rows:
        lost = {int(k): 100 - kept["geomean_pct"] for k, kept in row["regret"].items()}
        if min(lost.values()) <= 0:  # it knows the timings, and a log scale has no 0
            continue
        style = {"learned": "o-", "peer": "s-."}.get(row["kind"], ".--")
        axes.plot([*lost], [*lost.values()], style, label=WORDS.get(row["name"], row["name"]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ks = [int(k) for k in rows[0]["regret"]]
    axes.set_xticks(ks, ks)
    ticks = (0.03, 0.1, 0.3, 1, 3, 10, 30, 70)
    axes.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set(xlabel="configurations timed, the first of each ranking",
             ylabel="speed lost (geometric mean)")  # fmt: skip


def _plot_ablation(rows: Rows, axes: Any) -> None:
    """Plot what is lost with fewer kinds of columns, workloads or configurations, a line each."""
    groups = [row["group"] for row in rows]
    places = [i + len(set(groups[: i + 1])) for i in range(len(rows))]  # a gap between groups
    for key, label in (("top1_pct", "the first choice"), ("top8_pct", "the best of 8")):
        axes.plot([100 - row[key] for row in rows], places, "o", label=label)
    axes.set_yticks(places, [row["setting"] for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = (0.3, 0.5, 1, 2, 3, 5, 10, 15)
    axes.set_xticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set(xlabel="speed lost (geometric mean, cross-validation)")


def _plot_strategies(rows: Rows, axes: Any) -> None:
    """A dot for each workload, in columns by the strategy; a bar at the geometric mean."""
    timed = [row for row in rows if row["group"] in ("square", "eval")]
    cells = {name: None for row in timed for name, cell in row.items() if isinstance(cell, dict)}
    names = [name for name in cells if name != "torch"]
    axes.axhline(1, color="k", linewidth=0.8)
    for series, (group, words) in enumerate((("eval", "eval list"), ("square", "square sizes"))):
        colour = ("tab:blue", "tab:orange")[series]
        for place, name in enumerate(names):
            found = [row[name] for row in timed if row["group"] == group and row.get(name)]
            _strip(axes, place + (series - 0.5) * 0.42, [each["speedup"] for each in found], colour)
        axes.plot([], [], "o", color=colour, label=words)
    axes.set_yscale("log", base=2)
    ticks = (0.05, 0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 4)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    titles = [
        WORDS.get(name, name).replace(", ", ",\n").replace(" best", "\nbest") for name in names
    ]
    axes.set_xticks(range(len(names)), titles, fontsize=7)
    axes.grid(alpha=0.3, axis="y")
    axes.set(ylabel="times as fast as torch.matmul")


def _strip(axes: Any, middle: float, values: Sequence[float], colour: str) -> None:
    """Dots side by side in their order, so that none hides another; a bar at the geometric mean."""
    steps = [middle + 0.32 * ((i + 0.5) / len(values) - 0.5) for i in range(len(values))]
    axes.plot(steps, sorted(values), "o", color=colour, markersize=4, alpha=0.8)
    if values:
        axes.hlines(geomean(values), middle - 0.19, middle + 0.19, color=colour, linewidth=1.5)


_LAYER_ROWS = (1, 16, 64, 256, 1024, 4096)
_OTHER = "other\nproducts"


def _column_of(workload: str) -> str:
    """Return the m of a product of a language model's layer; other products are one column."""
    m, n, k = map(int, workload.split("x"))
    layer = m in _LAYER_ROWS and n % 1024 == k % 1024 == 0 and not m == n == k
    return str(m) if layer else _OTHER


def _plot_speeds(speeds: Speeds, axes: Any) -> None:
    """A dot for each workload, in columns by its m; a bar at the geometric mean of a column."""
    columns = [*map(str, _LAYER_ROWS), _OTHER]
    axes.axhline(1, color="k", linewidth=0.8)
    for series, ((what, other), found) in enumerate(speeds.items()):
        colour = ("tab:blue", "tab:orange")[series]
        mean = f"{what}: {geomean([*found.values()]):.2f} times as fast as {other}"
        # A legend beside the plot would take a quarter of its width.
        axes.text(0.02, 0.93 - 0.07 * series, mean, color=colour, transform=axes.transAxes)
        for place, column in enumerate(columns):
            values = [v for name, v in found.items() if _column_of(name) == column]
            _strip(axes, place + (series - 0.5) * 0.42, values, colour)
    # Twice as fast is as far from equal as half as fast.
    axes.set_yscale("log", base=2)
    every = [value for found in speeds.values() for value in found.values()]
    axes.set_ylim(min(0.9, *every) * 0.95, max(every) * 1.7)
    ticks = [t for t in (0.8, 1, 1.2, 1.5, 2, 3, 4, 6, 10, 20) if t < max(1.3, *every)]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_xticks(range(len(columns)), columns)
    axes.grid(alpha=0.3, axis="y")
    axes.set(xlabel="rows m of a layer of a language model", ylabel="times as fast; 1 is equal")


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
