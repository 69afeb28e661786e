"""Times configurations on a GPU, in a process that may die of them."""

import functools
from collections.abc import Sequence
from math import inf
from typing import Any

from costmodel.data.measurement import Batch, Measurement, Measurements, Runner
from costmodel.errors import host_errors
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import import_kernels
from costmodel.gemm.workload import Workload
from costmodel.hardware.installed import compiler_settings
from costmodel.launch.problem import GemmProblem
from costmodel.measure import timing
from costmodel.measure.protocol import TimingProtocol
from costmodel.measure.timing import Request
from costmodel.processes import Closable, Done, SupervisedWorker, TimedOut

_REHEARSAL = GemmProblem(Workload.dense(64, 64, 64))


class ChildRunner(Runner):
    """A runner with a child process that times, and may die of it.

    Args:
        worker: passes requests to the child; the request None has it give back the device's memory.
    """

    def __init__(self, worker: SupervisedWorker[Any, Measurements]):
        self._worker = worker

    def start(self) -> None:
        """Start the timing process now, in the background; else the first request does."""
        with host_errors():
            self._worker.start()

    def rest(self) -> None:
        """Have the timing process, if there is one, give back the device's memory."""
        if self._worker.running:
            with host_errors():
                self._worker.run(None)

    def _ask(self, request: object, count: int = 1) -> Measurements:
        """Time the ``count`` things of a request; if the child dies of one, none has a time."""
        with host_errors():
            outcome = self._worker.run(request)
        if isinstance(outcome, Done):
            return outcome.value
        if isinstance(outcome, TimedOut):
            return [Measurement("timeout", error=f"over {outcome.limit_s:g} s")] * count
        return [Measurement("crashed", error=outcome.how[:500])] * count


class DeviceRunner(ChildRunner, Closable):
    """Times configurations on one GPU; see :class:`TimingProtocol` for how.

    A kernel that hangs, or breaks the CUDA context, takes the timing process with it: its
    configuration is marked, and a fresh process goes on with the next one. The caller's process
    needs no CUDA context. If the process cannot be started, or the system refuses it its files,
    :class:`costmodel.errors.HostError` is raised.

    Args:
        device_index: the CUDA device, as torch counts them.
        protocol: how to time.
        idle_s: the timing process ends after this time without a request, and a new one answers the
            next request; None: it stays.
    """

    def __init__(
        self,
        device_index: int = 0,
        protocol: TimingProtocol | None = None,
        idle_s: float | None = None,
    ):
        self.protocol = protocol or TimingProtocol()
        super().__init__(
            SupervisedWorker(
                timing.answer,
                limit_s=self.protocol.limit_s,
                setup=functools.partial(
                    timing.start, self.protocol, device_index, _REHEARSAL, import_kernels
                ),
                idle_s=idle_s,
                settings=compiler_settings,
            )
        )

    def measure(self, workload: Workload, candidates: Batch, best_us: float = inf) -> Measurements:
        """Time candidates: one measurement each, in order.

        Args:
            best_us: a latency already known for the workload; a far slower one stops early.
        """
        result = []
        for candidate in candidates:
            artifact = candidate.artifact
            if artifact is not None and not artifact.ok:
                result.append(Measurement(artifact.status, error=artifact.error))
                continue
            measurement = self._ask(Request(GemmProblem(workload), candidate.config, best_us))[0]
            if measurement.ok:
                best_us = min(best_us, measurement.latency_us)
            result.append(measurement)
        return result

    def measure_torch(self, workload: Workload) -> Measurement:
        """Time ``torch.matmul`` (cuBLAS) by the same protocol."""
        return self._ask(Request(GemmProblem(workload), None))[0]

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> Measurements:
        """Time a few finalists in turn, so that drift affects all alike; None stands for torch."""
        if not configs:
            return []
        request = Request(GemmProblem(workload), None, compare=tuple(configs), rounds=rounds)
        result = self._ask(request, len(configs))
        if len(configs) > 1 and all(m.status in ("crashed", "timeout") for m in result):
            # One of them ended the process: timing each alone shows which.
            result = [self._ask(Request(GemmProblem(workload), config))[0] for config in configs]
        return result

    def close(self) -> None:
        """End the timing process."""
        self._worker.close()
