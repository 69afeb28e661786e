"""The identity of a run: card, driver, torch, time."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from uuid import uuid4

from costmodel.data.measurement import RunInfo
from costmodel.hardware.target import Target


def current_run(device_index: int = 0) -> RunInfo:
    """Return the identity of a run on this card that starts now.

    Raises:
        NoGpu: torch sees no NVIDIA GPU.
    """
    Target.current(device_index)  # the clear error where there is no GPU
    import torch

    driver, sm_mhz, memory_mhz = _nvml(device_index)
    return RunInfo(
        run_id=uuid4().hex,
        device_uuid=str(torch.cuda.get_device_properties(device_index).uuid),
        driver=driver,
        torch=torch.__version__,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        sm_clock_mhz=sm_mhz,
        memory_clock_mhz=memory_mhz,
    )


def _nvml(device_index: int) -> tuple[str, int, int]:
    """Return the driver version and highest clocks; blank where NVML does not tell.

    It finds no part of a card (MIG) by the UUID that torch has.
    """
    import torch

    try:
        import pynvml
    except ImportError:
        return "", 0, 0
    driver, clocks_mhz = "", (0, 0)
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        uuid = str(torch.cuda.get_device_properties(device_index).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        kinds = (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)
        sm_mhz, memory_mhz = (int(pynvml.nvmlDeviceGetMaxClockInfo(handle, k)) for k in kinds)
        clocks_mhz = (sm_mhz, memory_mhz)
    return driver, *clocks_mhz
