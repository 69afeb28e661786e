"""Cost of sharing a tuning among many m: a bucket's choice for an m against one tuned for it.

The first m of a bucket is tuned, as in a service that happens to see it first. The others get what
is then timed once for each part of the bucket. Two m in between, at which nothing was timed, are
tuned for themselves. At each of the two, four choices are timed in turn: its own winner, the
bucket's choice by timings, the bucket's choice by prediction alone, and the winner of the first m.
torch is a candidate, as in ``matmul``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean

from common import (
    CompiledAhead,
    Results,
    Row,
    announce,
    at_exit_code,
    drawn,
    find_model,
    in_turn,
    parser,
    until,
    us_or_none,
    versions,
)

from costmodel.evaluation.metrics import geomean
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.device import DeviceRunner
from costmodel.models import XgbCostModel
from costmodel.tuning.planning import plan_by_prediction, plan_by_timing
from costmodel.tuning.ranking import Answering
from costmodel.tuning.tuner import tune_by
from costmodel.tuning.tuning_key import Buckets
from costmodel.tuning.tuning_result import TuningResult

PAIRS = ((4096, 4096), (6144, 4096), (1024, 8192))
# One m of each bucket. Buckets past 128 are the widest, counted in tiles of a kernel.
BUCKETS_OF = (33, 129, 513, 1025, 2049)
_NOISE_PCT = 5.0
# The name of a column, by the choice that it is of.
_SLOWER = {
    "shared": "slower_pct", "predicted": "predicted_slower_pct", "first": "first_slower_pct",
}  # fmt: skip


def between(first: int, last: int) -> list[int]:
    """Return the m of a bucket to measure: in two parts of it, half-way between the timed m."""
    size = last - first + 1
    parts = ((first + i * size // 8, first - 1 + (i + 1) * size // 8) for i in (2, 6))
    return [(begin + end - 1) // 2 for begin, end in parts if begin < end - 2]


def row_of(
    m: int,
    n: int,
    k: int,
    rows: tuple[int, int],
    chosen: Mapping[str, GemmConfig | None],
    us: Mapping[str, float | None],
) -> Row:
    """Return the row of one m in between: each choice, and its time."""
    row: Row = {"workload": f"{m}x{n}x{k}", "bucket": f"{rows[0]}-{rows[1]}"}
    for name, config in chosen.items():
        row |= {name: str(config or "torch"), f"{name}_us": us[name]}
    own = us["own"]
    for name, column in _SLOWER.items():
        took = us[name]
        row[column] = 100 * (took / own - 1) if took and own else None
    return row


def summarize(rows: list[Row]) -> Row:
    """Say how much slower than its own winner an m is, in percent: geometric mean and worst."""
    known = [row for row in rows if None not in [row[column] for column in _SLOWER.values()]]
    worst = max(known, key=lambda row: row["slower_pct"], default=None)
    return {
        "workloads": len(rows),
        "not_timed": len(rows) - len(known),
        **_summary([row["slower_pct"] for row in known]),
        "slower_worst_pct": worst and worst["slower_pct"],
        "slower_worst_workload": worst and worst["workload"],
        **{
            f"{name}_{what}": value
            for name in ("predicted", "first")
            for what, value in _summary([row[_SLOWER[name]] for row in known]).items()
        },
        "parts_s": mean([row["parts_s"] for row in rows]),
        "tuning_s": mean([row["tuning_s"] for row in rows]),
    }


def _summary(slower_pct: Sequence[float]) -> Row:
    mean_pct = 100 * (geomean([1 + x / 100 for x in slower_pct]) - 1) if slower_pct else None
    return {"slower_geomean_pct": mean_pct, "over_5_pct": sum(x > _NOISE_PCT for x in slower_pct)}


def measured(
    n: int, k: int, rows: tuple[int, int], target: Target, model: XgbCostModel,
    compile_: CompiledAhead,
) -> Iterator[Row]:  # fmt: skip
    """Yield the rows of one bucket."""
    with DeviceRunner() as runner:

        def tuned(m: int, last: int) -> TuningResult:
            """Tune one m, among what is legal for all m up to ``last``."""
            workload, largest = Workload.dense(m, n, k), Workload.dense(last, n, k)
            return tune_by(
                Answering(model), workload, target, runner=runner, k=8, mode="auto",
                include_torch=True, compile_=compile_, largest=largest,
            )  # fmt: skip

        first = tuned(*rows)
        plan, costs = plan_by_timing(first, rows, model, runner, compile_)
        timed = replace(first, plan=plan)
        predicted = replace(first, plan=plan_by_prediction(first, rows, model))
        for m in between(*rows):
            chosen = {
                "own": tuned(m, m).config, "shared": timed.config_at(m),
                "predicted": predicted.config_at(m), "first": first.config,
            }  # fmt: skip
            final = in_turn(runner, Workload.dense(m, n, k), chosen)
            us = {name: us_or_none(x) for name, x in final.items()}
            seconds = {"tuning_s": first.costs.total_s, "parts_s": costs.total_s}
            yield row_of(m, n, k, rows, chosen, us) | seconds | {"parts_new": costs.compiled}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=4, help="buckets an octave above 128")
    args = arguments.parse_args()
    target = Target.current()
    model = find_model(args.model, target)
    buckets = Buckets(args.steps)
    todo = drawn([(n, k, buckets.of(m)) for n, k in PAIRS for m in BUCKETS_OF], args)
    tunings = 3 * len(todo)
    deadline = announce(
        args.budget_s, binaries=4 * tunings, timings=25 * tunings, comparisons=5 * tunings,
        seconds=6 * len(todo),
    )  # fmt: skip
    software = versions(target, model=f"{model.name} {model.hash}", steps=str(args.steps))
    results = Results("buckets", target, args.results, software, summarize)
    compile_ = CompiledAhead()
    for n, k, rows in until(deadline, todo):
        results.add(*measured(n, k, rows, target, model, compile_))
    results.show()


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
