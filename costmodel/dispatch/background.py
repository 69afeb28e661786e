"""Jobs that one thread does while calls are answered in another way."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from costmodel.dispatch.capture import ignore_other_captures
from costmodel.tuning.counters import count
from costmodel.validation import drop_oldest

_REMEMBERED = 4096

log = logging.getLogger("costmodel")


class Background:
    """A bounded number of jobs, and the daemon thread that does them one by one.

    Not an executor of ``concurrent.futures``: the interpreter waits for the threads of those, and
    a tuning takes seconds. A key has one job at a time. A task of a key is done once, whether its
    job succeeds or fails, until :meth:`forget`; all that fail are one warning.

    Args:
        at_most: jobs that may wait beside the one under way; more are refused.
    """

    def __init__(self, at_most: int = 64) -> None:
        self._at_most = at_most
        self._lock = threading.Lock()
        # By key: the task, the job, and the record that it ends in, which `forget` replaces. The
        # first one is under way.
        self._jobs: dict[Any, tuple[Any, Callable[[], object], dict[Any, None]]] = {}
        self._finished: dict[Any, None] = {}
        self._thread: threading.Thread | None = None
        self._has_warned = False

    @property
    def is_idle(self) -> bool:
        """True if no job is under way or waits."""
        return not self._jobs

    def submit(self, key: Any, task: Any, job: Callable[[], object]) -> None:
        """Queue a job, unless its task is finished, its key has one, or too many wait.

        Ask again later in the last two cases.
        """
        with self._lock:
            if (key, task) in self._finished:
                return
            if key not in self._jobs and len(self._jobs) <= self._at_most:
                self._jobs[key] = task, job, self._finished
            # In any case: an interrupt may have come between a job and its thread.
            if self._jobs and not (self._thread and self._thread.is_alive()):
                # A daemon: the interpreter ends without waiting for it.
                self._thread = threading.Thread(
                    target=self._serve, name="costmodel-background", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError as error:  # this process may have no more threads
                    log.debug("no thread to tune in the background: %s", error)

    def has_finished(self, key: Any, task: Any) -> bool:
        """Return True if the job of a task has succeeded or failed: another is useless."""
        return (key, task) in self._finished

    def forget(self) -> None:
        """Let each job be done again, one that is under way now too."""
        with self._lock:
            self._finished = {}

    def _serve(self) -> None:
        ignore_other_captures()
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                first = next(iter(self._jobs.items()), None)
                if first is None:
                    self._thread = None
                    return
            key, (task, job, finished) = first
            error: BaseException | None = None
            try:
                job()
            except BaseException as raised:  # SystemExit too: the next job is to have this thread
                if _is_ending():  # which ends the processes of a job too
                    return
                error = raised
            with self._lock:
                # A winner that was found and has left memory since is to be found again.
                if error is not None or task is not None:
                    finished[key, task] = None
                drop_oldest(finished, _REMEMBERED)
                del self._jobs[key]
            if error is None:
                count(background_done=1)
            else:
                count(background_failed=1)
                self._report(key, error)

    def _report(self, key: Any, error: BaseException) -> None:
        text = f"tuning in the background failed, the answer so far stays: {error!r:.500}"
        log.warning("%s: %s", key, text)
        if not self._has_warned:
            self._has_warned = True
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            except RuntimeWarning:  # made an error: it must not end this thread
                log.exception("the warning above was to be an error")


def _is_ending() -> bool:
    """Return True if the interpreter waits for its last threads, or has gone on from there."""
    return sys.is_finalizing() or not threading.main_thread().is_alive()
