"""``costmodel collect``: time configurations on the GPU, or draw the list of what to time."""

from __future__ import annotations

import csv
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from costmodel.cli.common import AsJson, TargetName, answer, find_target, named_options, note, takes
from costmodel.errors import InvalidInput, MissingData
from costmodel.files import file_errors
from costmodel.gemm.workload import MOST, Workload, kind_options
from costmodel.hardware.target import Target
from costmodel.validation import one_line

if TYPE_CHECKING:
    from costmodel.collect import Job, Progress

_OF_THE_MODEL = ("model", "best", "unsure")


@dataclass(frozen=True, slots=True)
class Draw:
    """The options that say what to time: workloads, and configurations of each."""

    workloads: Annotated[int, typer.Option(min=1, help="How many workloads to draw.")] = 100
    shapes: Annotated[
        Path | None, typer.Option(help="Instead of drawing: a CSV with columns name,m,n,k.")
    ] = None
    role: Annotated[
        Literal["train", "eval"],
        typer.Option(
            help="What --shapes are for: to learn from, which leaves out those that are held out "
            "for evaluation, or to judge by."
        ),
    ] = "train"
    dtypes: Annotated[
        str, typer.Option(help="float16, bfloat16, float32 or tf32, separated by commas.")
    ] = "float16"
    configs: Annotated[int, typer.Option(min=1, help="Configurations of each workload.")] = 200
    seed: Annotated[int, typer.Option(min=0, help="Of the draws: the same one resumes.")] = 0
    sampler: Annotated[
        Literal["random", "model"],
        typer.Option(help="How configurations are chosen; a model's best, its doubts, and others."),
    ] = "random"
    best: Annotated[float, typer.Option(min=0, max=1, help="Share of the model's best.")] = 0.4
    unsure: Annotated[float, typer.Option(min=0, max=1, help="Share of its doubts.")] = 0.1
    model: Annotated[
        Path | None, typer.Option(help="Model of `--sampler model`; default: the shipped one.")
    ] = None

    def check(self) -> None:
        """Refuse what is wrong with files and names, without a GPU and before drawing."""
        from costmodel.models import load

        if self.shapes is not None:
            read_shapes(self.shapes)
        for dtype in self.dtypes.split(","):
            kind_options(dtype)
        if self.model is not None:
            load(self.model)

    def jobs(self, target: Target) -> list[Job]:
        """Draw. People are told of workloads that no configuration can run.

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


@takes("draw", Draw)
def collect(
    context: typer.Context,
    *,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the dataset; one that is there goes on.")
    ] = None,
    worklist: Annotated[
        Path | None, typer.Option(help="Time what --write-worklist has drawn; no other draw.")
    ] = None,
    write_worklist: Annotated[
        Path | None,
        typer.Option(help="Draw only, and write here what is to be timed; needs no GPU."),
    ] = None,
    target: TargetName = None,
    draw: Draw,
    budget_s: Annotated[
        float, typer.Option(min=0, help="Begin no workload after so many seconds.")
    ] = float("inf"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Compiling processes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time configurations on this machine's GPU; stop it at any moment, run it again to go on."""
    from costmodel.data.shards import require_place

    deadline = time.monotonic() + budget_s
    _check_options(context, draw)
    if write_worklist is not None:
        _write(write_worklist, draw, target, as_json)
        return
    if out is not None:
        require_place(out, "dataset")
    if worklist is not None and not worklist.is_file():
        raise MissingData(f"no file {worklist}: `costmodel collect --write-worklist` draws one")
    draw.check()
    if target is not None:
        raise typer.BadParameter(f"--target {target}: timing is on the card at hand; leave it out")
    if out is None:
        raise typer.BadParameter("--out: expected the folder of the dataset")
    progress = _time(out, worklist, draw, deadline, jobs)
    title = f"{out}: {progress.jobs_done} workloads, {progress.rows} rows"
    answer(
        as_json,
        {"path": str(out), **asdict(progress)},
        (title, ["status", "rows"], sorted(progress.statuses.items())),
    )


def _check_options(context: typer.Context, draw: Draw) -> None:
    """Refuse options that would do nothing beside others."""
    if named_options(context, "worklist") and named_options(context, "write_worklist"):
        raise typer.BadParameter("--worklist and --write-worklist: expected one of them")
    for option, others, why in (
        ("worklist", Draw.__slots__, "draws nothing"),
        ("write_worklist", ("out", "budget_s", "jobs"), "times nothing"),
        ("shapes", ("workloads",), "draws no workloads"),
    ):
        named, idle = named_options(context, option), named_options(context, *others)
        if named and idle:
            raise InvalidInput(f"{named[0]} {why}: leave out {', '.join(idle)}")
    if draw.role == "eval" and draw.shapes is None:
        raise typer.BadParameter("--role eval: drawn workloads are to learn from; give --shapes")
    if draw.sampler != "model" and (idle := named_options(context, *_OF_THE_MODEL)):
        raise InvalidInput(f"{', '.join(idle)}: of `--sampler model`, which is not named")


def _write(path: Path, draw: Draw, target: str | None, as_json: bool) -> None:
    """Draw for any target, and write a work list."""
    from costmodel.collect.sampling import by_code, write_worklist
    from costmodel.data.shards import Identity, require_file_place
    from costmodel.measure.protocol import TimingProtocol

    require_file_place(path)  # drawing takes minutes: check before it
    draw.check()
    found = find_target(target)
    jobs = draw.jobs(found)
    write_worklist(path, by_code(jobs), Identity(found, TimingProtocol().to_dict()))
    rows = sum(len(job.configs) for job in jobs)
    answer(
        as_json,
        {"path": str(path), "workloads": len(jobs), "rows": rows},
        notes=[f"{path}: {len(jobs)} workloads, {rows} rows for {found.device.name}"],
    )


def _time(
    out: Path, worklist: Path | None, draw: Draw, deadline: float, n_jobs: int | None
) -> Progress:
    """Time a work list, or what is drawn, on this machine's GPU; show the progress on stderr."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    from costmodel.collect import collect as run_jobs
    from costmodel.collect.sampling import read_worklist
    from costmodel.data.dataset import Dataset
    from costmodel.measure.card import current_run
    from costmodel.measure.device import DeviceRunner

    def show(job: Job, progress: Progress) -> None:
        bar.update(task, total=progress.jobs, completed=progress.jobs_done)
        if bar.disable:
            note(f"{progress.jobs_done}/{progress.jobs} {job.workload} rows {progress.rows}")

    found = Target.current()
    todo = draw.jobs(found) if worklist is None else ()
    with DeviceRunner() as runner:
        runner.start()
        dataset = Dataset.create(out, found, runner.protocol.to_dict())
        if worklist is not None:
            todo = read_worklist(worklist, dataset.identity)
        try:
            with Bar(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
                task = bar.add_task("timing", total=None)
                return run_jobs(
                    todo, dataset, runner, current_run(), n_jobs=n_jobs,
                    budget_s=deadline - time.monotonic(), on_job=show,
                )  # fmt: skip
        finally:
            dataset.compact()


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
            lacking = [name for name in "mnk" if name not in (rows.fieldnames or ())]
            if lacking:
                raise InvalidInput(f"no column {', '.join(lacking)}: expected m, n and k by name")
            found = [(_size(row, "m"), _size(row, "n"), _size(row, "k")) for row in rows]
        except UnicodeDecodeError:  # read ahead: the line is not known
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
    # int() takes more than digits, and refuses thousands of them in words of its own.
    if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= MOST:
        raise InvalidInput(f"{name}={text!r:.40}: expected a whole number from 1 to {MOST}")
    return int(text)


def _not_held_out(shapes: Path, workloads: Sequence[Workload]) -> list[Workload]:
    """Return the workloads that may be trained on, and tell people how many others there are.

    Raises:
        InvalidInput: all are held out.
    """
    from costmodel.evaluation.heldout import HELD_OUT, is_held_out

    found = [w for w in workloads if not is_held_out(w)]
    left_out = len(workloads) - len(found)
    why = f"{HELD_OUT} (docs/protocol.md), so that no model may learn from them"
    if not found:
        raise InvalidInput(
            f"{shapes}: all {left_out} workloads are {why}: expected others, or `--role eval` to "
            f"judge by them"
        )
    if left_out:
        note(f"{left_out} of {len(workloads)} workloads left out: {why}")
    return found
