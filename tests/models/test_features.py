"""Features: one schema, one row per candidate, finite, and blind to what they must not see."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.data.candidates import ARTIFACT_COLUMNS, Candidates
from costmodel.features import features
from costmodel.features.analytic import ANALYTIC_FEATURES, analytic_columns, occupancy
from costmodel.features.features import CONFIG_FEATURES, FEATURES, design_matrix
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.dtypes import kinds
from costmodel.gemm.workload import Workload, kind_options
from costmodel.hardware.target import DEVICES, Target

MakeBatch = Callable[..., Candidates]
LARGE = Workload.dense(4096, 4096, 4096)


def column(matrix: np.ndarray, name: str) -> np.ndarray:
    return matrix[:, FEATURES.index(name)]


def one(workload: Workload, config: GemmConfig, target: Target) -> dict[str, float]:
    columns = analytic_columns(workload, Candidates.of([config]), target, binary=False)
    return {name: float(values[0]) for name, values in columns.items()}


@pytest.mark.fault("B34")
def test_names_are_distinct_and_the_configuration_head_is_a_prefix() -> None:
    assert len(set(FEATURES)) == len(FEATURES)
    assert FEATURES[: len(CONFIG_FEATURES)] == CONFIG_FEATURES


def test_no_feature_comes_from_a_timing() -> None:
    # roofline_us is the data sheet's bound of the sizes, not a measurement.
    timed = {n for n in FEATURES if n.endswith("_us") or "latency" in n or "clock" in n}
    assert timed == {"roofline_us"}
    assert "easurement" not in inspect.getsource(features).split("def ", 1)[1]


@pytest.mark.fault("B34")
def test_analytic_columns_are_those_listed(target: Target, make_batch: MakeBatch) -> None:
    found = analytic_columns(LARGE, make_batch(LARGE, 5), target, binary=True)
    assert set(found) == set(ANALYTIC_FEATURES)


@given(
    m=st.sampled_from([0, 1, 16, 17, 512, 4096, 131072]),
    n=st.sampled_from([0, 1, 8, 1000, 131072]),
    k=st.sampled_from([0, 1, 64, 1001, 16384]),
    device=st.sampled_from(sorted(DEVICES)),
)
def test_known_candidates_have_finite_features_at_any_size(
    m: int, n: int, k: int, device: str, target: Target, make_batch: MakeBatch
) -> None:
    batch = make_batch(LARGE, 40)
    other = Target(DEVICES[device], target.toolchain)
    for ptx in (True, False):
        matrix = design_matrix(Workload(m, n, k), batch, other, ptx=ptx)
        assert matrix.dtype == np.float32
        assert matrix.shape == (40, len(FEATURES if ptx else CONFIG_FEATURES))
        assert np.isfinite(matrix).all()


@pytest.mark.parametrize("kind", kinds())
def test_each_kind_of_operand_is_told_apart(
    kind: str, target: Target, make_batch: MakeBatch
) -> None:
    workload = Workload.dense(4096, 4096, 4096, **kind_options(kind))
    matrix = design_matrix(workload, make_batch(workload, 20), target, ptx=True)
    code = workload.code
    for name, value in (
        ("item_bytes", code.itemsize), ("out_bytes", code.out_itemsize), ("tf32", code.tf32),
        ("is_bfloat16", kind == "bfloat16"),
    ):  # fmt: skip
        assert (column(matrix, name) == value).all()
    # Of the data sheet's rate of the kind: the same share of it, whatever the rate.
    flops_us = workload.flops() / target.device.tflops_of(kind) / 1e6
    assert column(matrix, "roofline_us") == pytest.approx(flops_us, rel=1e-5)
    assert (column(matrix, "compute_bound") >= 0.99).all()
    assert (column(matrix, "estimate") > 0.99).all()
    if kind == "float32":
        assert not column(matrix, "wgmma_shape").any()


def test_rows_follow_the_order_of_the_candidates(target: Target, make_batch: MakeBatch) -> None:
    batch = make_batch(LARGE, 30)
    order = np.random.default_rng(0).permutation(30)
    whole = design_matrix(LARGE, batch, target, ptx=True)
    np.testing.assert_array_equal(
        design_matrix(LARGE, batch.take(order), target, ptx=True), whole[order]
    )


@pytest.mark.fault("B34", "B40")
def test_a_missing_artifact_is_nan_and_leaves_the_configuration_columns_alone(
    target: Target, make_batch: MakeBatch
) -> None:
    bare = make_batch(LARGE, 10, artifacts=False)
    assert not bare.has_artifact.any()
    matrix = design_matrix(LARGE, bare, target, ptx=True)
    assert np.isnan(matrix[:, len(CONFIG_FEATURES) :]).all()
    np.testing.assert_array_equal(
        matrix[:, : len(CONFIG_FEATURES)], design_matrix(LARGE, bare, target, ptx=False)
    )


def test_the_configuration_head_never_sees_the_artifact(
    target: Target, make_batch: MakeBatch
) -> None:
    known, bare = make_batch(LARGE, 10), make_batch(LARGE, 10, artifacts=False)
    np.testing.assert_array_equal(
        design_matrix(LARGE, known, target, ptx=False),
        design_matrix(LARGE, bare, target, ptx=False),
    )


@pytest.mark.fault("B40")
def test_a_loop_without_tensor_cores_is_missing_not_infinite(
    target: Target, make_batch: MakeBatch
) -> None:
    batch = make_batch(LARGE, 3)
    for name in ("loop_wgmma", "loop_mma_sync", "loop_tcgen05_mma", "loop_mma_flops"):
        batch.artifact_columns[:, ARTIFACT_COLUMNS.index(name)] = 0
    matrix = design_matrix(LARGE, batch, target, ptx=True)
    assert np.isnan(column(matrix, "loop_per_flop")).all()
    assert not np.isinf(matrix).any()


def test_waves_and_padding_of_a_hand_worked_launch(target: Target) -> None:
    # 1000 x 1000 x 100 in tiles of 128 x 256: 8 x 4 = 32 tiles of 2 steps of 64, on 132 SMs.
    config = GemmConfig("tma", 128, 256, 64, num_warps=8, num_stages=4)
    got = one(Workload.dense(1000, 1000, 100), config, target)
    assert (got["tiles_m"], got["tiles_n"], got["programs"]) == (8, 4, 32)
    assert got["steps_per_program"] == 2
    assert got["occupancy"] == 1  # four stages of 48 KiB
    assert got["waves"] == pytest.approx(32 / 132)
    assert got["useful_m"] == pytest.approx(1000 / 1024)
    assert got["useful_k"] == pytest.approx(100 / 128)
    assert got["even_k"] == 0
    assert got["tile_intensity"] == pytest.approx(128 * 256 / 384)


def test_split_k_shortens_programs_and_adds_partial_sums(target: Target) -> None:
    workload = Workload.dense(128, 128, 8192)
    plain = one(workload, GemmConfig("tma", 128, 128, 64), target)
    split = one(workload, GemmConfig("tma", 128, 128, 64, split_k=4), target)
    assert split["programs"] == 4 * plain["programs"]
    assert split["steps_per_program"] * 4 == plain["steps_per_program"] == 128
    # Four float32 tiles, each written once and read once.
    assert (plain["split_traffic"], split["split_traffic"]) == (0, 4 * 128 * 128 * 4 * 2)


@pytest.mark.fault("B01")
def test_even_k_is_divisibility_by_block_k_not_by_two(target: Target) -> None:
    config = GemmConfig("pointer", 64, 64, 32)
    assert one(Workload.dense(64, 64, 34), config, target)["even_k"] == 0
    assert one(Workload.dense(64, 64, 96), config, target)["even_k"] == 1


def test_bounds_are_never_under_the_roofline(target: Target, make_batch: MakeBatch) -> None:
    got = analytic_columns(LARGE, make_batch(LARGE, 200), target, binary=True)
    assert (got["bound"] > 0.999).all()


def test_an_estimate_is_as_long_as_its_parts_and_near_the_roofline_where_that_can_be_met(
    target: Target, make_batch: MakeBatch
) -> None:
    got = analytic_columns(LARGE, make_batch(LARGE, 200), target, binary=True)
    beside = got["split_share"] + got["repack_share"]
    assert (np.maximum(got["loop_share"], got["dram_share"]) + beside < 1).all()
    assert (got["tail_share"] <= got["loop_share"]).all()
    assert (got["estimate"] > 1).all()
    np.testing.assert_allclose(
        np.exp(got["log_estimate"]), got["estimate"] * got["roofline_us"], rtol=1e-9
    )
    good = GemmConfig("tma_persistent", 128, 256, 64, num_warps=8, num_stages=4)
    assert one(LARGE, good, target)["estimate"] < 2


def test_the_slowest_part_of_a_step_takes_most_of_it(target: Target, make_batch: MakeBatch) -> None:
    got = analytic_columns(LARGE, make_batch(LARGE, 200), target, binary=True)
    shares = np.array([got[f"step_{part}"] for part in ("compute", "bytes", "load", "wait")])
    assert (shares.max(axis=0) < 1).all()
    assert (shares.sum(axis=0) > 1).all()
    tiny = one(Workload.dense(16, 16, 4096), GemmConfig("tma", 16, 32, 64, 4, 2), target)
    assert tiny["step_wait"] > 0.95  # one block, two stages: it waits for memory
    assert one(LARGE, GemmConfig("tma", 128, 256, 64, 8, 4), target)["step_compute"] > 0.8


def test_the_tile_of_a_wide_instruction_is_asked_of_the_architecture(target: Target) -> None:
    """An A100 multiplies with a warp's instruction only, and that at its full rate."""
    config = GemmConfig("pointer", 128, 128, 64, 4, 3)
    for name in ("a100-sxm", "h100-sxm", "b200-sxm"):
        got = one(LARGE, config, Target(DEVICES[name], target.toolchain))
        assert got["wgmma_shape"] == (name != "a100-sxm")
        assert got["estimate"] < (2 if name == "a100-sxm" else 4)


def test_operands_aligned_to_two_bytes_are_not_pipelined(target: Target) -> None:
    few, many = (GemmConfig("pointer", 64, 64, 64, 4, stages) for stages in (2, 5))
    ragged, aligned = Workload.dense(64, 1001, 1001), Workload.dense(64, 1008, 1008)
    assert one(ragged, few, target)["estimate"] * 0.99 < one(ragged, many, target)["estimate"]
    assert one(aligned, few, target)["estimate"] > 1.1 * one(aligned, many, target)["estimate"]
    assert one(ragged, many, target)["estimate"] > one(aligned, few, target)["estimate"]


def test_plain_loads_of_b_are_slow_where_k_is_a_whole_number_of_steps(target: Target) -> None:
    config = GemmConfig("pointer", 64, 64, 64)
    whole, masked = (one(Workload.dense(64, 8191, k), config, target) for k in (4096, 4088))
    assert whole["estimate"] > 1.3 * masked["estimate"]
    aligned = one(Workload.dense(64, 8192, 4096), config, target)
    assert whole["estimate"] > 2 * aligned["estimate"]


def test_rows_that_cross_lines_of_the_cache_cost_traffic(target: Target) -> None:
    plain = GemmConfig("tma", 128, 128, 64, 4, 4)
    whole, half, odd = (
        one(Workload.dense(512, 512, k), plain, target)["a_straddle"] for k in (1024, 1056, 1032)
    )
    assert whole == 0 < half < odd
    ragged = Workload.dense(512, 512, 1001)
    copied = replace(plain, repack=True)
    assert one(ragged, copied, target)["a_straddle"] == 0  # a copy has whole lines
    assert one(ragged, GemmConfig("pointer", 64, 64, 64), target)["a_straddle"] > 0
    col = Workload.dense(512, 512, 1032, a_layout="col")
    assert one(col, plain, target)["a_straddle"] == 0  # its rows run along m


def test_what_the_cache_loses_between_stripes_is_read_again(target: Target) -> None:
    tall = Workload.dense(8192, 65536, 512)
    low, high = (
        one(tall, GemmConfig("tma", 128, 256, 64, 8, 4, group_m=group), target)["dram_estimate"]
        for group in (4, 16)
    )
    assert low > 1.2 * high
    small = Workload.dense(1024, 1024, 512)
    one_stripe = one(small, GemmConfig("tma", 128, 256, 64, 8, 4, group_m=1), target)
    assert one_stripe["dram_estimate"] * one_stripe["roofline_us"] == pytest.approx(
        small.bytes() / target.device.bandwidth_gbs / 1e3
    )


def test_a_last_wave_that_is_nearly_empty_takes_nearly_as_long(target: Target) -> None:
    config = GemmConfig("tma_persistent", 128, 128, 64, 8, 4)
    fits, spills = (one(Workload.dense(1536, 128 * n, 8192), config, target) for n in (11, 12))
    assert spills["log_estimate"] > fits["log_estimate"] + 0.4


def test_the_last_block_of_a_split_tile_pays_for_the_sum(target: Target) -> None:
    workload = Workload.dense(128, 128, 8192)
    plain, four, eight = (
        one(workload, GemmConfig("tma", 128, 128, 64, split_k=split), target) for split in (1, 4, 8)
    )
    assert plain["split_share"] == 0 < four["split_share"] < eight["split_share"]
    assert four["estimate"] < plain["estimate"]  # one tile on 132 SMs: splitting pays


def test_occupancy_is_that_of_nvidias_tables(target: Target) -> None:
    # (registers, shared bytes, warps) -> blocks of an H100 SM, limited by:
    cases = {
        (32, 0, 4): 16,  # warps: 64 / 4
        (255, 0, 8): 1,  # registers: 65536 / (256 * 32) = 8 warps
        (128, 0, 4): 4,  # registers: 16 warps
        (32, 100_000, 4): 2,  # shared memory: 233472 / 101024
        (32, 0, 1): 32,  # blocks
    }
    registers, shared, warps = (np.array(x, dtype=float) for x in zip(*cases, strict=True))
    found = occupancy(registers, shared, warps, target.device)
    assert found.tolist() == list(cases.values())


def test_an_artifact_replaces_the_estimate_of_its_registers(
    target: Target, make_batch: MakeBatch
) -> None:
    batch = make_batch(LARGE, 20)
    batch.artifact_columns[:, ARTIFACT_COLUMNS.index("registers")] = 77
    used = column(design_matrix(LARGE, batch, target, ptx=True), "registers_used")
    assert (used == 77).all()


@pytest.mark.fault("B48")
def test_the_features_of_a_whole_space_take_milliseconds(
    target: Target, make_batch: MakeBatch
) -> None:
    batch = make_batch(LARGE, 1500)
    seconds = []
    for _ in range(15):
        start = time.thread_time()
        design_matrix(LARGE, batch, target, ptx=True)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 30e-3, "2 to 4 ms; row by row it would be a tenth of a second"
