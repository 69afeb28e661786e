"""Draw what the reference datasets consist of, as lists of work for ``costmodel collect``.

``eval``: the held-out list, exhaustively. ``train``: workloads to learn from; an earlier model
chooses most configurations. ``transfer``: work for a new card, enough to see what a model of the
recorded card knows of it: the held-out list, with what may be the best of each workload, and some
training workloads. Several lists may be written, one for each card that records. Lists share no
binaries if that can be avoided.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import at_exit_code, count

import costmodel
from costmodel.collect import Job
from costmodel.collect.sampling import (
    ModelSampler,
    RandomSampler,
    by_code,
    training_workloads,
    write_worklist,
)
from costmodel.data.dataset import Dataset
from costmodel.data.shards import Identity, require_file_place
from costmodel.errors import InvalidInput
from costmodel.evaluation.heldout import eval_workloads
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.workload import Workload, kind_options
from costmodel.hardware.target import Target
from costmodel.measure.protocol import TimingProtocol
from costmodel.tuning.shipped import recording

_NEAR_BEST = 1.1


def eval_jobs(args: argparse.Namespace, target: Target) -> list[Job]:
    """The held-out list, all configurations, the longest first."""
    held_out = sorted(eval_workloads(args.dtypes[0]), key=Workload.flops, reverse=True)
    return [Job(w, SearchSpace.of(w, target).configs, "eval") for w in held_out]


def train_jobs(args: argparse.Namespace, target: Target) -> list[Job]:
    rng = np.random.default_rng(args.seed)
    sampler = sampler_of(args)
    drawn = training_workloads(args.workloads, target, args.dtypes, args.seed)
    return [Job(w, tuple(sampler.sample(SearchSpace.of(w, target), rng))) for w in drawn]


def transfer_jobs(args: argparse.Namespace, target: Target) -> list[Job]:
    """Take near-best recorded rows of the held-out list, and a sample led by a model of all."""
    rng = np.random.default_rng(args.seed)
    sampler = sampler_of(args)
    recorded = Dataset.open(args.data or recording("h100-sxm", sample=False))
    jobs = []
    trained = [w for w in recorded.workloads("train") if w.dtype == args.dtypes[0]]
    trained = sorted((w for w in trained if w.code.b_layout == "row"), key=Workload.key)
    if args.workloads > len(trained):
        raise InvalidInput(
            f"--workloads {args.workloads}: {recorded.path} has {len(trained)} training workloads "
            f"of {args.dtypes[0]} with a row-major B: expected at most so many"
        )
    some = [trained[i] for i in rng.choice(len(trained), args.workloads, replace=False)]
    for workload in (*eval_workloads(args.dtypes[0]), *some):
        space = SearchSpace.of(workload, target)
        chosen: dict[GemmConfig, None] = {}
        if workload not in some:
            chosen |= dict.fromkeys(near_best(recorded, workload))
        chosen |= dict.fromkeys(sampler.sample(space, rng))
        legal = set(space.configs)
        jobs.append(
            Job(
                workload,
                tuple(c for c in chosen if c in legal),
                "train" if workload in some else "eval",
            )
        )
    return jobs


def near_best(recorded: Dataset, workload: Workload) -> list[GemmConfig]:
    ok = {c: m.latency_us for c, m in recorded.recorded(workload).items() if m.ok}
    limit = _NEAR_BEST * min(ok.values(), default=0.0)
    return sorted((c for c in ok if ok[c] <= limit), key=ok.__getitem__)[:60]


def sampler_of(args: argparse.Namespace) -> RandomSampler | ModelSampler:
    """Return a sampler; an earlier model, if named, leads it to rows near the best."""
    if args.led_by is None:
        return RandomSampler(args.configs)
    return ModelSampler(costmodel.load(args.led_by), args.configs)


def shares(jobs: Sequence[Job], count: int) -> list[list[Job]]:
    """Split jobs into about equal shares; each class of code is in one, unless it is too large."""
    weight = Counter[object]()
    for job in jobs:
        weight[job.workload.code] += len(job.configs)
    fair = sum(weight.values()) / count
    result: list[list[Job]] = [[] for _ in range(count)]
    for code, rows in weight.most_common():
        of_code = [job for job in jobs if job.workload.code == code]
        parts = count if rows > 1.2 * fair else 1
        for part in range(parts):
            smallest = min(result, key=lambda share: sum(len(j.configs) for j in share))
            smallest += of_code[part::parts]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = {"eval": eval_jobs, "train": train_jobs, "transfer": transfer_jobs}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--out", type=Path, nargs="+", required=True, help="one file a card")
    parser.add_argument("--target", default="h100-sxm")
    parser.add_argument("--data", type=Path, help="dataset; default: the checkout's of the H100")
    parser.add_argument("--dtypes", nargs="+", default=["float16"])
    parser.add_argument("--workloads", type=count, default=100)
    parser.add_argument("--configs", type=count, default=240)
    parser.add_argument("--led-by", type=Path, metavar="MODEL")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    target = Target.named(args.target)
    for dtype in args.dtypes:  # a wrong name is an error before anything is drawn
        kind_options(dtype)
    for path in args.out:
        require_file_place(path)
    jobs = kinds[args.kind](args, target)
    identity = Identity(target, TimingProtocol().to_dict())
    for path, share in zip(args.out, shares(jobs, len(args.out)), strict=True):
        write_worklist(path, by_code(share), identity)
        print(f"{path}: {len(share)} workloads, {sum(len(j.configs) for j in share)} rows")


if __name__ == "__main__":
    sys.exit(at_exit_code(main))
