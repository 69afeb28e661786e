"""Something that takes long to start: kept for the next user, and ended when nobody comes."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["IDLE_S", "Kept"]

IDLE_S = 15.0
"""Seconds for which processes wait for another user: they hold memory, of the device too."""


class _Closes(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closes)


class Kept(Generic[T]):
    """One thing, made at its first use, for one thread at a time.

    A fork of the process makes its own: two would talk to the same children at once.

    Args:
        make: makes it, and another after one was closed.
        idle_s: close it when it was not used for so many seconds.
    """

    def __init__(self, make: Callable[[], T], idle_s: float = IDLE_S) -> None:
        self._make, self._idle_s = make, idle_s
        self._lock = threading.Lock()
        self._thing: T | None = None
        self._timer: threading.Timer | None = None
        _all.add(self)

    @property
    def in_use(self) -> bool:
        """Whether some thread has it now."""
        return self._lock.locked()

    @contextmanager
    def use(self) -> Iterator[T]:
        """The thing, while no other thread has it. What an exception leaves behind is closed."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._thing is None:
                self._thing = self._make()
            try:
                yield self._thing
            except BaseException:
                self._close()
                raise
            self._timer = threading.Timer(self._idle_s, self._close_if_idle)
            self._timer.daemon = True
            try:
                self._timer.start()
            except RuntimeError:  # this process may have no more threads, and nobody would close it
                self._close()

    def close(self) -> None:
        """Close it, if it is there; the next user gets another."""
        with self._lock:
            self._close()

    def _close_if_idle(self) -> None:
        """Not if somebody came while the timer was going off."""
        if self._lock.acquire(blocking=False):
            try:
                if self._timer is threading.current_thread():
                    self._close()
            finally:
                self._lock.release()

    def _close(self) -> None:
        thing, self._thing = self._thing, None
        if thing is not None:
            thing.close()

    def _begin_anew(self) -> None:
        """With nothing, and a lock that no thread has: those of the parent are not in its fork."""
        self._lock = threading.Lock()
        self._thing = self._timer = None


_all: weakref.WeakSet[Kept[Any]] = weakref.WeakSet()


def _begin_anew_in_fork() -> None:
    for kept in _all:
        kept._begin_anew()


os.register_at_fork(after_in_child=_begin_anew_in_fork)
