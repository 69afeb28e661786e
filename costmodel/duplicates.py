"""Which candidates are one and the same: the same program, launched the same way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from costmodel.candidates import Candidates
from costmodel.workload import Workload

__all__ = ["identities"]


def identities(workload: Workload, candidates: Candidates) -> NDArray[np.int64]:
    """Numbers, equal for candidates that do the same on this workload; int64 [n].

    The program is known by the hash of its PTX; a candidate that was not compiled is equal to
    none. Launch parameters count as far as they make a difference: a tile order of more rows than
    the workload has is the same as one of all its rows.
    """
    numbers: dict[object, int] = {}
    ids = []
    for row, (config, artifact) in enumerate(
        zip(candidates.configs, candidates.artifacts, strict=True)
    ):
        identity: object = row
        if artifact is not None and artifact.ok:
            tile_rows = max(-(-workload.m // config.block_m), 1)
            identity = (
                artifact.ptx_hash, artifact.shared_bytes, config.block_m, config.block_n,
                config.num_warps, config.split_k, config.repack, min(config.group_m, tile_rows),
            )  # fmt: skip
        ids.append(numbers.setdefault(identity, len(numbers)))
    return np.array(ids, dtype=np.int64)
