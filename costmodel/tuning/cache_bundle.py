"""Winners as one file, to take from one machine to others of its kind."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from costmodel.data.destination import write_file
from costmodel.errors import CorruptFile, FileError, InvalidInput, WrongVersion
from costmodel.files import CACHE_VARIABLE
from costmodel.support.untrusted import file_errors, parse_json, read_small_file, take
from costmodel.tuning.cache import SCHEMA, WinnerCache, is_key_of
from costmodel.tuning.tuning_result import TuningResult

__all__ = ["export_winners", "import_winners"]

_MOST_BYTES = 256 * 2**20


def export_winners(cache: WinnerCache, file: Path) -> int:
    """Write all winners of a cache to a JSON file; returns how many.

    Raises:
        FileError: it cannot be written.
    """
    entries = cache.entries()
    data = {
        "winners": SCHEMA,
        "entries": [{"key": dict(e.key), "result": e.result.to_dict()} for e in entries],
    }
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    write_file(file, text.encode())
    return len(entries)


def import_winners(cache: WinnerCache, file: Path) -> Counter[str]:
    """Add the winners of a file that :func:`export_winners` wrote; what is there already stays.

    A key is believed only for what it is the key of: a winner of another device or toolchain is
    kept, and never found there.

    Returns:
        how many were ``added``, ``known`` already, and ``refused`` as no winners.

    Raises:
        CorruptFile: no such file of winners. WrongVersion: of another release.
        FileError: a winner cannot be written; those before it were added.
    """
    with file_errors(file):
        text = read_small_file(file, _MOST_BYTES)
    try:
        data = parse_json(text)
        version = take(data, "winners", int)
        entries = take(data, "entries", list)
    except InvalidInput as error:
        raise CorruptFile(f"{file}: no file of winners ({error})") from None
    if version != SCHEMA:
        raise WrongVersion(f"{file}: winners of version {version}, this release reads {SCHEMA}")
    counts: Counter[str] = Counter(added=0, known=0, refused=0)
    for entry in entries:
        try:
            key = _key(take(entry, "key", dict))
            result = TuningResult.from_dict(take(entry, "result", dict))
            if not is_key_of(key, result.workload):
                raise InvalidInput("a key of another workload")
            is_known = cache.get(key) is not None
            if not is_known and not cache.put(key, result):
                raise FileError(_unwritten(cache, counts["added"]))
        except InvalidInput:
            counts["refused"] += 1
            continue
        counts["known" if is_known else "added"] += 1
    return counts


def _unwritten(cache: WinnerCache, added: int) -> str:
    return (
        f"{cache.path or 'the cache'}: {added} winners were added, and no more can be written "
        f"({cache.unusable_because}): check who may write there and that the disk is not full, or "
        f"set {CACHE_VARIABLE}"
    )


def _key(key: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(key.get("name"), str):
        raise InvalidInput("a key without a name")
    return key
