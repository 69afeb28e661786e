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


@given(st.one_of(configs, st.sampled_from(grid())))
def test_json_and_the_short_name_say_all(config: GemmConfig) -> None:
    assert GemmConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert parse_config(str(config)) == config


@pytest.mark.fault("B13")
def test_only_the_warp_specialized_kernel_has_sides_that_are_no_power_of_two() -> None:
    assert GemmConfig("warp_specialized", 192, 96, 64, 12)
    for kernel in families():
        free = ("block_m", "block_n", "num_warps") if kernel == "warp_specialized" else ()
        for field in {"block_m", "block_n", "block_k", "num_warps"} - {*free}:
            with pytest.raises(InvalidInput, match=f"{field}=96: expected a power of two"):
                GemmConfig(**(GOOD.to_dict() | {"kernel": kernel, field: 96}))


@given(st.integers(1, 2**20))
def test_a_width_falls_into_a_power_of_two_and_a_smaller_rest(block_n: int) -> None:
    first, rest = n_parts(block_n)
    assert first + rest == block_n
    assert first & (first - 1) == 0
    assert 0 <= rest < first


@given(configs, configs, st.sampled_from([f.name for f in fields(GemmConfig)]))
def test_all_but_launch_arguments_is_in_the_binary(
    config: GemmConfig, other: GemmConfig, name: str
) -> None:
    near = replace(config, **{name: getattr(other, name)})
    same = near == config or name == "group_m"
    if name == "split_k":
        same = (near.split_k > 1) == (config.split_k > 1)
    assert (near.binary == config.binary) == (same or name == "repack")


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


@pytest.mark.parametrize("name", ["halves", "flatten", "repack", "kernel"])
@pytest.mark.parametrize("value", [0, 1, "true", "TMA", None, ["tma"], "__import__('os')"])
def test_switches_are_booleans_and_kernels_known_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"{name}="):
        GemmConfig.from_dict(GOOD.to_dict() | {name: value})


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
