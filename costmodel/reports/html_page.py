"""One HTML page that holds everything it shows: it loads nothing and runs nothing.

Texts may come from anywhere, such as a data set of somebody else's: whatever is passed here as
``str`` is shown as it is written, and never read as HTML.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from costmodel.errors import MissingData

__all__ = ["Html", "Section", "figure", "page", "paragraph", "plain", "table"]

Html = NewType("Html", str)
"""Text that is HTML already; made here only."""

_LONGEST = 200
# A browser that keeps to this loads nothing from elsewhere and runs no script.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
img { max-width: 100%; height: auto; } p { max-width: 48rem; } nav a { margin-right: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
td, th { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    parts: tuple[Html, ...]


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole document."""
    links = " ".join(f'<a href="#s{i}">{_text(s.title)}</a>' for i, s in enumerate(sections))
    body = "\n".join(
        f'<h2 id="s{i}">{_text(section.title)}</h2>\n' + "\n".join(section.parts)
        for i, section in enumerate(sections)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{_text(title)}</h1>\n<nav>{links}</nav>\n{body}\n</body>\n</html>\n"
    )


def paragraph(text: str) -> Html:
    """A paragraph of plain text."""
    return Html(f"<p>{html.escape(text)}</p>")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Html:
    """A table: numbers to the right and shortened, None and NaN as a dash."""
    head = "".join(f"<th>{_text(name)}</th>" for name in columns)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return Html(f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>')


def figure(draw: Callable[[Any], None], alt: str, size: tuple[float, float] = (8, 4.5)) -> Html:
    """A plot, as a picture within the page.

    Args:
        draw: draws on the matplotlib ``Axes`` that it is given.
        alt: says what it shows.
        size: width and height in inches.

    Raises:
        MissingData: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingData("plots need matplotlib: run `pip install 'costmodel[plots]'`") from None
    stream = io.BytesIO()
    # Else a dollar sign in a name begins a formula, and a wrong formula is an error.
    with matplotlib.rc_context({"text.parse_math": False, "text.usetex": False}):
        drawing = Figure(figsize=size, layout="constrained")
        draw(drawing.subplots())
        if drawing.axes[0].get_legend_handles_labels()[0]:
            drawing.legend(loc="outside right center", fontsize=8)
        drawing.savefig(stream, format="png", dpi=110, metadata={"Software": None})
    data = base64.b64encode(stream.getvalue()).decode()
    return Html(f'<img src="data:image/png;base64,{data}" alt="{_text(alt)}">')


def plain(value: Any) -> str:
    """A value as people read it, shortened; not escaped."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _cell(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    kind = ' class="number"' if number else ""
    return f"<td{kind}>{_text(value)}</td>"


def _text(value: Any) -> str:
    return html.escape(plain(value), quote=True)
