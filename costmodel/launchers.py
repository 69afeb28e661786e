"""The C code between Python and a kernel, built while the kernel itself is being compiled.

Triton 3.6 writes a launcher for each kind of signature and has the C compiler build it, a quarter
of a second, when a binary is first loaded. All that it depends on is known before.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

__all__ = ["building_launchers"]

_AT_ONCE = 4

log = logging.getLogger("costmodel")


@contextmanager
def building_launchers(sources: Iterable[Any]) -> Iterator[None]:
    """Build the launchers of Triton sources into Triton's cache, in threads, until the end.

    What goes wrong is left for Triton to meet again, and to report, when it loads the binary. From
    Triton 3.7 on one launcher serves all kernels, and there is nothing to build.
    """
    texts = [*filter(None, map(_text, sources))]
    if not texts:
        yield
        return
    # Threads, because each only waits for a C compiler.
    with ThreadPoolExecutor(_AT_ONCE, "costmodel-launcher") as threads:
        for text in texts:
            threads.submit(_build, text)
        yield


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
