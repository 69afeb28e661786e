"""The timing process without a GPU: what it answers where there is no room, and what it keeps."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from costmodel.data.measurement import NO_ROOM, Measurement
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.measure import timing
from costmodel.measure.card import clock_reader
from costmodel.measure.device import DeviceRunner
from costmodel.measure.operands import NoRoom
from costmodel.measure.protocol import TimingProtocol
from costmodel.measure.timing import Request
from costmodel.processes import Done, SupervisedWorker

SHAPE = Workload.dense(1024, 1024, 1024)
CONFIGS = [GemmConfig("tma", 64, 128, 64, num_stages=s) for s in (2, 3, 4)]
RAN_OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
# torch says it in this way where not even a context can be made.
NO_CONTEXT = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
EXCLUSIVE = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nand so on")


class FakeSession:
    """Answers, or raises what it is told to."""

    def __init__(self, error: Callable[[Workload], Exception | None] = lambda _: None) -> None:
        self.error, self.released, self.rested = error, 0, 0

    def measure(self, workload: Workload, config: GemmConfig | None, best_us: float) -> Measurement:
        if (error := self.error(workload)) is not None:
            raise error
        return Measurement("ok", 10.0)

    def compare(self, workload: Workload, configs: object, rounds: int) -> list[Measurement]:
        raise NoRoom("it needs more")

    def release(self) -> None:
        self.released += 1

    def rest(self) -> None:
        self.rested += 1


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_session", None)


def started(monkeypatch: pytest.MonkeyPatch, make: Callable[..., FakeSession]) -> None:
    monkeypatch.setattr("costmodel.measure.session.Session", make)
    timing.start(TimingProtocol(), 0, Workload.dense(64, 64, 64), lambda: None)


@pytest.mark.parametrize("error", [RAN_OUT, NO_CONTEXT, EXCLUSIVE])
def test_a_full_device_is_a_status_and_no_exception(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def make(*_: object) -> FakeSession:
        raise error

    started(monkeypatch, make)
    (measurement,) = timing.answer(Request(SHAPE, CONFIGS[0]))
    assert measurement.no_room
    assert measurement.error == f"{NO_ROOM}: {str(error).splitlines()[0]}"
    assert timing.answer(None) == []


def test_a_device_too_full_for_the_rehearsal_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, lambda *_: FakeSession(lambda _: NoRoom("64x64x64 needs 1 MiB")))
    (measurement,) = timing.answer(Request(SHAPE, None))
    assert measurement.error == f"{NO_ROOM}: 64x64x64 needs 1 MiB"


def test_a_device_that_has_room_again_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is kept while it is used, longer than a device may be full."""
    full = [True]
    made = []

    def make(*_: object) -> FakeSession:
        if full[0]:
            raise RAN_OUT
        made.append(FakeSession())
        return made[-1]

    started(monkeypatch, make)
    (measurement,) = timing.answer(Request(SHAPE, None))
    assert measurement.no_room
    full[0] = False
    assert [timing.answer(Request(SHAPE, None))[0].ok for _ in range(3)] == [True] * 3
    assert len(made) == 1


def test_other_errors_at_the_start_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: object) -> FakeSession:
        raise RuntimeError("CUDA error: invalid device ordinal")

    with pytest.raises(RuntimeError, match="invalid device"):
        started(monkeypatch, make)


def test_room_is_lacking_for_all_or_memory_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: dict[Workload, Exception] = {
        SHAPE: NoRoom("it needs more"), Workload.dense(9, 9, 9): RAN_OUT,
    }  # fmt: skip
    session = FakeSession(errors.get)
    started(monkeypatch, lambda *_: session)
    (all_of_them,) = timing.answer(Request(SHAPE, CONFIGS[0]))
    assert (all_of_them.no_room, session.released) == (True, 0)
    (one_of_them,) = timing.answer(Request(Workload.dense(9, 9, 9), CONFIGS[0]))
    assert one_of_them.status == "out_of_resources"
    assert (one_of_them.no_room, session.released) == (False, 1)
    compared = timing.answer(Request(SHAPE, None, compare=(*CONFIGS, None), rounds=2))
    assert [m.no_room for m in compared] == [True] * 4


@pytest.mark.fault("B41")
def test_nothing_to_time_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession()
    started(monkeypatch, lambda *_: session)
    assert timing.answer(None) == []
    assert session.rested == 1


def test_resting_starts_no_process() -> None:
    with DeviceRunner() as runner:
        runner.rest()
        assert not runner._worker.running


def test_a_process_that_died_meanwhile_is_not_running_nor_started_to_rest() -> None:
    """Another one would take seconds, and device memory."""
    worker: SupervisedWorker[str, int] = SupervisedWorker(process_of, limit_s=60)
    with DeviceRunner() as runner, worker:
        runner._worker = worker  # type: ignore[assignment]
        done = worker.run("it")
        assert isinstance(done, Done)
        os.kill(done.value, signal.SIGKILL)
        os.waitid(os.P_PID, done.value, os.WEXITED | os.WNOWAIT)
        assert not worker.running
        runner.rest()
        assert not worker.running


def process_of(_: object) -> int:
    return os.getpid()


@pytest.mark.fault("B43")
def test_a_driver_that_no_longer_tells_the_clock_stops_no_timing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NVMLError(Exception):
        pass

    clocks = [1980]

    def clock(*_: object) -> int:
        if not clocks:
            raise NVMLError("GPU is lost")
        return clocks.pop()

    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda _: 0, NVML_CLOCK_SM=0,
        nvmlDeviceGetClockInfo=clock, NVMLError=NVMLError,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="u"))
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    read = clock_reader(torch.device("cuda", 0))
    found = []
    for now[0] in (1.0, 1.01, 2.0):
        found.append(read())
    assert found == [1980, 1980, 0]
