"""A batch of candidates as columns: what a cost model ranks.

Ranking 1,500 configurations must take milliseconds, so their numbers are laid out once per code
class and reused for every workload of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from costmodel.compile.artifact import Artifact
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.data.measurement import Candidate
from costmodel.gemm.config import GemmConfig, stored_columns
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
    """Configurations and their artifacts, one row each.

    Attributes:
        configs: the configurations.
        artifacts: their artifacts, None where unknown.
        config_columns: float64 [n, len(CONFIG_COLUMNS)].
        artifact_columns: float64 [n, len(ARTIFACT_COLUMNS)], NaN where there is no artifact.
    """

    configs: tuple[GemmConfig, ...]
    artifacts: tuple[Artifact | None, ...]
    config_columns: NDArray[np.float64] = field(repr=False)
    artifact_columns: NDArray[np.float64] = field(repr=False)

    @classmethod
    def of(
        cls,
        configs: Sequence[GemmConfig],
        artifacts: Sequence[Artifact | None] | None = None,
        artifact_columns: NDArray[np.float64] | None = None,
    ) -> Candidates:
        """Lay out configurations, and their artifacts where given, as columns.

        Args:
            artifact_columns: those of the artifacts, where they are there already.
        """
        found = tuple(artifacts) if artifacts is not None else (None,) * len(configs)
        if len(found) != len(configs):
            raise ValueError(f"{len(configs)} configurations, but {len(found)} artifacts")
        columns = np.array([_config_row(c) for c in configs], dtype=np.float64)
        rows = artifact_columns
        if rows is None:
            rows = np.array([_artifact_row(a) for a in found], dtype=np.float64)
        return cls(
            tuple(configs),
            found,
            columns.reshape(len(configs), len(CONFIG_COLUMNS)),
            rows.reshape(len(configs), len(ARTIFACT_COLUMNS)),
        )

    @classmethod
    def joined(cls, parts: Sequence[Candidates]) -> Candidates:
        """Several batches as one, in order; at least one."""
        return cls(
            tuple(config for part in parts for config in part.configs),
            tuple(artifact for part in parts for artifact in part.artifacts),
            np.concatenate([part.config_columns for part in parts]),
            np.concatenate([part.artifact_columns for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.configs)

    def take(self, rows: Sequence[int] | NDArray[np.intp]) -> Candidates:
        """The batch of the given rows, in the given order."""
        index = np.asarray(rows, dtype=np.intp)
        return Candidates(
            tuple(self.configs[i] for i in index),
            tuple(self.artifacts[i] for i in index),
            self.config_columns[index],
            self.artifact_columns[index],
        )

    def fits(self, device: Device) -> NDArray[np.bool_]:
        """Which may launch, bool [n]: False where the binary is known to need more shared memory
        than a block has. What has no artifact may."""
        shared = self.artifact_columns[:, ARTIFACT_COLUMNS.index("shared_bytes")]
        too_large: NDArray[np.bool_] = shared > device.shared_bytes
        return ~too_large

    def candidate(self, row: int) -> Candidate:
        return Candidate(self.configs[row], self.artifacts[row])


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


def _config_row(c: GemmConfig) -> tuple[float, ...]:
    return (
        c.kernel == "pointer", c.kernel == "tma", c.kernel == "tma_persistent",
        c.kernel == "warp_specialized", c.block_m, c.block_n, c.block_k, c.num_warps,
        c.num_stages, c.maxnreg, c.halves, c.flatten, c.repack, c.group_m, c.split_k,
        stored_columns(c.kernel, c.block_n, c.halves),
    )  # fmt: skip


def _artifact_row(a: Artifact | None) -> tuple[float, ...]:
    if a is None or not a.ok:
        return (np.nan,) * len(ARTIFACT_COLUMNS)
    counts = (a.ptx.get(name, np.nan) for name in PTX_FEATURES)
    return (a.registers, a.spill_bytes, a.shared_bytes, *counts)
