"""``costmodel collect``: time configurations on the GPU, or draw the list of what to time."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from costmodel.cli import output
from costmodel.cli.options import AsJson, TargetName, find_target, named_options
from costmodel.cli.shapes import not_held_out, read_shapes
from costmodel.errors import InvalidInput, MissingData
from costmodel.gemm.workload import Workload, kind_options
from costmodel.hardware.target import Target

if TYPE_CHECKING:
    from costmodel.collect import Job, Progress
    from costmodel.collect.sampling import Sampler

_OF_THE_MODEL = ("model", "best", "unsure")


@dataclass(frozen=True, slots=True)
class _Draw:
    """The options that say what to time: workloads, and configurations of each."""

    shapes: Path | None
    role: Literal["train", "eval"]
    workloads: int
    dtypes: Sequence[str]
    configs: int
    seed: int
    sampler: str
    best: float
    unsure: float
    model: Path | None

    def check(self) -> None:
        """Refuse what is wrong with files and names, without a GPU and before drawing."""
        from costmodel.models import load

        if self.shapes is not None:
            read_shapes(self.shapes)
        for dtype in self.dtypes:
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
        from costmodel.gemm.space import SearchSpace

        workloads, sampler = self._workloads(target), self._sampler(target)
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
                output.note(f"{job.workload} left out: no configuration runs it on {device}")
        return found

    def _workloads(self, target: Target) -> list[Workload]:
        from costmodel.collect.sampling import training_workloads

        if self.shapes is None:
            return training_workloads(self.workloads, target, self.dtypes, self.seed)
        sizes = read_shapes(self.shapes)
        found = [Workload.dense(*size, **kind_options(d)) for d in self.dtypes for size in sizes]
        return found if self.role == "eval" else not_held_out(self.shapes, found)

    def _sampler(self, target: Target) -> Sampler:
        from costmodel.collect.sampling import ModelSampler, RandomSampler
        from costmodel.models import find_model, load

        if self.sampler == "random":
            return RandomSampler(self.configs)
        model = load(self.model) if self.model else find_model(target)[0]
        return ModelSampler(model, self.configs, self.best, self.unsure)


def collect(
    context: typer.Context,
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
    workloads: Annotated[int, typer.Option(min=1, help="How many workloads to draw.")] = 100,
    shapes: Annotated[
        Path | None, typer.Option(help="Instead of drawing: a CSV with columns name,m,n,k.")
    ] = None,
    role: Annotated[
        Literal["train", "eval"],
        typer.Option(
            help="What --shapes are for: to learn from, which leaves out those that are held out "
            "for evaluation, or to judge by."
        ),
    ] = "train",
    dtypes: Annotated[
        str, typer.Option(help="float16, bfloat16, float32 or tf32, separated by commas.")
    ] = "float16",
    configs: Annotated[int, typer.Option(min=1, help="Configurations of each workload.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws: the same one resumes.")] = 0,
    sampler: Annotated[
        Literal["random", "model"],
        typer.Option(help="How configurations are chosen; a model's best, its doubts, and others."),
    ] = "random",
    best: Annotated[float, typer.Option(min=0, max=1, help="Share of the model's best.")] = 0.4,
    unsure: Annotated[float, typer.Option(min=0, max=1, help="Share of its doubts.")] = 0.1,
    model: Annotated[
        Path | None, typer.Option(help="Model of `--sampler model`; default: the shipped one.")
    ] = None,
    budget_s: Annotated[
        float, typer.Option(min=0, help="Begin no workload after so many seconds.")
    ] = float("inf"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Compiling processes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time configurations on this machine's GPU; stop it at any moment, run it again to go on."""
    deadline = time.monotonic() + budget_s
    _check_options(context, sampler, role)
    draw = _Draw(shapes, role, workloads, dtypes.split(","), configs, seed, sampler, best, unsure,
                 model)  # fmt: skip
    if write_worklist is not None:
        _write(write_worklist, draw, target, as_json)
    else:
        _time(out, worklist, draw, target, deadline, jobs, as_json)


def _check_options(context: typer.Context, sampler: str, role: str) -> None:
    """Refuse options that would do nothing beside others."""
    drawing = ("workloads", "shapes", "role", "dtypes", "configs", "seed", "sampler",
               *_OF_THE_MODEL)  # fmt: skip
    if named_options(context, "worklist") and named_options(context, "write_worklist"):
        raise typer.BadParameter("--worklist and --write-worklist: expected one of them")
    for option, others, why in (
        ("worklist", drawing, "draws nothing"),
        ("write_worklist", ("out", "budget_s", "jobs"), "times nothing"),
        ("shapes", ("workloads",), "draws no workloads"),
    ):
        named, idle = named_options(context, option), named_options(context, *others)
        if named and idle:
            raise InvalidInput(f"{named[0]} {why}: leave out {', '.join(idle)}")
    if role == "eval" and not named_options(context, "shapes"):
        raise typer.BadParameter("--role eval: drawn workloads are to learn from; give --shapes")
    if sampler != "model" and (idle := named_options(context, *_OF_THE_MODEL)):
        raise InvalidInput(f"{', '.join(idle)}: of `--sampler model`, which is not named")


def _write(path: Path, draw: _Draw, target: str | None, as_json: bool) -> None:
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
    if as_json:
        output.print_json({"path": str(path), "workloads": len(jobs), "rows": rows})
    else:
        output.note(f"{path}: {len(jobs)} workloads, {rows} rows for {found.device.name}")


def _time(
    out: Path | None,
    worklist: Path | None,
    draw: _Draw,
    target: str | None,
    deadline: float,
    n_jobs: int | None,
    as_json: bool,
) -> None:
    """Time a work list, or what is drawn, on the GPU of this machine."""
    from costmodel.collect import collect as run_jobs
    from costmodel.collect.sampling import read_worklist
    from costmodel.data.dataset import Dataset
    from costmodel.data.shards import require_place
    from costmodel.measure.card import current_run
    from costmodel.measure.device import DeviceRunner

    if out is not None:
        require_place(out, "dataset")
    if worklist is not None and not worklist.is_file():
        raise MissingData(f"no file {worklist}: `costmodel collect --write-worklist` draws one")
    draw.check()
    if target is not None:
        raise typer.BadParameter(f"--target {target}: timing is on the card at hand; leave it out")
    if out is None:
        raise typer.BadParameter("--out: expected the folder of the dataset")
    found = Target.current()
    todo = draw.jobs(found) if worklist is None else ()
    with DeviceRunner() as runner:
        runner.start()
        dataset = Dataset.create(out, found, runner.protocol.to_dict())
        if worklist is not None:
            todo = read_worklist(worklist, dataset.identity)
        try:
            with _ProgressBar() as bar:
                progress = run_jobs(
                    todo, dataset, runner, current_run(), n_jobs=n_jobs,
                    budget_s=deadline - time.monotonic(), on_job=bar.show,
                )  # fmt: skip
        finally:
            dataset.compact()
    if as_json:
        output.print_json({"path": str(out), **asdict(progress)})
        return
    title = f"{out}: {progress.jobs_done} workloads, {progress.rows} rows"
    output.print_table(title, ["status", "rows"], sorted(progress.statuses.items()))


class _ProgressBar:
    """Progress on stderr: a bar on a terminal, else a line for each workload."""

    def __enter__(self) -> _ProgressBar:
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._bar = Bar(console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._bar.start()
        self._task = self._bar.add_task("timing", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, job: Job, progress: Progress) -> None:
        self._bar.update(self._task, total=progress.jobs, completed=progress.jobs_done)
        if self._bar.disable:
            output.note(f"{progress.jobs_done}/{progress.jobs} {job.workload} rows {progress.rows}")
