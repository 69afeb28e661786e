"""``costmodel tune``: the winner, timed on the GPU, replayed from a recording, or predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from costmodel.cli.common import (
    DEFAULT_TARGET,
    AsJson,
    Model,
    OptionalPath,
    answer,
    current_target,
    device_name,
    named_options,
    note,
    option,
    product_options,
    sureness,
    takes_product,
)
from costmodel.cli.waiting import doing
from costmodel.errors import InvalidInput, NotRecorded
from costmodel.files import Named
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.tuning.modes import check_tuning_mode

if TYPE_CHECKING:
    from costmodel.tuning.tuning_result import TuningResult


@takes_product
def tune(
    context: Context,
    workload: Workload,
    replay: Annotated[
        bool, Option("--replay", help="Take recorded timings instead of a GPU.")
    ] = False,
    data: Annotated[OptionalPath, Option(help="Dataset to replay.")] = None,
    target: Annotated[
        str, option("Device of the recording; without a GPU also of the model.", device_name)
    ] = DEFAULT_TARGET,
    top: Annotated[int, Option(min=1, help="How many working candidates to time.")] = 8,
    mode: Annotated[str, Option(help="auto, predict, topk, heuristic or exhaustive.")] = "auto",
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Rank configurations, time the best few, keep the winner; --replay needs no GPU.

    Some products, such as small ones, are only predicted: that needs no GPU either.
    """
    import costmodel
    from costmodel.tuning import tuner

    check_tuning_mode(mode)
    named = target if named_options(context, "target") else None
    options: Named = {"model": model, "k": top, "mode": mode}
    replay = replay or data is not None
    here = None if replay else current_target()
    untimed = tuner.untimed_because(workload, mode)
    if untimed and not replay and (named or here is None):
        note(f"predicted for {target}: mode {mode} times nothing of this")
        _load(workload, Target.named(target), options)
        result = tuner.tune(workload, runner=None, target=Target.named(target), **options)
    elif here is None:
        result = _replay(workload, data, named, options)
    elif named not in (None, here.device.name):
        raise InvalidInput(
            f"--target {named} is of a recording: name --replay too; without it the GPU here times"
        )
    else:
        _load(workload, here, options)
        result = costmodel.tune(workload, **options)
    answer(as_json, result.to_dict(), _table(result), notes=_notes(result))


def _replay(
    workload: Workload, data: OptionalPath, target: str | None, options: Named
) -> TuningResult:
    """Choose by a recording: the one that is named, else the one of the target."""
    from costmodel.data.dataset import Dataset
    from costmodel.measure.replay import ReplayRunner
    from costmodel.tuning import tuner
    from costmodel.tuning.shipped import recording

    path = data or recording(target or DEFAULT_TARGET)
    runner = ReplayRunner(Dataset.open(path))
    device = runner.target.device
    if target not in (None, device.name):
        raise InvalidInput(
            f"--data {path} was recorded on {device.name}, --target is {target}: leave --target out"
        )
    note(f"REPLAY: timings were recorded on {device.product}, in {path}")
    _load(workload, runner.target, options)
    try:
        return tuner.tune(workload, runner=runner, **options)
    except NotRecorded as error:
        raise NotRecorded(
            f"{error}; without a recording `costmodel rank {product_options(workload)} "
            f"--target {device.name}` predicts"
        ) from None


def _load(workload: Workload, target: Target, options: Named) -> None:
    """Import and read the model first, so that the time of tuning does not include it."""
    from costmodel.tuning.ranking import rank

    if options["mode"] != "heuristic":
        doing("loading the model")
        rank(workload, target, options["model"], 1)
    doing("tuning")


def _table(result: TuningResult) -> tuple[str, list[str], list[list[Any]]]:
    """Make a table of timings beside predictions, the fastest first."""
    predicted_us = dict(result.ranked)
    timed = sorted(result.measured, key=lambda pair: (not pair[1].ok, pair[1].latency_us))
    rows = [[str(c), predicted_us.get(c), found.latency_us, found.status] for c, found in timed]
    if result.torch is not None:
        rows.append(["torch.matmul", None, result.torch.latency_us, result.torch.status])
    title = f"{result.workload} on {result.target.device.name}, ranked by {result.model}"
    columns = ["config", "predicted us", "timed us", "status"]
    return f"{title}\ntimings: {result.source}", columns, rows


def _notes(result: TuningResult) -> list[str]:
    """Say how far to trust the choice, and what it is.

    If no model answered, a warning has said so before.
    """
    costs, k = result.costs, result.k if result.timed else 1
    trust = sureness(result.expected_kept, result.out_of_coverage, k)
    of_model = [result.answered_by, "" if result.mode == "exhaustive" else trust, result.caveat]
    return [
        *(of_model if result.answered_by else ()),
        f"chosen: {result.chosen}: {result.why}",
        f"ranking {costs.rank_s:.2f} s, compiling {costs.compiled} {costs.compile_s:.2f} s, "
        f"timing {costs.timed} {costs.measure_s:.2f} s",
    ]
