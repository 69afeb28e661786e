"""The outcome of one timing, the run that it belongs to, and the interface of a runner."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, Literal, Protocol, runtime_checkable

from costmodel.compile.compiler import Artifact
from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target

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


@dataclass(frozen=True)
class Candidate:
    """A configuration of whatever is tuned, with its artifact if that is known."""

    config: Any
    artifact: Artifact | None = None


Batch = Sequence[Candidate]


@dataclass(frozen=True)
class Measurement:
    """Latency of one configuration on one workload, or why there is none.

    Attributes:
        status: ``ok`` has a latency; ``too_slow`` has one of a single launch; others have none.
        latency_us: median over the repeats, of a cold-cache launch with all its parts.
        p10_us, p90_us: quantiles over the repeats.
        repeats: timed repeats, each of several launches.
        clock_mhz: SM clock right after the timing; 0 where unknown.
        error: what went wrong; if the status is ``ok``, a reason to doubt the latency.
    """

    status: Status
    latency_us: float = nan
    p10_us: float = nan
    p90_us: float = nan
    repeats: int = 0
    clock_mhz: int = 0
    error: str = ""

    def __post_init__(self) -> None:
        if self.status in ("ok", "too_slow") and not 0 < (self.latency_us or 0) < inf:
            raise InvalidInput(
                f"a measurement that is {self.status}, with latency_us={self.latency_us!r}: "
                f"expected a time over 0; a failure has another status"
            )

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def least_us(self) -> float:
        """The latency minus its uncertainty, about two standard deviations of the median."""
        return self.latency_us - (self.p90_us - self.p10_us) / max(self.repeats, 1) ** 0.5

    @property
    def most_us(self) -> float:
        """The latency plus its uncertainty."""
        return 2 * self.latency_us - self.least_us

    @property
    def no_room(self) -> bool:
        """True if the card was too full to time anything."""
        return self.status == "out_of_resources" and self.error.startswith(NO_ROOM)


Measurements = list[Measurement]


@dataclass(frozen=True)
class TuningRecord:
    """One row of a dataset: workload + configuration + artifact + measurement."""

    workload: Workload
    config: GemmConfig
    artifact_key: str
    measurement: Measurement


Role = Literal["train", "eval", "anchor"]
"""Purpose of a row. ``anchor`` rows time again what is recorded already, later in the same run or
in another run. They show the noise, are kept once per run, and are never trained on."""


@dataclass(frozen=True)
class RunInfo:
    """One run of the collector on one card, recorded with each of its rows.

    Attributes:
        run_id: unique, such as a UUID.
        device_uuid: the card, as the driver names it.
        driver: version of the driver.
        torch: version of torch, whose cuBLAS is timed beside the kernels.
        started: UTC, ISO 8601.
        sm_clock_mhz, memory_clock_mhz: clocks that the card was set to; 0 where unknown.
    """

    run_id: str
    device_uuid: str
    driver: str
    torch: str
    started: str
    sm_clock_mhz: int = 0
    memory_clock_mhz: int = 0


@runtime_checkable
class Runner(Protocol):
    """Times configurations. Batch in, batch out: one measurement per candidate, in order.

    Attributes:
        needs_binaries: True if a candidate must be compiled before it is timed.
    """

    needs_binaries: bool = True

    @property
    def target(self) -> Target | None:
        """The target of its timings; None: the current device."""
        return None

    def configs(self, workload: Workload) -> Sequence[GemmConfig] | None:
        """The configurations that it can time for a workload; None: all that are legal."""
        return None

    def measure(self, workload: Workload, candidates: Batch, best_us: float = inf) -> Measurements:
        """Time candidates.

        Args:
            best_us: a latency already known for the workload; a candidate that is far slower may
                stop early.
        """
        ...

    def measure_torch(self, workload: Workload) -> Measurement:
        """Time ``torch.matmul`` (cuBLAS) on the same product by the same protocol."""
        return Measurement("launch_error", error="no library computes this")

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> Measurements:
        """Time a few configurations against each other; None stands for torch.

        A runner that can times them in turn, so that drift meets all alike; others one by one.
        """
        return [
            self.measure_torch(workload)
            if config is None
            else self.measure(workload, [Candidate(config)])[0]
            for config in configs
        ]

    def rest(self) -> None:
        """Give back the device memory that is held between two timings."""
        return
