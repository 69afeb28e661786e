"""The C code between Python and a kernel, built while the kernel itself is being compiled.

Triton 3.6 writes a launcher for each kind of signature and has the C compiler build it, a quarter
of a second, when a binary is first loaded. All that it depends on is known before.
"""

from __future__ import annotations

import hashlib
import logging
import sysconfig
import tempfile
from collections.abc import Hashable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from costmodel.executor import DaemonExecutor

__all__ = ["build_launchers"]

_NAME = "__triton_launcher"  # as Triton has it

log = logging.getLogger("costmodel")


def build_launchers(sources: Iterable[Any]) -> Future[None]:
    """Begin to build the launchers of Triton sources into Triton's cache, in daemon threads.

    What goes wrong is left for Triton to meet again, and to report, when it loads the binary. From
    Triton 3.7 on one launcher serves all kernels, and there is nothing to build.

    Args:
        sources: read in a thread too, since making one may import its kernel.

    Returns:
        A future that is done when all of them are built. It never raises.
    """
    try:
        return _reading.submit(_build_all, sources)
    except RuntimeError as error:  # this process may have no more threads, and can do without
        log.debug("no launcher built ahead: %s", error)
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing


def _build_all(sources: Iterable[Any]) -> None:
    try:
        wait([_building.submit(_build, text) for text in map(_text, sources) if text])
    except RuntimeError as error:  # as above
        log.debug("no launcher built ahead: %s", error)


def _text(source: Any) -> str:
    """The C code of a source's launcher; empty where there is none to build, or it was."""
    try:
        from triton import knobs
        from triton.backends.nvidia import driver

        kinds = tuple(source.signature.values())
        if not hasattr(driver, "make_launcher") or not _first((knobs.cache.dir, kinds)):
            return ""
        # Of the descriptors it only asks whether TMA reads them, as it does for all of ours.
        described = [kind for kind in kinds if kind.startswith("tensordesc")]
        text = driver.make_launcher(
            source.constants, dict(source.signature), [{} for _ in described]
        )
        # Types that differ in nothing that C knows of have one launcher.
        return str(text) if _first((knobs.cache.dir, text)) else ""
    except Exception as error:  # nothing depends on it
        log.debug("no launcher ahead: %s: %.200s", type(error).__name__, error)
        return ""


def _first(thing: Hashable) -> bool:
    """Whether this is the first time; asked by several threads, two may be told so."""
    if thing in _begun:
        return False
    _begun.add(thing)
    return True


def _build(text: str) -> None:
    """As Triton's ``compile_module_from_src``, so that it finds what is made here; not loaded.

    Loaded too early, before Triton's own C code, a launcher would refuse every tensor descriptor
    for as long as the process lives. And Python gives all launchers that it loads once more one
    module: a thread that loads one may take away another thread's.
    """
    try:
        from triton.backends.nvidia import driver
        from triton.runtime import build
        from triton.runtime.cache import get_cache_manager

        key = hashlib.sha256((text + build.platform_key()).encode()).hexdigest()
        cache, file = get_cache_manager(key), _NAME + sysconfig.get_config_var("EXT_SUFFIX")
        if cache.get_file(file) is not None:
            return
        # At the interpreter's end the compiler may still be writing when its folder goes.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            source = Path(folder, f"{_NAME}.c")
            source.write_text(text)
            libraries = driver.library_dirs(), driver.include_dirs, driver.libraries
            made = build._build(_NAME, str(source), folder, *libraries, [])
            cache.put(Path(made).read_bytes(), file, binary=True)
    except Exception as error:  # as above
        log.debug("no launcher built ahead: %s: %.200s", type(error).__name__, error)


_begun: set[Hashable] = set()
# Threads, because each only waits for a C compiler.
_reading = DaemonExecutor(2, "costmodel-launchers")
_building = DaemonExecutor(8, "costmodel-launcher")
