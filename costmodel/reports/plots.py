"""Plots, and the results files of benchmarks that some of them show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from costmodel.errors import MissingData
from costmodel.files import read_json


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


def read_results(path: Path) -> Results:
    """Read a results file.

    Raises:
        MissingData: no such file. CorruptFile: not a results file.
    """
    try:
        return read_json(path, Results)
    except FileNotFoundError:
        raise MissingData(f"no results at {path}: run its script in benchmarks/") from None


def draw_plot(
    draw: Callable[[Any], None], file: Path | BinaryIO, size: tuple[float, float], title: str = ""
) -> None:
    """Draw a plot into a file, as a PNG.

    Args:
        draw: draws on the matplotlib ``Axes`` that it is given.
        size: width and height in inches.

    Raises:
        MissingData: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingData("plots need matplotlib: run `pip install 'costmodel[plots]'`") from None
    drawing = Figure(figsize=size, layout="constrained")
    # Otherwise a dollar sign in a name begins a formula, and a wrong formula is an error.
    with matplotlib.rc_context({"text.parse_math": False, "text.usetex": False}):
        axes = drawing.subplots()
        draw(axes)
        axes.set_title(title, fontsize=9)
        if axes.get_legend_handles_labels()[0]:
            drawing.legend(loc="outside right center", fontsize=8)
        drawing.savefig(file, format="png", dpi=150, metadata={"Software": None})


def _plot_kept(rows: Rows, axes: Any) -> None:
    """Speed kept by each model over the number of configurations that are timed."""
    for entry in rows:
        kept = {int(k): value["geomean_pct"] for k, value in entry["regret"].items()}
        style = {"learned": "o-", "oracle": "k:", "peer": "s-."}.get(entry["kind"], ".--")
        style = "k-." if entry["name"] == "noise ceiling" else style
        axes.plot([*kept], [*kept.values()], style, label=entry["name"])
    axes.grid(alpha=0.3)
    axes.set_xscale("log", base=2)
    axes.set_xticks([*kept], [*kept])
    axes.set(xlabel="configurations timed (top-k)", ylabel="speed kept, geometric mean, %")


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
    "evaluate": _plot_kept,
    "kernels": _plot_relative,
}
"""How to draw the results of a bench whose name begins like this."""
