"""``costmodel collect``: time configurations on GPUs, alone or as a part of a larger collection."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli.common import AsJson, TargetName, answer, find_target, named_options, takes
from costmodel.cli.draw import Draw
from costmodel.cli.live import LiveView
from costmodel.errors import InvalidInput, MissingData
from costmodel.hardware.target import Target

if TYPE_CHECKING:
    from costmodel.collect import Job
    from costmodel.data.dataset import Dataset

_OF_THE_MODEL = ("model", "best", "unsure")


@takes("draw", Draw)
def collect(
    context: typer.Context,
    *,
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Of --merge.", metavar="DIR...")
    ] = None,
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
    replay: Annotated[
        Path | None,
        typer.Option(help="A dataset that answers in place of a GPU: rehearses a collection."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Bring the rows of folders together in --out.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what it would take, and run nothing.")
    ] = False,
    part: Annotated[
        str, typer.Option(help="Time one part of several, such as 3/8; --merge joins them.")
    ] = "1/1",
    target: TargetName = None,
    draw: Draw,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", "--budget-s", help="Stop after so long, such as 10m, 90s or 2h; the most "
            "instructive workloads come first."
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compiling processes.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Time configurations on this machine's GPUs; stop it at any moment, run it again to go on."""
    from costmodel.data.shards import require_place

    _check_options(context, draw)
    deadline = time.monotonic() + (float("inf") if budget is None else _seconds(budget))
    number = _part(part)
    if write_worklist is not None:
        _write(write_worklist, draw, target, as_json)
        return
    if out is not None:
        require_place(out, "dataset")
    if worklist is not None and not worklist.is_file():
        raise MissingData(f"no file {worklist}: `costmodel collect --write-worklist` draws one")
    draw.check()
    if plan:
        _plan(out, _Work(draw, worklist, replay, number, None), target, as_json)
        return
    if target is not None:
        raise typer.BadParameter(f"--target {target}: timing is on the card at hand; leave it out")
    if out is None:
        raise typer.BadParameter("--out: expected the folder of the dataset")
    if merge:
        _merge(out, folders or [], as_json)
        return
    _time(out, _Work(draw, worklist, replay, number, budget), deadline, jobs, as_json)


def _check_options(context: typer.Context, draw: Draw) -> None:
    """Refuse options that would do nothing beside others."""
    if named_options(context, "worklist") and named_options(context, "write_worklist"):
        raise typer.BadParameter("--worklist and --write-worklist: expected one of them")
    drawing = (*Draw.__slots__, "worklist", "write_worklist")
    running = ("budget", "jobs", "part")
    for option, others, why in (
        ("worklist", Draw.__slots__, "draws nothing"),
        ("write_worklist", ("out", "replay", *running), "times nothing"),
        ("replay", Draw.__slots__, "takes its workloads from the recording"),
        ("merge", (*drawing, *running, "replay", "plan"), "times nothing"),
        ("plan", ("budget", "jobs"), "runs nothing"),
        ("shapes", ("workloads",), "draws no workloads"),
    ):
        named, idle = named_options(context, option), named_options(context, *others)
        if named and idle:
            raise InvalidInput(f"{named[0]} {why}: leave out {', '.join(idle)}")
    if named_options(context, "folders") and not named_options(context, "merge"):
        raise InvalidInput("folders to read belong to --merge: name the one to write by --out")
    if draw.role == "eval" and draw.shapes is None:
        raise typer.BadParameter("--role eval: drawn workloads are to learn from; give --shapes")
    if draw.sampler != "model" and (idle := named_options(context, *_OF_THE_MODEL)):
        raise InvalidInput(f"{', '.join(idle)}: of `--sampler model`, which is not named")


def _part(text: str) -> tuple[int, int]:
    """Return number and count of a part such as 3/8."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise typer.BadParameter(f"--part {text}: expected i/n, such as 1/8 to 8/8")
    return int(found[1]), int(found[2])


def _seconds(text: str) -> float:
    """Return the seconds of a time such as 10m; a number alone is in seconds."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", text)
    if found is None:
        raise typer.BadParameter(f"--budget {text}: expected a time such as 10m, 90s or 2h")
    return float(found[1]) * {"m": 60, "h": 3600}.get(found[2], 1)


class _Work:
    """The work that the options describe, and who times it."""

    def __init__(
        self, draw: Draw, worklist: Path | None, replay: Path | None, part: tuple[int, int],
        budget: str | None,
    ) -> None:  # fmt: skip
        from costmodel.data.dataset import Dataset

        self.draw, self.worklist, self.part, self.budget = draw, worklist, part, budget
        self.recording = None if replay is None else Dataset.open(replay)

    def protocol(self) -> dict[str, Any]:
        from costmodel.measure.protocol import TimingProtocol

        recorded = self.recording
        return dict(recorded.protocol) if recorded else TimingProtocol().to_dict()

    def jobs(self, target: Target) -> list[Job]:
        """Return the workloads of this part, in the order in which they are to be timed."""
        from costmodel.collect import part_of, recorded_jobs
        from costmodel.collect.sampling import by_doubt, read_worklist
        from costmodel.data.shards import Identity
        from costmodel.models import find_model

        if self.worklist is not None:
            found = read_worklist(self.worklist, Identity(target, self.protocol()))
        elif self.recording is not None:
            found = recorded_jobs(self.recording)
        else:
            found = self.draw.jobs(target)
        found = part_of(found, *self.part)
        if self.budget is not None and self.worklist is None:
            return by_doubt(found, find_model(target)[0], target)
        return found


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


def _merge(out: Path, folders: Sequence[Path], as_json: bool) -> None:
    """Write the rows of several folders into one."""
    from costmodel.data.dataset import Dataset

    if not folders:
        raise InvalidInput("--merge: expected the folders to read, as in --merge part-1 part-2")
    there = [out] if (out / "card.json").exists() else []
    merged = Dataset.merge(out, [*there, *folders])
    rows, workloads = len(merged.measurements("train", "eval")), len(merged.workloads())
    answer(
        as_json,
        {"path": str(out), "workloads": workloads, "rows": rows, "folders": len(folders)},
        notes=[f"{out}: {workloads} workloads, {rows} rows of {len(folders)} folders"],
    )


def _plan(out: Path | None, work: _Work, target: str | None, as_json: bool) -> None:
    """Say what is left to do, and what it takes."""
    from costmodel.collect.plan import Plan, left_of
    from costmodel.data.dataset import Dataset
    from costmodel.data.shards import CARD
    from costmodel.gemm.specialize import kernel_hashes

    found = work.recording.target if work.recording else find_target(target)
    jobs = work.jobs(found)
    if out is not None and (out / CARD).exists():
        jobs = left_of(jobs, Dataset.open(out).measured(kernel_hashes()))
    plan = {name.rstrip("_"): value for name, value in asdict(Plan.of(jobs, found)).items()}
    answer(
        as_json,
        {"target": found.device.name, **plan},
        (f"left to collect on {found.device.name}", ["what", "how much"], plan.items()),
    )


def _time(out: Path, work: _Work, deadline: float, n_jobs: int | None, as_json: bool) -> None:
    """Time on each GPU of this machine, or in the place of each that is named."""
    from costmodel.collect.machine import collect_on_each, visible_gpus
    from costmodel.collect.sampling import write_worklist
    from costmodel.data.dataset import Dataset

    found = work.recording.target if work.recording else Target.current()
    gpus = visible_gpus(os.environ, _count_gpus if work.recording is None else lambda: 0)
    dataset = Dataset.create(out, found, work.protocol())
    with LiveView(as_json) as view:
        if len(gpus) < 2:
            _time_here(dataset, work, deadline, n_jobs, view)
        else:
            cores = len(os.sched_getaffinity(0)) - 2
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                path = Path(folder) / "worklist.parquet"
                write_worklist(path, work.jobs(found), dataset.identity)
                command = ["--worklist", str(path), "--out", str(out)]
                command += ["--jobs", str(n_jobs or max(cores // len(gpus), 1))]
                if work.recording is not None:
                    command += ["--replay", str(work.recording.path)]
                if deadline < float("inf"):
                    command += ["--budget", f"{max(deadline - time.monotonic(), 0):.1f}"]
                collect_on_each(gpus, command, (1, 1), view.event)
        total = view.total()
    title = f"{out}: {total['jobs_done']} workloads, {total['rows']} rows"
    answer(
        as_json,
        {"path": str(out), **total},
        (title, ["status", "rows"], sorted(total["statuses"].items())),
    )


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _time_here(
    dataset: Dataset, work: _Work, deadline: float, n_jobs: int | None, view: LiveView
) -> None:
    """Time on one GPU, or replay, in this process; the rows are compacted at the end."""
    from costmodel.collect import collect as run_jobs
    from costmodel.measure.card import collecting, current_run
    from costmodel.measure.device import DeviceRunner
    from costmodel.measure.replay import ReplayRunner, replayed_run

    todo = work.jobs(dataset.target)
    left_s = deadline - time.monotonic()
    try:
        if work.recording is not None:
            run, runner = replayed_run(), ReplayRunner(work.recording)
            with collecting(run.device_uuid):
                known = work.recording.artifacts()
                run_jobs(todo, dataset, runner, run, known=known, budget_s=left_s, on_job=view.job)
            return
        with DeviceRunner() as timer, collecting((run := current_run()).device_uuid):
            timer.start()
            run_jobs(todo, dataset, timer, run, n_jobs=n_jobs, budget_s=left_s, on_job=view.job)
    finally:
        dataset.compact()
