"""``costmodel bench`` and ``report``: run benchmarks, and make the pages from their results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from costmodel.cli.common import AsJson, Model, answer
from costmodel.cli.models import judged
from costmodel.errors import InvalidInput, MissingData
from costmodel.tuning.shipped import checkout

_PREFIX = "bench_"


def bench(
    name: Annotated[
        str | None, typer.Argument(help="Which one; without it they are listed.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Passed on to the benchmark, after `--`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a benchmark of the checkout; it writes benchmarks/results/*.json."""
    folder = checkout("benchmarks")
    scripts = {p.stem.removeprefix(_PREFIX): p for p in sorted(folder.glob(f"{_PREFIX}*.py"))}
    if name is None:
        listed = [{"name": n, "script": str(path)} for n, path in scripts.items()]
        answer(as_json, listed, ("benchmarks", ["name", "script"], scripts.items()))
        return
    if name not in scripts:
        raise InvalidInput(f"no benchmark {name!r}: expected one of {', '.join(scripts) or 'none'}")
    command = [sys.executable, str(scripts[name]), *(arguments or [])]
    code = subprocess.run(command, stdout=sys.stderr if as_json else None).returncode
    answer(as_json, {"name": name, "exit_code": code})
    raise typer.Exit(code)


def report(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 where a page is out of date.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Instead: write a page on how good a model is to this file.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Of --html: a dataset with eval rows; default: the H100's.")
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Make the tables of README and docs, and the plots, from benchmarks/results/*.json; or a page
    with --html."""
    from costmodel.reports.report import outdated, write

    if html is not None and not check:
        _html(html, data, model, as_json)
        return
    if html or data or model:
        raise InvalidInput("--data and --model belong to --html PATH, and --check to README alone")

    readme = checkout("benchmarks").parent / "README.md"
    changed = outdated(readme) if check else write(readme)
    title = "out of date" if check else "written"
    answer(
        as_json,
        {"readme": str(readme), "checked_only": check, "changed": changed},
        *([(title, ["part"], [[part] for part in changed])] if changed else []),
        notes=[] if changed else ["all parts are up to date"],
    )
    raise typer.Exit(1 if check and changed else 0)


def _html(path: Path, data: Path | None, model: Path | None, as_json: bool) -> None:
    from costmodel.reports.html_report import write_html

    dataset, chosen = judged(data, model)
    try:
        results = checkout("benchmarks") / "results"
    except MissingData:  # an installed package has none, and the page does without
        results = None
    sections = write_html(path, dataset, chosen, results)
    answer(
        as_json,
        {"html": str(path), "sections": sections, "bytes": path.stat().st_size},
        (f"written to {path}", ["section"], [[title] for title in sections]),
    )
