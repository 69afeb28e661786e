"""The outcome of timing a configuration, and the protocol of what times one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Literal, Protocol, runtime_checkable

from costmodel.compile.artifact import Artifact
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload

__all__ = [
    "NO_ROOM", "Candidate", "Compares", "Measurement", "Rests", "Runner", "Status", "TuningRecord",
    "in_turn", "says_no_room",
]  # fmt: skip

Status = Literal[
    "ok",
    "compile_error",  # Triton or ptxas refused
    "out_of_resources",  # the driver refused: shared memory, registers, threads
    "wrong_result",  # ran, and failed the correctness gate
    "launch_error",  # the driver refused the launch for another reason
    "crashed",  # the compiling or timing process died of it
    "timeout",  # killed at its time limit
    "too_slow",  # correct, but stopped early: far slower than the best so far
]


NO_ROOM = "no room in device memory to time anything"
"""Start of the ``error`` of a measurement that failed for want of device memory."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration, with its artifact if that is known."""

    config: GemmConfig
    artifact: Artifact | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """Latency of one configuration on one workload, or why there is none.

    Attributes:
        status: ``ok`` has a latency; ``too_slow`` has one of a single launch; others have none.
        latency_us: median over the repeats, of a cold-cache launch with all its parts.
        p10_us, p90_us: quantiles over the repeats.
        repeats: timed repeats, each of several launches.
        clock_mhz: SM clock beside the measurement, 0 where unknown.
        error: what went wrong.
    """

    status: Status
    latency_us: float = nan
    p10_us: float = nan
    p90_us: float = nan
    repeats: int = 0
    clock_mhz: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def no_room(self) -> bool:
        """True if the card was too full to time anything."""
        return says_no_room(self.status, self.error)


def says_no_room(status: str, error: str) -> bool:
    """Return :attr:`Measurement.no_room` for a row that is not an object."""
    return status == "out_of_resources" and error.startswith(NO_ROOM)


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """One row of a dataset: workload + configuration + artifact + measurement."""

    workload: Workload
    config: GemmConfig
    artifact_key: str
    measurement: Measurement


class Runner(Protocol):
    """Times configurations. Batch in, batch out: one measurement per candidate, in order."""

    def measure(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Measurement]: ...

    def measure_torch(self, workload: Workload) -> Measurement:
        """Time ``torch.matmul`` (cuBLAS) on the same product by the same protocol."""
        ...


@runtime_checkable
class Compares(Protocol):
    """A runner that can time a few in turn, against drift; None stands for torch."""

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> list[Measurement]: ...


@runtime_checkable
class Rests(Protocol):
    """A runner that holds device memory between two timings, and can give it back."""

    def rest(self) -> None: ...


def in_turn(
    runner: Runner, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
) -> list[Measurement]:
    """Time a few in turn if the runner can, else one by one. None is torch."""
    if isinstance(runner, Compares):
        return runner.compare(workload, configs, rounds)
    return [
        runner.measure_torch(workload)
        if config is None
        else runner.measure(workload, [Candidate(config)])[0]
        for config in configs
    ]
