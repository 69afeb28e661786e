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
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue
from typing import TYPE_CHECKING

from costmodel.compile.artifact import Artifact
from costmodel.compile.compiler import CompileFunction, compile_spec, shorten
from costmodel.compile.launchers import building_launchers
from costmodel.compile.triton_key import know_triton_key
from costmodel.errors import InvalidInput
from costmodel.gemm.kernel_code import import_kernels
from costmodel.gemm.specialize import Specialization, artifact_key, source
from costmodel.hardware.target import Target
from costmodel.support.daemons import Daemons, usable_cores
from costmodel.support.host import host_errors
from costmodel.support.kept import Kept
from costmodel.support.supervisor import Crashed, Done, Outcome, SupervisedWorker, TimedOut

if TYPE_CHECKING:
    from triton.compiler import ASTSource

__all__ = [
    "CompilePool", "compile_for_device", "compile_into_cache", "compile_many", "start_compilers",
]  # fmt: skip

# Triton 3.6 keeps about 0.2 MiB of each compile for good (measured over 160 of them).
_COMPILES_PER_CHILD = 250
# What a tuning compiles at once: its top 8.
_STARTED_EARLY = 8


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
    """Compile in supervised child processes that end with it; see :class:`CompilePool`.

    Args:
        specs, target, progress, dump, cache, compile_function: of :meth:`CompilePool.compile`.
        n_jobs, limit_s: of :class:`CompilePool`.
    """
    with CompilePool(n_jobs, limit_s) as pool:
        yield from pool.compile(
            specs,
            target,
            progress=progress,
            dump=dump,
            cache=cache,
            compile_function=compile_function,
        )


@dataclass(frozen=True, slots=True)
class _Item:
    """What a child is asked to compile, and how."""

    spec: Specialization
    target: Target
    dump: Path | None
    cache: Path | None
    compile_function: CompileFunction


class CompilePool:
    """Supervised compiling children: started when they are needed, and kept until it is closed.

    For one :meth:`compile` at a time. Where a child, or its folder, cannot be made, and where the
    system refuses one its files, :class:`costmodel.errors.HostError` is raised.

    Args:
        n_jobs: child processes at most; default: the cores that this process may use.
        limit_s: wall seconds per specialization; then its status is ``timeout``.
    """

    def __init__(self, n_jobs: int | None = None, limit_s: float = 60.0) -> None:
        self._jobs = usable_cores() if n_jobs is None else n_jobs
        if self._jobs < 1:
            raise InvalidInput(f"n_jobs={n_jobs}: expected a positive number of processes")
        with host_errors():
            scratch = tempfile.mkdtemp(prefix="costmodel-")
        # Runs once: when called, when this object is collected, or when the interpreter exits.
        self._clean_up = weakref.finalize(self, _remove, scratch, os.getpid())
        self._workers: list[SupervisedWorker[_Item, Artifact]] = [
            SupervisedWorker(
                _compile_in_child,
                limit_s=limit_s,
                setup=functools.partial(_set_up_child, scratch),
                items_per_child=_COMPILES_PER_CHILD,
            )
            for _ in range(self._jobs)
        ]
        # Last in, first out: few items are compiled by the children that are there already.
        self._idle: LifoQueue[SupervisedWorker[_Item, Artifact]] = LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def compile(
        self,
        specs: Iterable[Specialization],
        target: Target,
        *,
        progress: bool = False,
        dump: Path | None = None,
        cache: Path | None = None,
        compile_function: CompileFunction = compile_spec,
    ) -> Generator[Artifact, None, None]:
        """Compile each distinct specialization once.

        Args:
            specs: what to compile.
            target: its architecture is compiled for.
            progress: show a bar on stderr, if that is a terminal.
            dump: as for :func:`compile_spec`.
            cache: a folder of Triton's cache to leave the binaries in, for a process that is to
                load them; by default they are thrown away.
            compile_function: runs in the children; importable by name.

        Yields:
            One artifact per distinct specialization, in the order in which they are done. Closing
            the iterator before its end closes the pool, and kills the children.
        """
        todo = [_Item(spec, target, dump, cache, compile_function) for spec in dict.fromkeys(specs)]
        # Threads, because each only waits for a process of its own.
        threads = Daemons(self._supervised, todo, self._jobs, "costmodel-compile")
        try:
            with host_errors():
                yield from _shown(threads.answers(), len(todo), progress)
        except BaseException:
            threads.cancel()
            self.close()
            raise
        finally:
            threads.join()

    def start(self, count: int) -> None:
        """Start so many children now, in the background; else what is compiled first does."""
        with host_errors():
            for worker in self._workers[-count:]:
                worker.start()

    def close(self) -> None:
        """Kill the children, and what they are compiling."""
        for worker in self._workers:
            worker.close()
        self._clean_up()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _supervised(self, item: _Item) -> Artifact:
        worker = self._idle.get()
        start = time.perf_counter()
        try:
            outcome = worker.run(item)
        finally:
            self._idle.put(worker)
        return _artifact(item.spec, item.target, outcome, time.perf_counter() - start)


def compile_for_device(
    specs: Sequence[Specialization], target: Target
) -> Generator[Artifact, None, None]:
    """Compile in supervised children, into Triton's cache, where every process finds it.

    The children are kept for the next tuning, since each takes a second to start.
    """
    with _compilers.use() as pool:
        yield from compile_into_cache(pool, specs, target)


def compile_into_cache(
    pool: CompilePool, specs: Sequence[Specialization], target: Target
) -> Generator[Artifact, None, None]:
    """Compile by a pool into Triton's cache of this process, and build what launches it."""
    import triton

    sources = filter(None, map(_source_or_none, dict.fromkeys(specs)))
    with building_launchers(sources):
        yield from pool.compile(specs, target, cache=Path(triton.knobs.cache.dir))


def start_compilers() -> None:
    """Have the first children of :func:`compile_for_device` start while there is else to do.

    Does not wait: a tuning that compiles now, or a compile that is not wanted any more, has them.
    """
    if _compilers.in_use:
        return
    with _compilers.use() as pool:
        pool.start(_STARTED_EARLY)


_compilers: Kept[CompilePool] = Kept(CompilePool)


def _source_or_none(spec: Specialization) -> ASTSource | None:
    """None where this Triton lacks what the kernel uses: the child that compiles it says so."""
    with suppress(ImportError, AttributeError):
        return source(spec)[0]
    return None


def _remove(scratch: str, owner: int) -> None:
    """Remove the folder of a pool's children."""
    if os.getpid() == owner:  # a fork has a copy of the pool, but the children are not its own
        shutil.rmtree(scratch, ignore_errors=True)  # a killed ptxas may still be writing there


def _set_up_child(scratch: str) -> None:
    # Under TRITON_INTERPRET the kernels would not be compilable functions.
    os.environ.pop("TRITON_INTERPRET", None)
    # Triton and ptxas leave files behind when they fail; all of them go where they are removed.
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
