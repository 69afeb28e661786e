"""One thread that tunes for mode ``background``, while calls get an interim answer."""

import ctypes
import sys
import threading
import warnings
from collections import deque
from typing import Any

from costmodel.processes import Action
from costmodel.tuning.counters import count
from costmodel.validation import drop_oldest, log

_REMEMBERED = 4096
_THREAD = "costmodel-background"
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Background:
    """A bounded number of jobs, and the daemon thread that does them one by one.

    A key has at most one job at a time. After its job failed, it gets no other until
    :meth:`forget`. Only the first failure gives a warning.

    Args:
        at_most: number of jobs that may wait beside the one under way; more are refused.
    """

    def __init__(self, at_most: int = 64):
        self._at_most = at_most
        self._queued: deque[tuple[Any, Action, dict[Any, bool]]] = deque()
        self._is_at_work = False  # True while a thread does jobs
        self._lock = threading.Lock()
        self._keys: set[Any] = set()  # of the jobs that wait or are under way
        self._failed: dict[Any, bool] = {}  # by the key of each job that is done
        self._has_warned = False

    @property
    def is_idle(self) -> bool:
        """True if no job is under way or waits."""
        return not self._keys

    def submit(self, key: Any, job: Action) -> None:
        """Queue a job, unless the job of its key failed, or the key has one, or too many wait.

        In the last two cases, submit the job again later.
        """
        with self._lock:
            failed = self._failed
            if failed.get(key):
                return
            if key not in self._keys and len(self._keys) <= self._at_most:
                self._queued.append((key, job, failed))
                self._keys.add(key)
            # Checked last, and at each call: an interrupt may have stopped an earlier call here.
            if self._queued and not self._is_at_work:
                thread = threading.Thread(target=self._work, name=_THREAD, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # this process may have no more threads
                    log.debug("no thread to tune in the background: %s", error)

    def failed(self, key: Any) -> bool | None:
        """Return True if the job of a key has failed, False if it succeeded; None: neither yet."""
        return self._failed.get(key)

    def forget(self) -> None:
        """Let each job be done again, also one that is under way now."""
        with self._lock:
            self._failed = {}

    def _work(self) -> None:
        ignore_other_captures()
        with self._lock:
            if self._is_at_work:  # another thread
                return
            self._is_at_work = True
        while True:
            with self._lock:
                if not self._queued:
                    self._is_at_work = False
                    return
                job = self._queued.popleft()
            self._do(*job)

    def _do(self, key: Any, job: Action, failed: dict[Any, bool]) -> None:
        error = None
        try:
            job()
        except BaseException as raised:  # SystemExit too: this thread must do the next job
            # The interpreter is exiting: it waits for its last threads, or is past that. This ends
            # the processes of a job too.
            if sys.is_finalizing() or not threading.main_thread().is_alive():
                return
            error = raised
        with self._lock:
            failed[key] = error is not None
            drop_oldest(failed, _REMEMBERED)
            self._keys.discard(key)
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
                warnings.warn(text, RuntimeWarning, 2)
            except RuntimeWarning:  # warnings are errors, and nobody sees one here
                log.exception("the warning above was to be an error")


def ignore_other_captures() -> None:
    """Let this thread load binaries while another thread captures a graph, from now on.

    torch captures in CUDA's "global" mode: an unsafe call of any thread, such as loading, spoils
    the graph, unless that thread has declared that it takes no part.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver, no captures
        return
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
