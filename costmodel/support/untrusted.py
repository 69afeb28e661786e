"""What comes from outside, taken only if it is what it should be.

Files may be truncated, foreign or made to harm, and callers pass what they have. Here a value of
the wrong kind becomes an error of costmodel's own that names it, before it is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from costmodel.errors import InvalidInput
from costmodel.files import file_errors, parse_json, read_small_file

__all__ = ["as_path", "file_errors", "one_line", "parse_json", "printable", "read_small_file",
           "require", "require_count", "take"]  # fmt: skip

_T = TypeVar("_T")

_INT64_MAX = 2**63 - 1


def require(name: str, value: Any, kinds: type[_T] | tuple[type[_T], ...], expected: str) -> _T:
    """An argument of one of these types, as it is.

    Raises:
        InvalidInput: of another type; ``expected`` says of which, and how to get one.
    """
    if not isinstance(value, kinds):
        raise InvalidInput(f"{name} is a {type(value).__name__}: expected {expected}")
    return value


def require_count(name: str, value: Any) -> int:
    """An integer of at least 1.

    Raises:
        InvalidInput: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInput(f"{name}={value!r}: expected an int of at least 1")
    return value


def as_path(name: str, value: Any) -> Path:
    """A path that was passed as text or as a path.

    Raises:
        InvalidInput: neither, or no name that a file can have.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise InvalidInput(f"{name}={value!r:.200}: expected the path of a directory")
    return Path(text)


def printable(text: str) -> str:
    """A text that does nothing to a terminal but fill it: control characters as escapes."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def one_line(text: object, limit: int = 200) -> str:
    """What something says of itself, in one line of at most ``limit`` characters."""
    line = " ".join(printable(str(text)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def take(data: Any, name: str, kind: type[_T]) -> _T:
    """The entry of an object that was read, of exactly this kind; a float may be written as int.

    Args:
        kind: ``str``, ``bool``, ``int``, ``float``, ``list`` or ``dict``.

    Raises:
        InvalidInput: not there, of another kind, or a number that no field of ours can hold.
    """
    if not isinstance(data, dict) or name not in data:
        raise InvalidInput(f"expected an object with {name!r}, found {data!r:.80}")
    value = data[name]
    if type(value) is int and abs(value) <= _INT64_MAX and kind is float:
        value = float(value)
    fits = not isinstance(value, int | float) or abs(value) <= _INT64_MAX  # false for NaN too
    if type(value) is not kind or not fits:
        raise InvalidInput(f"{name}={value!r:.80}: expected {kind.__name__}")
    return value
