"""Compiling what configurations specialize to: GEMM's use of the compile pool."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.compile.artifact import Artifact
from costmodel.compile.compile_pool import CompilePool, as_compiled
from costmodel.compile.compiler import compile_source
from costmodel.compile.triton_private import build_launchers
from costmodel.gemm.config import Specialization
from costmodel.gemm.specialize import artifact_key, import_kernels, source
from costmodel.hardware.target import Target
from costmodel.processes import IDLE_S

if TYPE_CHECKING:
    from triton.compiler import ASTSource

CompileFunction = Callable[[Specialization, Target, Path | None], Artifact]
"""Compiles in this process, as :func:`compile_spec`."""


def compile_spec(spec: Specialization, target: Target, dump: Path | None = None) -> Artifact:
    """Compile in this process by :func:`costmodel.compile.compiler.compile_source`."""
    make = functools.partial(source, spec)
    return compile_source(make, target, artifact_key(spec, target), spec, dump)


def submit(
    pool: CompilePool,
    spec: Specialization,
    target: Target,
    *,
    dump: Path | None = None,
    cache: Path | None = None,
    compile_function: CompileFunction = compile_spec,
) -> Future[Artifact]:
    """Queue a specialization in a pool.

    Args:
        dump: as for :func:`compile_spec`.
        cache: of :meth:`CompilePool.submit`.
        compile_function: runs in the child; importable by name.
    """
    compile_ = functools.partial(compile_function, spec, target, dump)
    return pool.submit(artifact_key(spec, target), spec, compile_, cache=cache)


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
    """Compile each distinct specialization once, in a pool of its own.

    Args:
        specs, target, dump, cache, compile_function: of :func:`submit`.
        n_jobs, limit_s: of :class:`CompilePool`.
        progress: show a bar on stderr, if that is a terminal.

    Yields:
        One artifact per distinct specialization, in the order in which they are done. Closing the
        iterator before its end kills the children.
    """
    with CompilePool(n_jobs, limit_s, preload=import_kernels) as pool:
        submit_ = functools.partial(
            submit, pool, target=target, dump=dump, cache=cache, compile_function=compile_function
        )
        futures = [submit_(spec) for spec in dict.fromkeys(specs)]
        yield from as_compiled(futures, progress=progress)


@functools.cache
def device_compilers() -> CompilePool:
    """Return the pool of this process that compiles what is to be launched."""
    return CompilePool(idle_s=IDLE_S, preload=import_kernels)


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
    return [submit(pool, spec, target, cache=cache) for spec in specs]


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
