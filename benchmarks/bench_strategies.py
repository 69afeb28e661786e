"""The ways to choose a configuration, side by side: on square sizes and on the eval list.

Each strategy chooses; what was chosen is then timed again, all in turn and torch among them, so
that no strategy is credited with the luckiest of its timings. ``--replay`` answers from recorded
timings instead (no GPU; there a choice is judged by the timing it was chosen by) and is written
apart, as ``strategies-replay``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np
from common import (
    Results,
    Row,
    announce,
    at_exit_code,
    find_model,
    in_turn,
    note,
    parser,
    until,
    versions,
)

from costmodel.compile.compiler import Artifact
from costmodel.data.candidates import CostModel
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Candidate, Measurement, Runner
from costmodel.evaluation.heldout import eval_workloads
from costmodel.evaluation.metrics import geomean
from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.space import why_illegal
from costmodel.gemm.specialize import compile_for_device, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.replay import ReplayRunner
from costmodel.models import PtxScore, RuleHeuristic
from costmodel.tuning.ranking import Ranking, rank
from costmodel.tuning.shipped import recording

SQUARES = (256, 512, 1024, 2048, 4096)
K = 8

# The list of Triton's matmul tutorial (python/tutorials/03-matrix-multiplication.py, its
# get_cuda_autotune_config), unchanged: BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, stages, warps.
TUTORIAL = (
    (128, 256, 64, 8, 3, 8), (64, 256, 32, 8, 4, 4), (128, 128, 32, 8, 4, 4),
    (128, 64, 32, 8, 4, 4), (64, 128, 32, 8, 4, 4), (128, 32, 32, 8, 4, 4),
    (64, 32, 32, 8, 5, 2), (32, 64, 32, 8, 5, 2), (128, 256, 128, 8, 3, 8),
    (256, 128, 128, 8, 3, 8), (256, 64, 128, 8, 4, 4), (64, 256, 128, 8, 4, 4),
    (128, 128, 128, 8, 4, 4), (128, 64, 64, 8, 4, 4), (64, 128, 64, 8, 4, 4),
    (128, 32, 64, 8, 4, 4),
)  # fmt: skip
AUTOTUNE = tuple(
    GemmConfig("pointer", m, n, k, warps, stages, group_m=group)
    for m, n, k, group, stages, warps in TUTORIAL
)

# Strategy: whose proposals, and whether the best of them is found by timing.
STRATEGIES = {
    "autotune": ("autotune", True),
    "heuristic": ("heuristic", False),
    "ptx_top8": ("ptx", True),
    "model_top1": ("model", False),
    "model_top8": ("model", True),
}


def workloads(every: int) -> list[tuple[str, Workload]]:
    """(group, workload): the square sizes, and every n-th of the eval list."""
    squares = [("square", Workload.dense(side, side, side)) for side in SQUARES]
    return squares + [("eval", w) for w in eval_workloads()[::every]]


def proposals(
    ranking: Ranking, known: Sequence[GemmConfig] | None = None
) -> dict[str, list[GemmConfig]]:
    """The configurations that each source would try, in its order.

    Args:
        ranking: the model's, of the whole space.
        known: all that can be answered for (a replay's); default: anything.
    """
    workload, device = ranking.workload, ranking.target.device
    listed = [c for c in AUTOTUNE if not why_illegal(c, workload, device)]
    return {
        "autotune": [c for c in listed if known is None or c in known],
        "heuristic": _first(ranking, RuleHeuristic()),
        "ptx": _first(ranking, PtxScore()),
        "model": list(ranking.configs[:K]),
    }


def _first(ranking: Ranking, model: CostModel) -> list[GemmConfig]:
    cost = model.predict(ranking.workload, ranking.candidates, ranking.target)
    return [ranking.configs[i] for i in np.argsort(cost, kind="stable")[:K]]


def choose(
    proposed: Mapping[str, Sequence[GemmConfig]], measured: Mapping[GemmConfig, Measurement]
) -> dict[str, GemmConfig]:
    """What each strategy ends up with: the fastest of its proposals, or the first that works.

    A strategy none of whose proposals works is not there.
    """
    chosen = {}
    for strategy, (source, timed) in STRATEGIES.items():
        works = [c for c in proposed[source] if measured[c].ok]
        if timed:
            works.sort(key=lambda c: measured[c].latency_us)
        if works:
            chosen[strategy] = works[0]
    return chosen


def row_of(
    group: str,
    workload: Workload,
    chosen: Mapping[str, GemmConfig],
    final: Mapping[str, Measurement],
) -> Row:
    """A workload's row: under each strategy what it chose and how that ran."""
    torch_us = final["torch"].latency_us
    plain = final.get("autotune")
    row: Row = {"group": group, "workload": f"{workload.m}x{workload.n}x{workload.k}"}
    for strategy in ("torch", *STRATEGIES):
        measurement = final.get(strategy)
        if measurement is None or not measurement.ok:
            row[strategy] = None
            continue
        us = measurement.latency_us
        row[strategy] = {
            "config": str(chosen.get(strategy, "torch")),
            "steady_ms": us / 1e3,
            "tflops": workload.flops() / us / 1e6,
            "speedup": torch_us / us,
            "improvement_pct": 100 * (plain.latency_us / us - 1) if plain and plain.ok else None,
        }
    return row


def overall(rows: Sequence[Row]) -> list[Row]:
    """One row for each strategy and group of workloads: geometric means and the worst."""
    result: list[Row] = []
    for group in dict.fromkeys(row["group"] for row in rows):
        for strategy in ("torch", *STRATEGIES):
            cells = [r[strategy] for r in rows if r["group"] == group and r[strategy]]
            gains = [c["improvement_pct"] for c in cells if c["improvement_pct"] is not None]
            if cells:
                speedups = [c["speedup"] for c in cells]
                result.append({
                    "group": "overall", "workloads": f"{group} ({len(cells)})",
                    "strategy": strategy,
                    "tflops_geomean": geomean([c["tflops"] for c in cells]),
                    "speedup_geomean": geomean(speedups), "speedup_worst": min(speedups),
                    "improvement_geomean_pct": _mean_gain_pct(gains),
                })  # fmt: skip
    return result


def _mean_gain_pct(gains_pct: Sequence[float]) -> float | None:
    """The geometric mean of gains in percent."""
    return 100 * (geomean([1 + g / 100 for g in gains_pct]) - 1) if gains_pct else None


def summarize(rows: list[Row]) -> Row:
    """Speed-up over torch, geometric mean, by group and strategy."""
    found = overall([row for row in rows if row["group"] != "overall"])
    return {
        f"{row['workloads'].split()[0]}_{row['strategy']}_speedup": row["speedup_geomean"]
        for row in found
        if row["strategy"] != "torch"
    }


def run(
    todo: Sequence[tuple[str, Ranking, dict[str, list[GemmConfig]]]],
    runner: Runner,
    artifacts: Mapping[Specialization, Artifact],
    results: Results,
    deadline: float,
) -> None:
    """Time, choose, time in turn; one row a workload."""
    for group, ranking, proposed in until(deadline, todo):
        configs = list(dict.fromkeys(c for part in proposed.values() for c in part))
        specs = [specialize(ranking.workload, c) for c in configs]
        candidates = [Candidate(c, artifacts.get(s)) for c, s in zip(configs, specs, strict=True)]
        outcomes = runner.measure(ranking.workload, candidates)
        chosen = choose(proposed, dict(zip(configs, outcomes, strict=True)))
        final = in_turn(runner, ranking.workload, {"torch": None, **chosen})
        if final["torch"].ok:
            results.add(row_of(group, ranking.workload, chosen, final))
        else:
            note(f"{ranking.workload}: left out, torch {final['torch'].error}")
    if results.rows:
        results.add(*overall(results.rows))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--replay", action="store_true", help="answer from recorded timings")
    args = arguments.parse_args()
    replay = ReplayRunner(Dataset.open(recording("h100-sxm"))) if args.replay else None
    target = replay.target if replay else Target.current()
    model = find_model(args.model, target)
    recorded = set(replay.workloads()) if replay else None
    todo = []
    for group, workload in workloads(args.every):
        if recorded is None or workload in recorded:
            known = replay.configs(workload) if replay else None
            ranking = rank(workload, target, model, configs=known)
            todo.append((group, ranking, proposals(ranking, known)))
    specs = {specialize(r.workload, c) for _, r, p in todo for part in p.values() for c in part}
    timings = sum(len(part) for _, _, p in todo for part in p.values())
    name = "strategies-replay" if replay else "strategies"
    software = versions(target, model=f"{model.name} {model.hash}")
    if replay is not None:  # the torch that was timed
        software["torch"] = ", ".join(
            sorted({run.torch for run in replay.dataset.measurements().runs})
        )
    results = Results(name, target, args.results, software, summarize)
    if replay is not None:
        run(todo, replay, {}, results, float("inf"))
    else:
        from costmodel.measure.device import DeviceRunner

        deadline = announce(
            args.budget_s, binaries=len(specs), timings=timings, comparisons=len(todo)
        )
        artifacts = {a.spec: a for a in compile_for_device(list(specs), target)}
        with DeviceRunner() as runner:
            run(todo, runner, artifacts, results, deadline)
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
