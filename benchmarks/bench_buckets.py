"""What it costs that many m share a winner: the winner of a bucket against one tuned for each m.

The first m of a bucket is tuned, as by a service that happens to see it first, and so is each m in
between; the two winners are then timed in turn on the m in between. torch is a candidate, as in
``matmul``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import (
    CompiledAhead,
    Results,
    Row,
    announce,
    at_exit_code,
    find_model,
    in_turn,
    parser,
    until,
    us_or_none,
    versions,
)

from costmodel.buckets import Buckets
from costmodel.config import GemmConfig
from costmodel.metrics import geomean
from costmodel.models import XgbCostModel
from costmodel.runner.device import DeviceRunner
from costmodel.target import Target
from costmodel.tuner import tune
from costmodel.workload import Workload

PAIRS = ((4096, 4096), (6144, 4096), (1024, 8192))
# One m of each bucket; the widest against the tiles of a kernel are those past 128.
BUCKETS_OF = (33, 129, 513, 1025, 2049)
_NOISE_PCT = 5.0


def between(first: int, last: int) -> list[int]:
    """The m of a bucket that are asked about: one in the middle, and the last."""
    return sorted({(first + last) // 2, last} - {first})


def row_of(m: int, n: int, k: int, rows: tuple[int, int], us: dict[str, float | None]) -> Row:
    """One m in between: what its bucket's winner takes, and its own."""
    shared, own = us["shared"], us["own"]
    return {
        "workload": f"{m}x{n}x{k}", "bucket": f"{rows[0]}-{rows[1]}", "shared_us": shared,
        "own_us": own, "slower_pct": 100 * (shared / own - 1) if shared and own else None,
    }  # fmt: skip


def summarize(rows: list[Row]) -> Row:
    """Slower than tuned for itself, in percent: geometric mean and worst."""
    known = [row for row in rows if row["slower_pct"] is not None]
    worst = max(known, key=lambda row: row["slower_pct"], default=None)
    return {
        "workloads": len(rows),
        "not_timed": len(rows) - len(known),
        "slower_geomean_pct": (
            100 * (geomean([1 + row["slower_pct"] / 100 for row in known]) - 1) if known else None
        ),
        "slower_worst_pct": worst and worst["slower_pct"],
        "slower_worst_workload": worst and worst["workload"],
        "over_5_pct": sum(row["slower_pct"] > _NOISE_PCT for row in known),
    }


def measured(
    n: int, k: int, rows: tuple[int, int], target: Target, model: XgbCostModel,
    compile_: CompiledAhead,
) -> Iterator[Row]:  # fmt: skip
    """The rows of one bucket."""
    with DeviceRunner() as runner:

        def winner(m: int) -> GemmConfig | None:
            workload = Workload.dense(m, n, k)
            return tune(
                workload, runner=runner, target=target, model=model, compile_=compile_
            ).config

        shared = winner(rows[0])
        for m in between(*rows):
            final = in_turn(runner, Workload.dense(m, n, k), {"shared": shared, "own": winner(m)})
            yield row_of(m, n, k, rows, {name: us_or_none(x) for name, x in final.items()})


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=4, help="buckets an octave above 128")
    args = arguments.parse_args()
    target = Target.current()
    model = find_model(args.model, target)
    buckets = Buckets(args.steps)
    todo = [(n, k, buckets.of(m)) for n, k in PAIRS for m in BUCKETS_OF][:: args.every]
    tunings = 3 * len(todo)
    deadline = announce(
        args.budget_s, binaries=4 * tunings, timings=9 * tunings, comparisons=5 * tunings,
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
