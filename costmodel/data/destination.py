"""Checks of an output path before the work starts.

A model and a dataset share names of files, so each refuses a folder that holds the other: it would
replace a part of that, or be taken for one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from costmodel.errors import CorruptFile, FileError
from costmodel.files import file_errors, read_json, replace_file

CARD = "card.json"
"""File name of the card of a model or dataset."""
_MODEL_CARD = {"format", "hash", "features"}  # in those of every release
_ANOTHER = "name another folder"


def card_kind(folder: Path) -> Literal["", "model", "dataset", "other"]:
    """Tell whose ``card.json`` is in a folder: empty if there is none, ``other`` if not ours."""
    file = folder / CARD
    if not os.path.lexists(file):
        return ""
    try:
        card = read_json(file, dict[str, Any])
    except (OSError, CorruptFile):
        return "other"
    if type(card.get("schema")) is int and "protocol" in card:
        return "dataset"
    if type(card.get("format")) is int and card.keys() >= _MODEL_CARD:
        return "model"
    return "other"


def require_folder(path: Path) -> None:
    """Refuse a path that neither is a folder nor can become one.

    Raises:
        FileError: a file is there, or in the place of a folder above it.
    """
    there = next((p for p in (path, *path.parents) if os.path.lexists(p)), None)
    if there is not None and not there.is_dir():
        above = "" if there == path else f"{path}: "
        raise FileError(f"{above}expected a folder, and {there} is a file: {_ANOTHER}")


def require_model_place(path: Path) -> None:
    """Refuse a folder where saving a model would destroy something else; older models may go.

    Raises:
        FileError: it holds a dataset, or another ``card.json`` that is no model's.
    """
    require_folder(path)
    kind = card_kind(path)
    if kind == "dataset" or (not kind and _rows(path)):
        raise FileError(
            f"{path} holds a dataset, which a model would replace: {_ANOTHER} for the model"
        )
    if kind == "other":
        raise FileError(
            f"{path / CARD} is no model's: expected an empty folder, or one of a model: "
            f"{_ANOTHER}, or take the file away"
        )


def require_dataset_place(path: Path) -> None:
    """Refuse a folder whose files a dataset would take for its own.

    Raises:
        FileError: it holds a model, or another ``card.json``.
    """
    require_folder(path)
    kind = card_kind(path)
    if kind in ("model", "other"):
        what = "a model" if kind == "model" else f"a {CARD} that is no dataset's"
        raise FileError(f"{path} holds {what}: expected an empty folder, or a dataset: {_ANOTHER}")


def require_file_place(path: Path) -> None:
    """Refuse a path where no file can be written.

    Raises:
        FileError: a folder, or in one that is not there.
    """
    if path.is_dir():
        raise FileError(f"{path} is a folder: expected the name of a file to write")
    if not path.parent.is_dir():
        raise FileError(f"{path}: there is no folder {path.parent}: make it, or name another file")


def write_file(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all.

    Raises:
        FileError: it cannot be written.
    """
    require_file_place(path)
    with file_errors(path):
        replace_file(path, data)


def _rows(path: Path) -> bool:
    """Return True if tables of a dataset are here; those of a model come with its card."""
    return (path / "artifacts.parquet").exists() or any(path.glob("measurements*.parquet"))
