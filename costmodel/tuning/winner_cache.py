"""Winners on disk: one JSON file each, written whole or not at all, believed only if it fits.

Any number of processes may share the directory; nothing is locked. The file of a key is found by
the key's hash. The whole key is in the file, readable, and is compared. A file that is truncated,
foreign, of another version or about another key is no entry: its result is found again and the file
replaced. A file that cannot be read is a miss. After one failed write, and one warning, this
process writes nothing more. The file system may be on a network: a file appears whole, by renaming,
and nothing depends on locks or times.
"""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from costmodel.errors import CorruptFile, InvalidInput
from costmodel.files import Named, decode, encode, make_folder, read_json, replace_file
from costmodel.tuning.cache import CacheFolder, file_stem
from costmodel.tuning.tuning_result import TuningResult
from costmodel.validation import log, one_line

SCHEMA = 2
"""Version of the files; those of another are ignored."""

_ATTEMPTS = 3


@dataclass(frozen=True)
class CacheEntry:
    """One result on disk."""

    path: Path
    key: Named
    result: TuningResult


@dataclass(frozen=True)
class _Stored:
    """The content of a file."""

    schema: int
    key: Named
    result: Named


class WinnerCache(CacheFolder):
    """The winners in one directory, a file each."""

    def get(self, key: Named) -> TuningResult | None:
        """The result of a key, or None."""
        path = self._file(key)
        entry = path and self._read(path)
        return entry.result if entry and _text(entry.key) == _text(key) else None

    def put(self, key: Named, result: TuningResult) -> bool:
        """Keep a result, in place of the one of this key if there is one; False if it cannot be."""
        path = self._file(key)
        if path is None or self._gave_up:
            return False
        stored = _Stored(SCHEMA, dict(key), result.to_dict())
        try:
            content = encode(stored)
            TuningResult.from_dict(decode(content, _Stored).result)
        except InvalidInput as error:
            log.warning("%s is not kept, since it could not be read: %s", path, one_line(error))
            return False
        failure = None
        for _ in range(_ATTEMPTS):  # another process may just have removed the folder
            try:
                make_folder(path.parent)
                replace_file(path, content)
                return True
            except OSError as error:
                failure = error
        self._give_up(failure)  # what is there may still be read
        return False

    def discard(self, key: Named) -> None:
        """Forget a result."""
        if (path := self._file(key)) is not None:
            self._remove(path)

    def entries(self) -> list[CacheEntry]:
        """All that is kept, by file name; what is no entry is left out."""
        entries, unusable = self.survey()
        if unusable:
            log.warning(
                "%d files in %s are no cache entries and are ignored", len(unusable), self.path
            )
        return entries

    def survey(self) -> tuple[list[CacheEntry], list[Path]]:
        """All that is kept, and the files that are no entries, each by file name."""
        entries, unusable = [], []
        for path in self.files("*.json"):
            if entry := self._read(path, logging.INFO):
                entries.append(entry)
            elif os.path.lexists(path):  # else another process has just removed it
                unusable.append(path)
        return entries, unusable

    def clear(self, part: str = "") -> tuple[int, int]:
        """Remove all entries, files that are none, and what crashed writers left.

        Args:
            part: only files with this in their names.

        Returns:
            how many entries were removed, and how many files under such names that were none.
        """
        for path in self.files(".*.json.*.tmp"):
            self._remove(path)  # whoever is writing it writes it again
        entries, unusable = self.survey()
        removed = sum(self._remove(entry.path) for entry in entries if part in entry.path.name)
        return removed, sum(self._remove(path) for path in unusable if part in path.name)

    def _file(self, key: Named) -> Path | None:
        if (folder := self.path) is None:
            return None
        return folder / f"{file_stem(str(key.get('name', 'result')), _text(key))}.json"

    def _read(self, path: Path, level: int = logging.WARNING) -> CacheEntry | None:
        try:
            stored = read_json(path, _Stored)
            if stored.schema != SCHEMA:
                raise InvalidInput(f"schema {stored.schema}: this release reads {SCHEMA}")
            return CacheEntry(path, stored.key, TuningResult.from_dict(stored.result))
        except FileNotFoundError:
            return None
        except OSError as error:  # another user's, or a disk that fails: a write will tell
            log.info("%s cannot be read: %s", path, one_line(error))
        except (InvalidInput, CorruptFile) as error:
            log.log(level, "%s is no usable cache entry and is ignored: %s", path, one_line(error))
        return None

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except OSError as error:  # what is there may still be read
            if not isinstance(error, FileNotFoundError):
                self._give_up(error)
            return False
        return True


def _text(key: Named) -> str:
    """The key as text, the same for the key that JSON gives back."""
    return json.dumps(dict(key), sort_keys=True)
