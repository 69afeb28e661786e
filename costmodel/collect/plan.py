"""Says what a collection will take, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.collect import Job
from costmodel.gemm.specialize import specialize
from costmodel.hardware.target import Target
from costmodel.measure.protocol import TimingProtocol

# Means of the shipped recordings: seconds of one core, bytes on disk once compacted, latency.
_COMPILE_S = 0.48
_ROW_BYTES, _BINARY_BYTES = 15, 73
_ROOFLINES = 4.2
_ROW_S = 2.2e-3  # to ask, to check the result and to capture
_REPLAYS = 4.0  # most configurations are much slower than the best, and stop early


@dataclass(frozen=True, slots=True)
class Plan:
    """The work that is left, and an estimate of its cost.

    Attributes:
        compile_hours: of one core; binaries that Triton's cache holds cost nothing.
        gpu_minutes: of one GPU.
        bytes: of the dataset once it is compacted.
    """

    workloads: int
    rows: int
    binaries: int
    compile_hours: float
    gpu_minutes: float
    bytes: int

    @classmethod
    def of(cls, jobs: Sequence[Job], target: Target) -> Plan:
        """Estimate what jobs take."""
        protocol = TimingProtocol()
        rows, gpu_s = 0, 0.0
        for job in jobs:
            us = _ROOFLINES * job.workload.roofline_us(target.device)
            replay_us = max(protocol.replay_us, us) * (
                1 + protocol.idle * (us > protocol.idle_from_us)
            )
            rows += len(job.configs) + 1  # and torch
            gpu_s += (len(job.configs) + 1) * (_ROW_S + _REPLAYS * replay_us / 1e6)
        binaries = len({specialize(j.workload, c) for j in jobs for c in j.configs})
        size = rows * _ROW_BYTES + binaries * _BINARY_BYTES
        return cls(len(jobs), rows, binaries, binaries * _COMPILE_S / 3600, gpu_s / 60, size)
