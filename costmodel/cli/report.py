"""``costmodel report``: a page on how good a model is, and what a collection holds."""

from typing import Annotated

from typer import Option

from costmodel.cli.common import AsJson, Model, OptionalPath, answer
from costmodel.cli.models import judged
from costmodel.cli.waiting import doing


def report(
    html: Annotated[
        OptionalPath, Option(help="Write a page to this file instead of printing tables.")
    ] = None,
    data: Annotated[OptionalPath, Option(help="Dataset; default: the H100's.")] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Show correlations with latency, failures and noise; a page also shows how good a model is."""
    from costmodel.reports.collection import tables_of
    from costmodel.reports.html_report import write_html

    dataset, chosen = judged(data, model)
    if html is None:
        doing("reading the rows")
        tables = tables_of(dataset).items()
        found = {title: table._asdict() for title, table in tables}
        answer(as_json, found, *((title, names, rows[:20]) for title, (names, rows) in tables))
        return
    doing("making the page")
    sections = write_html(html, dataset, chosen)
    answer(
        as_json,
        {"html": str(html), "sections": sections, "bytes": html.stat().st_size},
        (f"written to {html}", ["section"], [[title] for title in sections]),
    )
