"""Options that several commands share, and their output: tables for people, JSON for machines."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Context, Option, echo

from costmodel.cli.waiting import heard
from costmodel.errors import InvalidInput, NoGpu, ShapeError
from costmodel.gemm.dtypes import DATA_TYPES, element_types
from costmodel.gemm.workload import MOST, Workload
from costmodel.hardware.target import DEVICES, Target
from costmodel.reports import shown
from costmodel.validation import printable


def device_name(name: str | None) -> str | None:
    """Return a target's name; a card's name, such as ``H100``, means the first of its targets."""
    plain = (name or "").lower()
    return next((d for d in DEVICES if d == plain or d.partition("-")[0] == plain), name)


def dtype_name(name: str | None) -> str | None:
    """Return the name of a type, or of several; ``fp16``, ``half`` and others are short names."""
    short = {row.triton: kind for kind, row in reversed(DATA_TYPES.items())} | _ALIASES
    return name and ",".join(short.get(part, part) for part in name.lower().split(","))


def option(help_: str, names: Callable[[str | None], str | None]) -> Any:
    """Make an option that also takes short names; the shell completes the known names."""
    known = DEVICES if names is device_name else element_types()
    return Option(help=help_, callback=names, autocompletion=lambda: [*known])


_ALIASES = {"half": "float16", "f16": "float16", "float": "float32", "f32": "float32"}
OptionalPath = Path | None
TargetName = Annotated[
    str | None, option("Device, such as h100-sxm; default: the GPU of this machine.", device_name)
]
Model = Annotated[
    OptionalPath, Option(help="Folder of a model; default: the one shipped for the target.")
]
Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON for machines on stdout.")]

DEFAULT_TARGET = "h100-sxm"

_Command = Callable[..., None]
_PIPE_WIDTH = 160


# --- Options --------------------------------------------------------------------------------------


def takes(parameter: str, make: Callable[..., Any]) -> Callable[[_Command], _Command]:
    """Decorate a command: its options are those of ``make`` in place of one parameter."""
    parts = signature(make, eval_str=True).parameters

    def decorate(command: _Command) -> _Command:
        own = signature(command, eval_str=True).parameters

        @wraps(command)
        def run(**values: Any) -> None:
            made = make(**{name: values.pop(name) for name in parts})
            command(**{parameter: made}, **values)

        # typer reads the signature and the annotations.
        options = [
            option.replace(kind=Parameter.KEYWORD_ONLY)
            for name in own
            for option in (parts.values() if name == parameter else [own[name]])
        ]
        run.__signature__ = Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        return run

    return decorate


def _product(
    m: Annotated[int, Argument(help="Rows of A and C.", metavar="M")],
    n: Annotated[int, Argument(help="Columns of B and C.", metavar="N")],
    k: Annotated[int, Argument(help="Columns of A, rows of B.", metavar="K")],
    dtype: Annotated[
        str,
        option(
            "Element type: float16 (fp16, half), bfloat16 (bf16) or float32 (fp32).", dtype_name
        ),
    ] = "float16",
    out_dtype: Annotated[
        str | None, option("Element type of C: that of A and B, or float32.", dtype_name)
    ] = None,
    tf32: Annotated[
        bool, Option("--tf32", help="Multiply float32 as TF32 on tensor cores.")
    ] = False,
    a_layout: Annotated[str, Option(help="Contiguous dimension of A: row or col.")] = "row",
    b_layout: Annotated[str, Option(help="Contiguous dimension of B: row or col.")] = "row",
) -> Workload:
    """Return the workload that these arguments name.

    Raises:
        ShapeError: a size is below 1 or too large. Others as :meth:`Workload.dense`.
    """
    for name, size in (("M", m), ("N", n), ("K", k)):
        if not 1 <= size <= MOST:
            raise ShapeError(f"{name}={size}: expected a size from 1 to {MOST}")
    # Workload.dense checks the layouts.
    layouts: dict[str, Any] = {"a_layout": a_layout, "b_layout": b_layout}
    return Workload.dense(m, n, k, dtype, **layouts, out_dtype=out_dtype, tf32=tf32)


def product_or_none(**values: Any) -> Workload | None:
    """Return the workload; None if M, N and K are left out."""
    return None if values["k"] is None else _product(**values)


product_or_none.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        each.replace(default=None) if each.default is each.empty else each
        for each in signature(_product, eval_str=True).parameters.values()
    ]
)


def product_options(workload: Workload) -> str:
    """Return the arguments that name a workload on the command line."""
    code, default = workload.code, Workload.dense(1, 1, 1).code
    out = code.out_dtype != code.dtype
    given = {"dtype": code.dtype, "a_layout": code.a_layout, "b_layout": code.b_layout}
    options = [f"--{n.replace('_', '-')} {x}" for n, x in given.items() if x != getattr(default, n)]
    options += [f"--out-dtype {code.out_dtype}"] * out + ["--tf32"] * (code.kind == "tf32")
    return " ".join([f"{workload.m} {workload.n} {workload.k}", *options])


takes_product = takes("workload", _product)
"""Decorate a command that takes a ``workload``: the command line gives M, N, K and options."""


def named_options(context: Context, *names: str) -> list[str]:
    """Return the options, such as ``--best``, of those parameters that the command line names."""
    # Compare by name: the class is click's, or since typer 0.29 typer's own copy of it.
    found = {name: getattr(context.get_parameter_source(name), "name", "") for name in names}
    return [f"--{n.replace('_', '-')}" for n, source in found.items() if source == "COMMANDLINE"]


def find_target(name: str | None) -> Target:
    """Return the named target, else this machine's GPU, else the H100."""
    found = Target.named(name) if name is not None else current_target()
    if found is None:
        note(f"no GPU here: taking --target {DEFAULT_TARGET}")
        return Target.named(DEFAULT_TARGET)
    return found


def current_target() -> Target | None:
    """Return this machine's GPU; None if it has none that can be used."""
    try:
        return Target.current()
    except NoGpu:
        return None


# --- Output ---------------------------------------------------------------------------------------


def answer(
    as_json: bool,
    data: Any,
    *tables: tuple[str, Sequence[str], Iterable[Sequence[Any]]],
    notes: Iterable[str] = (),
) -> None:
    """Print one JSON document for machines; else tables, then those notes that are not empty.

    NaN and infinity, which JSON lacks, become null.
    """
    if as_json:
        finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
        echo(json.dumps(finite, indent=1))
        return
    for table in tables:
        print_table(*table)
    for text in filter(None, notes):
        note(text)


def in_units(counts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield rows of a table: times and sizes get units that people can read."""
    for name, count in counts.items():
        what, _, unit = name.rpartition("_")
        if unit == "bytes":
            yield (
                what or "size",
                f"{count / 1e6:.2g} MB" if count < 1e7 else f"{count / 1e6:.0f} MB",
            )
        elif unit in ("hours", "minutes"):
            minutes = count * 60 if unit == "hours" else count
            yield what, f"{minutes:.2g} min" if minutes < 99 else f"{minutes / 60:.1f} h"
        else:
            yield name, count


def is_terminal() -> bool:
    """Return True if a person can be asked."""
    return sys.stdin.isatty()


def confirm(what: str, sure: object) -> None:
    """Ask a person whether to forget something.

    Raises:
        InvalidInput: nobody can be asked: a script or a pipe has no terminal.
    """
    if sure:
        return
    if not is_terminal():
        raise InvalidInput(f"no terminal to ask whether to forget {what}: give --yes to forget it")
    typer.confirm(f"forget {what}?", abort=True)


def note(text: str) -> None:
    """Tell people something, on stderr."""
    heard()
    echo(printable(text), err=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table on stdout: numbers to the right, floats shortened, None as a dash."""
    echo(printable(title))  # rich would break it, and the paths in it, at the table's width
    cells = [list(row) for row in rows]
    if not cells:  # a head without rows says nothing
        return
    # Text objects: brackets in a text, such as a compiler's, are no markup.
    table = Table()
    for i, name in enumerate(columns):
        numeric = any(isinstance(row[i], int | float) for row in cells)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(printable(shown(value))) for value in row))
    Console(width=console_width()).print(table)


def console_width() -> int:
    """Characters in a line of stdout; 160 for a file or a pipe, which has no width."""
    return Console().width if sys.stdout.isatty() else _PIPE_WIDTH


def sureness(expected_kept: float | None, out_of_coverage: str, k: int) -> str:
    """Say in a line how far to trust a ranking's first ``k``; empty if nothing is known."""
    if out_of_coverage:
        return f"unsure: {out_of_coverage}"
    if expected_kept is None:
        return ""
    return f"the best of the first {k} is expected to keep {100 * expected_kept:.1f} % of the speed"
