"""``costmodel bench``: runs the benchmarks of a checkout."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from costmodel.cli.common import AsJson, answer
from costmodel.errors import InvalidInput
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
