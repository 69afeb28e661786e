"""The clock of a GPU, as its driver reports it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def clock_reader(device: torch.device) -> Callable[[], int]:
    """Return a reader of the SM clock in MHz, by NVML; 0 where NVML does not tell.

    Within 20 ms the last reading is used again.
    """
    import torch

    try:
        import pynvml
    except ImportError:
        return lambda: 0
    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    except pynvml.NVMLError:  # as of a part of a card (MIG)
        return lambda: 0
    last = (0.0, 0)

    def read() -> int:
        nonlocal last
        now = time.monotonic()
        if now - last[0] > 0.02:
            try:
                clock_mhz = int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
            except pynvml.NVMLError:  # it did at first; a timing does without
                clock_mhz = 0
            last = (now, clock_mhz)
        return last[1]

    return read
