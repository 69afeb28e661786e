"""From a specialization to its binary and PTX features. No GPU is needed, and none is touched.

:func:`compile_spec` compiles in this process, :func:`compile_many` in supervised children: there a
compiler that aborts or hangs costs one artifact its status and nothing else. A child imports Triton
but not torch, so it is there in about a second (half of it is Triton hashing its own files once);
it then serves many specializations, at 0.1 to 0.4 s each on one core.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import LifoQueue
from typing import Any

from costmodel.artifact import Artifact
from costmodel.errors import InvalidInput
from costmodel.ptx import extract, ptx_hash
from costmodel.specialize import Specialization, artifact_key, source
from costmodel.supervisor import Crashed, Done, Outcome, SupervisedWorker, TimedOut
from costmodel.target import Target

__all__ = ["CompileFunction", "CompilePool", "compile_many", "compile_spec", "duplicates"]

CompileFunction = Callable[[Specialization, Target, Path | None], Artifact]

_ERROR_LIMIT = 500
# Triton 3.6 keeps about 0.2 MiB of each compile for good (measured over 160 of them).
_COMPILES_PER_CHILD = 250
# CUDA's own share of a block's shared memory, which ptxas reports from sm_90 on. The limits of
# CUDA's tables (227 KiB on sm_90) are without it.
_RESERVED_SHARED_BYTES = 1024


def compile_spec(spec: Specialization, target: Target, dump: Path | None = None) -> Artifact:
    """Compile in this process, with Triton's own disk cache.

    A configuration that Triton or ptxas refuses gives an artifact of status ``compile_error``.
    These exceptions of ``triton.compile`` mean so; all others propagate:

    - ``CompilationError``: the kernel's source, its ``static_assert`` among it;
    - ``PTXASError``: for one, a ``maxnreg`` that is too small for a wgmma;
    - ``OutOfResources``: shared or tensor memory;
    - ``ValueError``, ``AssertionError``: options that the backend checks, such as ``num_warps``;
    - ``RuntimeError("PassManager::run failed")``: a pass of MLIR gave up.

    Args:
        spec: what to compile.
        target: its architecture is compiled for.
        dump: a folder for ``KEY.ptx``, ``KEY.sass`` and ``KEY.json``, made if missing.

    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    key = artifact_key(spec, target)
    start = time.perf_counter()
    try:
        ast_source, options = source(spec)
        gpu = GPUTarget("cuda", target.device.arch, 32)
        compiled = triton.compile(ast_source, target=gpu, options=options)
    except (CompilationError, PTXASError, OutOfResources, ValueError, AssertionError) as error:
        artifact = Artifact(key, spec, "compile_error", _reason(error))
    except RuntimeError as error:
        if "PassManager::run failed" not in str(error):
            raise
        artifact = Artifact(key, spec, "compile_error", _reason(error))
    else:
        artifact = _describe(key, spec, target, compiled)
    artifact = replace(artifact, compile_s=time.perf_counter() - start)
    if dump is not None:
        _dump(dump, artifact, compiled.asm if artifact.ok else None)
    return artifact


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

    joblib's threads spread the work over them. For one :meth:`compile` at a time.

    Args:
        n_jobs: child processes at most; default: the cores that this process may use.
        limit_s: wall seconds per specialization; then its status is ``timeout``.
    """

    def __init__(self, n_jobs: int | None = None, limit_s: float = 60.0) -> None:
        import joblib

        self._jobs = joblib.cpu_count() if n_jobs is None else n_jobs
        if self._jobs < 1:
            raise InvalidInput(f"n_jobs={n_jobs}: expected a positive number of processes")
        # A killed ptxas may still be writing when its folder goes.
        self._scratch = tempfile.TemporaryDirectory(prefix="costmodel-", ignore_cleanup_errors=True)
        self._workers: list[SupervisedWorker[_Item, Artifact]] = [
            SupervisedWorker(
                _compile_in_child,
                limit_s=limit_s,
                setup=functools.partial(_set_up_child, self._scratch.name),
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
        import joblib
        from rich.console import Console
        from rich.progress import track

        todo = [_Item(spec, target, dump, cache, compile_function) for spec in dict.fromkeys(specs)]
        # Threads, because each only waits for a process of its own.
        parallel = joblib.Parallel(
            n_jobs=min(self._jobs, max(len(todo), 1)),
            backend="threading",
            return_as="generator_unordered",
        )
        artifacts = parallel(joblib.delayed(self._supervised)(item) for item in todo)
        try:
            for artifact in track(  # noqa: UP028 - a caller that stops early must not close joblib's
                artifacts,
                "compiling",
                total=len(todo),
                console=Console(stderr=True),
                disable=not (progress and sys.stderr.isatty()),
            ):
                yield artifact
        except BaseException:
            _close_quietly(artifacts)
            self.close()
            raise

    def close(self) -> None:
        """Kill the children, and what they are compiling."""
        for worker in self._workers:
            worker.close()
        self._scratch.cleanup()

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


def duplicates(artifacts: Iterable[Artifact]) -> dict[str, str]:
    """Keys of artifacts that repeat an earlier one, and the key of the first of their kind.

    Two are the same when the program, and what it is launched with, is: the PTX (which states
    the threads, the register limit and the architecture) and the shared memory.
    """
    first: dict[tuple[str, int], str] = {}
    repeated: dict[str, str] = {}
    for artifact in artifacts:
        if artifact.ok:
            kept = first.setdefault((artifact.ptx_hash, artifact.shared_bytes), artifact.key)
            if kept != artifact.key:
                repeated[artifact.key] = kept
    return repeated


def _set_up_child(scratch: str) -> None:
    # Under TRITON_INTERPRET the kernels would not be compilable functions.
    os.environ.pop("TRITON_INTERPRET", None)
    # Triton and ptxas leave files behind when they fail; all of them go where they are removed.
    tempfile.tempdir = scratch


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
            error = _shorten(f"the compiler's process was {how}")
            return Artifact(key(), spec, "crashed", error, compile_s=seconds)
        case TimedOut(limit_s):
            error = f"not compiled within {limit_s:g} s"
            return Artifact(key(), spec, "timeout", error, compile_s=seconds)
        case _:
            raise AssertionError(f"no exception is expected here: {outcome}")


def _describe(key: str, spec: Specialization, target: Target, compiled: Any) -> Artifact:
    """The artifact of a ``triton.compiler.CompiledKernel``."""
    metadata, ptx, cubin = compiled.metadata, compiled.asm["ptx"], compiled.asm["cubin"]
    usage = _resource_usage(cubin, metadata.name)
    reserved = _RESERVED_SHARED_BYTES if target.device.arch >= 90 else 0
    return Artifact(
        key,
        spec,
        registers=usage["REG"],
        spill_bytes=usage["STACK"],
        shared_bytes=metadata.shared + max(usage["SHARED"] - reserved, 0),
        ptx_hash=ptx_hash(ptx),
        ptx=extract(ptx),
    )


def _resource_usage(cubin: bytes, entry: str) -> dict[str, int]:
    """What ptxas gave the function: REG, STACK, SHARED (static), LOCAL; sizes in bytes."""
    text = _run_tool("cuobjdump", "--dump-resource-usage", cubin)
    match = re.search(rf"Function {re.escape(entry)}:\s*\n(.*)", text)
    usage = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", match[1])} if match else {}
    if not {"REG", "STACK", "SHARED"} <= set(usage):
        raise RuntimeError(
            f"cuobjdump --dump-resource-usage: expected REG, STACK and SHARED of {entry}, found "
            f"{text[:_ERROR_LIMIT]!r}; this Triton's cuobjdump is not known to costmodel"
        )
    return usage


def _run_tool(tool: str, option: str, cubin: bytes) -> str:
    """The output of one of the CUDA tools in Triton's wheel, which only read files."""
    from triton import knobs

    path = getattr(knobs.nvidia, tool).path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [path, option, file.name], check=True, stdout=subprocess.PIPE, text=True
        ).stdout


def _dump(folder: Path, artifact: Artifact, asm: Mapping[str, Any] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    row = asdict(replace(artifact, ptx={}))
    (folder / f"{artifact.key}.json").write_text(json.dumps(row, indent=1) + "\n")
    if asm is not None:
        sass = _run_tool("cuobjdump", "-sass", asm["cubin"])
        (folder / f"{artifact.key}.ptx").write_text(asm["ptx"])
        (folder / f"{artifact.key}.sass").write_text(sass)


def _reason(error: BaseException) -> str:
    """What was wrong, in a line or two: no source excerpts, PTX or names of temporary files."""
    while error.__cause__ is not None:  # Triton wraps once for every call on the way
        error = error.__cause__
    text = str(error)
    if fatal := re.findall(r"^ptxas.*?(?:fatal|error) *: *(.*)$", text, re.MULTILINE):
        text = f"ptxas: {fatal[0]}"
    elif excerpt := re.split(r"\n *\^(?:\n|$)", text)[:-1]:
        # The source up to the statement and a caret under it, then the message, if any.
        statement = excerpt[-1].rsplit("\n", 1)[-1].strip()
        text = f"{statement}: {text.rsplit('^', 1)[-1].strip()}".removesuffix(": ")
    return _shorten(f"{type(error).__name__}: {text.split('Repro command:')[0].strip()}")


def _shorten(text: str) -> str:
    return text if len(text) <= _ERROR_LIMIT else text[: _ERROR_LIMIT - 1] + "…"


def _close_quietly(artifacts: Generator[Artifact, None, None]) -> None:
    """Stop joblib. It warns of work that is not used; a caller that stops early knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        artifacts.close()
