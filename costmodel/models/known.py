"""What is known of binaries without compiling: the tables of a target's toolchain, put together."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from costmodel.compile.artifact import Artifact
from costmodel.data.artifact_files import read_tables, table_path, user_folder
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import CostModel
from costmodel.errors import FileError, InvalidInput
from costmodel.hardware.target import Target
from costmodel.models.registry import model_directory, shipped_model, warn_once
from costmodel.models.xgb import XgbCostModel
from costmodel.support.bounded import drop_oldest

__all__ = ["known_artifacts"]

_KEPT = 8

_Stamp = tuple[Path, int, int, int]


def known_artifacts(model: CostModel, target: Target) -> Mapping[str, Artifact]:
    """The artifacts by key that a model can be shown of a target's toolchain.

    Those that it was trained with, then those of the shipped model, each where the toolchain is
    the same; then the tables beside both and in the user's folder, for a binary is the same
    whoever asks.
    Tables are read again when they change. A file that cannot be used is one warning: ranking then
    goes by the configurations alone.
    """
    if not isinstance(model, XgbCostModel):
        return {}
    shipped = model_directory(target)
    tables = [_own(model, target)]
    if shipped is not None and shipped != model._directory:
        tables.append(_of_shipped(target))
    tables = [table for table in tables if table]
    stamps = tuple(filter(None, (_stamp(path) for path in _paths(model, shipped, target))))
    if not stamps and len(tables) < 2:
        return tables[0] if tables else {}
    key = (tuple(map(id, tables)), stamps, target)
    with _lock:
        found = _merged.get(key)
    if found is None:
        found = (tables, _merge(tables, [stamp[0] for stamp in stamps], target))
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


def _of_shipped(target: Target) -> Mapping[str, Artifact]:
    """What the shipped model was trained with; nothing where it cannot be used."""
    shipped, _ = shipped_model(target)
    return {} if shipped is None else _own(shipped, target)


def _paths(model: XgbCostModel, shipped: Path | None, target: Target) -> list[Path]:
    folders = [model._directory, shipped]
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
    known: list[Mapping[str, Artifact]], paths: list[Path], target: Target
) -> Mapping[str, Artifact]:
    """One table of all; of equal keys the first counts, the model's own before all others."""
    tables = [table for table in known if isinstance(table, ArtifactTable)]
    for path in paths:
        try:
            tables.append(ArtifactTable(read_tables([path], target)))
        except (FileError, FileNotFoundError) as error:
            warn_once(f"the artifacts at {path} cannot be used: {error}")
    return tables[0].with_those_of(tables[1:]) if tables else {}


_lock = threading.Lock()
# With the tables that are merged, so that the id of none is given to another one.
_merged: dict[
    tuple[tuple[int, ...], tuple[_Stamp, ...], Target],
    tuple[list[Mapping[str, Artifact]], Mapping[str, Artifact]],
] = {}
