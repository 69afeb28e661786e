"""The only place where the frozen file looks inside the package: change it when internals move."""

from __future__ import annotations

from typing import Any

import numpy as np

import costmodel
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.models import known_artifacts
from costmodel.tuning.ranking import answering_model

# Binaries are those of this toolchain, whatever Triton is installed.
TOOLCHAIN = {"triton": "3.6.0", "ptxas": "12.8"}


def target(name: str) -> costmodel.Target:
    """A named device with the pinned toolchain."""
    found = costmodel.Target.named(name).to_dict()
    return costmodel.Target.from_dict({**found, "toolchain": TOOLCHAIN})


def workload(fields: dict[str, Any]) -> costmodel.Workload:
    """A workload of the flat fields that `rank --json` prints."""
    return costmodel.Workload.from_dict(fields)


def ranked(
    workload: costmodel.Workload, target: costmodel.Target, k: int | None = None
) -> tuple[str, list[tuple[str, np.float32]]]:
    """The model that answers, and names of all configurations (or the first k) with their cost.

    The best comes first. The cost is the predicted latency in us; rules of thumb give a number that
    only orders.
    """
    found = costmodel.rank(workload, target, k=k)
    order = [(str(c), np.float32(x)) for c, x in zip(found.configs, found.cost, strict=True)]
    return f"{found.model} {found.model_hash}; {found.caveat}", order


def refused(workload: costmodel.Workload, target: costmodel.Target) -> list[tuple[str, str]]:
    """Configurations that are not ranked, with the reason: illegal, redundant, known to fail."""
    space = SearchSpace.of(workload, target)
    found = [(str(c), reason) for c, reason in (*space.rejected.items(), *space.redundant.items())]
    known = known_artifacts(answering_model(None, target, workload).model, target)
    for config in space.configs if known else ():
        artifact = known.get(artifact_key(specialize(workload, config), target))
        if artifact is None:
            continue
        if artifact.status == "compile_error":
            found.append((str(config), f"{artifact.status} {artifact.error}"))
        elif artifact.ok and artifact.shared_bytes > target.device.shared_bytes:
            found.append((str(config), f"shared memory: {artifact.shared_bytes} bytes"))
    return found
