"""Private parts of Triton that compiling needs; adaptations to another Triton belong here.

- **Key.** Triton finds what it compiled by a hash of its own files. It reads half a gigabyte of
  library again in each process, which takes half a second. The files hardly ever change, so the
  hash is remembered.
- **Launchers.** Triton 3.6 writes C code between Python and a kernel for each kind of signature.
  The C compiler builds it when a binary is first loaded, which takes a third of a second. Its
  inputs are known earlier, so here it is built while the kernel itself is compiled.
- **Binaries.** To find what it compiled before, Triton reads and hashes the kernel's source, which
  takes a tenth of a second. Here the binary is taken from Triton's cache directly, if nothing that
  it depends on has changed and it is still the same, byte for byte. Else Triton compiles it.
"""

import functools
import json
import logging
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any

from costmodel.errors import CompileError, host_errors
from costmodel.files import Named, cached_fact, digest
from costmodel.hardware.target import Target

MakeSource = Callable[[], tuple[Any, Named]]
"""Returns the Triton source and compile options of a binary; imports its kernel."""

# Names of variables that Triton, LLVM and ptxas read begin with these.
_VARIABLES = "TRITON PTXAS LLVM MLIR DISABLE USE_ NVPTX AMDGCN ENABLE"
_LAUNCHER = "__triton_launcher"  # as Triton has it

log = logging.getLogger("costmodel")


def cache_folder() -> Path:
    """Return the folder where Triton keeps what it compiles in this process.

    Some servers set their own cache manager (``TRITON_CACHE_MANAGER``), with a folder for each
    process.
    """
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    with host_errors():
        return Path(getattr(get_cache_manager(""), "cache_dir", None) or knobs.cache.dir)


# --- Key ------------------------------------------------------------------------------------------


_KEY_LOCK = Lock()


def know_triton_key() -> None:
    """Give Triton its key, so that this process need not compute it.

    The key is what Triton itself computed from the same files once. Triton 3.9 gives it to its own
    compile workers in the same way. Nothing is done if this Triton is built in another way. If one
    thread works the key out, others wait for it.
    """
    from triton.runtime import cache

    with _KEY_LOCK:
        own: Any = getattr(cache, "triton_key", None)
        # `cache_info` is missing if this Triton is built in another way, or after we replaced it.
        if not hasattr(own, "cache_info") or own.cache_info().currsize or not triton_files():
            return
        key = cached_fact("triton", triton_files(), lambda: {"key": str(own())})["key"]
        cache.triton_key = lambda: key


@functools.cache
def triton_files() -> tuple[Path, ...]:
    """List the files that Triton's key is made of, and more: its library, and all that compiles.

    Empty if this Triton is built in another way.
    """
    import triton

    root = Path(triton.__file__).parent
    library = [*root.glob("_C/libtriton.*")]
    sources = [
        Path(folder, name)
        for part in ("compiler", "backends", "language", "runtime")
        # In a development install of Triton, a backend is a link to another folder.
        for folder, _, names in os.walk(root / part, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    return (root / "__init__.py", *library, *sources) if library and sources else ()


# --- Launchers ----------------------------------------------------------------------------------


def build_launchers(sources: Iterable[Any]) -> Thread:
    """Begin to build the launchers of Triton sources into Triton's cache, in daemon threads.

    Failures are ignored here: Triton meets them again when it loads the binary, and reports them.
    From Triton 3.7 on one launcher serves all kernels, and there is nothing to build.

    Args:
        sources: consumed in the thread, since making one may import its kernel.

    Returns:
        A thread that ends when all of them are built.
    """
    return _begin(_build_all, sources)


def _begin(work: Callable[[Any], None], *arguments: Any) -> Thread:
    """Start a daemon thread; it may be a daemon, since it only waits for a C compiler."""
    thread = Thread(target=work, args=arguments, daemon=True)
    with host_errors():
        thread.start()
    return thread


def _build_all(sources: Iterable[Any]) -> None:
    from triton import knobs

    # Signatures whose types are the same in C share one launcher.
    wanted = {(knobs.cache.dir, text) for text in map(_text, sources) if text} - _begun
    _begun.update(wanted)
    for thread in [_begin(_build, text) for _, text in wanted]:
        thread.join()


def _text(source: Any) -> str:
    """Return the C code of a source's launcher; empty if there is nothing to build."""
    try:
        from triton.backends.nvidia import driver

        if not hasattr(driver, "make_launcher"):
            return ""
        # It only asks if TMA reads each descriptor, which is so for all of ours.
        described = sum(str(x).startswith("tensordesc") for x in source.signature.values())
        kinds = dict(source.signature)
        return str(driver.make_launcher(source.constants, kinds, [{}] * described))
    except Exception as error:  # nothing depends on it
        log.debug("no launcher ahead: %s: %.200s", type(error).__name__, error)
        return ""


def _build(text: str) -> None:
    """Build as Triton's ``compile_module_from_src``, which then finds the result; load nothing.

    A launcher that is loaded before Triton's own C code refuses every tensor descriptor for as long
    as the process lives. Also, Python gives all launchers that it loads again one module: a thread
    that loads one may replace that of another thread.
    """
    try:
        from triton.backends.nvidia import driver
        from triton.runtime import build
        from triton.runtime.cache import get_cache_manager

        key = digest(text + build.platform_key(), 64)
        cache, file = get_cache_manager(key), _LAUNCHER + sysconfig.get_config_var("EXT_SUFFIX")
        if cache.get_file(file) is not None:
            return
        # At the interpreter's end the compiler may still be writing when its folder is removed.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            source = Path(folder, f"{_LAUNCHER}.c")
            source.write_text(text)
            libraries = driver.library_dirs(), driver.include_dirs, driver.libraries
            # It only unpacks arguments: more optimization gains under 0.1 us a launch.
            made = build._build(_LAUNCHER, str(source), folder, *libraries, ["-Og"])
            cache.put(Path(made).read_bytes(), file, binary=True)
    except Exception as error:  # as above
        log.debug("no launcher built ahead: %s: %.200s", type(error).__name__, error)


_begun: set[tuple[str, str]] = set()


# --- Binaries -----------------------------------------------------------------------------------


def compiled(make_source: MakeSource, name: object, target: Target) -> Any:
    """Compile a source, or find its binary in Triton's cache; return the ``CompiledKernel``.

    Args:
        name: for messages.

    Raises:
        CompileError: Triton or ptxas refused.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    know_triton_key()
    source, options = make_source()
    gpu = GPUTarget("cuda", target.device.arch, 32)
    try:
        return triton.compile(source, target=gpu, options=options)
    except (CompilationError, PTXASError) as error:
        raise CompileError(f"{name} does not compile: {str(error)[:500]}") from None


def recalled(
    key: str, make_source: MakeSource, name: object, target: Target, files: Iterable[Path]
) -> Any:
    """Compile as :func:`compiled`; a later process finds the binary without reading the kernel.

    Args:
        key: the identity of the binary: its kernel's code, and the compiler that made it.
        files: files that determine the source and the options, besides the kernel's code.
    """
    if not _plain_triton():
        return compiled(make_source, name, target)
    files = [*triton_files(), *files]
    begins = tuple(_VARIABLES.split())
    settings = sorted(item for item in os.environ.items() if item[0].startswith(begins))
    seen = digest(f"{key}\n{settings}", 20)
    now = []

    def work_out() -> dict[str, str]:
        launcher = build_launchers(make_source()[:1])
        now.append(compiled(make_source, name, target))
        launcher.join()
        return _description(now[0])

    found = cached_fact(f"binary-{seen}", files, work_out)
    return now[0] if now else _from_cache(found) or compiled(make_source, name, target)


def _plain_triton() -> bool:
    """Return True if Triton takes binaries from its cache and no hook observes compiling."""
    from triton import knobs

    setting = knobs.compilation
    special = (setting.always_compile, setting.override, setting.dump_ir, setting.listener)
    return not any(special) and not knobs.cache.manager_class


def _description(kernel: Any) -> dict[str, str]:
    """Describe where a binary is, and what Triton's launcher needs of its source."""
    paths = {Path(path).suffix: str(path) for path in kernel.metadata_group.values()}
    metadata, cubin = paths[".json"], paths[".cubin"]
    return {
        "hash": str(kernel.hash),
        "metadata": metadata,
        "cubin": cubin,
        "content": _content(metadata, cubin),
        "arguments": json.dumps(list(kernel.src.fn.arg_names)),
        "signature": json.dumps(dict(kernel.src.signature)),
    }


def _content(*paths: str) -> str:
    return digest(b"".join(Path(path).read_bytes() for path in paths), 64)


def _from_cache(found: dict[str, str]) -> Any:
    """Return the binary as Triton would have read it; None if anything has changed."""
    from triton import knobs
    from triton.compiler import CompiledKernel

    try:
        metadata, cubin = found["metadata"], found["cubin"]
        folder = Path(knobs.cache.dir)
        if {Path(metadata).parent.parent, Path(cubin).parent.parent} != {folder}:
            return None
        if _content(metadata, cubin) != found["content"]:
            return None
        source = SimpleNamespace(
            constants={},
            signature=json.loads(found["signature"]),
            fn=SimpleNamespace(arg_names=json.loads(found["arguments"]), launch_metadata=None),
        )
        group = {Path(path).name: path for path in (metadata, cubin)}
        return CompiledKernel(source, group, found["hash"])
    except Exception as error:  # perhaps another Triton's cache: Triton itself will look
        log.debug("not taken from Triton's cache: %s: %.200s", type(error).__name__, error)
        return None
