"""``costmodel report``: a page on how good a model is."""

from pathlib import Path
from typing import Annotated

from typer import Option

from costmodel.cli.common import AsJson, Model, answer
from costmodel.cli.models import judged
from costmodel.cli.waiting import doing


def report(
    html: Annotated[Path, Option(help="File to write the page to.")],
    data: Annotated[
        Path | None, Option(help="Dataset with eval rows; default: the H100's.")
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Write a page on how good a model is, with tables and plots; needs no GPU."""
    from costmodel.reports.html_report import write_html

    dataset, chosen = judged(data, model)
    doing("making the page")
    sections = write_html(html, dataset, chosen)
    answer(
        as_json,
        {"html": str(html), "sections": sections, "bytes": html.stat().st_size},
        (f"written to {html}", ["section"], [[title] for title in sections]),
    )
