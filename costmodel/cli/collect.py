"""``costmodel collect``: time configurations on GPUs, alone or as a part of a larger collection."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, BadParameter, Context, Option

from costmodel.cli.common import (
    AsJson,
    OptionalPath,
    TargetName,
    answer,
    find_target,
    in_units,
    named_options,
    note,
    takes,
)
from costmodel.cli.draw import Draw
from costmodel.cli.live import LiveView
from costmodel.errors import InvalidInput, MissingData
from costmodel.files import Named
from costmodel.hardware.target import Target
from costmodel.measure.protocol import TimingProtocol

if TYPE_CHECKING:
    from costmodel.collect import Job
    from costmodel.data.dataset import Dataset
    from costmodel.data.shards import Identity


@dataclass(frozen=True, slots=True)
class Work:
    """The options that say where the work comes from, and who times which part of it."""

    worklist: Annotated[
        OptionalPath, Option(help="Time the work list that --write-worklist wrote.")
    ] = None
    bundle: Annotated[
        OptionalPath, Option(help="Time the bundle that `costmodel compile --bundle` wrote.")
    ] = None
    replay: Annotated[
        OptionalPath, Option(help="Take timings from this dataset instead of a GPU: a rehearsal.")
    ] = None
    kernel: Annotated[
        str | None, Option(help="With --bundle: the FILE.py:FUNCTION that it was made from.")
    ] = None
    part: Annotated[
        str | None, Option(help="Time one part of several, such as 3/8; --merge joins them.")
    ] = None
    budget: Annotated[
        str | None,
        Option(help="Stop after this time, such as 10m; the most useful work comes first."),
    ] = None
    engine: Annotated[
        Literal["local", "ray"],
        Option(help="local: GPUs of this machine; ray: those of a cluster."),
    ] = "local"
    counters: Annotated[
        bool, Option("--counters", help="Also record hardware counters of a few rows, with ncu.")
    ] = False

    @property
    def seconds(self) -> float:
        """The budget in seconds; infinite if none is given."""
        if self.budget is None:
            return inf
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", self.budget)
        if found is None:
            raise BadParameter(f"--budget {self.budget}: expected a time such as 10m or 90s")
        return float(found[1]) * {"m": 60, "h": 3600}.get(found[2], 1)

    @property
    def place(self) -> tuple[int, int]:
        """Number of the part, from 1 on, and count of parts."""
        ranks = os.environ  # under torchrun each rank times a part
        part = self.part or f"{int(ranks.get('RANK', 0)) + 1}/{ranks.get('WORLD_SIZE', 1)}"
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", part)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise BadParameter(f"--part {part}: expected i/n, such as 1/8 to 8/8")
        return int(found[1]), int(found[2])

    def recording(self) -> Dataset | None:
        """Open the dataset that is replayed; None if none is."""
        from costmodel.data.dataset import Dataset

        return None if self.replay is None else Dataset.open(self.replay)

    def jobs(self, draw: Draw, identity: Identity) -> list[Job]:
        """Return the workloads of this part, in the order in which they are to be timed."""
        from costmodel.collect.parts import part_of, recorded_jobs
        from costmodel.collect.sampling import by_doubt, read_worklist
        from costmodel.models import find_model

        if self.worklist is not None:
            found = read_worklist(self.worklist, identity)
        elif recording := self.recording():
            found = recorded_jobs(recording)
        else:
            found = draw.jobs(identity.target)
        found = part_of(found, *self.place)
        if self.budget is not None and self.worklist is None:
            return by_doubt(found, find_model(identity.target)[0], identity.target)
        return found


@takes("work", Work)
@takes("draw", Draw)
def collect(
    context: Context,
    *,
    folders: Annotated[
        list[Path] | None, Argument(help="With --merge: the folders.", metavar="DIR...")
    ] = None,
    out: Annotated[
        OptionalPath, Option(help="Folder of the dataset; an existing one is continued.")
    ] = None,
    work: Work,
    write_worklist: Annotated[
        OptionalPath, Option(help="Draw the work and write it to this file, no more; needs no GPU.")
    ] = None,
    merge: Annotated[
        bool, Option("--merge", help="Merge the rows of the folders into --out.")
    ] = False,
    plan: Annotated[
        bool, Option("--plan", help="Show the expected rows, time and bytes; run nothing.")
    ] = False,
    target: TargetName = None,
    draw: Draw,
    jobs: Annotated[int | None, Option(min=1, help="Compiling processes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time configurations on this machine's GPUs; stop it at any time, run it again to go on."""
    from costmodel.data.shards import require_place

    _check_options(context, draw)
    _ = work.place, work.seconds  # wrong values are refused before anything is written
    if write_worklist is not None:
        _write(write_worklist, draw, target, as_json)
        return
    if out is not None:
        require_place(out, "dataset")
    if work.worklist is not None and not work.worklist.is_file():
        raise MissingData(f"no file {work.worklist}: `costmodel collect --write-worklist` draws it")
    draw.check()
    if plan:
        _plan(work, draw, target, as_json)
        return
    if target is not None and work.engine == "local":
        raise BadParameter(f"--target {target}: timing is on the card at hand; leave it out")
    if out is None:
        raise BadParameter("--out: expected the folder of the dataset")
    if work.counters and not which("ncu"):
        raise MissingData("--counters: there is no program ncu in PATH: install Nsight Compute")
    if merge:
        _merge(out, folders or [], as_json)
    else:
        _time(out, work, draw, target, jobs, as_json)


def _check_options(context: Context, draw: Draw) -> None:
    """Refuse options that would have no effect together with others."""
    drawing, timing = Draw.__slots__, ("jobs", *Work.__slots__)
    for option, others, why in (
        ("worklist", (*drawing, "bundle"), "draws nothing"),
        ("write_worklist", ("out", *timing), "times nothing"),
        ("replay", drawing, "takes its workloads from the recording"),
        ("bundle", drawing, "holds its workloads"),
        ("merge", (*drawing, *timing, "write_worklist", "plan"), "times nothing"),
        ("plan", ("out", "budget", "jobs", "engine", "bundle", "counters"), "runs nothing"),
        ("counters", ("replay", "engine", "kernel"), "is of products on this machine's GPU"),
        ("shapes", ("workloads",), "draws no workloads"),
    ):
        named, idle = named_options(context, option), named_options(context, *others)
        if named and idle:
            raise InvalidInput(f"{named[0]} {why}: leave out {', '.join(idle)}")
    if named_options(context, "kernel") and not named_options(context, "bundle"):
        raise InvalidInput("--kernel is of a bundle: name that by --bundle")
    if named_options(context, "folders") and not named_options(context, "merge"):
        raise InvalidInput("folders to read belong to --merge: name the one to write by --out")
    if draw.role == "eval" and draw.shapes is None:
        raise BadParameter("--role eval: drawn workloads are to learn from; give --shapes")
    if draw.sampler != "model" and (idle := named_options(context, "model", "best", "unsure")):
        raise InvalidInput(f"{', '.join(idle)}: of `--sampler model`, which is not named")


def _write(path: Path, draw: Draw, target: str | None, as_json: bool) -> None:
    """Draw for any target, and write a work list."""
    from costmodel.collect.sampling import by_code, write_worklist
    from costmodel.data.shards import Identity, require_file_place

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
    from costmodel.autotune.bundle import merge_kernels
    from costmodel.collect.parts import merge

    if not folders:
        raise InvalidInput("--merge: expected the folders to read, as in --merge part-1 part-2")
    if any(file for folder in folders for file in folder.glob("*.jsonl")):
        calls = merge_kernels(out, *folders)
        answer(as_json, {"path": str(out), "calls": calls}, notes=[f"{out}: {calls} tuned calls"])
        return
    held = _held(merge(out, folders))
    answer(as_json, {"path": str(out), **held}, notes=[f"{out}: {_words(held)}"])


def _held(dataset: Dataset) -> dict[str, int]:
    """Count the workloads and rows in a folder, from all collections."""
    rows = dataset.measurements("train", "eval")
    return {"workloads": len(dataset.workloads()), "rows": len(rows)}


def _words(held: Named) -> str:
    return f"{held['workloads']} workloads, {held['rows']} rows"


def _plan(work: Work, draw: Draw, target: str | None, as_json: bool) -> None:
    """Print the estimated cost of a collection."""
    from costmodel.collect.parts import plan

    identity = _identity(work, target)
    jobs = work.jobs(draw, identity)
    planned = plan(jobs, identity.target)
    device = identity.target.device.name
    table = (
        f"to collect on {device}; compile: on one core",
        ["what", "how much"],
        in_units(planned),
    )
    answer(as_json, {"target": device, **planned}, table)


def _identity(work: Work, target: str | None) -> Identity:
    """Return the target and the protocol of the timings to make, or of the recording."""
    from costmodel.data.shards import Identity

    recording = work.recording()
    return (
        recording.identity
        if recording
        else Identity(find_target(target), TimingProtocol().to_dict())
    )


def _unpack(bundle: Path, folder: Path, identity: Identity, *, here: bool) -> Identity:
    """Unpack a bundle; return the identity of its timings.

    Args:
        here: True: this machine times it, so it must be able to use it.
    """
    from costmodel.collect.bundle import require_usable, unpack
    from costmodel.hardware.installed import driver_cuda

    made = Target.from_dict(unpack(bundle, folder).target)
    if here:
        require_usable(bundle, made, identity.target, driver_cuda())
        return identity
    return replace(identity, target=made)


def _time(
    out: Path, work: Work, draw: Draw, target: str | None, n_jobs: int | None, as_json: bool
) -> None:
    """Time on each GPU of this machine or of a cluster, or replay a recording instead."""
    import torch

    from costmodel.autotune.bundle import collect_kernels, merge_kernels
    from costmodel.collect.counters import record_counters
    from costmodel.collect.machine import Timer, collect_on_each, visible_gpus
    from costmodel.collect.ray_engine import collect_on_ray
    from costmodel.data.dataset import Dataset
    from costmodel.measure.card import collecting, current_run

    deadline, recording, view = time.monotonic() + work.seconds, work.recording(), LiveView(as_json)
    local, known, cache = work.engine == "local", None, None
    gpus = visible_gpus(os.environ, torch.cuda.device_count if recording is None else int)
    if len(gpus) == 1:  # under torchrun the GPU of this rank
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]
    n_jobs = n_jobs or max((len(os.sched_getaffinity(0)) - 2) // max(len(gpus), 1), 1)
    absorb: Callable[[Path], object] = partial(merge_kernels, out)
    kernels = work.kernel and partial(collect_kernels, work.kernel)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder = Path(name)
        if recording is None and local:
            Target.current()  # raises the clear error
        identity = _identity(work, target)
        if work.bundle is not None:
            identity = _unpack(work.bundle, folder, identity, here=local and recording is None)
        if not kernels:
            dataset = Dataset.create(out, identity.target, identity.protocol)
            absorb = dataset.absorb
            stack.push(partial(_say_kept, dataset))
            stack.callback(dataset.compact)
            if work.bundle is not None:
                work = replace(work, worklist=folder / "worklist.parquet")
                cache, known = folder / "cache", Dataset.open(folder / "data").artifacts()
        if not local:
            todo = work.bundle or work.jobs(draw, identity)
            ends = deadline, work.replay, kernels
            collect_on_ray(todo, identity, absorb, view.line, *ends, place=work.place)
        elif len(gpus) > 1:
            collect_on_each(gpus, work.place, n_jobs, view.line)
        elif kernels:
            with collecting(current_run().device_uuid):
                kernels(folder, out, *work.place)
        else:
            jobs = work.jobs(draw, identity)
            timer = stack.enter_context(Timer(recording, cache))
            left_s = deadline - time.monotonic()
            timer.collect(jobs, dataset, known, n_jobs=n_jobs, on_job=view.job, budget_s=left_s)
            if work.counters:
                record_counters(out)
    if kernels:
        answer(as_json, {"path": str(out)}, notes=[f"{out}: see `costmodel kernels list`"])
        return
    _tell_collected(dataset, view.total(), time.monotonic() > deadline, as_json)


def _tell_collected(dataset: Dataset, total: Named, is_late: bool, as_json: bool) -> None:
    """Print what was collected, and what the folder holds now."""
    held = _held(dataset)
    counts = f"{total['jobs_done']} workloads, {total['rows']} rows more"
    ended = is_late and not total["jobs_done"]
    answer(
        as_json,
        {"path": str(dataset.path), **total, "holds": held},
        (f"{dataset.path}: {counts}; it holds {_words(held)}", ["status", "rows"],
         sorted(total["statuses"].items())),
        notes=["the budget ended in the preparation: give --budget more time"][:ended],
    )  # fmt: skip


def _say_kept(dataset: Dataset, kind: type[BaseException] | None, *_: object) -> None:
    """Tell people what an interrupted collection has kept."""
    if kind in (KeyboardInterrupt, SystemExit):
        note(f"{dataset.path} keeps {_words(_held(dataset))}")
