"""Which candidates are one and the same: the same program, launched the same way."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.compile.artifact import Artifact
from costmodel.data.candidates import ARTIFACT_COLUMNS, CONFIG_COLUMNS, Candidates
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload

__all__ = ["identities", "identity", "programs"]

_BLOCK_M, _GROUP_M = (CONFIG_COLUMNS.index(name) for name in ("block_m", "group_m"))
_LAUNCH = [
    CONFIG_COLUMNS.index(n) for n in ("block_m", "block_n", "num_warps", "split_k", "repack")
]
_SHARED = ARTIFACT_COLUMNS.index("shared_bytes")


def identity(workload: Workload, config: GemmConfig, artifact: Artifact | None) -> object:
    """Equal for candidates that do the same on this workload; None for one that was not compiled.

    A tile order of more rows than the workload has is the same as one of all its rows.
    """
    program = _program(config, artifact)
    tile_rows = max(-(-workload.m // config.block_m), 1)
    return program and (program, min(config.group_m, tile_rows))


def identities(
    workload: Workload, candidates: Candidates, program: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Numbers from 0 to n - 1, equal for candidates of one :func:`identity`; int64 [n].

    Args:
        program: what :func:`programs` says of them, where it is known.
    """
    if program is None:
        program = programs(candidates)
    block_m, group_m = candidates.config_columns[:, [_BLOCK_M, _GROUP_M]].astype(np.int64).T
    order = np.minimum(group_m, np.maximum(-(-workload.m // block_m), 1))
    same = program * (int(group_m.max(initial=0)) + 1) + order
    return np.unique(same, return_inverse=True)[1].astype(np.int64)


def programs(candidates: Candidates) -> NDArray[np.int64]:
    """Numbers, equal for candidates that launch one program alike, tile order aside; int64 [n].

    A candidate that was not compiled is equal to none.
    """
    numbers: dict[object, int] = {}
    launch = candidates.config_columns[:, _LAUNCH].tolist()
    shared = candidates.artifact_columns[:, _SHARED].tolist()
    rows = zip(candidates.ptx_hash, shared, map(tuple, launch), strict=True)
    known = candidates.has_artifact
    same = (program if known[row] else row for row, program in enumerate(rows))
    return np.array([numbers.setdefault(s, len(numbers)) for s in same], dtype=np.int64)


def _program(config: GemmConfig, artifact: Artifact | None) -> tuple[Any, ...] | None:
    """The program, known by the hash of its PTX, and how it is launched; None if not compiled."""
    if artifact is None or not artifact.ok:
        return None
    return (
        artifact.ptx_hash, artifact.shared_bytes, config.block_m, config.block_n,
        config.num_warps, config.split_k, config.repack,
    )  # fmt: skip
