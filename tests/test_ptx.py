"""PTX text -> features: counts by hand, golden files, and what must never change them."""

from __future__ import annotations

import json
import os
import re
import runpy
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.config import GemmConfig
from costmodel.errors import InvalidInput
from costmodel.ptx import PTX_FEATURES, PTX_SCHEMA, extract, normalize, ptx_hash

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
HAND = {
    name: (GOLDEN / "hand" / f"{name}.ptx").read_text() for name in ("sm_80", "sm_90", "sm_100")
}

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

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r1};"


def kernel(body: str) -> str:
    return (
        ".version 8.7\n.target sm_80\n.address_size 64\n"
        f".visible .entry k(\n.param .u64 k_param_0\n)\n.reqntid 128\n{{\n{body}\nret;\n}}\n"
    )


# --- Counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HAND)
def test_counts_worked_out_by_hand(name: str) -> None:
    expected = dict.fromkeys(PTX_FEATURES, 0.0) | HAND_COUNTS[name]
    assert extract(HAND[name]) == expected


@pytest.mark.parametrize("name", EXPECTED["files"])
def test_golden_files(name: str) -> None:
    text = (GOLDEN / f"{name}.ptx").read_text()
    expected = EXPECTED["files"][name]
    assert EXPECTED["ptx_schema"] == PTX_SCHEMA
    assert extract(text) == expected["features"]
    assert ptx_hash(text) == expected["hash"]
    assert normalize(text) == text


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


# --- Loops -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(MMA, (0, 0, 0, 0), id="no loop"),
        pytest.param("L: add.s32 %r1, %r1, 1; @%p1 bra L;", (0, 0, 1, 0), id="no tensor core"),
        pytest.param(f"L: {MMA} bra.uni L;", (1, 1, 1, 1), id="endless"),
        pytest.param(f"L: {MMA} @!%p1 bra L;", (1, 1, 1, 1), id="negated guard"),
        pytest.param(
            f"O: I: {MMA} @%p1 bra I; @%p2 bra O;", (1, 2, 2, 1), id="nested, adjacent labels"
        ),
        pytest.param(
            f"O: {MMA} I: {MMA} {MMA} @%p1 bra I; @%p2 bra O;", (1, 2, 2, 2), id="work in both"
        ),
        pytest.param(
            f"A: {MMA} @%p1 bra A; B: {MMA} {MMA} @%p1 bra B;", (1, 1, 2, 2), id="most work"
        ),
        pytest.param(
            f"L: @%p1 bra M; {MMA} @%p2 bra L; ret; M: {MMA} bra L;", (1, 1, 1, 2), id="two latches"
        ),
        pytest.param(
            f"bra H; B: {MMA} H: @%p1 bra B;", (1, 1, 1, 1), id="test at the foot"
        ),
        pytest.param(
            f"L: {MMA} {{ .reg .pred q; L: @q bra L; }} @%p1 bra L;", (1, 1, 2, 1),
            id="a label of the same name in a scope",
        ),
        pytest.param(
            f"L: {MMA} {{ @%p1 bra L; }}", (1, 1, 1, 1), id="a branch out of a scope"
        ),
        pytest.param(
            f"L: brx.idx %r1, T; T: .branchtargets A, B; A: {MMA} bra L; B:", (1, 1, 1, 1),
            id="a table of targets",
        ),
        pytest.param(f"bra E; {MMA} E:", (0, 0, 0, 0), id="dead code"),
        pytest.param(f"L: {MMA} trap; @%p1 bra L;", (0, 0, 0, 0), id="a trap ends it"),
    ],
)  # fmt: skip
def test_main_loop(body: str, expected: tuple[int, int, int, int]) -> None:
    f = extract(kernel(body))
    assert (f["has_loop"], f["loop_depth"], f["loops"], f["loop_mma_sync"]) == expected
    assert f["all_mma_sync"] == body.count("mma.sync")


def test_functions_beside_the_kernel_have_loops_of_their_own() -> None:
    helper = f".func helper()\n{{\nL: {MMA} @%p1 bra L;\nret;\n}}\n"
    f = extract(kernel("bra L; L:") + helper)
    assert (f["loops"], f["has_loop"], f["score_ret"]) == (1, 1, 2)


def test_no_tensor_core_gives_zeros_not_another_length() -> None:
    f = extract(kernel("add.f32 %r1, %r2, %r3;"))
    assert tuple(f) == PTX_FEATURES
    assert all(value == 0 for name, value in f.items() if name.startswith("loop_"))
    assert f["has_loop"] == 0
    assert f["all_instructions"] == 2


# --- The schema --------------------------------------------------------------------------------


def test_names_are_unique_and_every_value_is_a_float() -> None:
    assert len(set(PTX_FEATURES)) == len(PTX_FEATURES)
    for text in HAND.values():
        features = extract(text)
        assert tuple(features) == PTX_FEATURES
        assert all(type(value) is float for value in features.values())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("// nothing\n", id="only a comment"),
        pytest.param("\x7fELF\x02\x01\x01\x00", id="a binary"),
        pytest.param("def kernel(x):\n    return {x: 1}\n", id="Python"),
        pytest.param("define void @k() {\nentry:\n  ret void\n}\n", id="LLVM"),
        pytest.param(".version 8.7\n.target sm_90\n", id="a header alone"),
        pytest.param(".func helper()\n{\nret;\n}\n", id="no kernel"),
        pytest.param(".visible .entry k()", id="no body"),
        pytest.param(kernel("}"), id="a brace too many"),
    ],
)
def test_what_is_no_ptx_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"PTX"):
        extract(text)


@given(cut=st.floats(0, 1, exclude_max=True), name=st.sampled_from(list(HAND)))
def test_ptx_that_breaks_off_is_refused(cut: float, name: str) -> None:
    program = normalize(HAND[name])
    with pytest.raises(InvalidInput, match=r"PTX"):
        extract(program[: int(cut * (len(program) - 2))])


@given(st.text() | st.text(alphabet='.;:{}@%$"/*\n regbaxn0') | st.text().map(kernel))
def test_any_text_gives_every_feature_or_invalid_input(text: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", ptx_hash(text))
    try:
        features = extract(text)
    except InvalidInput:
        return
    assert tuple(features) == PTX_FEATURES


# --- What must not change anything --------------------------------------------------------------

NOISE = st.sampled_from(
    [
        "// a comment; with { braces } and .entry\n",
        "/* bra L; */",
        "\t \n\n",
        '\n\t.loc\t1 17 23                         // "kernel.py":17:23 @[ a.py:1:2 ]\n',
        "\n\t.loc\t2 43 17, function_name $L__info_string0, inlined_at 1 97 25\n",
        '\n\t.file\t3 "/home/some one/x//y/kernel;{.py"\n',
        '\n\t.file\t4 "/home/*/kernel.py"\n',
        "\n$L__tmp99:\n",
        "\n\t.section\t.debug_info\n\t{\n.b8 47 // DW_AT_comp_dir }\n.b32 .debug_abbrev\n\t}\n",
    ]
)


@given(data=st.data(), name=st.sampled_from(list(HAND)))
def test_debug_information_comments_and_blanks_change_nothing(
    data: st.DataObject, name: str
) -> None:
    lines = normalize(HAND[name]).splitlines()
    places = data.draw(st.lists(st.tuples(st.integers(0, len(lines) - 1), NOISE), max_size=20))
    for place, noise in places:
        lines[place] = noise + lines[place]
    noisy = "\n".join(lines) + "\n"
    assert normalize(noisy) == normalize(HAND[name])
    assert ptx_hash(noisy) == ptx_hash(HAND[name])
    assert extract(noisy) == extract(HAND[name])


@given(seed=st.randoms(use_true_random=False), name=st.sampled_from(list(HAND)))
def test_width_of_blanks_changes_nothing(seed, name: str) -> None:  # type: ignore[no-untyped-def]
    lines = normalize(HAND[name]).splitlines(keepends=True)
    text = "".join(
        line.replace(" ", seed.choice([" ", "\t", "  ", " \t", " /* x */ "])) for line in lines
    )
    assert ptx_hash(text) == ptx_hash(HAND[name])


def test_the_path_that_it_was_compiled_in_changes_nothing() -> None:
    moved = HAND["sm_80"].replace("/somewhere/else", "/another/place").replace("DW_TAG", "OTHER")
    assert moved != HAND["sm_80"]
    assert ptx_hash(moved) == ptx_hash(HAND["sm_80"])


def test_another_program_has_another_hash() -> None:
    texts = [*HAND.values(), *(t.replace("%r5", "%r6") for t in HAND.values())]
    assert len({ptx_hash(t) for t in texts}) == len(texts)


STRAIGHT = [
    line
    for text in HAND.values()
    for line in normalize(text).splitlines()
    if re.match(r"(@!?%\w+ )?(?!bra|ret)[a-z]", line) and line.endswith(";")
]


@given(body=st.lists(st.sampled_from(STRAIGHT), max_size=30), looped=st.booleans())
def test_counts_add_up(body: list[str], looped: bool) -> None:
    """A body repeated counts twice, in a loop and outside of one."""

    def counts(times: int) -> dict[str, float]:
        repeated = "\n".join(body * times)
        # One mma makes the loop a main loop, whatever the body holds.
        return extract(kernel(f"L:\n{MMA}\n{repeated}\n@%p1 bra L;" if looped else repeated))

    none, once, twice = counts(0), counts(1), counts(2)
    for name in PTX_FEATURES:
        assert twice[name] - once[name] == once[name] - none[name], name


# --- Speed, and the compiler --------------------------------------------------------------------


def test_a_large_kernel_takes_milliseconds() -> None:
    body = "\n".join(f"\t.loc\t1 {i} 0   // x.py:{i}:0\n\t{STRAIGHT[i % 60]}" for i in range(1500))
    text = kernel(f"L:\n{MMA}\n{body}\n@%p1 bra L;")
    best_s = min(_seconds(text) for _ in range(5))
    # 3,000 lines take 4 to 8 ms; the limit leaves room for a loaded machine.
    assert best_s < 0.1


def _seconds(text: str) -> float:
    start = time.perf_counter()
    extract(text)
    return time.perf_counter() - start


@pytest.mark.compile
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
