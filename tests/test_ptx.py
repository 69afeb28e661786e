"""PTX text -> features: counts by hand, and golden files."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest
from ptx_texts import EXPECTED, GOLDEN, HAND, kernel

from costmodel.compile.ptx import PTX_FEATURES, PTX_SCHEMA, extract, normalize, ptx_hash
from costmodel.gemm.config import GemmConfig

# Worked out by reading the files in golden/hand, instruction by instruction; what is not named
# is zero. Sums show the instructions in the order of the text.
HAND_COUNTS: dict[str, dict[str, int]] = {
    "sm_80": {
        "all_instructions": 11 + 4 + 12 + 9 + 3 + 1,  # up to each label, then ret
        "all_mma_sync": 2,
        "all_mma_flops": 2 * (2 * 16 * 8 * 16),
        "all_cp_async": 1 + 1,
        "all_ldmatrix": 2,
        "all_ld_shared": 1,
        "all_ld_shared_bytes": 2 * 4,
        "all_st_shared": 1,
        "all_st_shared_bytes": 4 * 4,
        "all_ld_global": 1,
        "all_ld_global_bytes": 2,
        "all_st_global": 1,
        "all_st_global_bytes": 4 * 4,
        "all_barrier": 1 + 1,
        "all_branch": 4,
        "all_predicated": 4 + 2,  # the branches and two cp.async
        "all_predicate_ops": 5,  # setp
        "all_cvt": 2,
        "all_int_arith": 5 + 1 + 1,  # shl add cvta mul add; add; sub
        "all_float_arith": 1,  # max.f16x2
        "all_fence": 1 + 2,  # commit; wait, commit
        "all_mov": 2 + 1,
        "loop_instructions": 12,
        "loop_mma_sync": 2,
        "loop_mma_flops": 2 * (2 * 16 * 8 * 16),
        "loop_cp_async": 1,
        "loop_ldmatrix": 2,
        "loop_barrier": 1,
        "loop_branch": 1,
        "loop_predicated": 2,
        "loop_predicate_ops": 2,
        "loop_int_arith": 1,
        "loop_fence": 2,
        "has_loop": 1,
        "loop_depth": 2,
        "loops": 2,
        "reg_pred": 5,
        "reg_16": 3,
        "reg_32": 40 + 9,  # b32, f32
        "reg_64": 4,
        "static_shared_bytes": 96,
        "score_mma_sync": 2,
        "score_cp_async": 2 + 3,  # copies; commits and waits
        "score_bar_sync": 2,
        "score_bra": 4,
        "score_ret": 1,
    },
    "sm_90": {
        "all_instructions": 7 + 6 + 5 + 20 + 12,
        "all_wgmma": 2,
        "all_mma_flops": 2 * (2 * 64 * 16 * 16),
        "all_bulk_load": 2,
        "all_bulk_store": 1,
        "all_stmatrix": 1,
        "all_barrier": 1 + 1,
        "all_mbarrier": 1 + 2 + 2,  # init; arrive, try_wait; try_wait, inval
        "all_branch": 1 + 3 + 1,
        "all_predicated": 2 + 5 + 3,
        "all_predicate_ops": 1 + 1 + 1 + 1,  # setp; setp; and.pred; setp
        "all_cvt": 1 + 2,
        "all_int_arith": 1 + 3 + 5,  # cvta; shl add add; bfe or add xor add
        "all_fence": 1 + 3 + 3,  # proxy; wgmma fence, commit, wait; proxy, bulk commit, wait
        "all_mov": 4 + 1 + 1,
        "loop_instructions": 20,  # with the two of the wait that spins inside
        "loop_wgmma": 2,
        "loop_mma_flops": 2 * (2 * 64 * 16 * 16),
        "loop_bulk_load": 2,
        "loop_mbarrier": 2,
        "loop_branch": 3,
        "loop_predicated": 5,
        "loop_predicate_ops": 1,
        "loop_cvt": 1,
        "loop_int_arith": 5,
        "loop_fence": 3,
        "loop_mov": 1,
        "has_loop": 1,
        "loop_depth": 1,
        "loops": 4,  # init; main, and its wait; the last wait
        "reg_pred": 8 + 1 + 1,
        "reg_32": 60,
        "reg_64": 8,
        "score_cp_async": 2 + 1 + 2,
        "score_bar_sync": 2,
        "score_bra": 5,
        "score_ret": 1,
    },
    "sm_100": {
        "all_instructions": 12 + 4 + 11 + 13,
        "all_tcgen05_mma": 2,
        # The descriptor is 136380432 = 8 << 24 | 16 << 17 | 16: M = 8 * 16, N = 16 * 8; K = 16.
        "all_mma_flops": 2 * (2 * 128 * 128 * 16),
        "all_ld_shared": 1,
        "all_ld_shared_bytes": 4,
        "all_st_shared": 1,
        "all_st_shared_bytes": 8,
        "all_ld_global": 1,
        "all_ld_global_bytes": 4 * 4,
        "all_st_global": 1,
        "all_st_global_bytes": 2 * 4,
        "all_tmem": 1 + 1,
        "all_barrier": 1 + 1,  # bar.sync; bar.warp.sync
        "all_mbarrier": 1,
        "all_branch": 1 + 2 + 4,
        "all_predicated": 1 + 1 + 6 + 1,
        "all_predicate_ops": 1 + 1 + 1,
        "all_int_arith": 1,
        "all_float_arith": 2,  # fma, ex2
        "all_shuffle": 1,
        "all_fence": 1 + 1 + 2,  # wait::st; commit; wait::ld, fence
        "all_atomic": 2,
        "all_mov": 3 + 1,
        "loop_instructions": 3 + 11,  # the bra.uni that leaves is not in it
        "loop_tcgen05_mma": 2,
        "loop_mma_flops": 2 * (2 * 128 * 128 * 16),
        "loop_mbarrier": 1,
        "loop_branch": 1 + 4,
        "loop_predicated": 1 + 6,
        "loop_predicate_ops": 1 + 1,
        "loop_int_arith": 1,
        "loop_fence": 1,
        "loop_mov": 1,
        "has_loop": 1,
        "loop_depth": 1,
        "loops": 2,
        "reg_pred": 8 + 1,
        "reg_32": 40,
        "reg_64": 10,
        "reg_128": 2,
        "score_bar_sync": 1,
        "score_bra": 7,
        "score_ret": 1,
    },
}


@pytest.mark.parametrize("name", HAND)
def test_counts_worked_out_by_hand(name: str) -> None:
    expected = dict.fromkeys(PTX_FEATURES, 0.0) | HAND_COUNTS[name]
    assert extract(HAND[name]) == expected


@pytest.mark.fault("B40")
@pytest.mark.parametrize("name", EXPECTED["files"])
def test_golden_files(name: str) -> None:
    text = (GOLDEN / f"{name}.ptx").read_text()
    expected = EXPECTED["files"][name]
    assert EXPECTED["ptx_schema"] == PTX_SCHEMA
    assert extract(text) == expected["features"]
    assert ptx_hash(text) == expected["hash"]
    assert normalize(text) == text


@pytest.mark.fault("B40")
@pytest.mark.parametrize("name", EXPECTED["files"])
def test_golden_main_loop_does_one_step_of_the_tile(name: str) -> None:
    """Independent of the extractor: one turn of the loop multiplies one BLOCK_K."""
    case = EXPECTED["files"][name]
    config, features = GemmConfig.from_dict(case["config"]), case["features"]
    work = 2 * config.block_m * config.block_n * config.block_k
    # mma.sync has the work of one warp, wgmma of four, tcgen05.mma of the block.
    warps = {80: 1, 90: 4, 100: config.num_warps}[case["arch"]]
    assert features["loop_mma_flops"] * config.num_warps / warps == work
    # Tiles around steps; and around both, where warps share the work out, the wait for work.
    depth = {"pointer": 1, "tma": 1, "tma_persistent": 2, "warp_specialized": 3}[config.kernel]
    assert features["loop_depth"] == depth
    # Where warps share the work out, another one copies, in a loop of its own.
    assert (features["loop_bulk_load"] > 0) == config.kernel.startswith("tma")
    assert (features["loop_cp_async"] > 0) == (config.kernel == "pointer")


@pytest.mark.fault("B40")
@pytest.mark.parametrize(
    ("instruction", "counts"),
    [
        ("add.rn.f32x2 %rd1, %rd2, %rd3;", {"float_arith": 1}),
        ("fma.rn.bf16x2 %r1, %r2, %r3, %r4;", {"float_arith": 1}),
        ("mad.lo.s32 %r1, %r2, %r3, %r4;", {"int_arith": 1}),
        ("lop3.b32 %r1, %r2, %r3, %r4, 0x96;", {"int_arith": 1}),
        ("xor.pred %p1, %p2, %p3;", {"predicate_ops": 1}),
        ("selp.b32 %r1, %r2, %r3, %p1;", {"predicate_ops": 1}),
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r2;", {"cvt": 1}),
        ("ld.global.L1::evict_last.v8.b32 {%r1}, [%rd1];", {"ld_global": 1, "ld_global_bytes": 32}),
        ("ld.volatile.shared::cta.u8 %rs1, [%r1];", {"ld_shared": 1, "ld_shared_bytes": 1}),
        ("st.shared.v2.f16x2 [%r1], {%r2, %r3};", {"st_shared": 1, "st_shared_bytes": 8}),
        ("ld.param.b64 %rd1, [k_param_0];", {}),
        ("cp.async.ca.shared.global [%r1], [%rd1], 8;", {"cp_async": 1}),
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];", {"mbarrier": 1}),
        ("cp.async.bulk.shared::cluster.global.mbarrier [%r1];", {"bulk_load": 1}),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1];", {"bulk_store": 1}),
        ("cp.reduce.async.bulk.global.shared::cta.add.f32 [%rd1];", {"bulk_store": 1}),
        ("cp.async.bulk.prefetch.tensor.2d.L2.global [%rd1];", {}),
        ("barrier.cluster.arrive.aligned;", {"barrier": 1}),
        ("wgmma.fence.sync.aligned;", {"fence": 1}),
        ("membar.gl;", {"fence": 1}),
        ("wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {%r1}, %rd1, %rd2, 1, 1, 1;",
         {"wgmma": 1, "mma_flops": 2 * 64 * 256 * 32}),
        # Without its descriptor the shape is unknown: counted, with no work.
        ("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r9, %p1;", {"tcgen05_mma": 1}),
        ("mov.b32 %r9, 136380432; tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], %rd1, %rd2, %r9, 1;",
         {"tcgen05_mma": 1, "mov": 1, "mma_flops": 2 * 128 * 128 * 32, "instructions": 2}),
    ],
)  # fmt: skip
def test_one_instruction(instruction: str, counts: dict[str, int]) -> None:
    with_, without = extract(kernel(instruction)), extract(kernel(""))
    added = {n[4:]: with_[n] - without[n] for n in PTX_FEATURES if n.startswith("all_")}
    assert {n: v for n, v in added.items() if v} == {"instructions": 1} | counts


def test_score_counts_what_a_search_for_the_substring_would() -> None:
    for name, text in HAND.items():
        program, features = normalize(text), extract(text)
        assert features["score_cp_async"] == len(re.findall(r"(?<![\w.])cp\.async", program)), name
        assert features["score_mma_sync"] == program.count("mma.sync"), name
        assert features["score_bar_sync"] == program.count("bar.sync"), name
        assert features["score_bra"] == len(re.findall(r"\bbra\b", program)), name
        assert features["score_ret"] == len(re.findall(r"\bret\b", program)), name


@pytest.mark.fault("B40")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80-pointer", "sm_90-tma", "sm_100-tma_persistent"])
def test_the_compiler_still_gives_the_golden_ptx(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    if triton.__version__ != EXPECTED["triton"] and not os.environ.get("CI"):
        pytest.skip(f"golden files are Triton {EXPECTED['triton']}'s, not {triton.__version__}'s")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compile_ptx = runpy.run_path(str(GOLDEN / "regenerate.py"))["compile_ptx"]
    case = EXPECTED["files"][name]
    ptx = compile_ptx(case["arch"], GemmConfig.from_dict(case["config"]))
    assert normalize(ptx) == (GOLDEN / f"{name}.ptx").read_text()
    assert extract(ptx) == case["features"]
