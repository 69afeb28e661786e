"""Interrupts come between any two lines: no job in the background is lost."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from costmodel.dispatch import background
from costmodel.dispatch.background import Background


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# --- interrupts ---------------------------------------------------------------------------------


class At:
    """Raises KeyboardInterrupt the n-th time that it is called."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def after_calls(of: Any, do: Callable[[], None]) -> Callable[..., None]:
    """A profile function that does something after each call by a module.

    There Python looks for signals, and not before the end of a ``with``, as a trace function would.
    """

    def profile(frame: FrameType, event: str, _: object) -> None:
        caller = {"c_return": frame, "return": frame.f_back}.get(event)
        if caller is not None and caller.f_code.co_filename == of.__file__:
            do()

    return profile


@pytest.mark.fault("B31")
@pytest.mark.parametrize("fresh", [True, False], ids=["first job", "later job"])
@pytest.mark.parametrize("where", [background, threading], ids=["submit", "start of the thread"])
def test_an_interrupted_submit_loses_no_job(fresh: bool, where: Any) -> None:
    left = 0
    for n in range(1, 200):
        left = interrupt_submit(fresh, where, n)
        if left > 0:  # that many calls do not come
            return
    raise AssertionError(f"it never came to its end: {left}")


def interrupt_submit(fresh: bool, where: Any, n: int) -> int:
    """After the n-th call; then all jobs are to be done. Gives how many calls were lacking."""
    tuner = Background()
    if not fresh:
        tuner.submit("before", lambda: None)
        until(lambda: tuner.failed("before") is not None)
    at = At(n)
    sys.setprofile(after_calls(where, at))
    try:
        with contextlib.suppress(KeyboardInterrupt):
            tuner.submit("interrupted", lambda: None)
    finally:
        sys.setprofile(None)
    for job in ("later", "interrupted"):
        tuner.submit(job, lambda: None)
        until(lambda: tuner.failed(job) is not None)  # noqa: B023
    until(lambda: tuner.is_idle)
    return at.left
