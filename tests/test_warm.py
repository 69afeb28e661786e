"""A device that has rested is kept busy until its clock rises no more."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from costmodel.measure import warm


class Device:
    """Its clock rises while it is busy, and falls while it rests.

    Attributes:
        now: seconds; busy: those in which it was so, without a rest.
        clock: cycles in a second after so many seconds of work.
    """

    def __init__(self, clock: Callable[[float], float]) -> None:
        self.now, self.busy, self.clock = 100.0, 0.0, clock

    def rest(self, seconds: float) -> None:
        self.now += seconds
        self.busy = 0.0

    def sleep(self, cycles: int) -> None:
        took = cycles / self.clock(self.busy)
        self.now, self.busy = self.now + took, self.busy + took

    def event(self, **_: object) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: 1e3 * (other.at - event.at)
        return event


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(lambda busy: 2e9 if busy > 0.09 else 1.2e9 if busy > 0.04 else 3e8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "_sleep", device.sleep, raising=False)
    monkeypatch.setattr(warm, "_warm_until", {})
    monkeypatch.setattr(warm.time, "monotonic", lambda: device.now)
    return device


def test_the_clock_is_at_its_highest_then(device: Device) -> None:
    warm.keep_warm()
    assert device.clock(device.busy) == 2e9


def test_a_warm_device_is_not_kept_busy(device: Device) -> None:
    warm.keep_warm()
    before = device.now
    for _ in range(5):
        warm.keep_warm()
        device.now += 0.1
    assert device.now == pytest.approx(before + 0.5)


def test_each_device_is_warmed_for_itself(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    warm.keep_warm()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    device.rest(0.1)
    warm.keep_warm()
    assert device.clock(device.busy) == 2e9


def test_a_device_that_has_rested_is_warmed_again(device: Device) -> None:
    warm.keep_warm()
    device.rest(1.0)
    warm.keep_warm()
    assert device.clock(device.busy) == 2e9


def test_a_clock_that_never_settles_is_not_waited_for(device: Device) -> None:
    device.clock = lambda busy: 1e9 * (1 + 10 * busy)
    warm.keep_warm()
    assert device.busy < 0.4
