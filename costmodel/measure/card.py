"""The card that times: its identity in a run and its clock, as NVIDIA's driver reports them."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import uuid4

from costmodel.data.measurement import RunInfo
from costmodel.errors import NoGpu
from costmodel.files import file_errors, time_now
from costmodel.hardware.installed import driver_version
from costmodel.hardware.target import Target

T = TypeVar("T")


def current_run() -> RunInfo:
    """Return the identity of a run on the first card that starts now.

    Raises:
        NoGpu: torch sees no NVIDIA GPU.
    """
    Target.current(0)  # the clear error where there is no GPU
    import torch

    sm_mhz, memory_mhz = highest_clocks(0)
    return RunInfo(
        run_id=uuid4().hex,
        device_uuid=uuid_of(0),
        driver=driver_version(),
        torch=torch.__version__,
        started=time_now(),
        sm_clock_mhz=sm_mhz,
        memory_clock_mhz=memory_mhz,
    )


def highest_clocks(device: Any) -> tuple[int, int]:
    """Return the highest clocks of SM and memory, in MHz; 0 where NVML does not tell.

    NVML does not find a part of a card (MIG) by the UUID that torch has.
    """

    def highest(nvml: Any) -> tuple[int, int]:
        ask, handle = nvml.nvmlDeviceGetMaxClockInfo, _handle(nvml, device)
        return int(ask(handle, nvml.NVML_CLOCK_SM)), int(ask(handle, nvml.NVML_CLOCK_MEM))

    return _ask_nvml(highest, (0, 0))


def clock_reader(device: Any) -> Callable[[], int]:
    """Return a reader of the SM clock in MHz; 0 where NVML does not tell.

    Within 20 ms the last reading is used again.
    """
    last = (0.0, 0)
    handle = _ask_nvml(lambda nvml: _handle(nvml, device), None)

    def read(nvml: Any) -> int:
        return int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))

    def recent() -> int:
        nonlocal last
        now = time.monotonic()
        if now - last[0] > 0.02:
            last = (now, 0 if handle is None else _ask_nvml(read, 0))
        return last[1]

    return recent


@contextmanager
def collecting(card: str) -> Iterator[None]:
    """Keep other collections from a card while one runs; those of other users too.

    Raises:
        NoGpu: another collection runs there.
    """
    path = f"{tempfile.gettempdir()}/costmodel-collects-{card}.lock"
    flags = os.O_RDONLY | (0 if os.path.exists(path) else os.O_CREAT)
    with file_errors(Path(path)):
        lock = os.open(path, flags, 0o644)
    with open(lock) as file:
        if not _is_locked(file):
            raise NoGpu(
                f"{card}: another `costmodel collect` times there, and both would be wrong: wait "
                f"for its end, or name another GPU by CUDA_VISIBLE_DEVICES"
            )
        yield


@contextmanager
def alone(card: str, wait_s: float = 2.0) -> Iterator[None]:
    """Keep other timing processes of this user from a card meanwhile.

    This waits ``wait_s`` seconds at most, and not at all where no file can be locked.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            path = f"{tempfile.gettempdir()}/costmodel-{os.getuid()}-{card}.lock"
            lock = stack.enter_context(open(path, "a"))
            end = time.monotonic() + wait_s
            while not _is_locked(lock) and time.monotonic() < end:
                time.sleep(0.001)
        yield


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ask_nvml(question: Callable[[Any], T], otherwise: T) -> T:
    try:
        import pynvml
    except ImportError:
        return otherwise
    try:
        pynvml.nvmlInit()
        return question(pynvml)
    except pynvml.NVMLError:
        return otherwise


def _handle(nvml: Any, device: Any) -> Any:
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid_of(device)}".encode())


def uuid_of(device: Any) -> str:
    """Return the identity of a card."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
