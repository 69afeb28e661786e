"""Cards, and parts of cards: which one a tensor, a run and a clock belong to; without a GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import test_dispatch
import torch
from test_dispatch import A, B, half

import costmodel
from costmodel.dispatch import dispatch
from costmodel.dispatch.check import _check_devices
from costmodel.dispatch.launches import Launches
from costmodel.errors import DeviceError
from costmodel.measure.card import clock_reader, highest_clocks

prepared = test_dispatch.prepared  # a fixture


@pytest.mark.fault("B25")
@pytest.mark.parametrize("where", [("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cpu", "cuda:1")])
def test_operands_of_several_devices_are_refused_by_name(where: tuple[str, str]) -> None:
    given: Any = {
        name: SimpleNamespace(device=torch.device(device))
        for name, device in zip(("a", "b"), where, strict=True)
    }
    with pytest.raises(DeviceError, match=r"is on (cuda:1|cpu)"):
        _check_devices(given)


@pytest.mark.fault("B23")
def test_launches_do_not_pile_up(
    prepared: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each m has a launch of its own: what is kept of them is bounded."""
    monkeypatch.setattr(dispatch, "launches", Launches(at_most=50))
    for m in range(1, 301):
        costmodel.matmul(half(m, 8), B)
        assert len(dispatch.launches) <= 50
    costmodel.matmul(A, B)
    assert costmodel.matmul(A, B).shape == (4, 16)


class FakeNvml(ModuleType):
    """NVML of a machine with one card, of which this process has a part, or all."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def __init__(self, known: bytes, broken: str = "") -> None:
        super().__init__("pynvml")
        self.known, self.broken = known, broken

    def nvmlInit(self) -> None:
        self._fail("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        if uuid != self.known:
            raise self.NVMLError("not found")
        return "handle"

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        self._fail("clock")
        return {1: 1980, 2: 2619}[kind]

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        self._fail("clock")
        return 1755

    def _fail(self, what: str) -> None:
        if what == self.broken:
            raise self.NVMLError("not supported")


@pytest.mark.fault("B33", "B43")
@pytest.mark.parametrize(
    ("known", "broken", "expected", "clock_mhz"),
    [("GPU-aa", "", (1980, 2619), 1755), ("GPU-bb", "", (0, 0), 0),
     ("GPU-aa", "init", (0, 0), 0), ("GPU-aa", "clock", (0, 0), 0)],
)  # fmt: skip
def test_what_the_driver_does_not_tell_is_blank_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
    known: str,
    broken: str,
    expected: tuple[int, int],
    clock_mhz: int,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(known.encode(), broken))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="aa")
    )
    assert highest_clocks(0) == expected
    assert clock_reader(torch.device("cpu"))() == clock_mhz
