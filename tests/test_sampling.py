"""What is measured for training: nothing held out, the whole ground, the same for a seed."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from costmodel import models
from costmodel.collect.sampling import ModelSampler, RandomSampler, training_workloads
from costmodel.compile.compiler import Artifact
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import Candidates, CostModel
from costmodel.errors import InvalidInput
from costmodel.evaluation.heldout import is_held_out, is_ragged
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.specialize import artifact_key, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.models.registry import known_artifacts

H100 = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
SPACE = SearchSpace.of(Workload.dense(4096, 4096, 4096), H100)
NARROW = SearchSpace.of(Workload.dense(33, 77, 55), Target.named("a100-sxm", H100.toolchain))
MANY = training_workloads(1000, H100, ("float16", "bfloat16"))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**9), st.integers(0, 60))
def test_no_workload_is_held_out_or_twice(seed: int, count: int) -> None:
    found = training_workloads(count, H100, seed=seed)
    assert len(set(found)) == len(found) == count
    assert not any(is_held_out(w) for w in found)
    assert found == training_workloads(count, H100, seed=seed)


def test_more_of_a_seed_begins_with_less_of_it_and_seeds_differ() -> None:
    assert training_workloads(50, H100, seed=3) == training_workloads(90, H100, seed=3)[:50]
    one, other = (set(training_workloads(50, H100, seed=s)) for s in (3, 4))
    assert len(one & other) < 10, "layers of models may be drawn twice"


def test_the_ground_is_covered() -> None:
    """Every octave of each size, in aligned and in ragged workloads of both dtypes."""
    assert not any(is_held_out(w) for w in MANY)
    octaves = {name: {int(log2(getattr(w, name))) for w in MANY} for name in ("m", "n", "k")}
    assert octaves["m"] >= set(range(14))
    assert octaves["n"] >= set(range(5, 17))
    assert octaves["k"] >= set(range(5, 15))
    assert min(w.n for w in MANY) <= 32
    assert min(w.k for w in MANY) <= 32
    assert all(1 <= w.m <= 16384 for w in MANY)
    for dtype in ("float16", "bfloat16"):
        of_dtype = [w for w in MANY if w.code.dtype == dtype]
        assert 0.4 < len(of_dtype) / len(MANY) < 0.6
        assert 0.15 < sum(is_ragged(w) for w in of_dtype) / len(of_dtype) < 0.6
    assert len({w.nk for w in MANY}) > 500, "splits are by (n, k)"
    assert len({w.code.key() for w in MANY}) >= 8


def test_float32_is_drawn_in_ieee_and_in_tf32() -> None:
    kinds = {w.code.kind for w in training_workloads(40, H100, ("float32", "tf32"))}
    assert kinds == {"float32", "tf32"}


def test_nothing_that_the_device_cannot_hold() -> None:
    small = replace(H100, device=replace(H100.device, memory_bytes=2**30))
    found = training_workloads(100, small)
    assert max(w.bytes() for w in found) <= 2**30 // 16
    assert max(w.bytes() for w in MANY) <= 2**30
    roofline_us = [H100.device.roofline_us(w.flops(), w.bytes()) for w in MANY]
    assert max(roofline_us) < 1000


# --- configurations ------------------------------------------------------------------------------


class Prefers(CostModel):
    """A model to which one number of a configuration is all."""

    name, predicts_latency = "prefers", False

    def __init__(self, column: int, sign: int) -> None:
        self._column, self._sign = column, sign

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]:
        return self._sign * candidates.config_columns[:, self._column]


@pytest.mark.parametrize("space", [SPACE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("count", [0, 1, 7, 150, 10_000])
@pytest.mark.parametrize("model_led", [False, True])
def test_samples_are_distinct_and_of_the_size_asked(
    space: SearchSpace, count: int, model_led: bool
) -> None:
    sampler = ModelSampler(Prefers(3, 1), count) if model_led else RandomSampler(count)
    chosen = sampler.sample(space, np.random.default_rng(0))
    assert len(set(chosen)) == len(chosen) == min(count, len(space))
    assert set(chosen) <= set(space.configs)
    assert chosen == sampler.sample(space, np.random.default_rng(0))
    if 1 < count < len(space):
        assert chosen != sampler.sample(space, np.random.default_rng(1))


class TwoMinds(Prefers):
    """A model whose heads differ everywhere."""

    kind = "learned"

    def __init__(self) -> None:
        specs = dict.fromkeys(specialize(SPACE.workload, c) for c in SPACE.configs)
        made = [Artifact(artifact_key(spec, H100), spec) for spec in specs]
        self._artifacts = ArtifactTable(ArtifactTable.rows(made))

    def artifacts_for(self, target: Target) -> ArtifactTable:
        return self._artifacts

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]:
        known = candidates.has_artifact
        return np.where(known, 1.0, 1.5 + np.arange(len(candidates)) / (4 * len(candidates)))


@pytest.mark.parametrize("best", [0.0, 0.25, 0.5, 0.7, 1.0])
def test_shares_that_are_the_whole_are_rounded_to_no_more_than_it(best: float) -> None:
    model = TwoMinds()
    for count in (1, 2, 3, 5, 6, 7, 10, 11, 25):
        sampler = ModelSampler(model, count, best, 1 - best)
        chosen = sampler.sample(SPACE, np.random.default_rng(0))
        assert len(set(chosen)) == len(chosen) == count


def test_random_samples_reach_every_configuration() -> None:
    rng = np.random.default_rng(0)
    reached = {c for _ in range(200) for c in RandomSampler(100).sample(SPACE, rng)}
    assert reached == set(SPACE.configs)


def test_a_share_of_a_model_led_sample_is_of_the_best() -> None:
    rng = np.random.default_rng(0)
    costs = Prefers(3, -1).predict(SPACE.workload, Candidates.of(SPACE.configs), H100)
    best = {SPACE.configs[i] for i in np.argsort(costs, kind="stable")[:100]}
    chosen = ModelSampler(Prefers(3, -1), 100, best=0.5).sample(SPACE, rng)
    assert 50 <= len(best & set(chosen)) < 80
    only = ModelSampler(Prefers(3, -1), 100, best=0.0).sample(SPACE, rng)
    assert len(best & set(only)) < 30


def test_a_share_is_where_the_heads_of_a_model_differ_most() -> None:
    model = models.load(models.shipped_models()["h100-sxm"])
    rng = np.random.default_rng(0)
    chosen = ModelSampler(model, 40, best=0.0, unsure=1.0).sample(SPACE, rng)
    known = known_artifacts(model, H100)
    keys = [artifact_key(specialize(SPACE.workload, c), H100) for c in SPACE.configs]
    bare = model.predict(SPACE.workload, Candidates.of(SPACE.configs), H100)
    found = [known.get(key) for key in keys]
    full = model.predict(SPACE.workload, Candidates.of(SPACE.configs, found), H100)
    doubt = dict(zip(SPACE.configs, np.abs(np.log(full / bare)), strict=True))
    others = set(SPACE.configs) - set(chosen)
    near = [c for c, us in zip(SPACE.configs, full, strict=True) if us <= 1.9 * full.min()]
    assert min(doubt[c] for c in chosen) >= max(doubt[c] for c in near if c in others)


@pytest.mark.parametrize(("best", "unsure"), [(-0.1, 0.1), (0.5, 0.6), (0.1, -0.2)])
def test_shares_that_are_none(best: float, unsure: float) -> None:
    with pytest.raises(InvalidInput, match="shares"):
        ModelSampler(Prefers(3, 1), 10, best, unsure)
