"""Where a device is timed: one process for it, and one user of that at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from costmodel.data.measurement import Runner
from costmodel.support.kept import IDLE_S, Kept

if TYPE_CHECKING:
    from costmodel.measure.device import DeviceRunner

__all__ = ["Bench", "TimingBench"]


class TimingBench:
    """The timing process of one device, for one user at a time; it takes seconds to start."""

    def __init__(self, device_index: int, idle_s: float = IDLE_S) -> None:
        self._index = device_index
        self._kept: Kept[DeviceRunner] = Kept(self._started, idle_s)

    def _started(self) -> DeviceRunner:
        from costmodel.measure.device import DeviceRunner

        runner = DeviceRunner(self._index)
        runner.start()
        return runner

    @contextmanager
    def runner(self, wait: bool = True) -> Iterator[Runner]:
        """The runner, while no other thread has it.

        Args:
            wait: until the device has nothing else to do, so that timings are of nothing else. It
                reads none of the caller's memory, so that this is not needed to be right.
        """
        import torch

        with self._kept.use() as runner:
            if wait:
                torch.cuda.synchronize(self._index)
            yield runner

    def close(self) -> None:
        """End the process, if there is one; the next user starts another."""
        self._kept.close()


class Bench(Protocol):
    """Where a device is timed: gives its runner to one thread at a time."""

    def runner(self, wait: bool = True) -> AbstractContextManager[Runner]: ...
