"""``costmodel rank``: the configurations of a product in order, and with -v what is left out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costmodel.cli import output
from costmodel.cli.options import AsJson, Model, TargetName, find_target, takes_product
from costmodel.gemm.workload import Workload
from costmodel.validation import one_line

if TYPE_CHECKING:
    from costmodel.gemm.config import GemmConfig
    from costmodel.tuning.ranking import Ranking

log = logging.getLogger("costmodel")


@takes_product
def rank(
    workload: Workload,
    target: TargetName = None,
    top: Annotated[int, typer.Option(min=1, help="How many to list.")] = 8,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Rank the configurations of a product, the fastest first; needs no GPU, compiles nothing."""
    from costmodel.tuning import ranking

    found = ranking.rank(workload, find_target(target), model, top)
    log_skipped(found, model)
    if as_json:
        output.print_json(found.to_dict())
        return
    output.print_table(
        f"{workload} on {found.target.device.name}, by {found.model}",
        ["place", "config", "predicted us"],
        [[i + 1, str(config), found.predicted_us(i)] for i, config in enumerate(found.configs)],
    )
    k = len(found)
    trust = output.sureness(found.expected_kept(k), found.out_of_coverage, k)
    output.note_model(found.answered_by, trust, found.caveat)


def log_skipped(ranking: Ranking, model: Path | None) -> None:
    """Log a line for each configuration that is illegal, or known not to compile or to fit.

    Points of the grid that would only repeat another one are in the ranking, as that one.
    """
    if not log.isEnabledFor(logging.INFO):  # finding the reasons takes longer than ranking
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
    most = target.device.shared_bytes
    for config in space.configs:
        artifact = known.get(artifact_key(specialize(workload, config), target))
        if artifact is None:
            continue
        if artifact.refused:
            yield config, f"{artifact.status} {artifact.error}"
        elif artifact.ok and artifact.shared_bytes > most:
            yield config, f"shared memory: {artifact.shared_bytes} bytes, a block has {most}"
