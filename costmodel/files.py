"""Files: where costmodel keeps them, how they are written, and typed JSON.

A file may be truncated, foreign or made to harm. A value of the wrong kind becomes an error that
names its field, before the value is used.
"""

import functools
import hashlib
import json
import math
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4

from costmodel.errors import CorruptFile, CostModelError, FileError, InvalidInput

CACHE_VARIABLE = "COSTMODEL_CACHE_DIR"
"""Environment variable that names another cache directory."""

Named = dict[str, Any]
"""Values by name: an object of JSON, a row of a table, or the arguments of a call."""

_T = TypeVar("_T")

_SMALL_BYTES = 64 * 2**20
_INT64_MAX = 2**63 - 1
_DEEPEST = 64  # files of costmodel have under 12 levels, and what is read must be writable again


def digest(content: bytes | str, length: int = 16) -> str:
    """Return ``length`` hex digits of SHA-256: equal for equal content, in practice only then."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:length]


def time_now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- Folders and whole files ----------------------------------------------------------------------


def cache_directory() -> Path:
    """Return the folder for what can be made again: ``COSTMODEL_CACHE_DIR``, else the user's cache.

    A relative path is below the working directory at its first use, and stays there if the process
    changes directory.

    Raises:
        InvalidInput: no home directory is known, or the working directory is gone.
    """
    import platformdirs  # here, so that `doctor` can say that it is not installed

    named = os.environ.get(CACHE_VARIABLE, "")
    try:
        if named:
            return _absolute(Path(named).expanduser())
        path = Path(platformdirs.user_cache_dir("costmodel", appauthor=False))
    except RuntimeError as error:  # newer releases raise it; older ones return the "~"
        raise InvalidInput(f"{error}, or {CACHE_VARIABLE}") from None
    except FileNotFoundError:
        raise InvalidInput(
            f"{CACHE_VARIABLE}={named!r} is relative, and the working directory was removed"
        ) from None
    if not path.is_absolute():
        raise InvalidInput(f"no home directory is known ({path}): set HOME or {CACHE_VARIABLE}")
    return path


@functools.cache
def _absolute(path: Path) -> Path:
    return path.absolute()


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, where they are not there yet.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a :class:`FileError` that names the path."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{path}: {error.strerror or error}: check that the path is right, who may read and "
            f"write it, and that the disk is not full"
        ) from error


def read_small_file(path: Path) -> bytes:
    """Read a regular file; pipes and devices, which may never end, are not opened.

    Raises:
        CorruptFile: not a regular file, or larger than any that costmodel writes.
        OSError: it cannot be read.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CorruptFile(f"{path}: expected a file, found a directory, a pipe or a device")
    with path.open("rb") as file:  # some of the system's own files report no size, and never end
        content = file.read(_SMALL_BYTES + 1) if found.st_size <= _SMALL_BYTES else b""
    if max(found.st_size, len(content)) > _SMALL_BYTES:
        raise CorruptFile(f"{path}: expected at most {_SMALL_BYTES} bytes: take it away")
    return content


def replace_file(
    path: Path, content: bytes | Callable[[BinaryIO], object], *, durable: bool = True
) -> None:
    """Write a file as a whole: a crash at any moment leaves the old one, the new one, or none.

    Args:
        path: in a folder that exists.
        content: bytes, or a function that writes to the open file.
        durable: survive a power cut too, at the price of waiting for the disk.

    Raises:
        OSError: it cannot be written; the error names ``path``.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # there may be no such folder
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # the caller knows no temporary name
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    if durable:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a new name in the folder survive a power cut, where the file system can."""
    with suppress(OSError):
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


# --- Typed JSON -----------------------------------------------------------------------------------


def decode(data: object, kind: type[_T]) -> _T:
    """Convert JSON to a value of ``kind``, such as a frozen dataclass, and check every field.

    Args:
        data: JSON as ``str`` or ``bytes``, or the objects that it was parsed into.
        kind: any type that msgspec knows; a float may be written as an integer. Fields that the
            type does not have are ignored.

    Raises:
        InvalidInput: not JSON, or a field that is missing or of another type; also NaN, infinity,
            an integer over 64 bits, or more than 64 levels.
    """
    import msgspec  # here, so that `doctor` can say that it is not installed

    if isinstance(data, str | bytes):
        data = parse_json(data)
    else:
        _check_tree(data)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(_with_value(str(error), data)) from None
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON may write as \\ud800
        raise InvalidInput(f"JSON: a text that is not Unicode ({error})") from None


def encode(value: object) -> bytes:
    """Write a dataclass or built-in value as JSON text that ends with a newline.

    It uses json: msgspec writes 1e-7 where existing files have 1e-07.

    Raises:
        InvalidInput: a number that JSON lacks, such as NaN.
    """
    try:
        text = json.dumps(value, indent=1, default=_plain, allow_nan=False)
    except ValueError as error:
        raise InvalidInput(f"not a finite number: {error}") from None
    return f"{text}\n".encode()


def _plain(value: Any) -> Any:
    """Convert a dataclass, or a number of NumPy."""
    return value.item() if hasattr(value, "item") else asdict(value)


def read_json(path: Path, kind: type[_T] = object) -> _T:  # type: ignore[assignment]
    """Read a file and :func:`decode` it.

    Raises:
        CorruptFile: not such JSON, or too large.
        OSError: it cannot be read.
    """
    try:
        return decode(read_small_file(path), kind)
    except InvalidInput as error:
        raise CorruptFile(f"{path}: {error}") from None


def write_json(path: Path, value: object) -> None:
    """Encode a value (:func:`encode`) and write it (:func:`replace_file`).

    Raises:
        OSError: it cannot be written.
    """
    replace_file(path, encode(value))


def parse_json(text: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        InvalidInput: not JSON, more than 64 levels, or a number that does not fit a double or 64
            bits.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {error!s:.200}") from None
    _check_tree(found)
    return found


def _check_tree(data: Any, depth: int = 0) -> None:
    """Refuse what JSON, or a reader of it, cannot hold: deep nesting, NaN, very large integers.

    Raises:
        InvalidInput: names the number, or the depth.
    """
    kind = type(data)  # json makes these exact types; isinstance() takes three times as long
    if kind is dict or kind is list or kind is tuple:
        if depth == _DEEPEST:
            raise InvalidInput(f"not JSON: nested more than {_DEEPEST} deep")
        for value in data.values() if kind is dict else data:
            _check_tree(value, depth + 1)
    elif kind is float and not math.isfinite(data):
        raise InvalidInput(f"not JSON: {data} is not a finite number")
    elif kind is int and abs(data) > _INT64_MAX:
        raise InvalidInput(f"not JSON: an integer of {data.bit_length()} bits: at most 64")


def _with_value(message: str, data: object) -> str:
    """Add the field and the value found to msgspec's message, which names a JSON path."""
    text, _, path = message.partition(" - at `$")
    text = re.sub("^Object missing required field `(.*)`$", r"expected an object with '\1'", text)
    text = text.replace("Expected", "expected", 1)
    path = path.rstrip("`")
    field = path.lstrip(".")
    text = f"{field}: {text}" if field else text
    found: Any = data
    for key in re.findall(r"[^.\[\]]+", path):
        try:
            found = found[int(key) if isinstance(found, list) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            return text
    return f"{text}, found {found!r:.80}"


# --- Facts about files ----------------------------------------------------------------------------

_FACTS_FOLDER = "remembered"  # a folder of its own: the cache folder itself holds the winners
_SETTLED_S = 0.1  # far more than a tick of any file system's clock


def cached_fact(
    name: str, files: Iterable[Path], work_out: Callable[[], dict[str, str]]
) -> dict[str, str]:
    """Return what ``work_out`` makes of some files, from the cache while they do not change.

    A file counts as unchanged while its size, times and inode stay the same: ``stat`` costs less
    than reading. Times are coarse, so nothing is cached about a file written just now. Where the
    cache cannot be used, the fact is worked out.

    Args:
        name: of the fact; the cache file is named after it and the files' paths.
        files: all files that the answer depends on; it also depends on the version of Python. If
            ``stat`` fails for one, the fact is worked out.
        work_out: returns texts by name, for the same files always under the same names.
    """
    try:
        seen = [(str(path), *_state(path)) for path in sorted(files, key=str)]
        # The file system's bytes: a path need not be text.
        paths = digest(os.fsencode("\n".join(path for path, *_ in seen)), 20)
        file = cache_directory() / _FACTS_FOLDER / f"{name}-{paths}.json"
    except (OSError, CostModelError):
        return work_out()
    settled = time.time() - max(state[3] for state in seen) / 1e9 > _SETTLED_S
    stamp = digest(f"{sys.version}\n{seen}", 64)
    with suppress(OSError, CostModelError):
        data = read_json(file, Named)
        if data.get("stamp") == stamp:
            return decode(data.get("value"), dict[str, str])
    found = work_out()
    if settled:
        with suppress(OSError):  # a cache that cannot be written is no error
            make_folder(file.parent)
            replace_file(file, encode({"stamp": stamp, "value": found}), durable=False)
    return found


def _state(path: Path) -> tuple[int, int, int, int]:
    """Return numbers that change with every write, and with every file that replaces another."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
