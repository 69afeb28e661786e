"""Cuts work into parts, for machines that know nothing of each other, and joins what they made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from costmodel.collect import Job, merged_jobs
from costmodel.data.dataset import Dataset
from costmodel.data.measurement import Role
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import kernel_hashes
from costmodel.gemm.workload import Workload


def recorded_jobs(recording: Dataset) -> list[Job]:
    """Return the work that a recording holds, as far as its kernels are those of today."""
    measured = recording.measured(kernel_hashes())
    roles: dict[Workload, Role] = dict.fromkeys(recording.workloads("eval"), "eval")
    return [
        Job(workload, tuple(sorted(configs, key=str)), roles.get(workload, "train"))
        for workload, configs in sorted(measured.items(), key=lambda item: item[0].key())
    ]


def part_of(jobs: Sequence[Job], number: int, parts: int) -> list[Job]:
    """Return one part of several, the first is 1: every machine cuts the same list alike.

    A workload is never cut: its configurations are timed on one card, in one run.
    """
    return merged_jobs(jobs)[number - 1 :: parts]


def left_of(jobs: Sequence[Job], done: Mapping[Workload, Set[GemmConfig]]) -> list[Job]:
    """Return the jobs without what is recorded."""
    left = [
        replace(job, configs=tuple(c for c in job.configs if c not in done.get(job.workload, ())))
        for job in jobs
    ]
    return [job for job in left if job.configs]


def merge(path: Path, parts: Sequence[Path]) -> Dataset:
    """Write the rows of several datasets as one; merging again changes nothing.

    Raises:
        MixedData: they are of different devices, toolchains or protocols; nothing is written.
    """
    opened = [Dataset.open(part) for part in parts]
    for part in opened[1:]:
        opened[0].identity.require_same(part.identity, part.path)
    merged = Dataset.create(path, opened[0].target, opened[0].protocol)
    for part in opened:
        if part.path.resolve() != path.resolve():
            merged.absorb(part)
    merged.compact()
    return merged
