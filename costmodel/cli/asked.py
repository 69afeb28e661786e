"""What is asked of ``costmodel collect``: refused before the work where it makes no sense."""

from __future__ import annotations

from pathlib import Path

import typer

from costmodel.cli import output

__all__ = ["check_files", "check_together"]

_OF_THE_MODEL = ("model", "best", "unsure")


def check_together(context: typer.Context, sampler: str, role: str) -> None:
    """Refuse options that would do nothing beside others."""
    from costmodel.errors import InvalidInput

    drawing = (
        "workloads", "shapes", "role", "dtypes", "configs", "seed", "sampler", *_OF_THE_MODEL,
    )  # fmt: skip
    timing = ("out", "budget_s", "jobs")
    if output.named_options(context, "worklist") and output.named_options(
        context, "write_worklist"
    ):
        raise typer.BadParameter("--worklist and --write-worklist: expected one of them")
    for option, others, why in (
        ("worklist", drawing, "draws nothing"),
        ("write_worklist", timing, "times nothing"),
        ("shapes", ("workloads",), "draws no workloads"),
    ):
        named = output.named_options(context, option)
        idle = output.named_options(context, *others)
        if named and idle:
            raise InvalidInput(f"{named[0]} {why}: leave out {', '.join(idle)}")
    if role == "eval" and not output.named_options(context, "shapes"):
        raise typer.BadParameter("--role eval: drawn workloads are to learn from; give --shapes")
    if sampler != "model" and (idle := output.named_options(context, *_OF_THE_MODEL)):
        raise InvalidInput(f"{', '.join(idle)}: of `--sampler model`, which is not named")


def check_files(
    worklist: Path | None, shapes: Path | None, dtypes: str, model: Path | None
) -> None:
    """What is wrong with what is read is told without a GPU, and before minutes of drawing."""
    from costmodel.cli.shapes import read_shapes
    from costmodel.errors import MissingData
    from costmodel.gemm.workload import kind_options
    from costmodel.models import load

    if worklist is not None and not worklist.is_file():
        raise MissingData(f"no file {worklist}: `costmodel collect --write-worklist` draws one")
    if shapes is not None:
        read_shapes(shapes)
    for dtype in dtypes.split(","):
        kind_options(dtype)
    if model is not None:
        load(model)
