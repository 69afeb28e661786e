"""Times one problem at a time, and holds its operands and its reference in device memory.

The procedure is that of :class:`costmodel.measure.protocol.TimingProtocol`. Only the timing process
imports this file, since torch takes seconds to import.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import numpy as np
import torch

from costmodel.data.measurement import Measurement, Measurements
from costmodel.errors import CompileError, LaunchError
from costmodel.hardware.target import Target
from costmodel.measure.card import alone, clock_reader, uuid_of
from costmodel.measure.operands import OperandPool, Problem, set_count
from costmodel.measure.protocol import TimingProtocol
from costmodel.measure.warm import keep_warm

Launch = Callable[[Any], None]
"""Queues a launch on these operands on the current stream."""

_MARGIN_BYTES = 512 * 2**20  # of device memory, left to the program that waits
_KEPT_BYTES = 2**30  # kept between problems at most: a program may come to need this memory
_CHECK_BLOCK = 4096
_BUSY_CYCLES = 400_000  # 0.2 ms or more: even a busy host queues a launch in less
_MUCH_SLOWER = 3.0


def _nothing(*_: Any) -> None:
    """Stand for a launch where there is none."""


class Session:
    """Device memory, operands and the reference of the present problem."""

    def __init__(self, protocol: TimingProtocol, device_index: int):
        torch.cuda.set_device(device_index)
        self._protocol = protocol
        self._index = device_index
        self._target = Target.current(device_index)
        self._device = torch.device("cuda", device_index)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = OperandPool(self._device, 0)
        self._scratch: dict[str, Any] = {}
        self._count = torch.zeros(1, dtype=torch.int32, device=self._device)
        # Reading twice its size leaves nothing else in the cache, and nothing dirty.
        self._other = torch.zeros(
            2 * self._target.device.l2_bytes // 4, dtype=torch.int32, device=self._device
        )
        self._clock_mhz = clock_reader(self._device)
        self._card = uuid_of(self._device)
        self._problem: Problem = None
        self._sets: list[Any] = []
        self._reference: torch.Tensor | None = None

    def release(self) -> None:
        """Give back what the last problem held."""
        self._problem, self._sets, self._reference = None, [], None
        self._pool = OperandPool(self._device, int(time.time()))
        self._scratch.clear()
        torch.cuda.empty_cache()

    def rest(self) -> None:
        """Give back what is held, if it is much: nothing is to be timed for now."""
        if torch.cuda.memory_reserved(self._device) > _KEPT_BYTES:
            self.release()

    def _room_bytes(self) -> int:
        """Return the device memory that operands may take: what is free, and what they hold."""
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return int(free) + unused + self._pool.size_bytes - _MARGIN_BYTES

    def measure(self, problem: Problem, choice: Any, best_us: float) -> Measurement:
        """Time one choice (None: the baseline), less often if far slower than ``best_us``."""
        with self._ready(problem):
            return self._measure(choice, best_us)

    def compare(
        self, problem: Problem, choices: Sequence[Any | Launch | None], rounds: int
    ) -> Measurements:
        """Time several choices in turn, so that a drift of the clocks affects all of them alike.

        Short ones are timed as a model launches them, with other kernels between: then a split
        kernel finds neither its partial sums nor its code in a cache.

        Args:
            choices: None is the baseline. A function of the operands computes the same product, but
                may write it elsewhere: its result is not checked.
        """
        with self._ready(problem):
            return self._compare(choices, rounds)

    @contextmanager
    def _ready(self, problem: Problem) -> Iterator[None]:
        """Keep other timing processes from the device; warm it up; prepare a problem's operands."""
        with alone(self._card), torch.cuda.stream(self._stream):
            self._prepare(problem)
            keep_warm()
            yield

    def _prepare(self, problem: Problem) -> None:
        """Make the operands and the reference of a problem, if it is not the present one."""
        if problem == self._problem:
            return
        # Dropped before free memory is counted: they hold memory that the pool will free.
        self._problem, self._sets, self._reference = None, [], None
        count = set_count(
            problem, self._target.device.l2_bytes, self._protocol.max_launches, self._room_bytes()
        )
        self._sets = problem.operands(self._pool.draw, count)
        self._reference = problem.reference(self._sets[0])
        torch.cuda.synchronize()
        self._problem = problem

    def _measure(self, choice: Any, best_us: float) -> Measurement:
        launch, bad = self._passed(choice)
        if bad is not None:
            return bad
        protocol = self._protocol
        about_us = self._look(launch)
        if about_us > protocol.stop_factor * best_us:
            # The host may have been late; a replay of one launch does not wait for it.
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

    def _compare(self, choices: Sequence[Any | Launch | None], rounds: int) -> Measurements:
        result = [Measurement("wrong_result")] * len(choices)
        about_us, launchers = {}, {}
        for i, choice in enumerate(choices):
            launch, bad = self._passed(choice)
            if bad is not None:
                result[i] = bad
            else:
                launchers[i], about_us[i] = launch, self._look(launch)
        graphs = {}
        fills = {}
        for i, launch in launchers.items():
            # Starting a replay takes time too, which must weigh on all alike. So all choices near
            # the fastest have as many launches as the fastest.
            like_us = max(min(about_us.values()), about_us[i] / _MUCH_SLOWER)
            launches = self._protocol.launches(like_us)
            is_short = like_us <= self._protocol.idle_from_us
            between = self._fill_cache if is_short else _nothing
            graphs[i] = (self._capture(launch, launches, between), launches, like_us)
            if is_short:
                fills[i] = (self._capture(_nothing, launches, between), launches, like_us)
        times: dict[int, list[float]] = {i: [] for i in graphs}
        for turn in range(rounds):
            for i in graphs if turn % 2 == 0 else reversed(graphs):
                (us,) = self._replay(*graphs[i], repeats=1, sent=turn > 0)
                if i in fills:  # by turns too, as the clock may drift
                    us -= self._replay(*fills[i], repeats=1, sent=turn > 0)[0]
                times[i].append(us)
        for i, measured in times.items():
            result[i] = self._summary(measured, about_us[i])
        return result

    def _passed(self, choice: Any | Launch | None) -> tuple[Launch, Measurement | None]:
        """Return the launch of a choice, and the outcome of one that must not be timed."""
        if callable(choice):
            choice(self._sets[0])
            return choice, None
        stream = self._stream.cuda_stream
        try:
            launch = self._problem.launcher(
                choice, self._target, self._index, stream, self._scratch
            )
        except CompileError as error:
            return _nothing, Measurement("compile_error", error=str(error)[:500])
        except LaunchError as error:
            return _nothing, Measurement("out_of_resources", error=str(error)[:500])
        wrong = self._gate(launch, trusted=choice is None)
        return launch, Measurement("wrong_result", error=wrong) if wrong else None

    def _summary(self, times: list[float], about_us: float = inf) -> Measurement:
        p10, p50, p90 = map(float, np.quantile(times, (0.1, 0.5, 0.9)))
        if p50 <= 0:  # others used the device while its cache was filled: only the look is left
            return Measurement("ok", about_us, p10, max(p90, about_us), 1, self._clock_mhz())
        return Measurement("ok", p50, p10, p90, len(times), self._clock_mhz())

    def _gate(self, launch: Launch, trusted: bool = False) -> str:
        """Launch on a poisoned output and compare; return what is wrong, or an empty text.

        A ``trusted`` launch (torch, whose split-K adds in 16 bits) need only write every element.
        """
        from costmodel.kernels.check import count_mismatches

        assert self._reference is not None
        operands = self._sets[0]
        out = self._problem.output(operands)
        out.fill_(float("nan"))
        self._count.zero_()
        launch(operands)
        atol, rtol = self._protocol.tolerance(self._problem.precision, self._problem.terms)
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
        """Return roughly how long a cold launch takes, in us, to decide how to go on."""
        begin, end = _event(), _event()
        self._busy()
        self._other.max()
        begin.record()
        launch(self._sets[0])  # the gate has launched on these: nothing is left to prepare
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def _busy(self) -> None:
        """Keep the device busy until the host has queued what comes next."""
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]

    def _capture(
        self, launch: Launch, launches: int, between: Callable[..., object] = _nothing
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for i in range(launches):
                between()
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
        """Return us per launch of each replay, after one that sends the graph to the device.

        Args:
            sent: the graph is there already.
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
        self._other.max()


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
