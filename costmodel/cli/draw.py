"""The options of ``costmodel collect`` that say what to time, and the CSV file of --shapes."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from costmodel.cli.common import OptionalPath, dtype_name, note, option
from costmodel.errors import InvalidInput, MissingData
from costmodel.files import file_errors
from costmodel.gemm.workload import MOST, Workload, kind_options
from costmodel.hardware.target import Target
from costmodel.validation import one_line

if TYPE_CHECKING:
    from costmodel.collect import Job


@dataclass(frozen=True, slots=True)
class Draw:
    """The options that say what to time: workloads, and configurations of each."""

    workloads: Annotated[int, Option(min=1, help="How many workloads to draw.")] = 100
    shapes: Annotated[
        OptionalPath, Option(help="Take the shapes from a CSV with columns name,m,n,k; draw none.")
    ] = None
    role: Annotated[
        Literal["train", "eval"],
        Option(help="Use of --shapes: train (without those held out for evaluation) or eval."),
    ] = "train"
    dtypes: Annotated[
        str, option("float16, bfloat16, float32 or tf32, separated by commas.", dtype_name)
    ] = "float16"
    configs: Annotated[int, Option(min=1, help="Configurations of each workload.")] = 200
    seed: Annotated[int, Option(min=0, help="Seed of the draws; use the same one to resume.")] = 0
    sampler: Annotated[
        Literal["random", "model"],
        Option(help="At random, or by a model: its best, those it is unsure of, and others."),
    ] = "random"
    best: Annotated[float, Option(min=0, max=1, help="Share that the model ranks best.")] = 0.4
    unsure: Annotated[float, Option(min=0, max=1, help="Share it is least sure of.")] = 0.1
    model: Annotated[
        OptionalPath, Option(help="Model of `--sampler model`; default: the shipped one.")
    ] = None

    def check(self) -> None:
        """Raise the errors of wrong files and names, without a GPU and before drawing."""
        from costmodel.models import load

        if self.shapes is not None:
            read_shapes(self.shapes)
        for dtype in self.dtypes.split(","):
            kind_options(dtype)
        if self.model is not None:
            load(self.model)

    def jobs(self, target: Target) -> list[Job]:
        """Draw jobs, and tell people of workloads that no configuration can run.

        Raises:
            InvalidInput: no configuration can run any of them.
        """
        import numpy as np

        from costmodel.collect import Job
        from costmodel.collect.sampling import ModelSampler, RandomSampler
        from costmodel.gemm.space import SearchSpace
        from costmodel.models import find_model, load

        workloads = self._workloads(target)
        sampler: RandomSampler | ModelSampler = RandomSampler(self.configs)
        if self.sampler == "model":
            model = load(self.model) if self.model else find_model(target)[0]
            sampler = ModelSampler(model, self.configs, self.best, self.unsure)
        rng, device = np.random.default_rng(self.seed), target.device.name
        jobs = [
            Job(w, tuple(sampler.sample(SearchSpace.of(w, target), rng)), self.role)
            for w in workloads
        ]
        found = [job for job in jobs if job.configs]
        if jobs and not found:
            raise InvalidInput(
                f"no configuration runs on {device} what was asked for: expected smaller sizes "
                f"than those of {workloads[0]}"
            )
        for job in jobs:
            if not job.configs:
                note(f"{job.workload} left out: no configuration runs it on {device}")
        return found

    def _workloads(self, target: Target) -> list[Workload]:
        from costmodel.collect.sampling import training_workloads

        dtypes = self.dtypes.split(",")
        if self.shapes is None:
            return training_workloads(self.workloads, target, dtypes, self.seed)
        sizes = read_shapes(self.shapes)
        found = [Workload.dense(*size, **kind_options(d)) for d in dtypes for size in sizes]
        return found if self.role == "eval" else _not_held_out(self.shapes, found)


# --- The CSV file of --shapes ---------------------------------------------------------------------


def read_shapes(path: Path) -> list[tuple[int, int, int]]:
    """Read sizes (m, n, k) from a CSV file with the columns m, n and k; ignore other columns.

    Raises:
        MissingData: no such file. InvalidInput: a column or a row is missing, or holds no size.
        FileError: it cannot be read.
    """
    if not path.is_file():
        raise MissingData(f"no file {path}: expected a CSV with the columns name,m,n,k")
    with file_errors(path), path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        try:
            if lacking := [name for name in "mnk" if name not in (rows.fieldnames or ())]:
                raise InvalidInput(f"no column {', '.join(lacking)}: expected m, n and k by name")
            found = [(_size(row, "m"), _size(row, "n"), _size(row, "k")) for row in rows]
        except UnicodeDecodeError:  # the file is read ahead, so the line is not known
            raise InvalidInput(f"{path}: expected a CSV in UTF-8, found other bytes") from None
        except (InvalidInput, csv.Error) as error:
            line = max(rows.reader.line_num, 1)
            raise InvalidInput(f"{path}, line {line}: {one_line(error)}") from None
    if not found:
        raise InvalidInput(f"{path}: no row under its header: expected a product in each")
    return found


def _size(row: dict[str, str | None], name: str) -> int:
    """Return one size of a row, which may be shorter than the header."""
    text = (row[name] or "").strip()
    # int() takes more than digits, and refuses thousands of digits with a message of its own.
    if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= MOST:
        raise InvalidInput(f"{name}={text!r:.40}: expected a whole number from 1 to {MOST}")
    return int(text)


def _not_held_out(shapes: Path, workloads: Sequence[Workload]) -> list[Workload]:
    """Return the workloads that models may train on; tell people how many are left out.

    Raises:
        InvalidInput: all are held out.
    """
    from costmodel.evaluation.heldout import HELD_OUT, is_held_out

    found = [w for w in workloads if not is_held_out(w)]
    left_out = len(workloads) - len(found)
    why = (
        f"{HELD_OUT} (n and k within 2 % of a product in docs/protocol.md, also swapped), so that "
        f"no model may learn from them"
    )
    if not found:
        raise InvalidInput(
            f"{shapes}: all {left_out} workloads are {why}: expected others, or `--role eval` to "
            f"judge by them"
        )
    if left_out:
        note(f"{left_out} of {len(workloads)} workloads left out: {why}")
    return found
