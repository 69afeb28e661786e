"""The C code between Python and a kernel, built while the kernel itself is being compiled.

Triton 3.6 writes a launcher for each kind of signature and has the C compiler build it, a quarter
of a second, when a binary is first loaded. All that it depends on is known before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["building_launchers"]

log = logging.getLogger("costmodel")


@contextmanager
def building_launchers(sources: Iterable[Any]) -> Iterator[None]:
    """Build the launchers of Triton sources into Triton's cache, in threads, until the end.

    What goes wrong is left for Triton to meet again, and to report, when it loads the binary. From
    Triton 3.7 on one launcher serves all kernels, and there is nothing to build.

    Args:
        sources: read in a thread too, since making one may import its kernel.
    """
    building = threading.Thread(target=_build_all, args=(sources,), name="costmodel-launchers")
    building.start()
    try:
        yield
    finally:
        building.join()


def _build_all(sources: Iterable[Any]) -> None:
    texts = [text for text in map(_text, sources) if text]
    if not texts or not _has_tensor_maps():
        return
    # Threads, because each only waits for a C compiler.
    threads = [
        threading.Thread(target=_build, args=(text,), name="costmodel-launcher") for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _has_tensor_maps() -> bool:
    """Load Triton's own C code first, if it is not.

    To build a launcher is to load it, once in a process, and when it is loaded it takes the type of
    tensor maps from there: without one it would refuse every descriptor from then on.
    """
    try:
        from triton.backends.nvidia import driver

        if driver.PyCUtensorMap is None:
            driver.CudaUtils()
        return driver.PyCUtensorMap is not None
    except Exception as error:  # as without a driver, where no binary will be loaded either
        log.debug("no launchers ahead: %s: %.200s", type(error).__name__, error)
        return False


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
    try:
        from triton.backends.nvidia import driver
        from triton.runtime.build import compile_module_from_src

        # As triton.backends.nvidia.driver.CudaLauncher does, so that it finds what is made here.
        compile_module_from_src(
            src=text,
            name="__triton_launcher",
            library_dirs=driver.library_dirs(),
            include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )
    except Exception as error:  # as above
        log.debug("no launcher built ahead: %s: %.200s", type(error).__name__, error)


_begun: set[Hashable] = set()
