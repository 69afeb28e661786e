"""Interrupts and signal handlers come between any two lines: nothing is lost, nobody waits."""

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
from costmodel.support import counters


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def between_lines(of: tuple[Any, ...], do: Callable[[], None]) -> Callable[..., Any]:
    """A trace function that does something before each line of some modules, and at returns."""
    files = {module.__file__ for module in of}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event in ("line", "return"):
            do()
        return trace

    return trace


def traced(trace: Callable[..., Any], work: Callable[[], Any]) -> Any:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return work()
    finally:
        sys.settrace(before)


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
    tuner = Background(lambda keys: None)
    if not fresh:
        tuner.submit("before", lambda _: None)
        until(lambda: tuner.has_tried("before"))
    at = At(n)
    sys.setprofile(after_calls(where, at))
    try:
        with contextlib.suppress(KeyboardInterrupt):
            tuner.submit("interrupted", lambda _: None)
    finally:
        sys.setprofile(None)
    for job in ("later", "interrupted"):
        if not tuner.has_tried(job):
            assert tuner.submit(job, lambda _: None) == 0
        until(lambda: tuner.has_tried(job))  # noqa: B023
    until(lambda: not tuner._held)
    return at.left


def test_where_no_thread_can_start_the_call_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Background(lambda keys: None)

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(3):
            asked = tuner.submit("a job", lambda _: None)
            assert asked is None
            assert not tuner.hold("a job", "a launch", asked), "no job that ends would drop it"
    assert tuner.submit("a job", lambda _: None) == 0
    until(lambda: tuner.has_tried("a job"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lost_thread_is_replaced_for_the_job_that_waits() -> None:
    """As in a fork of the process, which has no threads."""
    goes_on = threading.Event()

    class Lost(Background):
        def _end(self, key: Any, error: BaseException | None) -> None:
            if key == "first" and not goes_on.is_set():
                goes_on.set()
                raise SystemExit
            super()._end(key, error)

    tuner = Lost(lambda keys: None)
    tuner.submit("first", lambda _: None)
    assert goes_on.wait(60)
    until(lambda: not tuner._thread.is_alive())  # type: ignore[union-attr]
    assert tuner.submit("first", lambda _: None) == 0
    until(lambda: tuner.has_tried("first"))


# --- handlers of signals, and finalizers --------------------------------------------------------


def tunes_on_the_side() -> object:
    dropped: list[Any] = []
    tuner = Background(dropped.extend)

    def handler() -> None:
        switches = tuner.submit("other", lambda switch: switch())
        tuner.hold("other", "other's launch", switches)
        tuner.forget_failures()

    def work() -> None:
        switches = tuner.submit("a job", lambda switch: switch())
        tuner.hold("a job", "a launch", switches)
        tuner.forget_failures()

    traced(between_lines((background,), handler), work)
    until(lambda: not tuner._held)
    return None


def counts_on_the_side() -> object:
    def handler() -> None:
        counters.count(misses=1)
        counters.stats()

    before = counters.stats()
    traced(
        between_lines((counters,), handler),
        lambda: [counters.count(timed=3, tuned=2) for _ in range(5)],
    )
    after = counters.stats().since(before)
    assert (after.timed, after.tuned) == (15, 10)
    assert after.misses > 10, "the handler's own are not lost"
    return None


@pytest.mark.fault("B15")
@pytest.mark.parametrize(
    "work", [counts_on_the_side, tunes_on_the_side], ids=["counts", "background"]
)
def test_what_a_handler_does_in_the_midst_is_no_deadlock(work: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for itself"
    assert errors == []
