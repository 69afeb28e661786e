"""Record the reference dataset: the eval list exhaustively, and training workloads by sample.

Run it on the card that the dataset is named after, as often as it takes: what is recorded is kept.
Several may record into one folder at once, each on a card of its own and a part of the workloads.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import numpy as np

import costmodel
from costmodel.collect import Job, Progress, collect
from costmodel.dataset import Dataset
from costmodel.heldout import eval_workloads
from costmodel.runner.device import DeviceRunner
from costmodel.runner.identity import current_run
from costmodel.sampling import ModelSampler, RandomSampler, Sampler, training_workloads
from costmodel.space import SearchSpace
from costmodel.target import Target
from costmodel.workload import Workload


def jobs(args: argparse.Namespace, target: Target) -> list[Job]:
    """What the parts asked for consist of."""
    result: list[Job] = []
    if "eval" in args.parts:
        held_out = sorted(eval_workloads(args.dtypes[0]), key=Workload.flops, reverse=True)
        result += [Job(w, SearchSpace.of(w, target).configs, "eval") for w in held_out]
    if "train" in args.parts:
        rng = np.random.default_rng(args.seed)
        sampler = sampler_of(args)
        drawn = training_workloads(args.workloads, target, args.dtypes, args.seed)
        for workload in drawn:
            chosen = sampler.sample(SearchSpace.of(workload, target), rng)
            result.append(Job(workload, tuple(chosen)))
    part, parts = args.part
    return result[part - 1 :: parts]


def share(text: str) -> tuple[int, int]:
    """``I/N``: which of how many equal parts."""
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"{text}: expected I/N with I from 1 to N, such as 1/2")
    return part, parts


def sampler_of(args: argparse.Namespace) -> Sampler:
    """Led by an earlier model if one is named: most rows near the best, where it must be exact."""
    if args.led_by is None:
        return RandomSampler(args.configs)
    return ModelSampler(costmodel.load(args.led_by), args.configs, share=0.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["eval", "train"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", default=["float16"])
    parser.add_argument("--workloads", type=int, default=100)
    parser.add_argument("--part", type=share, default=(1, 1), metavar="I/N", help="of the jobs")
    parser.add_argument("--configs", type=int, default=300)
    parser.add_argument("--led-by", type=Path, metavar="MODEL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, help="compiling processes")
    parser.add_argument("--budget-s", type=float, default=540)
    args = parser.parse_args()
    begin = time.monotonic()
    # Asked to end, it still merges what it has recorded.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    target = Target.current()
    run = current_run()
    with DeviceRunner() as runner:
        dataset = Dataset.create(args.out, target, runner.protocol.to_dict())
        todo = jobs(args, target)
        print(f"{len(todo)} jobs, {sum(len(j.configs) for j in todo)} rows", file=sys.stderr)

        def show(job: Job, p: Progress) -> None:
            print(
                f"{time.monotonic() - begin:6.1f}s {p.jobs_done}/{p.jobs} {job.workload} "
                f"rows {p.rows} compiled {p.compiled} timing {p.timing_s:.1f}s "
                f"waited {p.waiting_s:.1f}s",
                file=sys.stderr,
                flush=True,
            )

        spent = time.monotonic() - begin
        try:
            progress = collect(
                todo,
                dataset,
                runner,
                run,
                n_jobs=args.jobs,
                budget_s=args.budget_s - spent,
                on_job=show,
            )
        finally:
            dataset.compact()
    seconds = time.monotonic() - begin
    print(json.dumps({
        "seconds": seconds, "jobs": progress.jobs_done, "rows": progress.rows,
        "compiled": progress.compiled, "compile_failures": progress.compile_failures,
        "rows_per_timing_s": progress.rows / max(progress.timing_s, 1e-9),
        "timing_s": progress.timing_s, "waiting_s": progress.waiting_s,
        "statuses": progress.statuses,
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
