"""Tunes on a thread of its own, while calls are answered by what is at hand."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from costmodel.dispatch.capture import ignore_other_captures
from costmodel.support.bounded import drop_oldest
from costmodel.support.counters import count

__all__ = ["Background", "Job"]

Job = Callable[[Callable[[], None]], None]
"""What is to be done; it calls its argument where the answer so far is to be looked up anew."""

_REMEMBERED = 4096

log = logging.getLogger("costmodel")


@dataclass(slots=True)
class _Held:
    """A job that is queued or under way.

    Attributes:
        job: what is to be done.
        launches: keys of those that it is to better.
        switches: how often it has done so.
        outdated: whether all was forgotten since, so that its key may be asked anew.
    """

    job: Job
    launches: set[Any] = field(default_factory=set)
    switches: int = 0
    outdated: bool = False


class Background:
    """A bounded number of jobs, and the daemon thread that does them one by one.

    A launch that a job may better is held by its key: when the job is done it is dropped, and the
    next call of its kind finds the better one. A job that fails is not tried again: what it left
    stays, with one warning for all such jobs.

    An interrupt may leave a call anywhere: the jobs themselves are the queue, so that none is noted
    and not queued, and each call sees to it that there is a thread, and that it is awake.

    Args:
        drop: forgets launches by their keys.
        at_most: jobs that may wait; more are refused, and their calls ask again later.
    """

    def __init__(self, drop: Callable[[Iterable[Any]], None], at_most: int = 64) -> None:
        self._drop = drop
        self._at_most = at_most
        self._lock = threading.RLock()  # a signal's handler, or a finalizer, may multiply too
        self._held: dict[Any, _Held] = {}  # by job, and the first is under way or the next
        self._refused: set[Any] = set()  # keys of launches whose job found the queue full
        self._failed: dict[Any, None] = {}
        self._tried: dict[Any, None] = {}
        self._warned = False
        self._thread: threading.Thread | None = None
        self._wake: SimpleQueue[None] = SimpleQueue()  # of that thread alone

    def submit(self, key: Any, job: Job) -> int | None:
        """Queue a job, unless it is queued or has failed before.

        Returns:
            How often the job has switched to something better so far; None if the queue is full,
            or there can be no thread.
        """
        with self._lock:
            held = self._held.get(key)
            if held is None and key in self._failed:
                return 0
            # One more than may wait: the first is under way.
            if held is None and len(self._held) > self._at_most:
                return None
            asked = held or self._held.setdefault(key, _Held(job))
            if not self._see_to_thread():
                if held is None:
                    self._held.pop(key, None)
                return None
            if self._wake.empty():
                self._wake.put(None)
            return asked.switches

    def _see_to_thread(self) -> bool:
        """Whether there is a thread, started if need be."""
        if self._thread is not None and self._thread.is_alive():
            return True
        wake: SimpleQueue[None] = SimpleQueue()
        self._wake = wake
        # A daemon: the interpreter ends without waiting for a tuning.
        self._thread = threading.Thread(
            target=self._serve, args=(wake,), name="costmodel-background", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # this process may have no more threads
            log.debug("no thread to tune in the background: %s", error)
            return False
        return True

    def hold(self, key: Any, launch: Any, switches: int | None) -> bool:
        """Drop this launch when the job of this key has a better one; false if it has already.

        Args:
            switches: what :meth:`submit` said before the launch was looked up. A refused job's
                launch is dropped when the next job is done, so that the call asks again; at once
                if there is none.
        """
        with self._lock:
            if (held := self._held.get(key)) is not None:
                if held.switches == switches:
                    held.launches.add(launch)
                return held.switches == switches
            if switches is None and self._held and len(self._refused) < _REMEMBERED:
                self._refused.add(launch)
                return True
            return key in self._failed

    def has_tried(self, key: Any) -> bool:
        """Whether a job of this key is done, or has failed: another would not do better."""
        return key in self._tried

    def forget_failures(self) -> None:
        """Try again what has failed, when it is asked for."""
        with self._lock:
            self._failed.clear()
            self._tried.clear()
            for held in [*self._held.values()]:
                held.outdated = True

    def _serve(self, wake: SimpleQueue[None]) -> None:
        ignore_other_captures()
        while True:
            wake.get()
            # An interrupted call may not have seen that this thread started: it has another then.
            while self._wake is wake and (first := self._first()) is not None:
                if not self._has_done(*first):
                    return

    def _first(self) -> tuple[Any, _Held] | None:
        with self._lock:
            return next(iter(self._held.items()), None)

    def _has_done(self, key: Any, held: _Held) -> bool:
        """Do a job; false at the end of the program."""
        try:
            held.job(lambda: self._release(key))
        except BaseException as error:  # SystemExit too: the next job is to have this thread
            if sys.is_finalizing():
                return False
            self._end(key, error)
            return not _is_ending()
        self._end(key, None)
        return True

    def _release(self, key: Any) -> None:
        with self._lock:
            if (held := self._held.get(key)) is None:
                return
            launches, held.launches = held.launches, set()
            held.switches += 1
        self._drop(launches)

    def _end(self, key: Any, error: BaseException | None) -> None:
        with self._lock:
            if (held := self._held.pop(key, None)) is None:
                return
            launches = held.launches
            if not held.outdated:
                _note(self._tried, key)
                if error is not None:
                    launches = set()
                    _note(self._failed, key)
            refused, self._refused = self._refused, set()
            launches |= refused
        self._drop(launches)
        if error is None:
            count(background_done=1)
        else:
            count(background_failed=1)
            self._report(key, error)

    def _report(self, key: Any, error: BaseException) -> None:
        if _is_ending():  # which ends the processes of a job too
            log.debug("ended with the program: %s: %r", key, error)
            return
        text = f"tuning in the background failed, the answer so far stays: {error!r:.500}"
        log.warning("%s: %s", key, text)
        if not self._warned:
            self._warned = True
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            except RuntimeWarning:  # made an error: it must not end this thread
                log.exception("the warning above was to be an error")


def _is_ending() -> bool:
    """Whether the interpreter is at its end: no thread is left that it waits for.

    The main thread may be done long before, in a program that serves on in others.
    """
    return sys.is_finalizing() or not any(
        thread.is_alive() and not thread.daemon for thread in threading.enumerate()
    )


def _note(keys: dict[Any, None], key: Any) -> None:
    """Add a key; the oldest of too many goes."""
    keys[key] = None
    drop_oldest(keys, _REMEMBERED)
