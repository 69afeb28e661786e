"""Output of the commands: tables and notes for people, JSON for machines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from costmodel.reports.numbers import shown
from costmodel.validation import printable

_PIPE_WIDTH = 160


def note(text: str) -> None:
    """Tell people something, on stderr."""
    typer.echo(printable(text), err=True)


def note_model(head: str, *lines: str) -> None:
    """Say which head of a learned model answered, and lines about it that are not empty.

    Say nothing if no learned model answered: a warning has said why.
    """
    for line in filter(None, (head, *lines) if head else ()):
        note(line)


def print_json(data: Any) -> None:
    """Print one JSON document on stdout; NaN and infinity, which JSON lacks, become null."""
    typer.echo(json.dumps(_finite(data), indent=1, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table on stdout: numbers to the right, floats shortened, None as a dash."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    # Text objects: brackets in a text, such as a compiler's, are no markup.
    table = Table(title=Text(printable(title)), title_justify="left")
    for i, name in enumerate(columns):
        numeric = any(isinstance(row[i], int | float) for row in cells)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(printable(shown(value))) for value in row))
    Console(width=console_width()).print(table)


def console_width() -> int:
    """Characters in a line of stdout; a file or a pipe has no width to fit."""
    from rich.console import Console

    return Console().width if sys.stdout.isatty() else _PIPE_WIDTH


def sureness(expected_kept: float | None, out_of_coverage: str, k: int) -> str:
    """Say in a line how far to trust a ranking; empty if nothing is known."""
    if out_of_coverage:
        return f"unsure: {out_of_coverage}"
    if expected_kept is None:
        return ""
    return f"the best of the first {k} is expected to keep {100 * expected_kept:.1f} % of the speed"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
