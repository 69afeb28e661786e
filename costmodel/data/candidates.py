"""A batch of candidates as columns: what a cost model ranks.

Ranking 1,500 configurations must take milliseconds, so their numbers are laid out once per code
class and reused for every workload of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Literal

import numpy as np

from costmodel.arrays import Floats, Indices, Mask, Texts
from costmodel.compile.compiler import Artifact
from costmodel.compile.ptx import PTX_FEATURES
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import family
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Device, Target

_COLUMNS = """
    is_pointer is_tma is_persistent is_warp_specialized block_m block_n block_k num_warps
    num_stages maxnreg halves flatten repack group_m split_k stored_n
"""
CONFIG_COLUMNS = tuple(_COLUMNS.split())
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
    config_columns: Floats
    artifact_columns: Floats
    ptx_hash: Texts

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
        """Join batches, at least one, in their order."""
        return cls(
            tuple(config for part in parts for config in part.configs),
            np.concatenate([part.config_columns for part in parts]),
            np.concatenate([part.artifact_columns for part in parts]),
            np.concatenate([part.ptx_hash for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.configs)

    def take(self, rows: Sequence[int] | Indices) -> Candidates:
        """Return the batch of the given rows, in the given order."""
        index = np.asarray(rows, dtype=np.intp)
        return Candidates(
            tuple(self.configs[i] for i in index.tolist()),
            self.config_columns[index],
            self.artifact_columns[index],
            self.ptx_hash[index],
        )

    def without_artifacts(self) -> Candidates:
        """Return the same configurations, as if no binary were known."""
        nothing = np.full_like(self.artifact_columns, np.nan)
        return replace(self, artifact_columns=nothing, ptx_hash=np.full_like(self.ptx_hash, ""))

    @property
    def has_artifact(self) -> Mask:
        """Rows whose binary is known, bool [n]."""
        return ~np.isnan(self.artifact_columns[:, 0])

    def fits(self, device: Device) -> Mask:
        """Rows that may launch, bool [n]: all but those whose known binary needs more shared
        memory than a block has."""
        shared = self.artifact_columns[:, ARTIFACT_COLUMNS.index("shared_bytes")]
        return ~(shared > device.shared_bytes)


class CostModel(ABC):
    """Predicts the cost of candidates: a batch in, a batch out, lower is better.

    A subclass sets ``name`` and defines :meth:`predict`. The other methods have defaults for a
    model that has learned nothing.

    Attributes:
        directory: that it was loaded from; None if it was made in this process.
        name: what results call the model.
        kind: group in an evaluation; a learned model also chooses configurations for each m of a
            bucket.
        predicts_latency: True if a cost is a latency in us, False if it only orders.
    """

    directory: Path | None = None
    name: str
    kind: Literal["learned", "baseline", "peer", "oracle"] = "baseline"
    predicts_latency: bool = False

    @property
    def hash(self) -> str:
        """Identity of what the model has learned."""
        return "builtin"

    @abstractmethod
    def predict(self, workload: Workload, candidates: Candidates, target: Target) -> Floats:
        """Predict the cost of each candidate, float64 [n]."""

    def nearest(
        self, workload: Workload, candidates: Candidates, target: Target, count: int
    ) -> tuple[Indices, Floats]:
        """Predict the cost of the candidates that seem fastest, of at least ``count`` of them.

        Returns:
            (rows, cost): ascending rows of the candidates, intp, and the cost of each, float64.
        """
        return np.arange(len(candidates)), self.predict(workload, candidates, target)

    def predict_torch(self, workload: Workload, target: Target) -> float:
        """Predict the latency of ``torch.matmul`` in us; NaN if the model cannot."""
        return math.nan

    def contributions(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> tuple[Floats, Floats] | None:
        """Split predictions into a start and the log factor of each feature; None if it cannot.

        Returns:
            (start_us, log_factors): float64 [n] and [n, features].
        """
        return None

    def artifacts_for(self, target: Target) -> Mapping[str, Artifact] | None:
        """Artifacts by key that the model was trained with; None if this target's differ."""
        return None

    def why_not_usable(self, workload: Workload | None, target: Target) -> str:
        """Say why this model should not be asked; empty if it may be."""
        return ""

    def caveat(self, target: Target) -> str:
        """Say what makes predictions for a target less exact; empty if nothing does."""
        return ""

    def answered_by(self, target: Target, unknown: int, considered: int) -> str:
        """Say in a line which part of the model ranked; empty if it has no parts.

        Args:
            unknown: how many of the ``considered`` configurations have no known artifact.
        """
        return ""

    def expected_kept(self, *, ptx: bool) -> Mapping[str, float]:
        """Mean share of the best speed that the best of the first k has, by k; empty if unknown.

        Args:
            ptx: True: for rankings whose artifacts are all known; False: for others.
        """
        return {}

    def out_of_coverage(self, workload: Workload) -> str:
        """Say which property of a workload is new to the model; empty if none, or not known."""
        return ""


ModelLike = CostModel | str | PathLike[str] | None
"""A model, or the directory of one; None: the one that answers if none is named."""


def _matrix(rows: Iterable[tuple[float, ...]], width: int) -> Floats:
    """Stack rows as float64 [n, width]; n may be 0."""
    return np.array([*rows], dtype=np.float64).reshape(-1, width)


_TRAITS = CONFIG_COLUMNS[: CONFIG_COLUMNS.index("block_m")]
_NUMBERS = attrgetter(*CONFIG_COLUMNS[len(_TRAITS) : CONFIG_COLUMNS.index("stored_n")])


def _config_row(config: GemmConfig) -> tuple[float, ...]:
    of = family(config.kernel)
    traits = (name in of.traits for name in _TRAITS)
    return (*traits, *_NUMBERS(config), of.stored_columns(config))


def _artifact_row(a: Artifact | None) -> tuple[float, ...]:
    if a is None or not a.ok:
        return (np.nan,) * len(ARTIFACT_COLUMNS)
    counts = (a.ptx.get(name, np.nan) for name in PTX_FEATURES)
    return (a.registers, a.spill_bytes, a.shared_bytes, *counts)
