"""One HTML page that holds everything it shows: it loads nothing and runs nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.errors import MissingData
from costmodel.reports.numbers import shown

_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Table:
    """A table: numbers to the right and shortened, None and NaN as a dash."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture within the page: a PNG in base64, and a text that says what it shows."""

    png: str
    alt: str


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it; a text is a paragraph."""

    title: str
    parts: tuple[str | Table | Figure, ...]


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the whole document."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.filters["cut"] = cut
    return templates.get_template("page.html").render(title=title, sections=sections)


def cut(value: Any) -> str:
    """Return a value as people read it, shortened; not escaped."""
    text = shown(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def figure(draw: Callable[[Any], None], alt: str, size: tuple[float, float] = (8, 4.5)) -> Figure:
    """Draw a plot.

    Args:
        draw: draws on the matplotlib ``Axes`` that it is given.
        alt: says what it shows.
        size: width and height in inches.

    Raises:
        MissingData: matplotlib is not installed.
    """
    drawing = new_figure(size)
    import matplotlib

    stream = io.BytesIO()
    # Otherwise a dollar sign in a name begins a formula, and a wrong formula is an error.
    with matplotlib.rc_context({"text.parse_math": False, "text.usetex": False}):
        draw(drawing.subplots())
        if drawing.axes[0].get_legend_handles_labels()[0]:
            drawing.legend(loc="outside right center", fontsize=8)
        drawing.savefig(stream, format="png", dpi=110, metadata={"Software": None})
    return Figure(base64.b64encode(stream.getvalue()).decode(), alt)


def new_figure(size: tuple[float, float]) -> Any:
    """Return an empty figure of matplotlib's.

    Raises:
        MissingData: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as Drawing
    except ImportError:
        raise MissingData("plots need matplotlib: run `pip install 'costmodel[plots]'`") from None
    return Drawing(figsize=size, layout="constrained")
