"""PTX text -> features: which loop is the main one, and what is counted in it."""

from __future__ import annotations

import pytest
from ptx_texts import MMA, kernel

from costmodel.compile.ptx import PTX_FEATURES, extract


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


@pytest.mark.fault("B34")
def test_no_tensor_core_gives_zeros_not_another_length() -> None:
    f = extract(kernel("add.f32 %r1, %r2, %r3;"))
    assert tuple(f) == PTX_FEATURES
    assert all(value == 0 for name, value in f.items() if name.startswith("loop_"))
    assert f["has_loop"] == 0
    assert f["all_instructions"] == 2
