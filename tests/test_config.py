"""Configurations: what is not one is refused, whatever file it comes from."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig, parse_config
from costmodel.gemm.family import families
from costmodel.gemm.kernels.warp_specialized import n_parts
from costmodel.gemm.space import grid

powers = st.sampled_from([16, 32, 64, 128, 256, 512])
configs = st.builds(
    GemmConfig,
    kernel=st.sampled_from(list(families())),
    block_m=powers,
    block_n=powers,
    block_k=powers,
    num_warps=st.sampled_from([1, 2, 4, 8, 16, 32]),
    num_stages=st.integers(1, 10),
    maxnreg=st.sampled_from([0, 32, 80, 168, 255]),
    halves=st.booleans(),
    flatten=st.booleans(),
    group_m=st.integers(1, 64),
    split_k=st.integers(1, 64),
)
GOOD = GemmConfig("tma", 128, 256, 64, 8, 4)
INTEGERS = (
    "block_m", "block_n", "block_k", "num_warps", "num_stages", "maxnreg", "group_m", "split_k",
)  # fmt: skip


@given(configs)
def test_round_trip_through_json(config: GemmConfig) -> None:
    assert GemmConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(configs, configs, st.sets(st.sampled_from([f.name for f in fields(GemmConfig)])))
def test_names_are_equal_only_for_equal_configurations(
    one: GemmConfig, other: GemmConfig, taken_over: set[str]
) -> None:
    near = replace(one, **{name: getattr(other, name) for name in taken_over})
    assert (str(one) == str(near)) == (one == near)


def test_only_the_warp_specialized_kernel_has_sides_that_are_no_power_of_two() -> None:
    assert GemmConfig("warp_specialized", 192, 96, 64, 12)
    for field in ("block_m", "block_n", "num_warps"):
        for kernel in ("pointer", "tma", "tma_persistent"):
            with pytest.raises(InvalidInput, match=f"{field}=.*power of two"):
                GemmConfig(**(GOOD.to_dict() | {"kernel": kernel, field: 96}))
    with pytest.raises(InvalidInput, match=r"block_k=.*power of two"):
        GemmConfig("warp_specialized", 128, 128, 96, 8)


@given(st.integers(1, 2**20))
def test_a_width_falls_into_a_power_of_two_and_a_smaller_rest(block_n: int) -> None:
    first, rest = n_parts(block_n)
    assert first + rest == block_n
    assert first & (first - 1) == 0
    assert 0 <= rest < first


def test_names_tell_the_whole_grid_apart() -> None:
    assert len({str(c) for c in grid()}) == len(grid())


@given(configs)
def test_launch_arguments_are_not_in_the_binary(config: GemmConfig) -> None:
    assert replace(config, group_m=config.group_m + 1).binary == config.binary
    more = replace(config, split_k=config.split_k + 1)
    assert (more.binary == config.binary) == (config.split_k > 1)


@given(configs, configs, st.sampled_from([f.name for f in fields(GemmConfig)]))
def test_all_else_is_in_the_binary(config: GemmConfig, other: GemmConfig, name: str) -> None:
    near = replace(config, **{name: getattr(other, name)})
    if name not in ("group_m", "split_k"):
        assert (near.binary == config.binary) == (near == config)


@pytest.mark.fault("B13")
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(
    "value",
    [-1, 4097, 64.0, "64", True, None, [64], float("nan"), "__import__('os').system('true')"],
)
def test_numbers_must_be_small_positive_integers(name: str, value: Any) -> None:
    row = GOOD.to_dict() | {name: value}
    with pytest.raises(InvalidInput, match=f"{name}="):
        GemmConfig.from_dict(row)


def test_only_a_register_limit_may_be_zero() -> None:
    assert GemmConfig.from_dict(GOOD.to_dict() | {"maxnreg": 0}) == GOOD
    for name in set(INTEGERS) - {"maxnreg"}:
        with pytest.raises(InvalidInput, match=f"{name}=0"):
            GemmConfig.from_dict(GOOD.to_dict() | {name: 0})


@pytest.mark.fault("B13")
@pytest.mark.parametrize("name", ["block_m", "block_n", "block_k", "num_warps"])
def test_blocks_and_warps_are_powers_of_two(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name}=7: expected a power of two"):
        GemmConfig.from_dict(GOOD.to_dict() | {name: 7})


@pytest.mark.parametrize("name", ["halves", "flatten"])
@pytest.mark.parametrize("value", [0, 1, "true", None, "__import__('os')"])
def test_switches_are_booleans(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"{name}="):
        GemmConfig.from_dict(GOOD.to_dict() | {name: value})


@pytest.mark.parametrize("value", ["gluon", "", "TMA", 3, None, ["tma"], "__import__('os')"])
def test_kernels_are_known_by_name(value: Any) -> None:
    with pytest.raises(InvalidInput, match="kernel="):
        GemmConfig.from_dict(GOOD.to_dict() | {"kernel": value})


@pytest.mark.fault("B13", "B53")
@pytest.mark.parametrize(
    "row",
    [
        None, [], "tma 128x256x64", 7, {}, {"kernel": "tma"}, {**GOOD.to_dict(), "num_ctas": 2},
        {f.name: None for f in fields(GemmConfig) if f.name != "split_k"},
        {**GOOD.to_dict(), "": 7},
    ],
)  # fmt: skip
def test_foreign_rows_are_refused(row: Any) -> None:
    with pytest.raises(InvalidInput, match="not a configuration"):
        GemmConfig.from_dict(row)


@given(configs)
def test_a_short_name_says_all(config: GemmConfig) -> None:
    assert parse_config(str(config)) == config


def test_every_point_of_the_grid_has_a_name_of_its_own() -> None:
    assert [parse_config(str(config)) for config in grid()] == list(grid())


@pytest.mark.parametrize(
    "text",
    ["", "tma", "tma 128x256x64", "tma 128x256 w8 s4 g8", "tma 128x256x64 w8 s4 g8 x",
     "vax 128x256x64 w8 s4 g8", "tma 128x256x63 w8 s4 g8", "tma 128x256x64 w8 s0 g8",
     "tma 99999x256x64 w8 s4 g8", "tma 128x256x64 w8 s4 g\u0668", "x" * 10**6],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_config(text)
