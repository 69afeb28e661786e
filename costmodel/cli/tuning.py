"""``costmodel rank`` and ``tune``: which configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli import output
from costmodel.cli.output import AsJson, K, M, N
from costmodel.cli.skipped import log_skipped
from costmodel.tuning.modes import check_tuning_mode

if TYPE_CHECKING:
    from costmodel.gemm.workload import Workload
    from costmodel.tuning.ranking import Ranking
    from costmodel.tuning.tuning_result import TuningResult

__all__ = ["COMMANDS"]


def rank(
    m: M,
    n: N,
    k: K,
    dtype: output.Dtype = "float16",
    out_dtype: output.OutDtype = None,
    tf32: output.Tf32 = False,
    a_layout: output.ALayout = "row",
    b_layout: output.BLayout = "row",
    target: output.TargetName = None,
    top: Annotated[int, typer.Option(min=1, help="How many to list.")] = 8,
    model: output.Model = None,
    as_json: AsJson = False,
) -> None:
    """Rank the configurations of a product, the fastest first; needs no GPU, compiles nothing."""
    from costmodel.tuning.ranking import rank as rank_space

    workload = output.workload_of(m, n, k, dtype, a_layout, b_layout, out_dtype, tf32)
    ranking = rank_space(workload, output.find_target(target), model, top)
    log_skipped(ranking, model)
    if as_json:
        output.print_json(ranking.to_dict())
        return
    rows = [
        [place, str(config), ranking.predicted_us(place - 1)]
        for place, config in enumerate(ranking.configs, 1)
    ]
    output.print_table(_title(ranking), ["place", "config", "predicted us"], rows)
    _note_model(ranking)


def tune(
    context: typer.Context,
    m: M,
    n: N,
    k: K,
    dtype: output.Dtype = "float16",
    out_dtype: output.OutDtype = None,
    tf32: output.Tf32 = False,
    a_layout: output.ALayout = "row",
    b_layout: output.BLayout = "row",
    replay: Annotated[
        bool, typer.Option("--replay", help="Answer from recorded timings, as without a GPU.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Dataset to replay.")] = None,
    target: Annotated[
        str, typer.Option(help="Whose recording to replay; without a GPU, whose model predicts.")
    ] = output.DEFAULT_TARGET,
    top: Annotated[int, typer.Option(min=1, help="How many working candidates to time.")] = 8,
    mode: Annotated[
        str, typer.Option(help="auto, predict, topk, heuristic or exhaustive.")
    ] = "auto",
    model: output.Model = None,
    as_json: AsJson = False,
) -> None:
    """Rank, time the best few, keep the winner; without a GPU from recorded timings.

    A product that the mode does not time, such as a small one, is predicted; that needs neither.
    """
    import costmodel
    from costmodel.errors import InvalidInput
    from costmodel.tuning.tuner import untimed_because

    workload = output.workload_of(m, n, k, dtype, a_layout, b_layout, out_dtype, tf32)
    check_tuning_mode(mode)
    from costmodel.hardware.target import Target

    named = target if output.named_options(context, "target") else None
    if replay or data is not None:
        result = _replay(workload, data, named, model, top, mode)
    elif (named or not _has_gpu()) and untimed_because(workload, mode):
        result = _predict(workload, target, model, top, mode)
    elif not _has_gpu():
        result = _replay(workload, None, named, model, top, mode)
    elif named not in (None, Target.current().device.name):
        raise InvalidInput(
            f"--target {named} is of a recording: name --replay too; without it the GPU here times"
        )
    else:
        result = costmodel.tune(workload, model=model, k=top, mode=mode)
    if as_json:
        output.print_json(result.to_dict())
        return
    _print_result(result)


def _note_model(answer: Ranking | TuningResult) -> None:
    """Which head answered, how sure it is, and what is not as exact as it could be: a line each."""
    for line in (answer.head, _sureness(answer), answer.reservation):
        if answer.head and line:  # why a learned model did not answer was a warning
            output.note(line)


def _sureness(answer: Ranking | TuningResult) -> str:
    from costmodel.tuning.ranking import Ranking

    if isinstance(answer, Ranking):
        return output.sureness(
            answer.expected_kept(len(answer)), answer.out_of_coverage, len(answer)
        )
    if answer.mode == "exhaustive":
        return ""
    return output.sureness(answer.expected_kept, answer.doubt, answer.k if answer.timed else 1)


def _has_gpu() -> bool:
    from costmodel.errors import NoGpu
    from costmodel.hardware.target import Target

    try:
        Target.current()
    except NoGpu:
        return False
    return True


def _predict(
    workload: Workload, target: str, model: Path | None, top: int, mode: str
) -> TuningResult:
    """What is not timed needs neither a GPU nor a recording of it."""
    from costmodel.hardware.target import Target
    from costmodel.tuning.tuner import tune as choose

    output.note(f"predicted for {target}: mode {mode} times nothing of this")
    return choose(workload, runner=None, target=Target.named(target), model=model, k=top, mode=mode)


def _replay(
    workload: Workload,
    data: Path | None,
    target: str | None,
    model: Path | None,
    top: int,
    mode: str,
) -> TuningResult:
    """Choose by a recording: one that was named, else that of a device."""
    from costmodel.data.dataset import Dataset
    from costmodel.errors import InvalidInput, NotRecorded
    from costmodel.measure import ReplayRunner
    from costmodel.tuning.shipped import recording
    from costmodel.tuning.tuner import tune as choose

    path = data or recording(target or output.DEFAULT_TARGET)
    runner = ReplayRunner(Dataset.open(path))
    found = runner.target.device.name
    if target is not None and target != found:
        raise InvalidInput(
            f"--data {path} was recorded on {found}, --target is {target}: leave --target out"
        )
    output.note(f"REPLAY: timings were recorded on {runner.target.device.product}, in {path}")
    try:
        return choose(workload, runner=runner, model=model, k=top, mode=mode)
    except NotRecorded as error:
        raise NotRecorded(
            f"{error}; without a recording `costmodel rank {workload.m} {workload.n} {workload.k} "
            f"--target {found}` predicts"
        ) from None


def _print_result(result: TuningResult) -> None:
    """What was timed beside what was predicted, the fastest first, and what was chosen."""
    predicted_us = dict(result.ranked)
    rows: list[list[Any]] = [
        [str(config), predicted_us.get(config), measured.latency_us, measured.status]
        for config, measured in sorted(
            result.measured, key=lambda pair: (not pair[1].ok, pair[1].latency_us)
        )
    ]
    if result.torch is not None:
        rows.append(["torch.matmul", None, result.torch.latency_us, result.torch.status])
    title = f"{result.workload} on {result.target.device.name}, ranked by {result.model}"
    columns = ["config", "predicted us", "timed us", "status"]
    output.print_table(f"{title}\ntimings: {result.source}", columns, rows)
    costs = result.costs
    _note_model(result)
    output.note(
        f"chosen: {result.chosen}: {result.why}\n"
        f"ranking {costs.rank_s:.2f} s, compiling {costs.compiled} {costs.compile_s:.2f} s, "
        f"timing {costs.timed} {costs.measure_s:.2f} s"
    )


def _title(ranking: Ranking) -> str:
    return f"{ranking.workload} on {ranking.target.device.name}, by {ranking.model}"


COMMANDS: dict[str, Callable[..., None]] = {"rank": rank, "tune": tune}
