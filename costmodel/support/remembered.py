"""What is costly to work out from files, remembered on disk for as long as they do not change.

A file counts as unchanged while its size, times and inode are what they were: ``stat`` asks less
than reading does. Times are coarse, so that what was written just now is not remembered yet. What
cannot be remembered, or read back, is worked out: nothing depends on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from uuid import uuid4

from costmodel.errors import CostModelError
from costmodel.support.folders import cache_directory
from costmodel.support.untrusted import parse_json, read_small_file

__all__ = ["remembered"]

_FOLDER = "remembered"  # of its own: beside it lie the winners
_MOST_BYTES = 2**16
_SETTLED_S = 0.1  # far more than a tick of any file system's clock


def remembered(
    name: str, files: Iterable[Path], work_out: Callable[[], dict[str, str]]
) -> dict[str, str]:
    """What ``work_out`` makes of some files; asked again only when one of them has changed.

    Args:
        name: of the fact; with the files' paths it names where the answer is kept.
        files: all that the answer rests on, besides this Python. One that cannot be looked at
            makes the answer be worked out.
        work_out: gives text by name, always under the same names for the same files.
    """
    try:
        seen = [(str(path), *_state(path)) for path in sorted(files)]
        # As the file system has them: a path need not be text.
        paths = hashlib.sha256(os.fsencode("\n".join(path for path, *_ in seen))).hexdigest()
        file = cache_directory() / _FOLDER / f"{name}-{paths[:20]}.json"
    except (OSError, CostModelError):
        return work_out()
    settled = time.time() - max(state[3] for state in seen) / 1e9 > _SETTLED_S
    stamp = hashlib.sha256(f"{sys.version}\n{seen}".encode()).hexdigest()
    found = _read(file, stamp)
    if found is None:
        found = work_out()
        if settled:
            with contextlib.suppress(OSError):  # a cache that cannot be written is no error
                _write(file, {"stamp": stamp, "value": found})
    return found


def _state(path: Path) -> tuple[int, int, int, int]:
    """Changes with every write, and with every file that takes the place of another."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _read(file: Path, stamp: str) -> dict[str, str] | None:
    try:
        data = parse_json(read_small_file(file, _MOST_BYTES))
    except (OSError, CostModelError):
        return None
    if not isinstance(data, dict) or data.get("stamp") != stamp:
        return None
    value = data.get("value")
    if not isinstance(value, dict) or not all(type(text) is str for text in value.values()):
        return None
    return value


def _write(file: Path, data: dict[str, object]) -> None:
    """Whole or not at all, whoever else writes; a power cut may lose it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{uuid4().hex[:8]}.tmp")
    try:
        temporary.write_text(json.dumps(data) + "\n", encoding="utf-8")
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
