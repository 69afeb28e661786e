"""The compiled artifacts that a model can use without compiling anything."""

from __future__ import annotations

import functools

from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import CostModel
from costmodel.errors import FileError
from costmodel.hardware.target import Target
from costmodel.models.registry import model_directory, shipped_model, warn_once


def known_artifacts(model: CostModel, target: Target) -> ArtifactTable:
    """The artifacts of a target's toolchain that are known for a model, by key.

    Those that it was trained with, then those that the shipped model was: a binary is the same
    whoever asks. With another toolchain than theirs there are none, and the model ranks by the
    configurations alone. An artifact file that cannot be used is one warning.
    """
    if model.kind != "learned":
        return ArtifactTable.empty()
    own, shipped_at = _own(model, target), model_directory(target)
    if shipped_at is None or shipped_at == model.directory:
        return own or ArtifactTable.empty()
    shipped, _ = shipped_model(target)
    others = None if shipped is None else _own(shipped, target)
    if own and others:
        return _merged(own, others)
    return own or others or ArtifactTable.empty()


def _own(model: CostModel, target: Target) -> ArtifactTable | None:
    try:
        found = model.artifacts_for(target)
    except FileError as error:
        warn_once(f"the artifacts of model {model.name} cannot be used: {error}")
        return None
    return found if isinstance(found, ArtifactTable) else None


@functools.lru_cache(maxsize=8)
def _merged(own: ArtifactTable, others: ArtifactTable) -> ArtifactTable:
    return own.merged_with([others])
