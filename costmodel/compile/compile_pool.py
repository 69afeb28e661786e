"""Compiling in supervised children: there a compiler that aborts or hangs costs one artifact its
status and nothing else.

A child imports Triton but not torch, so it is there in about a second; it then serves many
specializations, at 0.1 to 0.8 s each on one core.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, LifoQueue
from typing import TYPE_CHECKING

from costmodel.compile.artifact import Artifact
from costmodel.compile.compiler import CompileFunction, compile_spec, shorten
from costmodel.compile.launchers import build_launchers
from costmodel.compile.triton_key import know_triton_key
from costmodel.errors import InvalidInput
from costmodel.executor import DaemonExecutor
from costmodel.gemm.kernel_code import import_kernels
from costmodel.gemm.specialize import Specialization, artifact_key, source
from costmodel.hardware.target import Target
from costmodel.processes import (
    IDLE_S,
    Crashed,
    Done,
    Outcome,
    SupervisedWorker,
    TimedOut,
    close_at_exit,
)
from costmodel.support.host import host_errors

if TYPE_CHECKING:
    from triton.compiler import ASTSource

__all__ = [
    "CompilePool", "as_compiled", "compile_for_device", "compile_many", "device_compilers",
    "submit_for_device",
]  # fmt: skip

# Triton 3.6 keeps about 0.2 MiB of each compile for good (measured over 160 of them).
_COMPILES_PER_CHILD = 250


@dataclass(frozen=True, slots=True)
class _Item:
    """One thing for a child to compile, and how."""

    spec: Specialization
    target: Target
    dump: Path | None
    cache: Path | None
    compile_function: CompileFunction


class CompilePool:
    """Supervised compiling children, each started when it is needed. For any number of threads.

    Where a child, or its folder, cannot be made, and where the system refuses one its files,
    :class:`costmodel.errors.HostError` is raised.

    Args:
        n_jobs: child processes at most; default: the cores that this process may use.
        limit_s: wall seconds per specialization; then its status is ``timeout``.
        idle_s: a child ends when it gets nothing to compile for so long; None: it stays.
    """

    def __init__(
        self, n_jobs: int | None = None, limit_s: float = 60.0, idle_s: float | None = None
    ) -> None:
        import joblib  # which sets environment variables

        jobs = joblib.cpu_count() if n_jobs is None else n_jobs
        if jobs < 1:
            raise InvalidInput(f"n_jobs={n_jobs}: expected a positive number of processes")
        with host_errors():
            self._scratch = tempfile.mkdtemp(prefix="costmodel-")
        self._workers: list[SupervisedWorker[_Item, Artifact]] = [
            SupervisedWorker(
                _compile_in_child,
                limit_s=limit_s,
                setup=functools.partial(_set_up_child, self._scratch),
                items_per_child=_COMPILES_PER_CHILD,
                idle_s=idle_s,
            )
            for _ in range(jobs)
        ]
        # Last in, first out: few items are compiled by the children that are there already.
        self._idle: LifoQueue[SupervisedWorker[_Item, Artifact]] = LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # Threads, because each only waits for a process of its own.
        self._threads = DaemonExecutor(jobs, "costmodel-compile")
        close_at_exit(self)

    def submit(
        self,
        spec: Specialization,
        target: Target,
        *,
        dump: Path | None = None,
        cache: Path | None = None,
        compile_function: CompileFunction = compile_spec,
    ) -> Future[Artifact]:
        """Queue a specialization; a compiler's failure is a status of the future's artifact.

        Args:
            spec: what to compile.
            target: its architecture is compiled for.
            dump: as for :func:`compile_spec`.
            cache: a folder of Triton's cache to leave the binaries in, for a process that is to
                load them; by default they are thrown away.
            compile_function: runs in the child; importable by name.
        """
        item = _Item(spec, target, dump, cache, compile_function)
        with host_errors():
            return self._threads.submit(self._compile, item)

    def start(self, count: int) -> None:
        """Start so many children now, in the background; else what is compiled first does."""
        started: list[SupervisedWorker[_Item, Artifact]] = []
        with suppress(Empty), host_errors():
            for _ in range(count):
                worker = self._idle.get_nowait()
                started.append(worker)
                worker.start()
        for worker in started:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill the children, and what they are compiling; what is queued is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        shutil.rmtree(
            self._scratch, ignore_errors=True
        )  # a killed ptxas may still be writing there

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compile(self, item: _Item) -> Artifact:
        worker = self._idle.get()
        start = time.perf_counter()
        try:
            with host_errors():
                outcome = worker.run(item)
        finally:
            self._idle.put(worker)
        return _artifact(item.spec, item.target, outcome, time.perf_counter() - start)


def compile_many(
    specs: Iterable[Specialization],
    target: Target,
    *,
    n_jobs: int | None = None,
    limit_s: float = 60.0,
    progress: bool = True,
    dump: Path | None = None,
    cache: Path | None = None,
    compile_function: CompileFunction = compile_spec,
) -> Generator[Artifact, None, None]:
    """Compile each distinct specialization once, in a :class:`CompilePool` of its own.

    Args:
        specs, target, dump, cache, compile_function: of :meth:`CompilePool.submit`.
        n_jobs, limit_s: of :class:`CompilePool`.
        progress: show a bar on stderr, if that is a terminal.

    Yields:
        One artifact per distinct specialization, in the order in which they are done. Closing the
        iterator before its end kills the children.
    """
    with CompilePool(n_jobs, limit_s) as pool:
        futures = [
            pool.submit(spec, target, dump=dump, cache=cache, compile_function=compile_function)
            for spec in dict.fromkeys(specs)
        ]
        yield from _shown(as_compiled(futures), len(futures), progress)


def as_compiled(futures: Iterable[Future[Artifact]]) -> Generator[Artifact, None, None]:
    """Yield each artifact as soon as it is there; what is left when this is closed is cancelled."""
    futures = list(futures)
    try:
        for future in as_completed(futures):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


@functools.cache
def device_compilers() -> CompilePool:
    """Return the pool of this process that compiles what is to be launched."""
    return CompilePool(idle_s=IDLE_S)


def submit_for_device(
    specs: Sequence[Specialization], target: Target, pool: CompilePool | None = None
) -> list[Future[Artifact]]:
    """Begin to compile into Triton's cache, where every process finds the binaries.

    What launches them is built as well, in the background.

    Args:
        pool: default: :func:`device_compilers`.
    """
    import triton

    pool = pool or device_compilers()
    specs = list(dict.fromkeys(specs))
    build_launchers(filter(None, map(_source_or_none, specs)))
    cache = Path(triton.knobs.cache.dir)
    return [pool.submit(spec, target, cache=cache) for spec in specs]


def compile_for_device(
    specs: Sequence[Specialization], target: Target, pool: CompilePool | None = None
) -> Generator[Artifact, None, None]:
    """Compile as :func:`submit_for_device`, from now on; yield what is done."""
    return as_compiled(submit_for_device(specs, target, pool))


def _source_or_none(spec: Specialization) -> ASTSource | None:
    """Return None where this Triton lacks what the kernel uses: the child that compiles says so."""
    with suppress(ImportError, AttributeError):
        return source(spec)[0]
    return None


def _set_up_child(scratch: str) -> None:
    # Under TRITON_INTERPRET the kernels would not be compilable functions.
    os.environ.pop("TRITON_INTERPRET", None)
    # Triton and ptxas leave files behind when they fail; all of them go where they are removed.
    os.makedirs(scratch, exist_ok=True)  # who tidies up /tmp may have taken it
    tempfile.tempdir = scratch
    # What each process needs once is done while nobody waits for it.
    know_triton_key()
    import_kernels()


def _compile_in_child(item: _Item) -> Artifact:
    from triton import knobs

    # Unless asked for, a cache of its own for each compile: nothing stale, nothing piles up.
    scratch = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        knobs.cache.dir = str(item.cache) if item.cache else folder
        try:
            return item.compile_function(item.spec, item.target, item.dump)
        finally:
            tempfile.tempdir = scratch


def _artifact(
    spec: Specialization, target: Target, outcome: Outcome[Artifact], seconds: float
) -> Artifact:
    key = functools.partial(artifact_key, spec, target)
    match outcome:
        case Done(artifact):
            return artifact
        case Crashed(how):
            error = shorten(f"the compiler's process was {how}")
            return Artifact(key(), spec, "crashed", error, compile_s=seconds)
        case TimedOut(limit_s):
            error = f"not compiled within {limit_s:g} s"
            return Artifact(key(), spec, "timeout", error, compile_s=seconds)
        case _:
            raise AssertionError(f"no exception is expected here: {outcome}")


def _shown(artifacts: Iterator[Artifact], total: int, progress: bool) -> Iterable[Artifact]:
    """The artifacts, with a bar on stderr if that is wanted and a terminal."""
    if not (progress and sys.stderr.isatty()):
        return artifacts
    from rich.console import Console
    from rich.progress import track

    return track(artifacts, "compiling", total=total, console=Console(stderr=True))
