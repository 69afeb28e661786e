"""Plots."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from costmodel.errors import MissingData


def require_matplotlib() -> None:
    """Raise MissingData unless plots can be drawn."""
    try:
        from matplotlib.figure import Figure  # noqa: F401
    except ImportError:
        raise MissingData("plots need matplotlib: run `pip install matplotlib`") from None


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
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    drawing = Figure(figsize=size, layout="constrained")
    # Otherwise a dollar sign in a name begins a formula, and a wrong formula is an error.
    with matplotlib.rc_context({"text.parse_math": False, "text.usetex": False}):
        axes = drawing.subplots()
        draw(axes)
        axes.set_title(title, fontsize=9)
        if axes.get_legend_handles_labels()[0]:
            drawing.legend(loc="outside right center", fontsize=8)
        drawing.savefig(file, format="png", dpi=150, metadata={"Software": None})


def plot_kept(rows: Sequence[Mapping[str, Any]], axes: Any) -> None:
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
