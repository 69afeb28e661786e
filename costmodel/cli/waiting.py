"""Says on stderr that a command is still at work, and at what, so that none is silent for long."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from threading import Event, Thread
from time import monotonic

_STEPS_S = (2, 3, 5, 10)  # between the first lines; then 30
_at, _heard = "", 0.0


def doing(what: str) -> None:
    """Name what the command is at; empty: another program tells."""
    global _at
    _at = what


def heard() -> None:
    """Keep in mind that something was just told."""
    global _heard
    _heard = monotonic()


@contextmanager
def told() -> Iterator[None]:
    """Tell people what a command is at, from two seconds on, ever more rarely."""
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
        teller.join(1)  # or it would tell when the stream is closed
