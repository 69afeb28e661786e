"""The timing process of each device, for one user at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from costmodel.data.measurement import Runner
from costmodel.processes import IDLE_S


class DeviceProcess:
    """The timing process of one device, for one user at a time; it takes seconds to start."""

    def __init__(self, device_index: int, idle_s: float = IDLE_S) -> None:
        from costmodel.measure.device import DeviceRunner

        self._index = device_index
        self._lock = threading.Lock()
        self._runner = DeviceRunner(device_index, idle_s=idle_s)

    @contextmanager
    def runner(self, wait: bool = True) -> Iterator[Runner]:
        """The runner, while no other thread has it.

        Args:
            wait: until the device has nothing else to do, so that timings are of nothing else. It
                reads none of the caller's memory, so that this is not needed to be right.
        """
        import torch

        with self._lock:
            self._runner.start()
            if wait:
                torch.cuda.synchronize(self._index)
            yield self._runner

    def close(self) -> None:
        """End the process, if there is one; nobody can use this afterwards."""
        self._runner.close()


class TimingProcess(Protocol):
    """Gives the runner of one device to one thread at a time."""

    def runner(self, wait: bool = True) -> AbstractContextManager[Runner]: ...
