"""The files of a model change all at once: whatever happens, the old one or the new one is there.

New files are written beside the old ones, under names that end with the stamp of the card to come.
Replacing the card is the one step that counts. To a reader a file whose name has the stamp of the
card goes before the one without; so it reads one model, also where the process that saved it died
before the new files took their lasting names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from costmodel.data.destination import CARD
from costmodel.data.shards import compaction_lock
from costmodel.errors import CorruptFile
from costmodel.files import read_small_file, replace_file

__all__ = ["Part", "card_digest", "locate", "part_of", "read_part", "replace_model",
           "stamp_of"]  # fmt: skip

Part = Callable[[Path], object] | None
"""Writes a file of this path, whole or not at all; None where a model has no such file."""

_DIGITS = 16


def card_digest(card: bytes) -> str:
    """The stamp of a card: hex digits of its content."""
    return hashlib.sha256(card).hexdigest()[:_DIGITS]


def stamp_of(folder: Path) -> str:
    """The stamp of the card in a folder; empty where none can be read."""
    try:
        return card_digest(read_small_file(folder / CARD))
    except (OSError, CorruptFile):
        return ""


def part_of(data: bytes) -> Part:
    """A file with this content."""
    return lambda path: replace_file(path, lambda file: file.write(data))


def locate(folder: Path, name: str, stamp: str) -> Path | None:
    """Where a file of the model lies whose card has this stamp; None where it has no such file.

    Raises:
        OSError: the folder cannot be looked at.
    """
    for path in (_staged(folder, name, stamp), folder / name):
        with suppress(FileNotFoundError):
            # An empty one stands for none, so that the file of the model before is not taken.
            return path if path.stat().st_size or path.name == name else None
    return None


def read_part(folder: Path, name: str, stamp: str) -> bytes:
    """The content of a small file of the model whose card has this stamp.

    Raises:
        OSError: not there, or it cannot be read. CorruptFile: as :func:`read_small_file`.
    """
    try:
        return read_small_file(_staged(folder, name, stamp))
    except FileNotFoundError:  # it has its lasting name, or took it just now
        return read_small_file(folder / name)


def replace_model(folder: Path, card: bytes, parts: Mapping[str, Part]) -> None:
    """Replace the card of a model and all of its other files, or nothing.

    Args:
        parts: what writes each file, by name; every name that a model may have.

    Raises:
        OSError: a file cannot be written. Whatever a part raises.
    """
    stamp = card_digest(card)
    with compaction_lock(folder):  # of two that save at once, one is first
        try:
            for name, write in parts.items():
                staged = _staged(folder, name, stamp)
                (write or _write_nothing)(staged)
            replace_file(folder / CARD, lambda file: file.write(card))
        except BaseException:
            if stamp_of(folder) != stamp:  # else they are the files of what lies there
                _remove(_staged(folder, name, stamp) for name in parts)
            raise
        with suppress(OSError):  # readers find them under either name
            _settle(folder, stamp, parts)


def _settle(folder: Path, stamp: str, parts: Mapping[str, Part]) -> None:
    """Give the files their lasting names, and take away what was left by who died before that."""
    for name, write in parts.items():
        staged = _staged(folder, name, stamp)
        if write is not None:
            os.replace(staged, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
            staged.unlink()
    for name in parts:
        _remove(_all_staged(folder, name))


def _staged(folder: Path, name: str, stamp: str) -> Path:
    return folder / f"{name}.{stamp}"


def _all_staged(folder: Path, name: str) -> Iterator[Path]:
    return folder.glob(f"{name}.{'[0-9a-f]' * _DIGITS}")


def _write_nothing(path: Path) -> None:
    replace_file(path, lambda _: None)


def _remove(paths: Iterable[Path]) -> None:
    """As many as can be: what stays is of no card."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)
