"""What a ranking leaves out, and why: the lines of ``costmodel -v rank`` and ``-v explain``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.support.untrusted import one_line

if TYPE_CHECKING:
    from costmodel.compile.artifact import Artifact
    from costmodel.gemm.config import GemmConfig
    from costmodel.tuning.ranking import Ranking

__all__ = ["log_skipped"]

log = logging.getLogger("costmodel")


def log_skipped(ranking: Ranking, model: Path | None) -> None:
    """A line for each configuration that cannot run, or is known not to compile or to fit.

    Points of the grid that would only repeat another one are in the ranking, as that one.
    """
    if not log.isEnabledFor(logging.INFO):  # asking for the reasons takes longer than ranking
        return
    for config, reason in _skipped(ranking, model):
        log.info("%s: %s", config, one_line(reason))


def _skipped(ranking: Ranking, model: Path | None) -> Iterator[tuple[GemmConfig, str]]:
    from costmodel.gemm.space import SearchSpace
    from costmodel.gemm.specialize import artifact_key, specialize
    from costmodel.models import known_artifacts
    from costmodel.tuning.ranking import answering_model

    workload, target = ranking.workload, ranking.target
    space = SearchSpace.of(workload, target)
    yield from space.rejected.items()
    known = known_artifacts(answering_model(model, target, workload).model, target)
    for config in space.configs:
        artifact = known.get(artifact_key(specialize(workload, config), target))
        if artifact is not None and (reason := _trouble(artifact, target.device.shared_bytes)):
            yield config, reason


def _trouble(artifact: Artifact, shared_bytes: int) -> str:
    """Why a binary that is known cannot be launched; empty if it can, or that is not known."""
    if artifact.refused:
        return f"{artifact.status} {artifact.error}"
    if artifact.ok and artifact.shared_bytes > shared_bytes:
        return f"shared memory: {artifact.shared_bytes} bytes, a block has {shared_bytes}"
    return ""
