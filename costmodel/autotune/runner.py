"""Times a kernel in this process, on the arguments of the call that is being tuned.

The L2 cache is filled with other data before each launch. Each launch is queued while the device is
busy, so that the device does not wait for the host. Hooks and the restoring of arguments run
outside the timed part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic, perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from costmodel.autotune.arguments import Snapshot
from costmodel.autotune.call import KernelCall
from costmodel.data.measurement import NO_ROOM, Batch, Measurement, Measurements, Runner, Status
from costmodel.errors import CompileError, CostModelError
from costmodel.measure.card import alone, uuid_of
from costmodel.measure.warm import keep_warm

_TIMED_US = 2500.0  # of launches and waits, for one configuration
_MOST = 9  # launches, beside the first three
_EARLY = 1.3  # times slower than the best: then two more launches are enough
_STOP = 8.0  # times slower than the best: then no more are needed
_COMPARED_S = 1.0  # of comparing finalists, once each has been launched a few times
_CYCLES_PER_US = 2000  # for the highest clock of any NVIDIA GPU, so that no wait is too short

T = TypeVar("T")

_REFUSALS: tuple[tuple[Any, Status], ...] = (
    ((OutOfResources, torch.OutOfMemoryError), "out_of_resources"),
    ((PTXASError, CompilationError, CompileError), "compile_error"),
)


class BrokenContext(CostModelError):
    """A kernel has broken the CUDA context: this process can compute nothing more on the GPU."""


@dataclass(eq=False)
class KernelRunner(Runner):
    """Times the configurations of one call.

    Attributes:
        call: the call to launch.
        by_name: configurations by name; candidates are these names.
        note: called with a name and its measurement as soon as it is made.
        agree: True: a finalist whose results differ from those of most configurations is wrong.
    """

    call: KernelCall
    by_name: Mapping[str, Any]
    note: Callable[[str, Measurement], None]
    agree: bool = False

    def __post_init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self._device)
        # Reading twice the size of the cache leaves nothing else in it, and nothing dirty.
        self._other = torch.zeros(
            2 * properties.L2_cache_size // 4, dtype=torch.int32, device=self._device
        )
        self._card = uuid_of(self._device)
        self._host_us = 100.0  # of a launch
        self._votes: list[tuple[Snapshot, set[str]]] = []  # results, and who computed them

    def measure(self, workload: Any, candidates: Batch, best_us: float = inf) -> Measurements:
        """Time candidates: one measurement each, in order."""
        found = []
        with alone(self._card):
            keep_warm()
            for candidate in candidates:
                measurement = self._survived(candidate.config, self._measured, best_us)
                self.note(candidate.config, measurement)
                if measurement.ok:
                    best_us = min(best_us, measurement.latency_us)
                found.append(measurement)
        return found

    def compare(self, workload: Any, configs: Sequence[Any], rounds: int = 9) -> Measurements:
        """Time a few finalists in turn, so that drift meets all alike."""
        with alone(self._card):
            keep_warm()
            # Another process may have timed them, so here they may be refused.
            tried = {name: self._survived(name, self._first_launch) for name in configs}
            refused = {name: said for name, said in tried.items() if said is not None}
            times: dict[str, list[float]] = {name: [] for name in configs if name not in refused}
            end = monotonic() + _COMPARED_S
            for turn in range(rounds):
                if turn > 2 and monotonic() > end:
                    break
                for name in [*times][:: -1 if turn % 2 else 1]:
                    with self._blamed(name):
                        times[name] += self._timed(name, 2)
        found = {name: _summary(each) for name, each in times.items()} | self.outvoted() | refused
        for name in found:
            self.note(name, found[name])
        return [found[name] for name in configs]

    def get_ready(self) -> None:
        """Warm the device up, so that it is ready when the first binary is."""
        keep_warm()

    def rest(self) -> None:
        """Give back the memory that only timing needs."""
        self._votes.clear()

    def outvoted(self) -> dict[str, Measurement]:
        """Return an outcome for each name whose results differ from those of most.

        Code written by hand has no vote.
        """

        by_hand = [x for x, config in self.by_name.items() if getattr(config, "ir_override", None)]
        ranked = sorted(self._votes, key=lambda vote: -len(vote[1].difference(by_hand)))
        wrong: dict[str, Measurement] = {}
        for found, names in ranked[1:]:
            most = f"other results than {len(ranked[0][1])} configurations"
            error = f"{most}: {ranked[0][0].differs_from(found)}"
            wrong |= dict.fromkeys(names, Measurement("wrong_result", error=error))
        return wrong

    def _survived(self, name: str, do: Callable[..., T], *args: Any) -> T | Measurement:
        """Call ``do`` for a configuration; a refusal is an outcome, a broken context an error."""
        try:
            with self._blamed(name):
                return do(name, *args)
        except Exception as error:
            if str(error) == "Triton Error [CUDA]: out of memory":  # as the driver loads a binary
                error = torch.OutOfMemoryError(str(error))
            status = next((s for kind, s in _REFUSALS if isinstance(error, kind)), None)
            if status is None and not str(error).startswith("Triton Error [CUDA]"):
                raise
            full = f"{NO_ROOM}: " if isinstance(error, torch.OutOfMemoryError) else ""
            return Measurement(status or "launch_error", error=f"{full}{error}"[:500])

    @contextmanager
    def _blamed(self, name: str) -> Iterator[None]:
        """Record the configuration that breaks the CUDA context: the next process leaves it out."""
        try:
            yield
        except RuntimeError as error:
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as broken:  # each use of a broken context raises
                text = str(broken).partition("\n")[0]  # torch's general advice follows
                self.note(name, Measurement("crashed", error=text))
                raise BrokenContext(
                    f"{self.by_name[name]} of {self.call} broke the CUDA context: {text}; this "
                    f"process must end, the next run leaves that configuration out"
                ) from error
            raise

    def _measured(self, name: str, best_us: float) -> Measurement:
        self._first_launch(name)
        times = self._timed(name, 2)
        us = min(times)
        if us > _STOP * best_us and not self.agree:  # its results have a vote
            return Measurement("too_slow", us, us, us, 2)
        wanted = int(_TIMED_US / (us + self._host_us + 50))
        most = 2 if us > _EARLY * best_us else _MOST
        return _summary(times[1:] + self._timed(name, min(max(wanted, 1), most)))

    def _first_launch(self, name: str) -> None:
        """Launch once, which loads the binary."""
        call, config = self.call, self.by_name[name]
        if self.agree:
            call.restore()
        call.prepare(config)
        try:
            call.launch(config)
        except Exception as error:
            call.finish(config, error)
            raise
        call.finish(config)
        torch.cuda.synchronize(self._device)
        if self.agree:
            self._vote(name, call.written())

    def _vote(self, name: str, result: Snapshot) -> None:
        for found, names in self._votes:
            if not found.differs_from(result):
                names.add(name)
                return
        self._votes.append((result, {name}))

    def _timed(self, name: str, repeats: int) -> list[float]:
        """Return the times in us of ``repeats`` launches, each with a cold cache."""
        call, config, events = self.call, self.by_name[name], []
        for _ in range(repeats):
            call.prepare(config)
            self._other.max()
            torch.cuda._sleep(int(_CYCLES_PER_US * (1.2 * self._host_us + 10)))  # type: ignore[no-untyped-call]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start = perf_counter()
            begin.record()
            call.launch(config)
            end.record()
            # The slowest of the last few launches: a fast one must not make the next one late.
            self._host_us = max(1e6 * (perf_counter() - start), self._host_us / 2)
            call.finish(config)
            events.append((begin, end))
        torch.cuda.synchronize(self._device)
        return [1e3 * begin.elapsed_time(end) for begin, end in events]


def _summary(times: Sequence[float]) -> Measurement:
    p10, p50, p90 = map(float, np.quantile(times, (0.1, 0.5, 0.9)))
    return Measurement("ok", max(p50, 1e-3), p10, p90, len(times))
