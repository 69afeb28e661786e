"""Compiling what configurations specialize to: GEMM's use of the compile pool."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from costmodel.compile.artifact import Artifact
from costmodel.compile.compile_pool import CompilePool, as_compiled
from costmodel.compile.compiler import compile_source
from costmodel.compile.triton_private import build_launchers
from costmodel.gemm.config import Specialization
from costmodel.gemm.specialize import artifact_key, import_kernels, source
from costmodel.hardware.target import Target
from costmodel.processes import IDLE_S


def submit(
    pool: CompilePool,
    spec: Specialization,
    target: Target,
    *,
    dump: Path | None = None,
    cache: Path | None = None,
) -> Future[Artifact]:
    """Queue a specialization in a pool.

    Args:
        dump: as for :func:`costmodel.compile.compiler.compile_source`.
        cache: of :meth:`CompilePool.submit`.
    """
    key, make_source = artifact_key(spec, target), functools.partial(source, spec)
    compile_ = functools.partial(compile_source, make_source, target, key, spec, dump)
    return pool.submit(key, spec, compile_, cache=cache)


def compile_many(
    specs: Iterable[Specialization],
    target: Target,
    *,
    n_jobs: int | None = None,
    progress: bool = True,
    dump: Path | None = None,
    cache: Path | None = None,
) -> Generator[Artifact, None, None]:
    """Compile each distinct specialization once, in a pool of its own.

    Args:
        specs, target, dump, cache: of :func:`submit`.
        n_jobs: of :class:`CompilePool`.
        progress: show a bar on stderr, if that is a terminal.

    Yields:
        One artifact per distinct specialization, in the order in which they are done. Closing the
        iterator before its end kills the children.
    """
    with CompilePool(n_jobs, preload=import_kernels) as pool:
        futures = [
            submit(pool, spec, target, dump=dump, cache=cache) for spec in dict.fromkeys(specs)
        ]
        yield from as_compiled(futures, progress=progress)


@functools.cache
def device_compilers() -> CompilePool:
    """Return the pool of this process that compiles what is to be launched."""
    return CompilePool(idle_s=IDLE_S, preload=import_kernels)


def compile_for_device(
    specs: Sequence[Specialization], target: Target, pool: CompilePool | None = None
) -> Generator[Artifact, None, None]:
    """Begin to compile into Triton's cache, where every process finds the binaries.

    What launches them is built as well, in the background.

    Args:
        pool: default: :func:`device_compilers`.

    Returns:
        The artifacts, in the order in which they are done.
    """
    import triton

    pool = pool or device_compilers()
    specs = list(dict.fromkeys(specs))
    sources = []
    for spec in specs:
        # Where this Triton lacks what a kernel uses, the child that compiles says so.
        with suppress(ImportError, AttributeError):
            sources.append(source(spec)[0])
    build_launchers(sources)
    cache = Path(triton.knobs.cache.dir)
    return as_compiled([submit(pool, spec, target, cache=cache) for spec in specs])
