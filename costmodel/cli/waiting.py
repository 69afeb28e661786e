"""Says on stderr what a command is working on, so that no command is silent for long."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from threading import Event, Thread
from time import monotonic

_STEPS_S = (2, 3, 5, 10)  # between the first lines; 30 from then on
_at, _heard = "", 0.0


def doing(what: str) -> None:
    """Name the work that the command is doing; empty: say nothing, another program does."""
    global _at
    _at = what


def heard() -> None:
    """Remember that something was just printed."""
    global _heard
    _heard = monotonic()


@contextmanager
def told() -> Iterator[None]:
    """Tell people what a command is doing, from two seconds on, less and less often."""
    ended, start = Event(), monotonic()

    def tell() -> None:
        for seconds in chain(_STEPS_S, repeat(30)):
            if ended.wait(seconds):
                return
            now = monotonic()
            if _at and now - _heard >= min(seconds, 5):
                print(f"... {_at}, {now - start:.0f} s", file=sys.stderr, flush=True)

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join(1)  # else it could print when the stream is closed
