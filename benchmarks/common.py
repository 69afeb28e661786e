"""Parts that the benchmarks share: their arguments, their results files, and timing in turn."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import costmodel
from costmodel.cli.common import note, print_table
from costmodel.compile.compiler import Artifact
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Measurement, Runner
from costmodel.errors import CostModelError, NoModel
from costmodel.files import file_errors, write_json
from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.specialize import compile_for_device
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models import XgbCostModel, load, model_directory
from costmodel.validation import one_line

__all__ = [
    "PART", "CompiledAhead", "Results", "Row", "announce", "are_part", "at_exit_code", "count",
    "drawn", "find_model", "in_turn", "note", "parser", "seconds_left", "until", "us_or_none",
    "versions",
]  # fmt: skip

Row = dict[str, Any]
T = TypeVar("T")

PART = 3
"""Exit code of a benchmark that its budget has stopped: its results are a part."""

# Measured on an H100 with 16 cores; only for saying beforehand how long a benchmark will take.
_BINARIES_PER_S = 25.0
_TIMING_S = 0.005
_COMPARISON_S = 0.1
_START_S = 15.0
_parts: set[str] = set()  # not empty: the results are a part


class Results:
    """One results file in the shape that ``tables.py`` reads, saved with every row.

    Args:
        bench: its name; the file is ``<bench>-<target>.json``.
        target: what the rows were timed on.
        folder: where it is written.
        software: names and versions of what the numbers rest on.
        summarize: makes the summary of the rows so far.
    """

    def __init__(
        self,
        bench: str,
        target: Target,
        folder: Path,
        software: Mapping[str, str],
        summarize: Callable[[list[Row]], Row],
    ) -> None:
        self.path = folder / f"{bench}-{target.device.name}.json"
        self.rows: list[Row] = []
        self._summarize = summarize
        self._head: Row = {
            "bench": bench,
            "target": target.device.name,
            "device": target.device.product,
            "date": datetime.now(UTC).date().isoformat(),
            "versions": dict(software),
        }

    @property
    def summary(self) -> Row:
        """Summary of the rows so far; empty if there are none."""
        return self._summarize(self.rows) if self.rows else {}

    def add(self, *rows: Row) -> None:
        """Add rows and save: a run that is stopped keeps what it has."""
        self.rows += rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with file_errors(self.path):
            write_json(self.path, {**self._head, "summary": self.summary, "rows": self.rows})

    def show(self) -> None:
        """Print the summary, and where the rest is."""
        print_table(self._head["bench"], ["", "value"], list(self.summary.items()))
        note(f"{len(self.rows)} rows in {self.path}")


class CompiledAhead:
    """A compiler that keeps what it made, so that many workloads can be compiled at once."""

    def __init__(self, compile_: Callable[..., Iterable[Artifact]] = compile_for_device) -> None:
        self._compile = compile_
        self._made: dict[Specialization, Artifact] = {}

    def __call__(self, specs: Sequence[Specialization], target: Target) -> list[Artifact]:
        missing = [s for s in dict.fromkeys(specs) if s not in self._made]
        if missing:
            self._made.update((a.spec, a) for a in self._compile(missing, target))
        return [self._made[s] for s in specs]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments that benchmarks on a GPU have in common."""
    result = argparse.ArgumentParser(description=doc)
    folder = Path(__file__).parent / "results"
    result.add_argument("--results", type=Path, default=folder, help="folder to write to")
    result.add_argument("--model", type=Path, help="folder of a model; default: the shipped one")
    result.add_argument("--budget-s", type=float, default=540.0, help="stop after so many seconds")
    result.add_argument("--every", type=count, default=1, help="take only every n-th workload")
    result.add_argument("--first", type=int, default=0, help="of --every: begin with this one")
    return result


def count(text: str) -> int:
    """A whole number of at least 1, for ``type=`` of an argument."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r:.40}: expected a whole number of at least 1")
    return int(text)


def drawn(items: Sequence[T], args: argparse.Namespace) -> Sequence[T]:
    """The items that ``--every`` and ``--first`` leave; one at least."""
    return items[args.first % max(min(args.every, len(items)), 1) :: args.every]


def at_exit_code(main: Callable[[], object]) -> int:
    """Run a benchmark; an error of costmodel or the system is one line and exit code 1.

    A number that the benchmark returns is the exit code. If its budget was spent, PART is.
    """
    _parts.clear()
    try:
        code = main()
    except CostModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # a file that cannot be read or written is no fault of ours
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    return code if isinstance(code, int) else PART * bool(_parts)


def find_model(path: Path | None, target: Target) -> XgbCostModel:
    """Load the model at a path, else the one that is shipped for the target.

    Raises:
        NoModel: none is shipped.
    """
    directory = path or model_directory(target)
    if directory is None:
        raise NoModel(
            f"no model is shipped for {target.device.name}: train one with `costmodel train` and "
            f"name its folder with --model"
        )
    return load(directory)


def announce(
    budget_s: float,
    *,
    binaries: float = 0,
    timings: float = 0,
    comparisons: float = 0,
    seconds: float = 0,
) -> float:
    """Say how long a benchmark will take, before the GPU is kept busy.

    Args:
        binaries, timings, comparisons: how many to compile, to time, to time in turn.
        seconds: for anything else.

    Returns:
        The deadline, on the clock of ``time.monotonic()``.
    """
    total = _START_S + binaries / _BINARIES_PER_S + timings * _TIMING_S
    total += comparisons * _COMPARISON_S + seconds
    note(f"about {total:.0f} s; the budget is {budget_s:.0f} s")
    return time.monotonic() + budget_s


def seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline; if it is over, the results are a part."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        are_part()
    return left_s


def are_part() -> None:
    """Note that the results are a part; the exit code will say so."""
    _parts.add("the budget was spent")


def until(deadline: float, items: Sequence[T]) -> Iterator[T]:
    """Yield the items until the budget is spent."""
    for i, item in enumerate(items):
        if seconds_left(deadline) <= 0:
            note(f"the budget is spent: {i} of {len(items)} done")
            return
        yield item


def in_turn(
    runner: Runner, workload: Workload, choices: Mapping[str, GemmConfig | None]
) -> dict[str, Measurement]:
    """Time named choices (None is torch) in turn, each distinct one once.

    A replay answers with recorded timings.
    """
    distinct = list(dict.fromkeys(choices.values()))
    found = dict(zip(distinct, runner.compare(workload, distinct), strict=True))
    return {name: found[config] for name, config in choices.items()}


def us_or_none(found: Measurement) -> float | None:
    """Return the latency in us; if there is none, None, which JSON can hold."""
    return round(found.latency_us, 4) if found.ok else None


def recorded_torch(dataset: Dataset) -> str:
    """The torch that timed the rows of a dataset, not the one that evaluates them."""
    return ", ".join(sorted({run.torch for run in dataset.measurements().runs}))


def versions(target: Target, **others: str) -> dict[str, str]:
    """Return the versions that the numbers depend on; further names override these."""
    import torch

    return {
        "costmodel": costmodel.__version__,
        "torch": torch.__version__,
        "triton": target.toolchain.triton,
        "ptxas": target.toolchain.ptxas,
        **others,
    }
