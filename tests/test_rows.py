"""A data type is a row, and so is an architecture: an invented one needs nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodel.data.candidates import Candidates
from costmodel.features.analytic import analytic_columns
from costmodel.features.features import CONFIG_FEATURES, design_matrix
from costmodel.gemm.dtypes import DATA_TYPES, DataType
from costmodel.gemm.family import families
from costmodel.gemm.space import SearchSpace, why_illegal
from costmodel.gemm.specialize import constants, specialize
from costmodel.gemm.workload import Workload, kind_options
from costmodel.hardware.architectures import ARCHITECTURES
from costmodel.hardware.target import DEVICES, Target, Toolchain
from costmodel.models import AnalyticModel, RuleHeuristic

TOOLS = Toolchain("3.6.0", "12.8")
H100 = Target(DEVICES["h100-sxm"], TOOLS)
SIZES = (4096, 4096, 4096)


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind with one byte an element; ``bfloat16`` comes out."""
    row = DataType("float8_e4m3fn", 1, "fp8e4nv", ("bfloat16", "float32"))
    monkeypatch.setitem(DATA_TYPES, row.name, row)
    return row.name


@pytest.fixture
def future(monkeypatch: pytest.MonkeyPatch) -> Target:
    """A card of an architecture that nobody sells: Hopper's parts, twice as fast and wide."""
    row = replace(
        ARCHITECTURES[90], capability=930, name="Invented", tensor_flops=8192, max_blocks=64
    )
    monkeypatch.setitem(ARCHITECTURES, row.capability, row)
    device = replace(H100.device, name="invented", arch=930, tflops=2 * H100.device.tflops)
    return Target(device, TOOLS)


def least_us(workload: Workload, target: Target) -> float:
    """The least estimate of the whole space, which is checked on the way."""
    space = SearchSpace.of(workload, target)
    assert len(space) > 500
    for config in space.configs[::50]:
        assert not why_illegal(config, workload, target.device)
    batch = Candidates.of(space.configs)
    matrix = design_matrix(workload, batch, target, ptx=False)
    assert matrix.shape == (len(space), len(CONFIG_FEATURES))
    assert np.isfinite(matrix).all()
    assert np.isfinite(RuleHeuristic().predict(workload, batch, target)).all()
    return float(AnalyticModel().predict(workload, batch, target).min())


def test_an_invented_data_type_has_a_space_features_and_an_estimate(float8: str) -> None:
    workload = Workload.dense(*SIZES, **kind_options(float8), out_dtype="bfloat16")
    half = Workload.dense(*SIZES)
    assert (workload.code.itemsize, workload.code.a_align) == (1, 16)
    assert half.bytes() - workload.bytes() == 2 * 4096**2
    assert least_us(workload, H100) < 0.7 * least_us(half, H100)
    kernels = {c.kernel for c in SearchSpace.of(workload, H100).configs}
    assert kernels == families().keys() - {"warp_specialized"}, "of 16 bits only are warp groups"
    odd = Workload.dense(4096, 4095, 4096, float8, out_dtype="bfloat16")
    assert odd.code.b_align == 1
    config = SearchSpace.of(odd, H100).configs[0]
    assert constants(specialize(odd, config))["B_CONTIGUOUS"] == 1


def test_more_stages_of_smaller_elements_fit(float8: str) -> None:
    eight = Workload.dense(*SIZES, float8, out_dtype="bfloat16")
    half = Workload.dense(*SIZES)
    configs = SearchSpace.of(eight, H100).configs
    reasons = {why_illegal(c, half, H100.device).partition(":")[0] for c in configs}
    assert "shared memory" in reasons


def test_an_invented_architecture_has_a_space_features_and_an_estimate(future: Target) -> None:
    workload = Workload.dense(*SIZES)
    assert least_us(workload, future) < 0.8 * least_us(workload, H100)
    assert SearchSpace.of(workload, future).configs == SearchSpace.of(workload, H100).configs


def test_what_an_architecture_lacks_is_not_in_its_space(
    future: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(ARCHITECTURES[930], capability=931, instruction="mma.sync", tma=False)
    monkeypatch.setitem(ARCHITECTURES, 931, row)
    lesser = Target(replace(future.device, arch=931), TOOLS)
    workload = Workload.dense(*SIZES)
    space = SearchSpace.of(workload, lesser)
    descriptors = {name for name, of in families().items() if of.reads_by_descriptor}
    assert {c.kernel for c in space.configs} == families().keys() - descriptors
    columns = analytic_columns(workload, Candidates.of(space.configs), lesser, binary=False)
    assert not columns["wgmma_shape"].any()
    assert any("sm_931 has no tensor memory" in reason for reason in space.rejected.values())
    assert any("sm_931 has no wgmma" in reason for reason in space.rejected.values())
