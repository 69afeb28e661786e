"""Speed of chosen configurations, relative to torch, on the eval list.

Each workload has three choices: the fastest known Triton configuration (the best few of the
exhaustively recorded rows and the model's choice, timed again in turn), the best of the model's
top 8, and the tuner's default (torch is a candidate).
The choices are frozen in a file. Then three fresh processes, one after the other, time the choices
and torch in turn. The best of the three runs counts, for torch too: cuBLAS itself may differ
between processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import (
    PART,
    CompiledAhead,
    Results,
    Row,
    announce,
    are_part,
    at_exit_code,
    drawn,
    find_model,
    in_turn,
    note,
    parser,
    seconds_left,
    until,
    us_or_none,
    versions,
)

from costmodel.data.candidates import CostModel
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Runner
from costmodel.errors import MissingData
from costmodel.evaluation.heldout import eval_list, eval_workloads
from costmodel.evaluation.metrics import geomean
from costmodel.files import read_json, write_json
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.tuning.ranking import rank
from costmodel.tuning.shipped import recording
from costmodel.tuning.tuner import search_of, tune

CHOICES = ("triton_best", "model_top8", "default")
RUNS = 3
K = 8
FINALISTS = 6
COMPUTE_BOUND = 295.0
"""FLOP a byte: arithmetic bounds a product of 16-bit types from here on. It is the H100's
989 TFLOP/s over 3.35 TB/s, by the data sheet."""


def recorded_finalists(dataset: Dataset | None, workload: Workload) -> list[GemmConfig]:
    """Return the fastest recorded configurations, best first; none if the workload has no rows.

    If bfloat16 is not recorded, those of float16 are taken: the same instructions run.
    """
    outcomes = dataset.recorded(workload) if dataset else {}
    if dataset and not outcomes:
        halves = replace(workload.code, dtype="float16", out_dtype="float16")
        outcomes = dataset.recorded(replace(workload, code=halves))
    works = [c for c, m in outcomes.items() if m.ok]
    return sorted(works, key=lambda c: outcomes[c].latency_us)[:FINALISTS]


def freeze(
    name: str,
    workload: Workload,
    finalists: Sequence[GemmConfig],
    runner: Runner,
    target: Target,
    model: CostModel,
    compile_: CompiledAhead,
) -> Row:
    """Choose for a workload; each choice is a configuration, "torch" or None, ready for JSON."""
    top = search_of(rank(workload, target, model, 4 * K), runner, compile_)
    top.run(K)
    top.remeasure_finalists()
    result = tune(workload, runner=runner, target=target, model=model, k=K, compile_=compile_)
    guided = top.choose().config
    # The least of over a thousand timings may be luck: the first few are timed again, in turn.
    known = {str(c): c for c in (*finalists, *([guided] if guided else []))}
    again = {name: m for name, m in in_turn(runner, workload, known).items() if m.ok}
    best = known[min(again, key=lambda name: again[name].latency_us)] if again else None
    return {
        "name": name,
        "workload": workload.to_dict(),
        "triton_best": best.to_dict() if best else None,
        "model_top8": guided.to_dict() if guided else None,
        "default": result.config.to_dict() if result.config else "torch",
    }


def measure(winners: Sequence[Row], runner: Runner, deadline: float) -> dict[str, Row]:
    """Time all choices and torch once, in turn for each workload; return us by workload."""
    found = {}
    for winner in until(deadline, winners):
        choices: dict[str, GemmConfig | None] = {"torch": None}
        for choice in CHOICES:
            if winner[choice] is not None:
                choices[choice] = _config(winner[choice])
        workload = Workload.from_dict(winner["workload"])
        final = in_turn(runner, workload, choices)
        found[workload.key()] = {name: us_or_none(m) for name, m in final.items()}
    return found


def row_of(winner: Row, runs: Sequence[Row]) -> Row:
    """Make a workload's row: speeds relative to torch (1 is equal), by the best of the runs.

    Args:
        runs: us of each run, as :func:`measure` gives them.
    """
    workload = Workload.from_dict(winner["workload"])
    torch_us = _best(runs, "torch")
    row: Row = {
        "name": winner["name"],
        "workload": f"{workload.m}x{workload.n}x{workload.k}",
        "torch_us": torch_us,
        "flops_per_byte": round(workload.flops() / workload.bytes(), 1),
    }
    for choice in CHOICES:
        us = _best(runs, choice)
        row[choice] = torch_us / us if torch_us and us else None
        config = winner[choice]
        row[f"{choice}_config"] = str(_config(config) or "torch") if config else None
    ratios = [run["torch"] / run["default"] for run in runs if run["torch"] and run["default"]]
    row["default_worst_run"] = min(ratios, default=None)
    row["runs"] = list(runs)
    return row


def summarize(rows: list[Row]) -> Row:
    """Geometric means and worst workloads; how often the default is a Triton kernel."""
    summary: Row = {"workloads": len(rows), "of_eval_list": len(eval_list())}
    for choice in ("triton_best", "model_top8", "default"):
        speeds = [row[choice] for row in rows if row[choice]]
        summary[f"{choice}_geomean"] = geomean(speeds) if speeds else None
        summary[f"{choice}_worst"] = min(speeds, default=None)
    compute_bound = [row for row in rows if row["flops_per_byte"] >= COMPUTE_BOUND]
    for choice in ("triton_best", "model_top8"):
        speeds = [row[choice] for row in compute_bound if row[choice]]
        summary[f"{choice}_compute_bound_geomean"] = geomean(speeds) if speeds else None
    summary["compute_bound_workloads"] = len(compute_bound)
    summary["default_worst_run"] = min(
        (row["default_worst_run"] for row in rows if row["default_worst_run"]), default=None
    )
    chosen = [row for row in rows if row["default_config"] != "torch"]
    summary["triton_chosen_share"] = len(chosen) / len(rows)
    for choice in CHOICES:
        summary[f"{choice}_five_worst"] = five_worst(rows, choice)
    summary["not_timed"] = sum(row["default"] is None for row in rows)
    return summary


def five_worst(rows: Sequence[Row], choice: str) -> str:
    """The slowest workloads by name, the slowest first."""
    slowest = sorted((row for row in rows if row[choice]), key=lambda row: row[choice])[:5]
    return ", ".join(f"{row['workload']} {row[choice]:.3f}" for row in slowest)


def _config(value: Any) -> GemmConfig | None:
    return None if value == "torch" else GemmConfig.from_dict(value)


def _best(runs: Sequence[Row], name: str) -> float | None:
    """The least us of a choice; None unless it worked in every run."""
    times = [run.get(name) for run in runs]
    return min(times) if times and all(times) else None  # type: ignore[type-var]


def freeze_all(args: argparse.Namespace, target: Target, deadline: float) -> Row:
    """Choose for every workload, in this process."""
    from costmodel.measure.device import DeviceRunner

    model = find_model(args.model, target)
    try:
        dataset = Dataset.open(args.data or recording(target.device.name, sample=False))
    except MissingData as error:
        note(f"no recorded best: {error}")
        dataset = None
    named = zip((e.name for e in eval_list()), eval_workloads(args.dtype), strict=True)
    todo = [(n, w, recorded_finalists(dataset, w)) for n, w in drawn(list(named), args)]
    compile_ = CompiledAhead()
    ahead = [
        specialize(w, c)
        for _, w, finalists in todo
        for c in (*rank(w, target, model, K).configs, *finalists)
    ]
    note(f"compiling {len(set(ahead))} binaries")
    compile_(ahead, target)
    with DeviceRunner() as runner:
        winners = [
            freeze(name, workload, finalists, runner, target, model, compile_)
            for name, workload, finalists in until(deadline, todo)
        ]
    return {"model": f"{model.name} {model.hash}", "dtype": args.dtype, "winners": winners}


def measure_all(frozen: Path, out: Path, budget_s: float) -> None:
    """Make one run; this process must be a fresh one."""
    from costmodel.measure.device import DeviceRunner

    deadline = announce(budget_s)
    with DeviceRunner() as runner:
        write_json(out, measure(read_json(frozen, dict[str, Any])["winners"], runner, deadline))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    arguments.add_argument("--data", type=Path, help="dataset; default: the target's")
    arguments.add_argument("--winners", type=Path, help="file of frozen winners; taken if there")
    arguments.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.measure:
        measure_all(args.winners, args.measure, args.budget_s)
        return
    target = Target.current()
    count = len(drawn(eval_list(), args))
    deadline = announce(
        args.budget_s, binaries=(K + FINALISTS) * count, timings=2 * K * count,
        comparisons=(3 + RUNS) * count, seconds=RUNS * 10,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        frozen = args.winners or Path(folder) / "winners.json"
        if not frozen.exists():
            # Choosing gets half of the time: a winner that is not measured again says nothing.
            write_json(frozen, freeze_all(args, target, deadline - args.budget_s / 2))
        choices = json.loads(frozen.read_text())
        software = versions(target, model=choices["model"])
        runs: list[dict[str, Row]] = []
        for i in range(RUNS):
            out = Path(folder) / f"run-{i}.json"
            budget_s = max(seconds_left(deadline) / (RUNS - i), 1.0)
            command = [sys.executable, __file__, "--winners", str(frozen), "--measure", str(out)]
            done = subprocess.run([*command, "--budget-s", str(budget_s)], check=False)
            if done.returncode == PART:
                are_part()
            else:
                done.check_returncode()
            runs.append(read_json(out, dict[str, Any]))
            results = Results(
                f"kernels-{choices['dtype']}", target, args.results, software, summarize
            )
            results.add(*rows_of(choices["winners"], runs))
    results.show()


def rows_of(winners: Sequence[Row], runs: Sequence[dict[str, Row]]) -> list[Row]:
    """A row for each workload that is in every run."""
    keys = [Workload.from_dict(winner["workload"]).key() for winner in winners]
    return [
        row_of(winner, [run[key] for run in runs])
        for winner, key in zip(winners, keys, strict=True)
        if all(key in run for run in runs)
    ]


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
