"""Compiles any Triton kernel in other processes, which import no module of the user's program.

Triton binds a call's arguments as it always does, but is stopped before it compiles
(:func:`recorded`). In this process the kernel becomes raw TTIR, a text (:class:`FrontEnd`); often
many configurations share one text. A child of
:class:`costmodel.compile.compile_pool.CompilePool` compiles the text into Triton's own cache under
Triton's own key (:func:`compile_job`), and the program's launch then finds it there.
"""

import functools
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars, ir
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import JITFunction

from costmodel.compile.compiler import Artifact, compile_source, reason
from costmodel.compile.triton_private import build_launchers, know_triton_key
from costmodel.errors import CompileError, HostError
from costmodel.files import Named, digest

# --- What Triton would compile --------------------------------------------------------------------


@dataclass(frozen=True)
class Compilation:
    """A compile that Triton would have made for a call.

    Attributes:
        function: the ``triton.jit`` or Gluon function.
        signature, constexprs, attrs: of its arguments, as ``ASTSource`` takes them.
        options: the backend's options, parsed.
    """

    function: Any
    signature: Named
    constexprs: dict[Any, Any]
    attrs: dict[Any, Any]
    options: Any
    target: GPUTarget
    backend: Any


def recorded(call: Callable[[], object], kernel: object = None) -> tuple[list[Compilation], object]:
    """Run a call of kernels in this thread; compile nothing, launch only what is compiled already.

    Args:
        call: such as ``lambda: kernel.run(*args, grid=grid, warmup=True, num_warps=8)``.
        kernel: given to Triton as the compiled kernel, which it launches; None: it launches none.

    Returns:
        the compiles that Triton would have made, and what the call returned. A kernel that this
        process has compiled already is not in the list; ``run`` has then returned the
        ``CompiledKernel``.
    """
    found: list[Compilation] = []
    outer, _recorder.found = getattr(_recorder, "found", None), (found, kernel)
    try:
        return found, call()
    finally:
        _recorder.found = outer


_recorder = threading.local()
_compile = JITFunction._do_compile


def _record_or_compile(
    self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any,
    *rest: Any, **more: Any,
) -> Any:  # fmt: skip
    recorder = getattr(_recorder, "found", None)
    if recorder is None:
        return _compile(self, key, signature, device, constexprs, options, attrs, *rest, **more)
    found, kernel = recorder
    _, _, target, backend, _ = self.device_caches[device]
    found.append(Compilation(self, signature, constexprs, attrs, options, target, backend))
    return kernel  # if it is None, `run` returns None


JITFunction._do_compile = _record_or_compile

_parse, _parsing = JITFunction.parse, threading.RLock()


def _parse_alone(self: Any) -> Any:
    with _parsing:
        return _parse(self)


if sys.version_info < (3, 12):  # there two threads cannot both make a tree (CPython's gh-106905)
    JITFunction.parse = _parse_alone


# --- From there to a text -------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelJob:
    """A kernel to be compiled, in plain data.

    Attributes:
        key: Triton's key of the binary in its cache.
        override: a hash of the content of the ``ir_override`` file; ``key`` has its path only.
        name: of the kernel.
        text: raw TTIR, or what Gluon makes instead.
        ext: ``ttir``, or Gluon's ``ttgir`` (``glir`` from Triton 3.9 on).
        source_hash: of the kernel, its helpers and its constants.
        options: of Triton's backend.
        arch: compute capability times ten.
    """

    key: str
    override: str
    name: str
    text: str
    ext: str
    source_hash: str
    options: Named
    arch: int

    @property
    def identity(self) -> str:
        """Return the key, and the hash of the override if there is one."""
        return f"{self.key}-{self.override}" if self.override else self.key


_LAUNCHER_S = 10.0  # for the C compiler; after that Triton builds the launcher itself


class FrontEnd:
    """Makes jobs of compilations. Any number of threads may use it; one works at a time.

    Configurations that differ only in options that the making of the text did not read share one
    text. It seldom reads the numbers of warps and of stages.

    Args:
        kept: limit of sets of constants that are remembered; then all are forgotten, since a server
            that never ends may tune without end.
    """

    def __init__(self, kept: int = 200):
        self._kept = kept
        self._lock = threading.Lock()
        self._texts: dict[Any, list[tuple[Named, str]]] = {}
        self._building: list[threading.Thread] = []

    def wait_for_launchers(self) -> None:
        """Wait until the launchers that were begun are built."""
        with suppress(IndexError):  # another thread may have taken the last one
            while True:
                self._building.pop().join(_LAUNCHER_S)

    def job(self, compilation: Compilation) -> KernelJob:
        """Make the job of a compilation; if it needs a new text, begin to build its launcher.

        Raises:
            CompileError: the kernel cannot be made into TTIR, or its override cannot be read.
            HostError: a hook in this process takes part in compiling, so no child can compile it.
        """
        function, options = compilation.function, compilation.options
        hooks = options.instrumentation_mode not in ("", "consan")  # other modes are Proton's
        if hooks or knobs.runtime.add_stages_inspection_hook:
            raise HostError(
                f"{function.__name__}: a hook in this process, such as Proton's instrumentation, "
                f"changes what Triton compiles, and child processes have none: tune without it"
            )
        source = function.ASTSource(
            function, compilation.signature, compilation.constexprs, compilation.attrs
        )
        environment = get_cache_invalidating_env_vars()
        try:
            with self._lock:
                text = self._text(source, compilation, environment)
            override = getattr(options, "ir_override", None)
            content = Path(override).read_bytes() if override else b""
        except HostError:
            raise
        except Exception as error:  # the user's functions run at compile time
            raise CompileError(f"{source.name} does not compile: {reason(error)}") from error
        know_triton_key()
        key = get_cache_key(source, compilation.backend, options, env_vars=environment)
        return KernelJob(
            key=digest(key, 64),
            override=digest(content, 64) if override else "",
            name=source.name,
            text=text,
            ext=source.ext,
            source_hash=source.hash(),
            options=dict(options.__dict__),
            arch=compilation.target.arch,
        )

    def _text(self, source: Any, compilation: Compilation, environment: dict[str, str]) -> str:
        key = (source.hash(), source.ext, compilation.target, *sorted(environment.items()))
        if key not in self._texts and len(self._texts) >= self._kept:
            self._texts.clear()
        made = self._texts.setdefault(key, [])
        for read, text in made:
            if all(getattr(compilation.options, name) == value for name, value in read.items()):
                return text
        self._building.append(build_launchers([source]))
        options = _Watched(compilation.options)
        context = ir.context()
        ir.load_dialects(context)
        backend = compilation.backend
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        text = str(source.make_ir(compilation.target, options, functions, modules, context))
        made.append((options._read, text))
        return text


front_end = functools.cache(FrontEnd)
"""Returns the front end of this process."""


class _Watched:
    """Options that remember which of them were read."""

    __slots__ = ("_options", "_read")

    def __init__(self, options: Any):
        self._options = options
        self._read: Named = {}

    def __getattr__(self, name: str) -> Any:
        value = self._read[name] = getattr(self._options, name)
        return value


@functools.lru_cache(maxsize=64)
def count_operations(text: str) -> dict[str, int]:
    """Count the operations of a text of TTIR or TTGIR by name, such as ``tt.load``."""
    return dict(Counter(re.findall(r"(?<![\w.!#])(?:tt|ttg|ttng|scf|math|arith)\.\w+", text)))


# --- From a text to a binary ----------------------------------------------------------------------


class TextSource(ASTSource):  # type: ignore[misc]
    """A kernel that Triton sees as a text only."""

    def __init__(self, job: KernelJob):
        self._job = job
        self.name, self.ext = job.name, job.ext
        self.language = Language.TRITON if job.ext == "ttir" else Language.GLUON
        self.signature: Named = {}
        self.constants: dict[Any, Any] = {}

    def hash(self) -> str:
        return self._job.source_hash

    def make_ir(self, *arguments: Any) -> Any:
        return parse_module(self._job.text, arguments[-1])


def parse_module(text: str, context: Any) -> Any:
    """Parse the text of a module; RuntimeError if it is no module."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    return module


def compile_job(job: KernelJob, spec: Any = None, dump: Path | None = None) -> Artifact:
    """Compile a job into Triton's cache, in this process; the kernel's module is not needed.

    A process whose settings differ from those of the process that made the job cannot spoil the
    cache: it leaves the binary under another key, and the program then compiles for itself. Any
    failure except an OSError is a status of the artifact: other people's kernels may fail in any
    way.

    Args:
        spec: of the artifact.
        dump: as in :func:`costmodel.compile.compiler.compile_source`.
    """
    source = TextSource(job), dict(job.options)
    # Triton would not see that an override's file has changed.
    anew = bool(job.override)
    try:
        return compile_source(lambda: source, job.arch, job.identity, spec, dump, anew=anew)
    except OSError:
        raise
    except Exception as error:
        return Artifact(job.identity, spec, "crashed", reason(error))
