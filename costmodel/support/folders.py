"""Where costmodel keeps what outlives a process."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import platformdirs

from costmodel.errors import InvalidInput

__all__ = ["VARIABLE", "cache_directory"]

VARIABLE = "COSTMODEL_CACHE_DIR"
"""Environment variable that names another directory."""


def cache_directory() -> Path:
    """What can be made again is kept here: ``COSTMODEL_CACHE_DIR``, else the user's cache.

    A relative one is below the working directory of its first use, wherever the process goes then.

    Raises:
        InvalidInput: there is none, as where no home directory is known.
    """
    named = os.environ.get(VARIABLE, "")
    try:
        if named:
            return _from_here(Path(named).expanduser())
        path = Path(platformdirs.user_cache_dir("costmodel", appauthor=False))
    except RuntimeError as error:  # newer releases say so; older ones give back the "~"
        raise InvalidInput(f"{error}, or {VARIABLE}") from None
    except FileNotFoundError:
        raise InvalidInput(
            f"{VARIABLE}={named!r} is relative, and the working directory was removed"
        ) from None
    if not path.is_absolute():
        raise InvalidInput(f"no home directory is known ({path}): set HOME or {VARIABLE}")
    return path


@functools.cache
def _from_here(path: Path) -> Path:
    return path.absolute()
