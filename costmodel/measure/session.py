"""Device memory, operands and the reference of one workload at a time; times against them.

The procedure is told in :class:`costmodel.measure.protocol.TimingProtocol`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from costmodel.data.measurement import Measurement
from costmodel.errors import CompileError, LaunchError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.kernel import load
from costmodel.launch.plan import Plan
from costmodel.launch.repacking import Repack
from costmodel.launch.workspace import Workspace
from costmodel.measure.clock import clock_reader
from costmodel.measure.operands import OperandPool, Operands, set_count
from costmodel.measure.protocol import TimingProtocol
from costmodel.measure.reference import reference_product, torch_launcher

if TYPE_CHECKING:
    import torch

__all__ = ["Launch", "Session"]

Launch = Callable[[Operands], None]
"""Queues a product on the current stream."""

_MARGIN_BYTES = 512 * 2**20  # of device memory, which is left to the program that waits
_KEPT_BYTES = 2**30  # between workloads: a program may come to need what is held here
_CHECK_BLOCK = 4096
_BUSY_CYCLES = 400_000  # 0.2 ms and more: the host queues a launch in less, even a loaded one
_MUCH_SLOWER = 3.0


class Session:
    """Device memory, operands and the reference of the workload at hand."""

    def __init__(self, protocol: TimingProtocol, device_index: int, seed: int) -> None:
        import torch

        torch.cuda.set_device(device_index)
        self._protocol = protocol
        self._index = device_index
        self._target = Target.current(device_index)
        self._device = torch.device("cuda", device_index)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = OperandPool(self._device, seed)
        self._workspace = Workspace(self._device)
        self._count = torch.zeros(1, dtype=torch.int32, device=self._device)
        # Reading twice the cache leaves nothing else in it, and nothing dirty.
        self._other = torch.zeros(
            2 * self._target.device.l2_bytes // 4, dtype=torch.int32, device=self._device
        )
        self._clock_mhz = clock_reader(self._device)
        self._workload: Workload | None = None
        self._sets: list[Operands] = []
        self._reference: torch.Tensor | None = None

    def release(self) -> None:
        """Give back what the last workload held."""
        import torch

        self._workload, self._sets, self._reference = None, [], None
        self._pool = OperandPool(self._device, int(time.time()))
        self._workspace = Workspace(self._device)
        torch.cuda.empty_cache()

    def rest(self) -> None:
        """Nothing is to be timed for now: give back what is held, if that is much."""
        import torch

        if torch.cuda.memory_reserved(self._device) > _KEPT_BYTES:
            self.release()

    def _room_bytes(self) -> int:
        """Device memory that operands may take: what is free, and what they hold already."""
        import torch

        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return int(free) + unused + self._pool.size_bytes - _MARGIN_BYTES

    def measure(self, workload: Workload, config: GemmConfig | None, best_us: float) -> Measurement:
        """Time one configuration, or torch for None; what is far slower than ``best_us`` less."""
        import torch

        with torch.cuda.stream(self._stream):
            self._prepare(workload)
            return self._measure(config, best_us)

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | Launch | None], rounds: int
    ) -> list[Measurement]:
        """Time several in turn, so that a drift of the clocks meets all of them alike.

        Args:
            configs: None is torch; what else computes the product, and need not write it where the
                operands say, is a function of them, whose result is not checked.
        """
        import torch

        with torch.cuda.stream(self._stream):
            self._prepare(workload)
            return self._compare(configs, rounds)

    def _prepare(self, workload: Workload) -> None:
        """Operands and reference of a workload, if it is not the one at hand."""
        import torch

        if workload == self._workload:
            return
        # Dropped before the room is looked at: they hold what the pool is going to let go.
        self._workload, self._sets, self._reference = None, [], None
        count = 1 if self._protocol.cache == "hot" else set_count(
            workload, self._target.device.l2_bytes, self._protocol.max_launches, self._room_bytes()
        )  # fmt: skip
        self._sets = self._pool.sets(workload, count)
        a, b, _, bias = self._sets[0]
        self._reference = reference_product(a, b, bias, workload.code.activation).contiguous()
        torch.cuda.synchronize()
        self._workload = workload

    def _measure(self, config: GemmConfig | None, best_us: float) -> Measurement:
        launch, bad = self._passed(config)
        if bad is not None:
            return bad
        protocol = self._protocol
        about_us = self._look(launch)
        if about_us > protocol.stop_factor * best_us:
            # The host may have been late; a replay of one launch has none to wait for.
            graph = self._capture(launch, 1)
            about_us = min(about_us, *self._replay(graph, 1, about_us, 1))
        if about_us > protocol.stop_factor * best_us:
            slow = f"one launch took {about_us:.0f} us, the best so far {best_us:.1f}"
            return Measurement("too_slow", about_us, repeats=1, error=slow)
        launches = protocol.launches(about_us)
        graph = self._capture(launch, launches)
        times = self._replay(graph, launches, about_us, 1)
        if launches < 0.8 * (wanted := protocol.launches(times[0])):
            # It takes far less than it seemed to: starting the replay weighs too much.
            launches, graph = wanted, self._capture(launch, wanted)
            times = self._replay(graph, launches, times[0], 1)
        if times[0] <= protocol.early_factor * best_us:
            more = protocol.repeats - 1
            times += self._replay(graph, launches, times[0], more, sent=True)
        return self._summary(times)

    def _compare(
        self, configs: Sequence[GemmConfig | Launch | None], rounds: int
    ) -> list[Measurement]:
        result = [Measurement("wrong_result")] * len(configs)
        about_us, launchers = {}, {}
        for i, config in enumerate(configs):
            launch, bad = self._passed(config)
            if bad is not None:
                result[i] = bad
            else:
                launchers[i], about_us[i] = launch, self._look(launch)
        graphs = {}
        for i, launch in launchers.items():
            # Starting a replay takes a while too: it must weigh on all alike, so all that are near
            # the fastest have as many launches as that.
            like_us = max(min(about_us.values()), about_us[i] / _MUCH_SLOWER)
            launches = self._protocol.launches(like_us)
            graphs[i] = (self._capture(launch, launches), launches, like_us)
        times: dict[int, list[float]] = {i: [] for i in graphs}
        for turn in range(rounds):
            for i in graphs if turn % 2 == 0 else reversed(graphs):
                times[i] += self._replay(*graphs[i], repeats=1, sent=turn > 0)
        for i, measured in times.items():
            result[i] = self._summary(measured)
        return result

    def _passed(self, config: GemmConfig | Launch | None) -> tuple[Launch, Measurement | None]:
        """What launches a configuration, and why it must not be timed, if so."""
        if callable(config):
            config(self._sets[0])
            return config, None
        try:
            launch = self._launcher(config)
        except CompileError as error:
            return _nothing, Measurement("compile_error", error=str(error)[:500])
        except LaunchError as error:
            return _nothing, Measurement("out_of_resources", error=str(error)[:500])
        wrong = self._gate(launch, trusted=config is None)
        return launch, Measurement("wrong_result", error=wrong) if wrong else None

    def _summary(self, times: list[float]) -> Measurement:
        import numpy as np

        p10, p50, p90 = np.quantile(times, (0.1, 0.5, 0.9))
        return Measurement("ok", float(p50), float(p10), float(p90), len(times), self._clock_mhz())

    def _launcher(self, config: GemmConfig | None) -> Launch:
        """What queues one launch on the session's stream."""
        assert self._workload is not None
        if config is None:
            return torch_launcher(self._workload)
        plan = Plan.of(self._workload, config, self._target.device.sm_count)
        kernel = load(plan.spec, self._target, self._index, remember=False)
        repack = Repack(plan, self._target, self._index) if config.repack else None
        stream = self._stream.cuda_stream
        prepared: dict[int, dict[str, Any]] = {}

        def launch(operands: Operands) -> None:
            a, b, out, bias = operands
            if repack is not None:
                a, b = repack(a, b, self._workspace, stream)
            key = id(operands)
            if key not in prepared:
                prepared[key] = plan.arguments(a, b, out, bias, plan.scratch(self._workspace))
            kernel(plan.blocks, stream, prepared[key])

        return launch

    def _gate(self, launch: Launch, trusted: bool = False) -> str:
        """Launch on a poisoned output and compare: empty, or what is wrong.

        What is ``trusted`` (torch, whose split-K adds in 16 bits) need only write every element.
        """
        from costmodel.kernels.check import count_mismatches

        assert self._workload is not None
        assert self._reference is not None
        operands = self._sets[0]
        out = operands[2]
        out.fill_(float("nan"))
        self._count.zero_()
        launch(operands)
        atol, rtol = self._protocol.tolerance(self._workload.code, self._workload.k)
        if trusted:
            atol *= 1e3
        flat = out if out.is_contiguous() else out.T
        ref = self._reference if out.is_contiguous() else self._reference.T.contiguous()
        blocks = -(-flat.numel() // _CHECK_BLOCK)
        count_mismatches[(blocks,)](
            flat, ref, self._count, flat.numel(), atol, rtol, BLOCK=_CHECK_BLOCK
        )
        wrong = int(self._count.item())
        if not wrong:
            return ""
        return f"{wrong} of {flat.numel()} elements are off by more than {atol:g} + {rtol:g} |ref|"

    def _look(self, launch: Launch) -> float:
        """About what a cold launch takes, in us, for deciding how to go on."""
        begin, end = _event(), _event()
        self._busy()
        self._other.max()
        begin.record()
        launch(self._sets[0])  # the gate has launched on these: nothing is left to prepare
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def _busy(self) -> None:
        """Keep the device from what comes next until the host has queued it."""
        import torch

        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]

    def _capture(self, launch: Launch, launches: int) -> torch.cuda.CUDAGraph:
        import torch

        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for i in range(launches):
                launch(self._sets[i % len(self._sets)])
        finally:
            graph.capture_end()
        return graph

    def _replay(
        self,
        graph: torch.cuda.CUDAGraph,
        launches: int,
        about_us: float,
        repeats: int,
        sent: bool = False,
    ) -> list[float]:
        """us per launch of each replay, after one that sends the graph to the device.

        Args:
            sent: it is there already.
        """
        events = []
        if sent:
            self._busy()
        else:
            graph.replay()
        for _ in range(repeats):
            if about_us > self._protocol.idle_from_us:
                self._stream.synchronize()
                time.sleep(self._protocol.idle * launches * about_us / 1e6)
                self._busy()
            begin, end = _event(), _event()
            self._fill_cache()
            begin.record(self._stream)
            graph.replay()
            end.record(self._stream)
            events.append((begin, end))
        self._stream.synchronize()
        return [begin.elapsed_time(end) * 1e3 / launches for begin, end in events]

    def _fill_cache(self) -> None:
        if self._protocol.cache == "cold":
            self._other.max()


def _nothing(operands: Operands) -> None:
    """The launch of what cannot be launched."""


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
