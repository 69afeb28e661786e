"""Ranks the whole space of a workload, without a GPU and without compiling anything.

Most columns that a model sees of a configuration do not depend on the sizes of the workload. So
those of all configurations are laid out once for each class of code, and a new shape takes its rows
from there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd
from os import PathLike
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from costmodel.arrays import Floats, Indices, Integers, Mask
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import Candidates, CostModel, ModelLike
from costmodel.errors import FileError, InvalidInput, ModelError
from costmodel.evaluation.duplicates import identities, programs
from costmodel.evaluation.metrics import top_rows
from costmodel.files import Named, file_errors
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import grid, space_rows
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models.confidence import kept_at
from costmodel.models.registry import find_model, known_artifacts, load
from costmodel.models.storage import card_stamp
from costmodel.tuning.tuning_result import Answered
from costmodel.validation import as_path, require, require_count

T = TypeVar("T")

_SHORTLIST = 8  # this many times the number asked for are looked at closely
_LEAST_RANKED = 31  # at least so many are ranked with all trees
_SHOWN = (1, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Ranking(Answered):
    """Distinct configurations, the most promising first.

    Attributes:
        cost_model: the model that answered.
        candidates: the configurations in order, with the artifacts that are known.
        cost: float64 [n], ascending; a latency in us where ``cost_model.predicts_latency``.
        considered: configurations that were ranked, duplicates among them.
        without_artifact: how many of these the model judged by the configuration alone.
        failed: configurations left out because they are known not to compile.
        kept: the mean share of the best speed that the best of the first k keep, by k, as measured
            on other workloads; empty if the model cannot tell.
    """

    cost_model: CostModel = field(repr=False)
    candidates: Candidates = field(repr=False)
    cost: Floats = field(repr=False)
    considered: int
    without_artifact: int
    failed: int
    kept: Mapping[str, float] = field(repr=False)

    def __len__(self) -> int:
        return len(self.cost)

    @property
    def configs(self) -> tuple[GemmConfig, ...]:
        """The configurations, the most promising first: as many as ``k`` asked for."""
        return self.candidates.configs

    def predicted_us(self, row: int) -> float | None:
        """The predicted latency of a row; None where the model only knows an order."""
        return float(self.cost[row]) if self.cost_model.predicts_latency else None

    def expected_kept(self, k: int) -> float | None:
        """Return the speed that the best of the first k is expected to keep, from 0 to 1.

        None if the model cannot tell.
        """
        return kept_at(self.kept, k)

    def to_dict(self) -> Named:
        """JSON-ready."""
        return super().to_dict() | {
            "considered": self.considered,
            "without_artifact": self.without_artifact,
            "failed": self.failed,
            "expected_kept": (
                {str(k): self.expected_kept(k) for k in _SHOWN} if self.kept else None
            ),
            "sure": not self.out_of_coverage if self.kept else None,
            "ranked": [
                {"config": config.to_dict(), "predicted_us": self.predicted_us(row)}
                for row, config in enumerate(self.configs)
            ],
        }


class Answering(NamedTuple):
    """The model to ask, and a caveat: why it is not the named one, or less exact; else empty."""

    model: CostModel
    caveat: str = ""


def rank(
    workload: Workload,
    target: Target | None = None,
    model: ModelLike = None,
    k: int | None = None,
    *,
    configs: Sequence[GemmConfig] | None = None,
) -> Ranking:
    """The ``k`` configurations that a model expects to be fastest (all where k is None).

    Args:
        target: where it would run; default: the current CUDA device.
        model: a model, or the directory of one; default: that of :func:`costmodel.use`, else the
            one shipped for the target, else rules of thumb (with a warning).
        configs: rank only these; default: the whole legal space.

    Raises:
        InvalidInput: k < 1, or no configuration to rank.
        NoGpu: no target was named and there is no GPU to ask.
        NoModel, CorruptFile, WrongVersion, SchemaMismatch, MisreadModel: ``model`` is a path
            without a usable model.
    """
    require("workload", workload, Workload, "a Workload, such as Workload.dense(m, n, k)")
    if k is not None:
        require_count("k", k)
    if target is not None:
        require("target", target, Target, "a Target, such as Target.named('h100-sxm')")
    if configs is not None:
        require("configs", configs, Sequence, "a list of GemmConfig")
        for config in configs:
            require("an entry of configs", config, GemmConfig, "a GemmConfig")
    target = target or Target.current()
    return with_answering(
        model, target, workload,
        lambda answering: rank_by(answering, workload, target, k, configs=configs),
    )  # fmt: skip


def rank_by(
    answering: Answering,
    workload: Workload,
    target: Target,
    k: int | None = None,
    *,
    configs: Sequence[GemmConfig] | None = None,
    largest: Workload | None = None,
) -> Ranking:
    """Rank as :func:`rank` does, by a model that was resolved before.

    Args:
        largest: rank only configurations that are legal for this product too, which has the same
            n, k and class of code.

    Raises:
        InvalidInput: no configuration to rank.
    """
    chosen = answering.model
    layout, rows = _layout(chosen, workload, target, configs, largest or workload)
    failed = int(layout.failed[rows].sum())
    rows = rows[~layout.failed[rows]]
    candidates = layout.candidates.take(rows)
    if not len(candidates):
        raise InvalidInput(
            f"no configuration to rank for {workload} on {target.device.name}: {failed} are known "
            f"not to compile or to fit, and nothing else is legal"
        )
    least = len(candidates) if k is None else max(k, _LEAST_RANKED)
    identity = identities(workload, candidates, layout.program[rows])
    # All of them, if so many do the same that the others are far down the list.
    for count in (_SHORTLIST * least, len(candidates)):
        rows, nearest = chosen.nearest(workload, candidates, target, count)
        cost = np.full(len(candidates), np.inf)
        cost[rows] = np.where(np.isnan(nearest), np.inf, nearest)
        order = top_rows(cost, identity, least)
        if np.isfinite(cost[order]).all():
            break
    order = order[:k]
    unknown = int((~candidates.has_artifact).sum())
    return Ranking(
        workload=workload,
        target=target,
        model=chosen.name,
        model_hash=chosen.hash,
        caveat=answering.caveat,
        answered_by=chosen.answered_by(target, unknown, len(candidates)),
        cost_model=chosen,
        candidates=candidates.take(order),
        cost=cost[order],
        considered=len(candidates),
        without_artifact=unknown,
        failed=failed,
        kept=chosen.expected_kept(ptx=not unknown),
        out_of_coverage=chosen.out_of_coverage(workload),
    )


def answering_model(model: ModelLike, target: Target, workload: Workload) -> Answering:
    """Resolve which model answers.

    A learned model that knows nothing of this device or element type is passed over with a
    warning, as :func:`costmodel.models.find_model` does.
    """
    return Answering(*find_model(target, workload, named_model(model)))


def with_answering(
    model: ModelLike, target: Target, workload: Workload, do: Callable[[Answering], T]
) -> T:
    """Do something with the model that answers.

    A shipped model reads its trees only at their first use. If they cannot be used, the next model
    answers.
    """
    answering = answering_model(model, target, workload)
    try:
        return do(answering)
    except (FileError, ModelError):
        if model is not None:
            raise
        instead = answering_model(model, target, workload)
        if instead.model is answering.model:
            raise
    return do(instead)


def named_model(model: ModelLike) -> CostModel | None:
    """The model itself; that of a directory is kept, and read again after it was saved again.

    Raises:
        NoModel, CorruptFile, WrongVersion, SchemaMismatch, MisreadModel: no usable model there.
        InvalidInput: neither a model nor a path.
    """
    if not isinstance(model, str | PathLike):
        if model is not None and not isinstance(model, CostModel):
            raise InvalidInput(
                f"model is a {type(model).__name__}: expected a model, or the directory of one"
            )
        return model
    path = as_path("model", model)
    try:
        stamp = card_stamp(path)
    except OSError:
        stamp = None  # loading tells what is wrong with the path
    with file_errors(path):
        return _loaded(path, stamp)


@lru_cache(maxsize=8)
def _loaded(path: Path, stamp: object) -> CostModel:
    return load(path)


class _Layout(NamedTuple):
    """The columns of some configurations, which serve all products with the same binaries."""

    candidates: Candidates
    program: Integers
    failed: Mask


def _lay_out(
    workload: Workload, target: Target, artifacts: ArtifactTable, configs: Sequence[GemmConfig]
) -> _Layout:
    keys = [artifact_key(specialize(workload, config), target) for config in configs]
    columns, hashes = artifacts.columns(keys)
    candidates = replace(Candidates.of(configs), artifact_columns=columns, ptx_hash=hashes)
    # A configuration that once crashed the compiler, or took it too long, may compile now.
    failed = artifacts.refused(keys) | ~candidates.fits(target.device)
    return _Layout(candidates, programs(candidates), failed)


@lru_cache(maxsize=32)
def _lay_out_grid(workload: Workload, target: Target, artifacts: ArtifactTable) -> _Layout:
    return _lay_out(workload, target, artifacts, grid())


def _layout(
    model: CostModel,
    workload: Workload,
    target: Target,
    configs: Sequence[GemmConfig] | None,
    largest: Workload,
) -> tuple[_Layout, Indices]:
    """The columns to rank by, and the rows that are legal."""
    artifacts = known_artifacts(model, target)
    if configs is not None:
        layout = _lay_out(workload, target, artifacts, list(dict.fromkeys(configs)))
        return layout, np.arange(len(layout.failed))
    # A binary depends on the sizes only by whether BLOCK_K divides K.
    same_binaries = replace(workload, m=1, n=1, k=gcd(workload.k, 256))
    rows = space_rows(workload, target)
    if largest != workload:  # of configurations that do the same, both spaces have the first
        rows = rows[np.isin(rows, space_rows(largest, target), assume_unique=True)]
    return _lay_out_grid(same_binaries, target, artifacts), rows
