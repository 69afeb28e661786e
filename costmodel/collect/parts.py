"""Estimates the cost of work, cuts it for machines that do not communicate, and joins the rows."""

from collections.abc import Sequence
from pathlib import Path

from costmodel.collect import Job, Jobs, anchor_workloads, merged_jobs, split_anchors
from costmodel.data.dataset import Dataset
from costmodel.gemm.specialize import kernel_hashes, specialize
from costmodel.hardware.target import Target
from costmodel.measure.protocol import TimingProtocol

# Means of the shipped recordings: seconds of one core; compacted bytes; latency in rooflines.
_COMPILE_S = 0.48
_ROW_BYTES, _BINARY_BYTES = 15, 73
_ROOFLINES = 4.2
_ROW_S = 5e-3  # to ask for a row, check and capture it: 360,000 rows took 40 minutes
_REPLAYS = 4.0  # few, since most configurations are much slower than the best and stop early


def recorded_jobs(recording: Dataset) -> list[Job]:
    """Return the work that a recording holds, without kernels that have changed since."""
    measured = recording.measured(kernel_hashes())
    to_judge = {*recording.workloads("eval")}
    return [
        Job(workload, tuple(sorted(configs, key=str)), "eval" if workload in to_judge else "train")
        for workload, configs in sorted(measured.items(), key=lambda item: item[0].key())
    ]


def part_of(jobs: Jobs, number: int, parts: int) -> list[Job]:
    """Return one part of several, counted from 1; every machine cuts the same list in the same way.

    A workload is never cut: its configurations are timed on one card, in one run. All parts begin
    with the same anchors, so that their cards can be compared.
    """
    anchors, work = split_anchors(merged_jobs(jobs))
    firsts = {job.workload: job.configs[:1] for job in work}
    found = (Job(workload, firsts[workload], "anchor") for workload in anchor_workloads(firsts))
    return [*(anchors or found), *work[number - 1 :: parts]]


def plan(jobs: Jobs, target: Target) -> dict[str, float]:
    """Estimate the cost of jobs: hours of one core, minutes of one GPU, bytes of the dataset.

    Binaries that are in Triton's cache already are counted too, though they cost nothing.
    """
    protocol, rows, gpu_s = TimingProtocol(), 0, 0.0
    jobs = split_anchors(jobs)[1]
    for job in jobs:
        us = _ROOFLINES * job.workload.roofline_us(target.device)
        rests = protocol.idle * (us > protocol.idle_from_us)
        row_s = _ROW_S + _REPLAYS * max(protocol.replay_us, us) * (1 + rests) / 1e6
        of_job = len(job.configs) + 1  # and torch
        rows += of_job
        gpu_s += of_job * row_s
    binaries = len({specialize(j.workload, c) for j in jobs for c in j.configs})
    return {
        "workloads": len(jobs), "rows": rows, "binaries": binaries,
        "compile_hours": binaries * _COMPILE_S / 3600, "gpu_minutes": gpu_s / 60,
        "bytes": rows * _ROW_BYTES + binaries * _BINARY_BYTES,
    }  # fmt: skip


def merge(path: Path, parts: Sequence[Path]) -> Dataset:
    """Write the rows of several datasets as one; merging again changes nothing.

    Raises:
        MixedData: they are of different devices, toolchains or protocols; nothing is written.
    """
    opened = [Dataset.open(part) for part in parts]
    first = opened[0]
    for part in opened:
        first.identity.require_same(part.identity, part.path)
    merged = Dataset.create(path, first.target, first.protocol)
    for part in opened:
        if part.path.resolve() != path.resolve():
            merged.absorb(part.path)
    merged.compact()
    return merged
