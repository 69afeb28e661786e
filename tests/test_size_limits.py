"""Sizes near 2**31, in which kernels count: right, or refused with the limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.dispatch.check import Call
from costmodel.dispatch.resolve_launch import resolve_launch
from costmodel.errors import ShapeError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import family
from costmodel.gemm.space import SearchSpace, grid, why_illegal
from costmodel.gemm.workload import LARGEST, MOST, MOST_OFFSET, Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.launch.plan import Plan

pytestmark = pytest.mark.fault("N8")

H100 = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
INT32 = 2**31 - 1
TOO_LARGE = [MOST + 1, INT32, INT32 + 1]


def counted(config: GemmConfig, workload: Workload) -> dict[str, int]:
    """The largest value of each 32-bit expression of the kernels that is not of fixed size."""
    sizes, blocks = {}, (config.block_m, config.block_n, config.block_k)
    for name, size, block in zip("MNK", (workload.m, workload.n, workload.k), blocks, strict=True):
        sizes[f"cdiv({name})"] = size + block - 1
        # The pipeline works out where the loads of steps to come would be.
        ahead = config.num_stages if name == "K" else 0
        sizes[f"offset of {name}"] = (-(-size // block) + ahead) * block + block - 1
    tiles_m, tiles_n = -(-workload.m // config.block_m), -(-workload.n // config.block_n)
    programs = Plan(workload, config, H100.device.sm_count).blocks
    return {
        **sizes,
        "tiles of a group": config.group_m * tiles_n,
        "tiles, and a step past them": tiles_m * tiles_n
        + programs * family(config.kernel).is_persistent,
        "programs": programs,
    }


# One of m, n and k near the limit and the others tiny, or two of them large.
near = st.integers(MOST - 5000, MOST)
tiny = st.integers(1, 40)
large = st.integers(2**20, 2**26)
shapes = st.one_of(
    st.tuples(near, tiny, tiny), st.tuples(tiny, near, tiny), st.tuples(tiny, tiny, near),
    st.tuples(large, large, tiny), st.tuples(near, large, tiny), st.tuples(large, near, tiny),
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(shapes, st.sampled_from(["float16", "float32"]))
def test_no_legal_configuration_counts_past_32_bits(
    shape: tuple[int, int, int], dtype: str
) -> None:
    workload = Workload.dense(*shape, dtype)
    space = SearchSpace.of(workload, H100)
    for config in space.configs:
        over = {what: x for what, x in counted(config, workload).items() if x > INT32}
        assert not over, (config, over)


@pytest.mark.parametrize("shape", [(MOST, 8, 8), (8, MOST, 8), (8, 8, MOST)])
def test_the_largest_size_has_configurations(shape: tuple[int, int, int]) -> None:
    assert len(SearchSpace.of(Workload.dense(*shape), H100)) > 100


def test_any_tile_can_be_rounded_up_to_at_the_largest_size() -> None:
    assert MOST + LARGEST - 1 == INT32 == MOST_OFFSET


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and C of any sizes, without memory of them."""
    one = torch.ones(1, 1, dtype=torch.float16)
    return one.expand(m, k), one.expand(k, n), torch.empty(m, n, dtype=one.dtype, device="meta")


@pytest.mark.parametrize("size", TOO_LARGE)
@pytest.mark.parametrize("name", ["m", "n", "k"])
def test_operands_past_the_limit_are_refused_with_it(name: str, size: int) -> None:
    """As ``matmul`` does it at its first call, before a model, the disk or the GPU is asked."""
    sizes = {"m": 2, "n": 2, "k": 2, name: size}
    a, b, out = operands(**sizes)
    nothing: Any = None
    with pytest.raises(ShapeError, match=rf"{name}={size}: expected .* {MOST}"):
        resolve_launch(Call(a, b), out, nothing, nothing)
    a, b, out = operands(**{**sizes, name: MOST})
    assert getattr(Workload.from_tensors(a, b, out), name) == MOST


# --- what only a configuration of a user's own can ask for ---------------------------------------


def test_a_group_of_more_tiles_than_32_bits_count_is_refused() -> None:
    config = GemmConfig("pointer", 16, 16, 64, group_m=LARGEST)
    wide = Workload.dense(64, 2**24, 64)
    reason = why_illegal(config, wide, H100.device)
    assert reason.startswith("grid: ")
    assert "4096 rows pass 2**31 - 1" in reason
    assert not why_illegal(replace(config, group_m=8), wide, H100.device)
    assert not why_illegal(config, replace(wide, n=2**22), H100.device)


def test_a_persistent_walk_over_more_tiles_than_32_bits_count_is_refused() -> None:
    config = next(
        c for c in grid() if c.kernel == "tma_persistent" and c.block_m == c.block_n == 64
    )
    most = Workload.dense(2**22, 2**21, 64)
    assert "tiles and a step past them pass 2**31 - 1" in why_illegal(config, most, H100.device)
    assert not why_illegal(config, replace(most, m=2**21), H100.device)
