"""Legality on a GPU: what is rejected does not compile or launch, what is legal does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from costmodel.data.measurement import Candidate, Measurement
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import SearchSpace, grid, why_illegal
from costmodel.gemm.specialize import compile_many, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.measure.device import DeviceRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(900),
]

ALIGNED = Workload.dense(512, 512, 512)
RAGGED = Workload.dense(333, 777, 555)


def enlarged_grid() -> Iterator[GemmConfig]:
    """The grid and its surroundings: deeper, wider, with fewer registers and more warps."""
    for c in grid():
        if c.repack:
            continue
        yield c
        for stages in (c.num_stages + 1, c.num_stages + 4):
            yield replace(c, num_stages=stages)
        for limit in (24, 40, 48, 64, 72):
            yield replace(c, maxnreg=limit)
        for warps in (2 * c.num_warps, 16, 64):
            yield replace(c, num_warps=warps)
        yield replace(c, block_k=2 * c.block_k)


def outcomes(workload: Workload, configs: list[GemmConfig]) -> list[tuple[Candidate, Measurement]]:
    """What comes of compiling, loading and launching each."""
    from triton import knobs

    target = Target.current()
    specs = {specialize(workload, c) for c in configs}
    compiled = compile_many(specs, target, cache=Path(knobs.cache.dir))
    made = {a.spec: a for a in compiled}
    batch = [Candidate(c, made[specialize(workload, c)]) for c in configs]
    with DeviceRunner() as runner:
        return list(zip(batch, runner.measure(workload, batch), strict=True))


@pytest.mark.fault("B14")
def test_what_is_rejected_cannot_run() -> None:
    device = Target.current().device
    points = sorted(set(enlarged_grid()))
    reasons = {c: why_illegal(c, ALIGNED, device) for c in points}
    by_kind: dict[str, list[GemmConfig]] = {}
    for config, reason in reasons.items():
        if reason:
            by_kind.setdefault(reason.split(":")[0], []).append(config)
    assert {"registers", "shared memory", "threads"} <= set(by_kind)
    rng = random.Random(0)
    # Half of them just over the limit of shared memory, where a wrong estimate would show.
    edge = sorted(by_kind["shared memory"], key=lambda c: int(reasons[c].split()[5]))[:400]
    chosen = rng.sample(edge, 50)
    for kind, count in (("shared memory", 50), ("registers", 70), ("threads", 30)):
        rest = [c for c in by_kind[kind] if c not in chosen]
        chosen += rng.sample(rest, count)
    assert len(chosen) == 200
    found = outcomes(ALIGNED, chosen)
    print(Counter((reasons[c.config].split(":")[0], m.status) for c, m in found))
    ran = [f"{c.config}: {reasons[c.config]}" for c, m in found if m.status in ("ok", "too_slow")]
    assert not ran, "\n".join(ran)
    assert {m.status for _, m in found} <= {"compile_error", "out_of_resources"}


@pytest.mark.fault("B14")
@pytest.mark.parametrize("workload", [ALIGNED, RAGGED], ids=["aligned", "ragged"])
def test_what_is_legal_runs(workload: Workload) -> None:
    """All but a few whose epilogue takes more shared memory than is certain before compiling.

    Their artifacts tell.
    """
    target = Target.current()
    space = SearchSpace.of(workload, target)
    found = outcomes(workload, random.Random(1).sample(space.configs, 200))
    print(Counter(m.status for _, m in found))
    failed = [(c, m) for c, m in found if m.status not in ("ok", "too_slow")]
    assert len(failed) <= 6, "\n".join(f"{c.config}: {m.status} {m.error}" for c, m in failed)
    for candidate, measurement in failed:
        assert measurement.status == "out_of_resources", (candidate.config, measurement.error)
        assert candidate.artifact is not None
        assert candidate.artifact.shared_bytes > target.device.shared_bytes
