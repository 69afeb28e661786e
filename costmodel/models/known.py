"""What is known of binaries without compiling: the tables of a target's toolchain, put together."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from costmodel.artifact import Artifact
from costmodel.artifact_files import read_tables, table_path, user_folder
from costmodel.artifact_table import ArtifactTable
from costmodel.bounded import drop_oldest
from costmodel.candidates import CostModel
from costmodel.errors import FileError, InvalidInput
from costmodel.models.registry import model_directory, warn_once
from costmodel.models.xgb import XgbCostModel
from costmodel.target import Target

__all__ = ["known_artifacts"]

_KEPT = 8

_Stamp = tuple[Path, int, int, int]


def known_artifacts(model: CostModel, target: Target) -> Mapping[str, Artifact]:
    """The artifacts by key that a model can be shown of a target's toolchain.

    Those that it was trained with, where the toolchain is the same; then the tables beside it,
    beside the shipped model and in the user's folder, for a binary is the same whoever asks.
    Tables are read again when they change. A file that cannot be used is one warning: ranking then
    goes by the configurations alone.
    """
    if not isinstance(model, XgbCostModel):
        return {}
    own = _own(model, target)
    stamps = tuple(filter(None, (_stamp(path) for path in _paths(model, target))))
    if not stamps:
        return own
    key = (id(own) if own else 0, stamps, target)
    with _lock:
        found = _merged.get(key)
    if found is None:
        found = (own, _merge(own, [stamp[0] for stamp in stamps], target))
        with _lock:
            _merged[key] = found
            drop_oldest(_merged, _KEPT)
    return found[1]


def _own(model: XgbCostModel, target: Target) -> Mapping[str, Artifact]:
    if model.target_ is None or model.target_.toolchain != target.toolchain:
        return {}  # no key would be found in them
    try:
        return model.artifacts or {}
    except FileError as error:
        warn_once(f"the artifacts of model {model.name} cannot be used: {error}")
        return {}


def _paths(model: XgbCostModel, target: Target) -> list[Path]:
    folders = [model._directory, model_directory(target)]
    with suppress(InvalidInput):  # a user without a home has no tables of their own
        folders.append(user_folder(target.device.name))
    there = dict.fromkeys(folder for folder in folders if folder is not None)
    return [table_path(folder, target.toolchain) for folder in there]


def _stamp(path: Path) -> _Stamp | None:
    """A file as it is now; None where there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warn_once(f"the artifacts at {path} cannot be used: {error}")
        return None
    return path, found.st_mtime_ns, found.st_ino, found.st_size


def _merge(
    own: Mapping[str, Artifact], paths: list[Path], target: Target
) -> Mapping[str, Artifact]:
    tables = [own] if isinstance(own, ArtifactTable) else []
    for path in paths:
        try:
            tables.append(ArtifactTable(read_tables([path], target)))
        except (FileError, FileNotFoundError) as error:
            warn_once(f"the artifacts at {path} cannot be used: {error}")
    return tables[0].with_those_of(tables[1:]) if tables else own


_lock = threading.Lock()
_merged: dict[
    tuple[int, tuple[_Stamp, ...], Target], tuple[Mapping[str, Artifact], Mapping[str, Artifact]]
] = {}
