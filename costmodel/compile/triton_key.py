"""Triton's name for itself, without reading itself.

Triton finds what it compiled by a hash in which its own files are: half a gigabyte of library,
read anew in each process, which takes half a second. They hardly ever change.
"""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path

from costmodel.files import cached_fact

__all__ = ["know_triton_key", "triton_files"]

_lock = threading.Lock()


def know_triton_key() -> None:
    """Have Triton's key at hand in this process: Triton need not work it out any more.

    It is what Triton itself made of the same files, once, and Triton's own compile workers are
    given it in this way too (3.9). Where Triton is built in another way, nothing is done.
    """
    from triton.runtime import cache

    with _lock:
        own = getattr(cache, "triton_key", None)
        asked = getattr(own, "cache_info", None)  # an lru_cache: what we put there is none
        if own is None or asked is None or asked().currsize:
            return
        if not (files := triton_files()):
            return
        key = cached_fact("triton", files, lambda: {"key": str(own())})["key"]
        cache.triton_key = lambda: key


@functools.cache
def triton_files() -> tuple[Path, ...]:
    """All that Triton's key is made of, and more: its library, and what compiles.

    None where Triton is built in another way.
    """
    import triton

    root = Path(triton.__file__).parent
    library = [*root.glob("_C/libtriton.*")]
    sources = [
        Path(folder, name)
        for part in ("compiler", "backends", "language", "runtime")
        # Where Triton is being developed, a backend is a link to another folder.
        for folder, _, names in os.walk(root / part, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    return (root / "__init__.py", *library, *sources) if library and sources else ()
