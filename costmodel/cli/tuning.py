"""``costmodel rank``, ``tune`` and ``explain``: which configuration, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli import output
from costmodel.cli.output import AsJson, K, M, N

if TYPE_CHECKING:
    from costmodel.ranking import Ranking
    from costmodel.tuning_result import TuningResult
    from costmodel.workload import Workload

__all__ = ["COMMANDS"]

Model = Annotated[
    Path | None, typer.Option(help="Folder of a model; default: the one shipped for the target.")
]


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
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Rank the configurations of a product, the fastest first; needs no GPU, compiles nothing."""
    from costmodel.ranking import rank as rank_space

    workload = output.workload_of(m, n, k, dtype, a_layout, b_layout, out_dtype, tf32)
    ranking = rank_space(workload, output.find_target(target), model, top)
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
    target: Annotated[str, typer.Option(help="Whose recording to replay.")] = output.DEFAULT_TARGET,
    top: Annotated[int, typer.Option(min=1, help="How many working candidates to time.")] = 8,
    mode: Annotated[str, typer.Option(help="auto, predict, heuristic or exhaustive.")] = "auto",
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Rank, time the best few, keep the winner; without a GPU from recorded timings."""
    import costmodel

    workload = output.workload_of(m, n, k, dtype, a_layout, b_layout, out_dtype, tf32)
    if replay or data is not None or not _has_gpu():
        result = _replay(workload, data, target, model, top, mode)
    else:
        result = costmodel.tune(workload, model=model, k=top, mode=mode)
    if as_json:
        output.print_json(result.to_dict())
        return
    _print_result(result)


def _note_model(answer: Ranking | TuningResult) -> None:
    """Which head answered, and what is not as exact as it could be: a line each."""
    for line in (answer.head, answer.reservation):
        if answer.head and line:  # why a learned model did not answer was a warning
            output.note(line)


def _has_gpu() -> bool:
    from costmodel.errors import NoGpu
    from costmodel.target import Target

    try:
        Target.current()
    except NoGpu:
        return False
    return True


def _replay(
    workload: Workload, data: Path | None, target: str, model: Path | None, top: int, mode: str
) -> TuningResult:
    from costmodel.dataset import Dataset
    from costmodel.runner import ReplayRunner
    from costmodel.shipped import recording
    from costmodel.tuner import tune as choose

    path = data or recording(target)
    runner = ReplayRunner(Dataset.open(path))
    output.note(f"REPLAY: timings were recorded on {runner.target.device.product}, in {path}")
    return choose(workload, runner=runner, model=model, k=top, mode=mode)


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


def explain(
    m: M,
    n: N,
    k: K,
    place: Annotated[int, typer.Argument(min=1, help="As `costmodel rank` numbers them.")] = 1,
    dtype: output.Dtype = "float16",
    out_dtype: output.OutDtype = None,
    tf32: output.Tf32 = False,
    a_layout: output.ALayout = "row",
    b_layout: output.BLayout = "row",
    target: output.TargetName = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Why a configuration ranks where it does: what is known of it, beside the best one's."""
    from costmodel.errors import InvalidInput
    from costmodel.ranking import rank as rank_space

    workload = output.workload_of(m, n, k, dtype, a_layout, b_layout, out_dtype, tf32)
    ranking = rank_space(workload, output.find_target(target), model)
    if place > len(ranking):
        raise InvalidInput(f"place {place}: the space has {len(ranking)} distinct configurations")
    best, chosen = (_facts(ranking, row) for row in (0, place - 1))
    roofline_us = ranking.target.device.roofline_us(
        workload.flops(), workload.bytes(), workload.code.kind
    )
    if as_json:
        head = ranking.to_dict()
        del head["ranked"]
        output.print_json(
            {**head, "place": place, "of": len(ranking), "roofline_us": roofline_us,
             "explained": chosen, "best": best}
        )  # fmt: skip
        return
    rows = [
        [name, value, best_value]
        for part in ("config", "prediction", "binary", "on paper")
        for (name, value), best_value in zip(chosen[part].items(), best[part].values(), strict=True)
    ]
    title = f"{_title(ranking)}\nplace {place} of {len(ranking)}; roofline {roofline_us:.4g} us"
    output.print_table(title, ["", f"place {place}", "place 1"], rows)


def _title(ranking: Ranking) -> str:
    return f"{ranking.workload} on {ranking.target.device.name}, by {ranking.model}"


def _facts(ranking: Ranking, row: int) -> dict[str, dict[str, Any]]:
    """What the model saw of a configuration, in four parts; None where it is not known."""
    from costmodel.analytic import analytic_columns
    from costmodel.candidates import ARTIFACT_COLUMNS

    one = ranking.candidates.take([row])
    paper = analytic_columns(ranking.workload, one, ranking.target, binary=True)
    known = one.artifacts[0] is not None
    roofline_us = float(paper["roofline_us"][0])
    predicted_us = ranking.predicted_us(row)
    return {
        "config": ranking.configs[row].to_dict(),
        "prediction": {
            "cost": float(ranking.cost[row]),
            "predicted_us": predicted_us,
            "times_roofline": predicted_us / roofline_us if predicted_us else None,
        },
        "binary": {
            name: float(value) if known else None
            for name, value in zip(ARTIFACT_COLUMNS, one.artifact_columns[0], strict=True)
            if name in _SHOWN_COUNTS
        },
        "on paper": {name: float(column[0]) for name, column in paper.items()},
    }


_SHOWN_COUNTS = {
    "registers", "spill_bytes", "shared_bytes", "loop_instructions", "loop_mma_sync", "loop_wgmma",
    "loop_tcgen05_mma", "loop_cp_async", "loop_bulk_load", "loop_ldmatrix", "loop_barrier",
    "loop_mbarrier", "loop_int_arith", "all_instructions",
}  # fmt: skip


COMMANDS: dict[str, Callable[..., None]] = {
    "rank": rank, "tune": tune, "explain": explain,
}  # fmt: skip
