"""``costmodel compile`` and ``costmodel collect``: from the space to artifacts and timings."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from costmodel.cli import output
from costmodel.cli.asked import check_files, check_together
from costmodel.cli.output import AsJson, K, M, N
from costmodel.cli.shapes import not_held_out, read_shapes

if TYPE_CHECKING:
    from costmodel.collect.collect import Job, Progress
    from costmodel.collect.sampling import Sampler
    from costmodel.compile.artifact import Artifact
    from costmodel.data.dataset import Role
    from costmodel.gemm.workload import Workload
    from costmodel.hardware.target import Target

__all__ = ["COMMANDS"]


def compile_space(
    m: M,
    n: N,
    k: K,
    dtype: output.Dtype = "float16",
    out_dtype: output.OutDtype = None,
    tf32: output.Tf32 = False,
    a_layout: output.ALayout = "row",
    b_layout: output.BLayout = "row",
    target: output.TargetName = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many binaries.")] = 64,
    dump: Annotated[
        Path | None, typer.Option(help="Write the PTX, SASS and JSON of each to this folder.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: all cores.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compile configurations of a product's space; needs no GPU."""
    from costmodel.compile.compiler import duplicates
    from costmodel.data.destination import require_folder
    from costmodel.errors import InvalidInput
    from costmodel.gemm.binaries import compile_many
    from costmodel.gemm.space import SearchSpace
    from costmodel.gemm.specialize import specialize

    workload = output.workload_of(m, n, k, dtype, a_layout, b_layout, out_dtype, tf32)
    if dump is not None:
        require_folder(dump)
    found = output.find_target(target)
    space = SearchSpace.of(workload, found)
    if not len(space):
        raise InvalidInput(
            f"no configuration to compile for {workload} on {found.device.name}: expected smaller "
            f"sizes"
        )
    by_spec = {specialize(workload, config): config for config in reversed(space.configs)}
    # Spread over the space, not its first corner.
    specs = list(by_spec)[:: -(-len(by_spec) // limit)]
    begin = time.perf_counter()
    artifacts = list(compile_many(specs, found, n_jobs=jobs, dump=dump))
    seconds = time.perf_counter() - begin
    repeated = duplicates(artifacts)
    rows = [_artifact_row(str(by_spec[a.spec]), a, repeated.get(a.key)) for a in artifacts]
    failed = sum(not a.ok for a in artifacts)
    if as_json:
        output.print_json({
            "workload": workload.to_dict(), "target": found.to_dict(), "space": len(space),
            "binaries": len(by_spec), "compiled": len(rows) - failed, "failed": failed,
            "duplicates": len(repeated), "seconds": round(seconds, 3), "artifacts": rows,
        })  # fmt: skip
        return
    title = f"{workload} on {found.device.name}: {len(rows)} of {len(by_spec)} binaries"
    columns = ["config", "status", "registers", "spill_bytes", "shared_bytes", "compile_s",
               "duplicate_of", "error"]  # fmt: skip
    output.print_table(title, columns, [[row[c] or "" for c in columns] for row in rows])
    output.note(
        f"{len(rows) - failed} compiled, {failed} failed, {len(repeated)} repeat another, in "
        f"{seconds:.1f} s" + (f"; see {dump}" if dump else "")
    )


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
    target: output.TargetName = None,
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
    begin = time.monotonic()
    check_together(context, sampler, role)
    _check_places(out, write_worklist)
    check_files(worklist, shapes, dtypes, model)
    found = _collecting_target(target, out, write_worklist)
    if worklist is None:
        chosen = _workloads(shapes, role, workloads, found, dtypes.split(","), seed)
        draw = _sampler(sampler, configs, model, found, best, unsure)
        todo = _jobs(chosen, role, found, draw, seed)
    if write_worklist is not None:
        _write_worklist(write_worklist, todo, found, as_json)
        return
    assert out is not None
    from costmodel.collect.collect import collect as run_jobs
    from costmodel.collect.worklist import read_worklist
    from costmodel.data.dataset import Dataset
    from costmodel.measure.device import DeviceRunner
    from costmodel.measure.identity import current_run

    with DeviceRunner() as runner:
        runner.start()
        dataset = Dataset.create(out, found, runner.protocol.to_dict())
        if worklist is not None:
            todo = read_worklist(worklist, dataset.identity)
        try:
            with _progress_bar() as on_job:
                progress = run_jobs(
                    todo, dataset, runner, current_run(), n_jobs=jobs,
                    budget_s=budget_s - (time.monotonic() - begin), on_job=on_job,
                )  # fmt: skip
        finally:
            dataset.compact()
    if as_json:
        output.print_json({"path": str(out), **asdict(progress)})
        return
    rows = [[status, count] for status, count in sorted(progress.statuses.items())]
    title = f"{out}: {progress.jobs_done} workloads, {progress.rows} rows"
    output.print_table(title, ["status", "rows"], rows)


def _check_places(out: Path | None, write_worklist: Path | None) -> None:
    """Drawing takes minutes: what cannot be written is told before it."""
    from costmodel.data.destination import require_dataset_place, require_file_place

    if write_worklist is not None:
        require_file_place(write_worklist)
    elif out is not None:
        require_dataset_place(out)


def _collecting_target(name: str | None, out: Path | None, write_worklist: Path | None) -> Target:
    """The card at hand; drawing only, any that is named."""
    if write_worklist is not None:
        return output.find_target(name)
    if name is not None:
        raise typer.BadParameter(f"--target {name}: timing is on the card at hand; leave it out")
    if out is None:
        raise typer.BadParameter("--out: expected the folder of the dataset")
    from costmodel.hardware.target import Target

    return Target.current()


def _write_worklist(path: Path, jobs: Sequence[Job], target: Target, as_json: bool) -> None:
    from costmodel.collect.worklist import by_code, write_worklist
    from costmodel.data.shards import Identity
    from costmodel.measure.protocol import TimingProtocol

    write_worklist(path, by_code(jobs), Identity(target, TimingProtocol().to_dict()))
    rows = sum(len(job.configs) for job in jobs)
    if as_json:
        output.print_json({"path": str(path), "workloads": len(jobs), "rows": rows})
        return
    output.note(f"{path}: {len(jobs)} workloads, {rows} rows for {target.device.name}")


def _artifact_row(config: str, artifact: Artifact, duplicate_of: str | None) -> dict[str, Any]:
    names = ("key", "status", "registers", "spill_bytes", "shared_bytes", "ptx_hash", "error")
    return {
        "config": config,
        **{name: getattr(artifact, name) for name in names},
        "compile_s": round(artifact.compile_s, 3),
        "duplicate_of": duplicate_of,
    }


def _workloads(
    shapes: Path | None, role: Role, count: int, target: Target, dtypes: Sequence[str], seed: int
) -> list[Workload]:
    from costmodel.collect.sampling import training_workloads
    from costmodel.gemm.workload import Workload, kind_options

    if shapes is None:
        for dtype in dtypes:  # a wrong name is an error before anything is drawn
            kind_options(dtype)
        return training_workloads(count, target, dtypes, seed)
    sizes = read_shapes(shapes)
    found = [Workload.dense(*size, **kind_options(dtype)) for dtype in dtypes for size in sizes]
    return found if role == "eval" else not_held_out(shapes, found)


def _sampler(
    name: str, count: int, model: Path | None, target: Target, best: float, unsure: float
) -> Sampler:
    from costmodel.collect.sampling import ModelSampler, RandomSampler
    from costmodel.models import find_model, load

    if name == "random":
        return RandomSampler(count)
    chosen = load(model) if model else find_model(target)[0]
    return ModelSampler(chosen, count, best, unsure)


def _jobs(
    workloads: Sequence[Workload], role: Role, target: Target, sampler: Sampler, seed: int
) -> list[Job]:
    """What is to be timed of each workload; people are told of those that nothing can run.

    Raises:
        InvalidInput: nothing can run any of them.
    """
    import numpy as np

    from costmodel.collect.collect import Job
    from costmodel.errors import InvalidInput
    from costmodel.gemm.space import SearchSpace

    rng = np.random.default_rng(seed)
    jobs = [Job(w, tuple(sampler.sample(SearchSpace.of(w, target), rng)), role) for w in workloads]
    found = [job for job in jobs if job.configs]
    if jobs and not found:
        raise InvalidInput(
            f"no configuration runs on {target.device.name} what was asked for: expected smaller "
            f"sizes than those of {workloads[0]}"
        )
    for job in jobs:
        if not job.configs:
            device = target.device.name
            output.note(f"{job.workload} left out: no configuration runs it on {device}")
    return found


class _progress_bar:
    """Shows a collection's progress on stderr: a bar on a terminal, else a line a workload."""

    def __enter__(self) -> Callable[[Job, Progress], None]:
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._bar = Bar(console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._bar.start()
        self._task = self._bar.add_task("timing", total=None)
        return self._show

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _show(self, job: Job, progress: Progress) -> None:
        self._bar.update(self._task, total=progress.jobs, completed=progress.jobs_done)
        if self._bar.disable:
            output.note(f"{progress.jobs_done}/{progress.jobs} {job.workload} rows {progress.rows}")


COMMANDS: dict[str, Callable[..., None]] = {"collect": collect, "compile": compile_space}
