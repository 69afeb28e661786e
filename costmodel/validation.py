"""Checks of arguments, text that is safe to print, and dictionaries of a limited size.

A value of the wrong kind becomes an error of costmodel that names it, before the value is used.
"""

import logging
import os
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from costmodel.errors import InvalidInput

_T = TypeVar("_T")

log = logging.getLogger("costmodel")


def require(name: str, value: Any, kinds: type[_T] | tuple[type[_T], ...], expected: str) -> _T:
    """Return an argument that has one of these types, unchanged.

    Raises:
        InvalidInput: it has another type; ``expected`` names the right one and says how to get it.
    """
    if not isinstance(value, kinds):
        raise InvalidInput(f"{name} is a {type(value).__name__}: expected {expected}")
    return value


def require_count(name: str, value: Any) -> int:
    """Return an integer that is at least 1, unchanged.

    Raises:
        InvalidInput: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInput(f"{name}={value!r}: expected an int of at least 1")
    return value


def as_path(name: str, value: Any) -> Path:
    """Return a path that was passed as text or as a path.

    Raises:
        InvalidInput: neither, or a name that no file can have.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise InvalidInput(f"{name}={value!r:.200}: expected the path of a directory")
    return Path(text)


def printable(text: str) -> str:
    """Replace control characters by escapes, so that text cannot steer a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def one_line(text: object, limit: int = 200) -> str:
    """Return the text of something in one line of at most ``limit`` characters."""
    line = " ".join(printable(str(text)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def warn_once(text: str, about: str = "", stacklevel: int = 3) -> None:
    """Warn once in a process: for each ``about``, or for each text if ``about`` is empty."""
    if (about or text) not in _warned:
        _warned.add(about or text)
        warnings.warn(text, RuntimeWarning, stacklevel)


_warned: set[str] = set()


def closest(name: str, names: Iterable[str]) -> str:
    """Return a question that names what may have been meant; empty if nothing is near."""
    by_lower = {each.lower(): each for each in names}
    found = get_close_matches(name.lower(), by_lower, 1)
    return f" (did you mean {by_lower[found[0]]}?)" if found else ""


def drop_oldest(kept: dict[Any, Any], limit: int) -> None:
    """Drop the oldest entries until at most ``limit`` are left; the caller holds the lock."""
    while len(kept) > limit:
        kept.pop(next(iter(kept)), None)
