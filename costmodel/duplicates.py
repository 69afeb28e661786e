"""Which candidates are one and the same: the same program, launched the same way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from costmodel.artifact import Artifact
from costmodel.candidates import Candidates
from costmodel.config import GemmConfig
from costmodel.workload import Workload

__all__ = ["identities", "identity"]


def identity(workload: Workload, config: GemmConfig, artifact: Artifact | None) -> object:
    """Equal for candidates that do the same on this workload; None for one that was not compiled.

    The program is known by the hash of its PTX. Launch parameters count as far as they make a
    difference: a tile order of more rows than the workload has is the same as one of all its rows.
    """
    if artifact is None or not artifact.ok:
        return None
    tile_rows = max(-(-workload.m // config.block_m), 1)
    return (
        artifact.ptx_hash, artifact.shared_bytes, config.block_m, config.block_n,
        config.num_warps, config.split_k, config.repack, min(config.group_m, tile_rows),
    )  # fmt: skip


def identities(workload: Workload, candidates: Candidates) -> NDArray[np.int64]:
    """Numbers, equal for candidates of one :func:`identity`; int64 [n].

    A candidate that was not compiled is equal to none.
    """
    numbers: dict[object, int] = {}
    ids = []
    for row, (config, artifact) in enumerate(
        zip(candidates.configs, candidates.artifacts, strict=True)
    ):
        same = identity(workload, config, artifact)
        ids.append(numbers.setdefault(row if same is None else same, len(numbers)))
    return np.array(ids, dtype=np.int64)
