"""A batch of candidates as columns: what a cost model ranks.

Ranking 1,500 configurations must take milliseconds, so their numbers are laid out once per code
class and reused for every workload of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from costmodel.compile.artifact import Artifact
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import family
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Device, Target

__all__ = ["ARTIFACT_COLUMNS", "CONFIG_COLUMNS", "Candidates", "CostModel"]

CONFIG_COLUMNS = (
    "is_pointer", "is_tma", "is_persistent", "is_warp_specialized", "block_m", "block_n",
    "block_k", "num_warps", "num_stages", "maxnreg", "halves", "flatten", "repack", "group_m",
    "split_k", "stored_n",
)  # fmt: skip
ARTIFACT_COLUMNS = ("registers", "spill_bytes", "shared_bytes", *PTX_FEATURES)


@dataclass(frozen=True)
class Candidates:
    """Configurations and what is known of their binaries, one row each.

    Attributes:
        configs: the configurations.
        config_columns: float64 [n, len(CONFIG_COLUMNS)].
        artifact_columns: float64 [n, len(ARTIFACT_COLUMNS)], NaN where no binary is known.
        ptx_hash: object array of str [n], equal for equal programs; empty where none is known.
    """

    configs: tuple[GemmConfig, ...]
    config_columns: NDArray[np.float64] = field(repr=False)
    artifact_columns: NDArray[np.float64] = field(repr=False)
    ptx_hash: NDArray[np.object_] = field(repr=False)

    @classmethod
    def of(
        cls, configs: Sequence[GemmConfig], artifacts: Sequence[Artifact | None] | None = None
    ) -> Candidates:
        """Lay out configurations, and their artifacts where given; None where one is unknown."""
        found = [None] * len(configs) if artifacts is None else artifacts
        if len(found) != len(configs):
            raise ValueError(f"{len(configs)} configurations, but {len(found)} artifacts")
        hashes = [a.ptx_hash if a is not None and a.ok else "" for a in found]
        return cls(
            tuple(configs),
            _matrix(map(_config_row, configs), len(CONFIG_COLUMNS)),
            _matrix(map(_artifact_row, found), len(ARTIFACT_COLUMNS)),
            np.array(hashes, dtype=object),
        )

    @classmethod
    def joined(cls, parts: Sequence[Candidates]) -> Candidates:
        """Several batches as one, in order; at least one."""
        return cls(
            tuple(config for part in parts for config in part.configs),
            np.concatenate([part.config_columns for part in parts]),
            np.concatenate([part.artifact_columns for part in parts]),
            np.concatenate([part.ptx_hash for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.configs)

    def take(self, rows: Sequence[int] | NDArray[np.intp]) -> Candidates:
        """The batch of the given rows, in the given order."""
        index = np.asarray(rows, dtype=np.intp)
        return Candidates(
            tuple(self.configs[i] for i in index.tolist()),
            self.config_columns[index],
            self.artifact_columns[index],
            self.ptx_hash[index],
        )

    def without_artifacts(self) -> Candidates:
        """The same configurations, as if no binary were known."""
        nothing = np.full_like(self.artifact_columns, np.nan)
        return Candidates(
            self.configs, self.config_columns, nothing, np.full(len(self), "", dtype=object)
        )

    @property
    def has_artifact(self) -> NDArray[np.bool_]:
        """Which rows have a binary that compiled, bool [n]."""
        there: NDArray[np.bool_] = ~np.isnan(self.artifact_columns[:, 0])
        return there

    def fits(self, device: Device) -> NDArray[np.bool_]:
        """Which rows may launch, bool [n]: not those whose binary is known to need more shared
        memory than a block has."""
        shared = self.artifact_columns[:, ARTIFACT_COLUMNS.index("shared_bytes")]
        too_large: NDArray[np.bool_] = shared > device.shared_bytes
        return ~too_large


class CostModel(Protocol):
    """Predicts the cost of candidates: a batch in, a batch out, lower is better.

    ``predicts_latency`` says whether a cost is a latency in us or only an order.
    """

    @property
    def name(self) -> str: ...

    @property
    def predicts_latency(self) -> bool: ...

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]: ...


def _matrix(rows: Any, width: int) -> NDArray[np.float64]:
    """Rows of equal width as float64 [n, width], also where there is no row."""
    return np.array([*rows], dtype=np.float64).reshape(-1, width)


_TRAITS = CONFIG_COLUMNS[: CONFIG_COLUMNS.index("block_m")]


def _config_row(c: GemmConfig) -> tuple[float, ...]:
    of = family(c.kernel)
    return (
        *(name in of.traits for name in _TRAITS),
        c.block_m, c.block_n, c.block_k, c.num_warps, c.num_stages, c.maxnreg, c.halves, c.flatten,
        c.repack, c.group_m, c.split_k,
        of.stored_columns(c),
    )  # fmt: skip


def _artifact_row(a: Artifact | None) -> tuple[float, ...]:
    if a is None or not a.ok:
        return (np.nan,) * len(ARTIFACT_COLUMNS)
    counts = (a.ptx.get(name, np.nan) for name in PTX_FEATURES)
    return (a.registers, a.spill_bytes, a.shared_bytes, *counts)
