"""What commands share: their common arguments, tables for people, JSON for machines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.support.untrusted import printable

if TYPE_CHECKING:
    from costmodel.gemm.workload import Workload
    from costmodel.hardware.target import Target

__all__ = [
    "DEFAULT_TARGET", "ALayout", "AsJson", "BLayout", "Dtype", "K", "M", "Model", "N",
    "OutDtype", "TargetName", "Tf32", "console_width", "find_target", "named_options", "note",
    "print_json", "print_table", "sureness", "workload_of",
]  # fmt: skip

M = Annotated[int, typer.Argument(help="Rows of A and C.", metavar="M")]
N = Annotated[int, typer.Argument(help="Columns of B and C.", metavar="N")]
K = Annotated[int, typer.Argument(help="Columns of A, rows of B.", metavar="K")]
Dtype = Annotated[str, typer.Option(help="Element type: float16, bfloat16 or float32.")]
OutDtype = Annotated[
    str | None, typer.Option(help="Element type of C: that of A and B, or float32.")
]
Tf32 = Annotated[bool, typer.Option("--tf32", help="Multiply float32 as TF32 on tensor cores.")]
ALayout = Annotated[str, typer.Option(help="Contiguous dimension of A: row or col.")]
BLayout = Annotated[str, typer.Option(help="Contiguous dimension of B: row or col.")]
TargetName = Annotated[
    str | None,
    typer.Option("--target", help="Device, such as h100-sxm; default: the GPU of this machine."),
]
Model = Annotated[
    Path | None, typer.Option(help="Folder of a model; default: the one shipped for the target.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines on stdout.")]

DEFAULT_TARGET = "h100-sxm"
_PIPE_WIDTH = 160


def workload_of(
    m: int,
    n: int,
    k: int,
    dtype: str,
    a_layout: str,
    b_layout: str,
    out_dtype: str | None = None,
    tf32: bool = False,
) -> Workload:
    """The workload that the common arguments name.

    Raises:
        ShapeError: a size that is not over 0: of an empty product there is nothing to choose.
        As :meth:`costmodel.gemm.workload.Workload.dense`.
    """
    from costmodel.errors import ShapeError
    from costmodel.gemm.workload import MOST, Workload

    for name, size in (("M", m), ("N", n), ("K", k)):
        if not 1 <= size <= MOST:
            raise ShapeError(f"{name}={size}: expected a size from 1 to {MOST}")
    # Layouts are checked where they are used; a wrong one is InvalidInput there.
    layouts: dict[str, Any] = {"a_layout": a_layout, "b_layout": b_layout}
    return Workload.dense(m, n, k, dtype, **layouts, out_dtype=out_dtype, tf32=tf32)


def named_options(context: typer.Context, *names: str) -> list[str]:
    """Those of these parameters that the command line names, as it spells them: ``--best``."""
    # By name: the class is click's, or typer's own copy of it since 0.29.
    found = [name for name in names if _source(context, name) == "COMMANDLINE"]
    return [f"--{name.replace('_', '-')}" for name in found]


def _source(context: typer.Context, name: str) -> str:
    return str(getattr(context.get_parameter_source(name), "name", ""))


def find_target(name: str | None) -> Target:
    """The named target, else this machine's GPU, else the H100 that the shipped data is of."""
    from costmodel.errors import NoGpu
    from costmodel.hardware.target import Target

    if name is not None:
        return Target.named(name)
    try:
        return Target.current()
    except NoGpu:
        note(f"no GPU here: taking --target {DEFAULT_TARGET}")
        return Target.named(DEFAULT_TARGET)


def note(text: str) -> None:
    """Tell people something, on stderr."""
    typer.echo(printable(text), err=True)


def print_json(data: Any) -> None:
    """One JSON document on stdout; numbers that JSON lacks (NaN, infinity) become null."""
    typer.echo(json.dumps(_plain(data), indent=1, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on stdout; numbers to the right, floats shortened, None as a dash."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    # Text objects, because brackets in a text of ours or a compiler's are no markup.
    table = Table(title=Text(printable(title)), title_justify="left")
    for i, name in enumerate(columns):
        numeric = any(isinstance(row[i], int | float) for row in cells)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(_text(value)) for value in row))
    Console(width=console_width()).print(table)


def console_width() -> int:
    """Characters in a line of stdout; a file or a pipe has no width to fit."""
    from rich.console import Console

    return Console().width if sys.stdout.isatty() else _PIPE_WIDTH


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return printable(str(value))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def sureness(expected_kept: float | None, out_of_coverage: str, k: int) -> str:
    """Say in a line how far to trust a ranking; empty if nothing is known."""
    if out_of_coverage:
        return f"unsure: {out_of_coverage}"
    if expected_kept is None:
        return ""
    return f"the best of the first {k} is expected to keep {100 * expected_kept:.1f} % of the speed"
