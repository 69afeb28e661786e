"""Arguments and options that several commands share: the product, the target, the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodel.cli.output import note
from costmodel.errors import NoGpu, ShapeError
from costmodel.gemm.workload import MOST, Workload
from costmodel.hardware.target import Target

TargetName = Annotated[
    str | None,
    typer.Option("--target", help="Device, such as h100-sxm; default: the GPU of this machine."),
]
Model = Annotated[
    Path | None, typer.Option(help="Folder of a model; default: the one shipped for the target.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines on stdout.")]

DEFAULT_TARGET = "h100-sxm"


def _product(
    m: Annotated[int, typer.Argument(help="Rows of A and C.", metavar="M")],
    n: Annotated[int, typer.Argument(help="Columns of B and C.", metavar="N")],
    k: Annotated[int, typer.Argument(help="Columns of A, rows of B.", metavar="K")],
    dtype: Annotated[
        str, typer.Option(help="Element type: float16, bfloat16 or float32.")
    ] = "float16",
    out_dtype: Annotated[
        str | None, typer.Option(help="Element type of C: that of A and B, or float32.")
    ] = None,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Multiply float32 as TF32 on tensor cores.")
    ] = False,
    a_layout: Annotated[str, typer.Option(help="Contiguous dimension of A: row or col.")] = "row",
    b_layout: Annotated[str, typer.Option(help="Contiguous dimension of B: row or col.")] = "row",
) -> Workload:
    """Return the workload that these arguments name.

    Raises:
        ShapeError: a size is not over 0, or too large. Others as :meth:`Workload.dense`.
    """
    for name, size in (("M", m), ("N", n), ("K", k)):
        if not 1 <= size <= MOST:
            raise ShapeError(f"{name}={size}: expected a size from 1 to {MOST}")
    # Workload.dense checks the layouts.
    layouts: dict[str, Any] = {"a_layout": a_layout, "b_layout": b_layout}
    return Workload.dense(m, n, k, dtype, **layouts, out_dtype=out_dtype, tf32=tf32)


def takes_product(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command that takes a ``workload``: the command line gives M, N, K and options."""
    product = inspect.signature(_product, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters

    @wraps(command)
    def run(**values: Any) -> None:
        named = {name: values.pop(name) for name in product}
        command(workload=_product(**named), **values)

    # typer reads both.
    found = {**product, **{name: own[name] for name in own if name != "workload"}}
    shown = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in found.values()]
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in shown}
    return run


def named_options(context: typer.Context, *names: str) -> list[str]:
    """Return those of these parameters that the command line names, spelled like ``--best``."""
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
