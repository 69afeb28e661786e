"""A pool of compiling child processes: a compiler that aborts or hangs fails one artifact only.

A child imports Triton but not torch, so it is there in about a second; it then serves many
compiles, at 0.1 to 0.8 s each on one core.
"""

import functools
import heapq
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any

from costmodel.compile.compiler import Artifact, shorten
from costmodel.compile.triton_private import know_triton_key
from costmodel.errors import InvalidInput, host_errors
from costmodel.hardware.installed import compiler_settings
from costmodel.processes import (
    Action,
    Closable,
    Done,
    SupervisedWorker,
    TimedOut,
    close_at_exit,
)

# Triton 3.6 keeps about 0.2 MiB of each compile for good (measured over 160 of them).
_COMPILES_PER_CHILD = 250


_Item = tuple[Callable[[], Artifact], Path | None]  # what compiles; a folder for Triton's cache
_Worker = SupervisedWorker[_Item, Artifact]
Pending = Future[Artifact]


class CompilePool(Closable):
    """Supervised compiling children, each started when it is needed. Any thread may use the pool.

    :class:`costmodel.errors.HostError` is raised if a child or its folder cannot be made, or if the
    system refuses a child its files.

    Args:
        n_jobs: child processes at most; default: the cores that this process may use.
        limit_s: wall seconds per compile; then its status is ``timeout``.
        idle_s: a child ends when it gets nothing to compile for so many seconds; None: it stays.
        preload: an importable function that each fresh child calls while nobody waits for it.

    Attributes:
        size: child processes at most.

    Raises:
        InvalidInput: ``n_jobs`` is below 1.
    """

    def __init__(
        self,
        n_jobs: int | None = None,
        limit_s: float = 60.0,
        idle_s: float | None = None,
        preload: Action | None = None,
    ):
        import joblib  # here, since it sets environment variables

        jobs = self.size = joblib.cpu_count() if n_jobs is None else n_jobs
        if jobs < 1:
            raise InvalidInput(f"n_jobs={n_jobs}: expected a positive number of processes")
        with host_errors():
            self._scratch = tempfile.mkdtemp(prefix="costmodel-")
        self._workers = [
            _Worker(
                _compile_in_child,
                limit_s=limit_s,
                setup=functools.partial(_set_up_child, self._scratch, preload),
                items_per_child=_COMPILES_PER_CHILD,
                idle_s=idle_s,
                settings=settings_of_triton,
            )
            for _ in range(jobs)
        ]
        # The last one is taken first, so few items go to children that run already.
        self._idle = list(self._workers)
        self._queued: list[tuple[int, int, Pending, str, Any, _Item]] = []  # a heap
        self._numbers = itertools.count()
        self._closed = False
        self._lock = threading.Lock()  # guards the four above
        close_at_exit(self)

    def submit(
        self,
        key: str,
        spec: Any,
        compile_: Callable[[], Artifact],
        *,
        cache: Path | None = None,
        urgency: int = 0,
    ) -> Pending:
        """Queue a compile; a compiler's failure is a status of the future's artifact.

        Args:
            key, spec: of the artifact that is made if the child dies.
            compile_: runs in the child: an importable function, or a ``functools.partial`` of one.
            cache: a folder of Triton's cache to leave the binaries in, for a process that will
                load them; by default they are thrown away.
            urgency: the highest is compiled first; among equals, what was queued first.
        """
        future: Pending = Future()
        with host_errors(), self._lock:
            if self._closed:
                raise RuntimeError("this pool is closed: make another one")
            if self._idle:
                # A daemon: when the interpreter ends, an executor's threads would first do all
                # that is queued. This one only waits for its child, which is killed then.
                thread = threading.Thread(target=self._work, args=self._idle[-1:], daemon=True)
                thread.start()
                self._idle.pop()
            item = compile_, cache
            place = -urgency, next(self._numbers)
            heapq.heappush(self._queued, (*place, future, key, spec, item))
        return future

    def hurry(self, future: Pending, urgency: int) -> None:
        """Change the urgency of a compile that is still queued."""
        with self._lock:
            self._queued = [
                (-urgency, *item[1:]) if item[2] is future else item for item in self._queued
            ]
            heapq.heapify(self._queued)

    def start(self, count: int) -> None:
        """Start ``count`` children now, without waiting; else the first compiles start them."""
        with host_errors(), self._lock:
            for worker in self._idle[-count:] if count > 0 else ():
                worker.start()

    def close(self) -> None:
        """Kill the children, and what they are compiling; what is queued is cancelled."""
        with self._lock:
            self._closed = True
            queued = list(self._queued)
            self._queued.clear()
        for _, _, future, *_ in queued:
            if future.cancel():
                future.set_running_or_notify_cancel()  # wakes the threads that wait for it
        for worker in self._workers:
            worker.close()
        shutil.rmtree(self._scratch, ignore_errors=True)  # a killed ptxas may still write there

    def _work(self, worker: _Worker) -> None:
        """Compile with one child until nothing is queued."""
        while True:
            with self._lock:
                if not self._queued:
                    self._idle.append(worker)
                    return
                _, _, future, key, spec, item = heapq.heappop(self._queued)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(_compile(worker, key, spec, item))
                except BaseException as error:  # else a thread that waits would wait for ever
                    if self._closed:  # just before the child got the item
                        future.set_result(Artifact(key, spec, "crashed", "the pool was closed"))
                    else:
                        future.set_exception(error)


def _compile(worker: _Worker, key: str, spec: Any, item: _Item) -> Artifact:
    start = time.perf_counter()
    with host_errors():
        outcome = worker.run(item)
    if isinstance(outcome, Done):
        return outcome.value
    seconds = time.perf_counter() - start
    if isinstance(outcome, TimedOut):
        error = f"not compiled within {outcome.limit_s:g} s"
        return Artifact(key, spec, "timeout", error, compile_s=seconds)
    error = shorten(f"the compiler's process was {outcome.how}")
    return Artifact(key, spec, "crashed", error, compile_s=seconds)


def as_compiled(
    futures: Iterable[Pending], *, progress: bool = False
) -> Generator[Artifact, None, None]:
    """Yield each artifact as soon as it is there; closing the generator cancels the others.

    Args:
        progress: show a bar on stderr, if that is a terminal.
    """
    futures = list(futures)
    done: Iterable[Pending] = as_completed(futures)
    if progress and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        done = track(done, "compiling", total=len(futures), console=Console(stderr=True))
    try:
        for future in done:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def settings_of_triton() -> dict[str, str | None]:
    """Return the environment variables with which a child compiles as this process does."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    # In Triton's key a variable that is set to its default differs from one that is not set.
    return {**compiler_settings(), **get_cache_invalidating_env_vars()}


def _set_up_child(scratch: str, preload: Action | None) -> None:
    # Under TRITON_INTERPRET the kernels would not be compilable functions.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("TRITON_CACHE_MANAGER", None)  # the child is told the folder it would choose
    # Triton and ptxas leave files behind when they fail; all go to a folder that is removed.
    os.makedirs(scratch, exist_ok=True)  # a cleaner of /tmp may have removed it
    tempfile.tempdir = scratch
    # Work that each process does once is done here, while nobody waits for it.
    know_triton_key()
    if preload is not None:
        preload()


def _compile_in_child(item: _Item) -> Artifact:
    from triton import knobs

    # By default each compile has a cache of its own: nothing is stale, and nothing piles up.
    compile_, cache = item
    scratch = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        knobs.cache.dir = str(cache or folder)
        try:
            return compile_()
        finally:
            tempfile.tempdir = scratch
