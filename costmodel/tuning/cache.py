"""Winners on disk: one JSON file each, written whole or not at all, believed only if it fits.

Any number of processes may share the directory; nothing is locked. The file of a key is found by
the key's hash, and the whole key is in it, readable, and compared. A file that is truncated,
foreign, of another version or about another key is no entry: its winner is found anew and the
file replaced. What cannot be read is a miss; what cannot be written ends the keeping, with one
warning. The file system may be a network's: a name appears by renaming, whole, and nothing rests
on locks or times.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.errors import CorruptFile, InvalidInput
from costmodel.files import (
    CACHE_VARIABLE,
    cache_directory,
    parse_json,
    read_small_file,
    replace_file,
)
from costmodel.gemm.workload import Workload
from costmodel.tuning.tuning_result import TuningResult
from costmodel.validation import one_line, take

SCHEMA = 2
"""Version of the files; those of another are ignored."""

# An exhaustive tuning of the whole space takes about one.
_MOST_BYTES = 16 * 2**20
_MOST_KEY_BYTES = 64 * 2**10
_ATTEMPTS = 3

log = logging.getLogger("costmodel")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One winner on disk."""

    path: Path
    key: Mapping[str, Any]
    result: TuningResult


class WinnerCache:
    """The winners in one directory. Where it cannot be used: one warning, and nothing is kept.

    Args:
        directory: default: :func:`cache_directory`, looked up when first used.

    Attributes:
        unusable_because: what ended the keeping; empty while it goes on.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._named = Path(directory) if directory is not None else None
        self._usable = self._writable = True
        self._lock = threading.Lock()
        self.unusable_because = ""

    @property
    def path(self) -> Path | None:
        """The directory, which may not exist yet; None where there can be none."""
        if self._named is None and self._usable:
            try:
                self._named = cache_directory()
            except InvalidInput as error:
                self._give_up(error)
        return self._named if self._usable else None

    def get(self, key: Mapping[str, Any]) -> TuningResult | None:
        """The winner of a key, or None."""
        path = self._file(key)
        if path is None:
            return None
        entry = self._read(path)
        if entry is None or entry.key != _plain(key):
            return None
        return entry.result

    def put(self, key: Mapping[str, Any], result: TuningResult) -> bool:
        """Keep a winner, in place of the one of this key if there is one.

        Returns:
            whether it is on disk.

        Raises:
            InvalidInput: larger than any entry, and so would not be read again.
        """
        path = self._file(key)
        if path is None or not self._writable:
            return False
        data = {"schema": SCHEMA, "key": _plain(key), "result": result.to_dict()}
        content = (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()
        if len(content) > _MOST_BYTES or len(json.dumps(data["key"])) > _MOST_KEY_BYTES:
            raise InvalidInput(f"an entry of {len(content)} bytes: expected {_MOST_BYTES} at most")
        try:
            _write(path, content)
        except OSError as error:  # what is there may still be read
            self._give_up(error, reading=False)
            return False
        return True

    def discard(self, key: Mapping[str, Any]) -> None:
        """Forget a winner."""
        if (path := self._file(key)) is not None:
            self._remove(path)

    def entries(self) -> list[CacheEntry]:
        """All that is kept, by file name; what is no entry is left out."""
        return self.survey()[0]

    def survey(self) -> tuple[list[CacheEntry], int]:
        """All that is kept, by file name, and how many files are no entries."""
        entries, unusable = self.sorted_files()
        if unusable:
            log.warning(
                "%d files in %s are no cache entries and are ignored", len(unusable), self.path
            )
        return entries, len(unusable)

    def sorted_files(self) -> tuple[list[CacheEntry], list[Path]]:
        """All that is kept, and the files that are no entries, each by file name."""
        entries, unusable = [], []
        for path in self._files("*.json"):
            if entry := self._read(path, logging.INFO):
                entries.append(entry)
            elif os.path.lexists(path):  # else another process has just removed it
                unusable.append(path)
        return entries, unusable

    def clear(self) -> int:
        """Remove all entries, and what else lies there; how many entries there were."""
        return self.remove_all()[0]

    def remove_all(self) -> tuple[int, int]:
        """Remove all entries, files that are none, and what crashed writers left.

        Returns:
            how many entries there were, and how many files under such names that were none.
        """
        for path in self._files(".*.json.*.tmp"):
            self._remove(path)  # whoever is writing it writes it again
        entries, unusable = self.sorted_files()
        removed = sum(self._remove(entry.path) for entry in entries)
        return removed, sum(map(self._remove, unusable))

    def _file(self, key: Mapping[str, Any]) -> Path | None:
        if self.path is None:
            return None
        text = json.dumps(_plain(key), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:20]
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", str(key.get("name", "winner")))[:80]
        return self.path / f"{name}-{digest}.json"

    def _files(self, pattern: str) -> list[Path]:
        if self.path is None:
            return []
        try:
            return sorted(self.path.glob(pattern))
        except OSError as error:
            self._give_up(error)
            return []

    def _read(self, path: Path, level: int = logging.WARNING) -> CacheEntry | None:
        try:
            data = parse_json(_content(path))
            if (schema := take(data, "schema", int)) != SCHEMA:
                raise InvalidInput(f"schema {schema!r}: this release reads {SCHEMA}")
            result = TuningResult.from_dict(take(data, "result", dict))
            return CacheEntry(path, take(data, "key", dict), result)
        except FileNotFoundError:
            return None
        except OSError as error:  # another user's, or a disk that fails: whoever writes will tell
            log.info("%s cannot be read: %s", path, one_line(error))
            return None
        except (InvalidInput, CorruptFile) as error:
            log.log(level, "%s is no usable cache entry and is ignored: %s", path, one_line(error))
            return None

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:  # what is there may still be read
            self._give_up(error, reading=False)
            return False
        return True

    def _give_up(self, error: Exception, *, reading: bool = True) -> None:
        with self._lock:
            first, self._writable = self._writable, False
            self.unusable_because = self.unusable_because or str(error)
            self._usable = self._usable and not reading
        if first:
            warnings.warn(
                f"the cache of winners cannot be used, so they last for this process only: {error} "
                f"({CACHE_VARIABLE}=DIR names another directory)",
                RuntimeWarning,
                stacklevel=3,
            )


def _write(path: Path, content: bytes) -> None:
    """Write again where another process has just removed the folder, or what lay in it."""
    for attempt in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda file: file.write(content))
            return
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise


def _content(path: Path) -> bytes:
    """Read again where a network's file system had another file under this name meanwhile."""
    try:
        return read_small_file(path, _MOST_BYTES)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return read_small_file(path, _MOST_BYTES)


def is_key_of(key: Mapping[str, Any], workload: Workload) -> bool:
    """Return True if a key, as ``TuningKey.on_disk`` makes it, is one of this workload."""
    told = {name: x for name, x in workload.to_dict().items() if name != "m"}
    rows = key.get("m")
    return (
        isinstance(rows, list)
        and len(rows) == 2
        and all(type(row) is int for row in rows)
        and rows[0] <= workload.m <= rows[1]
        and all(key.get(name) == x for name, x in told.items())
    )


def _plain(key: Mapping[str, Any]) -> dict[str, Any]:
    """The key as JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(key)))
    return plain
