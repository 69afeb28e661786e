"""Finds candidates that are the same program, launched the same way."""

from typing import Any

import numpy as np

from costmodel.arrays import Integers
from costmodel.compile.compiler import Artifact
from costmodel.data.candidates import ARTIFACT_COLUMNS, CONFIG_COLUMNS, Candidates
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import Columns, effective_group
from costmodel.gemm.workload import Workload

_BLOCK_M, _GROUP_M = (CONFIG_COLUMNS.index(name) for name in ("block_m", "group_m"))
_LAUNCH = [
    CONFIG_COLUMNS.index(n) for n in ("block_m", "block_n", "num_warps", "split_k", "repack")
]
_SHARED = ARTIFACT_COLUMNS.index("shared_bytes")


def identity(workload: Workload, config: GemmConfig, artifact: Artifact | None) -> object:
    """Key of a candidate, equal for those that do the same; None for one that was not compiled.

    A group of more tile rows than the workload has is the same as a group of all its rows.
    """
    (program,) = _programs(Candidates.of([config], [artifact]))
    return program and (program, int(effective_group(config, workload)))


def identities(
    workload: Workload, candidates: Candidates, program: Integers | None = None
) -> Integers:
    """Number candidates from 0 to n - 1; equal :func:`identity` means equal number; int64 [n].

    Args:
        program: int64 [n], their :func:`programs`, if known already.
    """
    if program is None:
        program = programs(candidates)
    block_m, group_m = candidates.config_columns[:, [_BLOCK_M, _GROUP_M]].astype(np.int64).T
    order = effective_group(Columns(block_m=block_m, group_m=group_m), workload)
    same = program * (int(group_m.max(initial=0)) + 1) + order
    return np.unique(same, return_inverse=True)[1].astype(np.int64)


def programs(candidates: Candidates) -> Integers:
    """Number candidates; those that launch one program the same way share a number; int64 [n].

    The order of the tiles does not count. A candidate that was not compiled shares with none.
    """
    numbers: dict[object, int] = {}
    keys = (program or row for row, program in enumerate(_programs(candidates)))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _programs(candidates: Candidates) -> list[tuple[Any, ...] | None]:
    """Each program, by the hash of its PTX, and how it is launched; None if not compiled."""
    launch = candidates.config_columns[:, _LAUNCH].tolist()
    shared = candidates.artifact_columns[:, _SHARED].tolist()
    rows = zip(candidates.has_artifact.tolist(), candidates.ptx_hash, shared, launch)
    return [(ptx, size, *how) if known else None for known, ptx, size, how in rows]
