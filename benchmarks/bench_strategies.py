"""Strategies to choose a configuration, side by side: on square sizes and on the eval list.

Each strategy chooses. Then all choices and torch are timed again in turn, so that no strategy is
credited with the luckiest of its timings. Inductor's kernel is timed in turn with torch, in a
process of its own. ``tuning_s`` is the time that a strategy spends with empty caches: Triton's own
tuner compiles one configuration after the other, the other strategies by up to eight processes;
timing is the same for all. ``--replay`` answers from recorded timings instead: it needs no GPU, and
judges a choice by the timing that chose it. Its results have a file of their own,
``strategies-replay``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from common import (
    Results,
    Row,
    announce,
    at_exit_code,
    count,
    drawn,
    find_model,
    in_turn,
    note,
    parser,
    until,
    versions,
)
from peers import NvMatmulHeuristics
from strategy_inductor import answers
from strategy_reasons import why

from costmodel.compile.compiler import Artifact
from costmodel.data.candidates import CostModel
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Candidate, Measurement, Runner
from costmodel.errors import NoModel
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

# Strategy: the source of its proposals, and whether it times them to find the best.
STRATEGIES = {
    "autotune": ("autotune", True),
    "heuristic": ("heuristic", False),
    "ptx_top8": ("ptx", True),
    "nvmmh_top1": ("nvmmh", False),
    "nvmmh_top8": ("nvmmh", True),
    "model_top1": ("model", False),
    "model_top8": ("model", True),
}
Todo = tuple[str, Ranking, dict[str, list[GemmConfig]], float]
"""Group, ranking, proposals by source, and the seconds that ranking took."""

SHOWN = ("torch", *STRATEGIES, "inductor")
_PROCESSES = 8  # that compile at once
_INDUCTOR_S = 8.0  # for each product


def workloads(args: Any) -> list[tuple[str, Workload]]:
    """Return (group, workload): the square sizes, and those drawn from the eval list."""
    squares = [("square", Workload.dense(side, side, side)) for side in SQUARES]
    return squares + [("eval", w) for w in drawn(eval_workloads(), args)]


def proposals(
    ranking: Ranking, known: Sequence[GemmConfig] | None = None, peer: CostModel | None = None
) -> dict[str, list[GemmConfig]]:
    """Return the configurations that each source would try, in its order.

    Args:
        ranking: the model's, of the whole space.
        known: configurations that a replay has timings of; default: all.
        peer: nvMatmulHeuristics, if it is installed.
    """
    workload, device = ranking.workload, ranking.target.device
    listed = [c for c in AUTOTUNE if not why_illegal(c, workload, device)]
    return {
        "autotune": [c for c in listed if known is None or c in known],
        "heuristic": _first(ranking, RuleHeuristic()),
        "ptx": _first(ranking, PtxScore()),
        "nvmmh": _first(ranking, peer) if peer else [],
        "model": list(ranking.configs[:K]),
    }


def _first(ranking: Ranking, model: CostModel) -> list[GemmConfig]:
    cost = model.predict(ranking.workload, ranking.candidates, ranking.target)
    return [ranking.configs[i] for i in np.argsort(cost, kind="stable")[:K]]


def choose(
    proposed: Mapping[str, Sequence[GemmConfig]], measured: Mapping[GemmConfig, Measurement]
) -> dict[str, GemmConfig]:
    """Return the choice of each strategy: the fastest of its proposals, or the first that works.

    A strategy is left out if none of its proposals works.
    """
    chosen = {}
    for strategy, (source, timed) in STRATEGIES.items():
        works = [c for c in proposed[source] if measured[c].ok]
        if timed:
            works.sort(key=lambda c: measured[c].latency_us)
        if works:
            chosen[strategy] = works[0]
    return chosen


def costs_of(
    proposed: Mapping[str, Sequence[GemmConfig]],
    artifacts: Mapping[GemmConfig, Artifact],
    measured_s: Mapping[str, float],
    rank_s: float,
) -> dict[str, Row]:
    """Return what each strategy spends with empty caches; one without artifacts is left out."""
    found: dict[str, Row] = {}
    for strategy, (source, timed) in STRATEGIES.items():
        configs = list(proposed[source])[: None if timed else 1]
        made = {a.key: a.compile_s for a in map(artifacts.get, configs) if a is not None}
        if not configs or not made:
            continue
        side_by_side = max(max(made.values()), sum(made.values()) / _PROCESSES)
        compile_s = sum(made.values()) if source == "autotune" else side_by_side
        seconds = [compile_s, measured_s[source] * timed, rank_s * (source == "model")]
        timed_count = len(configs) if timed else 0
        found[strategy] = {
            "tuning_s": sum(seconds), "compiled": len(made), "timed": timed_count,
        }  # fmt: skip
    return found


def cell_of(workload: Workload, config: str, us: float, torch_us: float, cost: Row | None) -> Row:
    """Return the speed and the cost of a choice; ``improvement_pct`` is added later."""
    return {
        "config": config,
        "steady_ms": us / 1e3,
        "tflops": workload.flops() / us / 1e6,
        "gbs": workload.bytes() / us / 1e3,
        "speedup": torch_us / us,
        **(cost or {"tuning_s": None, "compiled": None, "timed": None}),
    }


def row_of(
    group: str,
    workload: Workload,
    chosen: Mapping[str, GemmConfig],
    final: Mapping[str, Measurement],
    costs: Mapping[str, Row],
) -> Row:
    """Make a workload's row: for each strategy its choice, and the choice's speed and cost."""
    torch_us = final["torch"].latency_us
    row: Row = {"group": group, "workload": f"{workload.m}x{workload.n}x{workload.k}"}
    for strategy in SHOWN:
        found, cost = final.get(strategy), costs.get(strategy)
        config = str(chosen.get(strategy, "torch"))
        row[strategy] = (
            cell_of(workload, config, found.latency_us, torch_us, cost)
            if found is not None and found.ok else None
        )  # fmt: skip
    return with_improvement(row)


def with_improvement(row: Row) -> Row:
    """Add to each choice how much faster it is than that of Triton's plain autotune."""
    plain = row["autotune"]
    for cell in filter(None, (row[strategy] for strategy in SHOWN)):
        gain = cell["speedup"] / plain["speedup"] - 1 if plain else None
        cell["improvement_pct"] = None if gain is None else 100 * gain
    return row


def with_inductor(row: Row, workload: Workload, found: Row) -> Row:
    """Add Inductor's choice. Its speed-up is over the torch that was timed in turn with it."""
    if not (found.get("us") and found.get("torch_us")):
        note(f"{row['workload']}: Inductor left out: {found.get('error', 'no timing')}")
        return row
    cost = {"tuning_s": found["tuning_s"], "compiled": None, "timed": None}
    cell = cell_of(workload, "Inductor's", found["us"], found["torch_us"], cost)
    return with_improvement(row | {"inductor": cell})


def overall(rows: Sequence[Row]) -> list[Row]:
    """One row for each strategy and group of workloads: geometric means and the worst."""
    result: list[Row] = []
    for group in dict.fromkeys(row["group"] for row in rows):
        for strategy in SHOWN:
            cells = [r[strategy] for r in rows if r["group"] == group and r[strategy]]
            gains = [c["improvement_pct"] for c in cells if c["improvement_pct"] is not None]
            spent = [c["tuning_s"] for c in cells if c["tuning_s"] is not None]
            timed = [c["timed"] for c in cells if c["timed"] is not None]
            if cells:
                speedups = [c["speedup"] for c in cells]
                result.append({
                    "group": "overall", "workloads": f"{group} ({len(cells)})",
                    "strategy": strategy,
                    "steady_ms_geomean": geomean([c["steady_ms"] for c in cells]),
                    "tflops_geomean": geomean([c["tflops"] for c in cells]),
                    "gbs_geomean": geomean([c["gbs"] for c in cells]),
                    "speedup_geomean": geomean(speedups), "speedup_worst": min(speedups),
                    "improvement_geomean_pct": _mean_gain_pct(gains),
                    "tuning_s_mean": sum(spent) / len(spent) if spent else None,
                    "timed_mean": sum(timed) / len(timed) if timed else None,
                })  # fmt: skip
    return result


def _mean_gain_pct(gains_pct: Sequence[float]) -> float | None:
    """The geometric mean of gains in percent."""
    return 100 * (geomean([1 + g / 100 for g in gains_pct]) - 1) if gains_pct else None


def summarize(rows: list[Row]) -> Row:
    """Speed-up over torch, geometric mean, by group and strategy."""
    found = overall([row for row in rows if row["group"] != "overall"])
    named = {f"{r['workloads'].split()[0]}_{r['strategy']}": r for r in found}
    summary = {f"{n}_speedup": r["speedup_geomean"] for n, r in named.items() if "_torch" not in n}
    return summary | {
        f"{n}_tuning_s": r["tuning_s_mean"] for n, r in named.items() if r["tuning_s_mean"]
    }


def run(
    todo: Sequence[Todo],
    runner: Runner,
    artifacts: Mapping[Specialization, Artifact],
    results: Results,
    deadline: float,
) -> list[tuple[Row, Workload]]:
    """Time the proposals, choose, and time the choices in turn; return one row a workload."""
    rows = []
    for group, ranking, proposed, rank_s in until(deadline, todo):
        workload = ranking.workload
        known = {c: artifacts.get(specialize(workload, c)) for p in proposed.values() for c in p}
        measured: dict[GemmConfig, Measurement] = {}
        measured_s: dict[str, float] = {}
        for source, configs in proposed.items():
            start = time.perf_counter()
            outcomes = runner.measure(workload, [Candidate(c, known[c]) for c in configs])
            measured_s[source] = time.perf_counter() - start
            # What two sources propose keeps its first timing, so that both judge it alike.
            measured = dict(zip(configs, outcomes, strict=True)) | measured
        chosen = choose(proposed, measured)
        final = in_turn(runner, workload, {"torch": None, **chosen})
        if not final["torch"].ok:
            note(f"{workload}: left out, torch {final['torch'].error}")
            continue
        made = {c: a for c, a in known.items() if a is not None}
        row = row_of(group, workload, chosen, final, costs_of(proposed, made, measured_s, rank_s))
        results.add(row | differences(ranking, chosen, row))
        rows.append((results.rows[-1], workload))
    return rows


def differences(ranking: Ranking, chosen: Mapping[str, GemmConfig], row: Row) -> Row:
    """Say which strategy's choice is the fastest, and why plain autotune's is slower."""
    ran = {s: row[s]["steady_ms"] for s in chosen if row[s]}
    best = min(ran, key=ran.__getitem__, default=None)
    plain = chosen.get("autotune")
    return {
        "best": best,
        "distinct": len({*chosen.values()}),
        "why": why(ranking, chosen[best], plain) if best and plain else None,
    }


def add_inductor(
    rows: Sequence[tuple[Row, Workload]], found: Iterator[Row], results: Results, deadline: float
) -> None:
    """Add Inductor's choices to the rows, as its answers come."""
    for (row, workload), answer in zip(until(deadline, rows), found, strict=False):
        row.update(with_inductor(row, workload, answer))
        results.add()


def known_peer(target: Target) -> CostModel | None:
    """Return nvMatmulHeuristics if it is installed and knows the device."""
    peer = NvMatmulHeuristics()
    try:
        peer.propose(Workload.dense(1024, 1024, 1024), target)
    except NoModel as error:
        note(f"left out: {error}")
        return None
    return peer


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--replay", action="store_true", help="answer from recorded timings")
    arguments.add_argument("--inductor-every", type=count, default=3,
                           help="Inductor on the squares and every n-th other")  # fmt: skip
    args = arguments.parse_args()
    replay = ReplayRunner(Dataset.open(recording("h100-sxm"))) if args.replay else None
    target = replay.target if replay else Target.current()
    model = find_model(args.model, target)
    recorded = set(replay.workloads()) if replay else None
    todo: list[Todo] = []
    peer = known_peer(target)
    for group, workload in workloads(args):
        if recorded is None or workload in recorded:
            known = replay.configs(workload) if replay else None
            start = time.perf_counter()
            ranking = rank(workload, target, model, configs=known)
            rank_s = time.perf_counter() - start
            todo.append((group, ranking, proposals(ranking, known, peer), rank_s))
    specs = {specialize(r.workload, c) for _, r, p, _ in todo for part in p.values() for c in part}
    timings = sum(len(part) for _, _, p, _ in todo for part in p.values())
    name = "strategies-replay" if replay else "strategies"
    software = versions(target, model=f"{model.name} {model.hash}")
    if replay is not None:  # name the torch that was timed
        software["torch"] = ", ".join(
            sorted({run.torch for run in replay.dataset.measurements().runs})
        )
    results = Results(name, target, args.results, software, summarize)
    if replay is not None:
        run(todo, replay, {}, results, float("inf"))
    else:
        from costmodel.measure.device import DeviceRunner

        asked = sum(g == "square" for g, *_ in todo) + len(todo) // args.inductor_every
        deadline = announce(
            args.budget_s, binaries=len(specs), timings=timings, comparisons=2 * len(todo),
            seconds=_INDUCTOR_S * asked,
        )  # fmt: skip
        artifacts = {a.spec: a for a in compile_for_device(list(specs), target)}
        with DeviceRunner() as runner:
            rows = run(todo, runner, artifacts, results, deadline)
        squares = [pair for pair in rows if pair[0]["group"] == "square"]
        others = [pair for pair in rows if pair[0]["group"] != "square"][:: args.inductor_every]
        ask = [*squares, *others]
        add_inductor(ask, answers([workload for _, workload in ask]), results, deadline)
    results.add(*overall(results.rows))
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
