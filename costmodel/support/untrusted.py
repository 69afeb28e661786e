"""What comes from outside, taken only if it is what it should be.

Files may be truncated, foreign or made to harm, and callers pass what they have. Here a value of
the wrong kind becomes an error of costmodel's own that names it, before it is used.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from costmodel.errors import CorruptFile, FileError, InvalidInput

__all__ = ["as_path", "file_errors", "one_line", "parse_json", "printable", "read_small_file",
           "require", "require_count", "take"]  # fmt: skip

_T = TypeVar("_T")

_SMALL_BYTES = 64 * 2**20
_INT64_MAX = 2**63 - 1
_DEEPEST = 64  # nothing of ours is a dozen deep; what is read must be writable again


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


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """What the file system refuses becomes a :class:`FileError` that names the path."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{path}: {error.strerror or error}: check that the path is right, who may read and "
            f"write it, and that the disk is not full"
        ) from error


def read_small_file(path: Path, limit_bytes: int = _SMALL_BYTES) -> bytes:
    """The content of a regular file: pipes and devices, which may never end, are not opened.

    Raises:
        CorruptFile: no regular file, or larger than any that costmodel writes.
        OSError: it cannot be read.
    """
    found = path.stat()
    if not path.is_file():
        raise CorruptFile(f"{path}: expected a file, found a directory, a pipe or a device")
    with path.open("rb") as file:  # some of the system's own have no size, and no end
        content = file.read(limit_bytes + 1) if found.st_size <= limit_bytes else b""
    size = max(found.st_size, len(content))
    if size > limit_bytes:
        raise CorruptFile(f"{path}: {size} bytes, expected at most {limit_bytes}: take it away")
    return content


def printable(text: str) -> str:
    """A text that does nothing to a terminal but fill it: control characters as escapes."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def one_line(text: object, limit: int = 200) -> str:
    """What something says of itself, in one line of at most ``limit`` characters."""
    line = " ".join(printable(str(text)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def parse_json(text: bytes | str) -> Any:
    """JSON by the letter of the standard.

    Raises:
        InvalidInput: not JSON, nested more than 64 deep, a name twice in one object, or a number
            that is no finite double.
    """
    try:
        found = json.loads(
            text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_distinct
        )
        _require_flat(found)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {error!s:.200}") from None
    return found


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


def _require_flat(data: Any) -> None:
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(_DEEPEST):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"nested more than {_DEEPEST} deep")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is more than a double holds")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} stands twice in one object")
        found[name] = value
    return found
