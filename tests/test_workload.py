"""Workloads: what they promise of their operands holds, and their keys tell them apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from code_classes import TYPES, code_classes
from hypothesis import assume, given
from hypothesis import strategies as st

from costmodel.errors import CostModelError, InvalidInput, LayoutError, ShapeError, UnsupportedDtype
from costmodel.gemm.dtypes import DATA_TYPES, element_types, kinds
from costmodel.gemm.workload import (
    MOST,
    CodeClass,
    Layout,
    Workload,
    alignment_class,
    kind_options,
)

sizes = st.integers(0, MOST)
classes = code_classes()
workloads = st.builds(Workload, sizes, sizes, sizes, classes)


def test_operands_are_copied_into_aligned_rows_or_columns() -> None:
    layouts: tuple[Layout, ...] = ("row", "col", "strided")
    for a in layouts:
        for b in layouts:
            code = CodeClass("float16", "float16", a_layout=a, b_layout=b, a_align=2, b_align=4)
            copied = code.repacked()
            assert (copied.a_align, copied.b_align) == (16, 16)
            expected = tuple("row" if x == "strided" else x for x in (a, b))
            assert (copied.a_layout, copied.b_layout) == expected


# --- alignment -----------------------------------------------------------------------------------


@pytest.mark.fault("B19")
@given(st.lists(st.integers(0, 2**40).map(lambda x: 2 * x), min_size=1, max_size=4))
def test_the_alignment_class_divides_all_and_is_the_widest_that_does(values: list[int]) -> None:
    found = alignment_class(*values)
    assert found in (16, 8, 4, 2)
    assert all(v % found == 0 for v in values)
    assert found == 16 or any(v % (2 * found) for v in values)


@pytest.mark.fault("B19")
@given(classes.filter(lambda c: c.wide is False), st.data())
def test_a_class_of_code_tells_the_truth_about_its_tensors(code: CodeClass, data: Any) -> None:
    """Address, leading stride and contiguous extent are multiples of the alignment."""
    rows, cols = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    pad, shift = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    buffer = torch.empty(100 + rows * (cols + pad), dtype=torch.float16)
    x = buffer.as_strided((rows, cols), (cols + pad, 1), shift)
    w = Workload.from_tensors(x, torch.empty(cols, 8).half(), torch.empty(rows, 8).half())
    assert w.code.a_layout == "row"
    promised = [x.data_ptr(), 2 * cols] + [2 * (cols + pad)] * (rows > 1)
    assert w.code.a_align == alignment_class(*promised)
    if rows == 1 or cols == 1:
        return  # row- and column-major at once: which it is called is free
    # The same memory seen from the side.
    turned = Workload.from_tensors(torch.empty(8, cols).half(), x.T, torch.empty(8, rows).half())
    assert turned.code.b_align == w.code.a_align
    assert turned.code.b_layout == "col"


@given(
    st.tuples(*[st.integers(1, 70)] * 3),
    st.sampled_from(TYPES),
    st.tuples(*[st.sampled_from(["row", "col"])] * 3),
)
def test_dense_is_what_fresh_tensors_are(
    shape: tuple[int, int, int],
    types: tuple[str, str, bool],
    layouts: tuple[Layout, Layout, Layout],
) -> None:
    (m, n, k), (dtype, out_dtype, tf32) = shape, types
    # One row or one column is row- and column-major at once: which it is called is free.
    assume("col" not in layouts or min(shape) > 1)

    def fresh(rows: int, cols: int, layout: Layout, name: str) -> torch.Tensor:
        kind = getattr(torch, name)
        if layout == "row":
            return torch.empty(rows, cols, dtype=kind)
        return torch.empty(cols, rows, dtype=kind).T

    a, b = fresh(m, k, layouts[0], dtype), fresh(k, n, layouts[1], dtype)
    out = fresh(m, n, layouts[2], out_dtype)
    a_layout, b_layout, c_layout = layouts
    dense = Workload.dense(
        m, n, k, dtype, out_dtype=out_dtype, tf32=tf32, a_layout=a_layout, b_layout=b_layout,
        c_layout=c_layout,
    )  # fmt: skip
    assert Workload.from_tensors(a, b, out, tf32=tf32) == dense


@pytest.mark.parametrize(
    ("shape", "strides", "layout", "align16", "align32"),
    [
        ((1, 64), (7, 1), "row", 16, 16),  # the stride of the only row is never used
        ((64, 1), (1, 7), "col", 16, 16),
        ((64, 1), (64, 7), "row", 2, 4),  # a column of gaps: rows of one element
        ((1, 64), (7, 3), "col", 2, 4),
        ((5, 64), (64, 2), "strided", 2, 4),
        ((5, 64), (0, 1), "row", 16, 16),  # expanded
        ((4, 12), (12, 1), "row", 8, 16),
        ((4, 12), (1, 4), "col", 8, 16),
        ((4, 6), (6, 1), "row", 4, 8),
        ((4, 5), (8, 1), "row", 2, 4),
    ],
)
def test_layouts_of_views(
    shape: tuple[int, int], strides: tuple[int, int], layout: Layout, align16: int, align32: int
) -> None:
    for dtype, align in ((torch.float16, align16), (torch.float32, align32)):
        memory = torch.empty(10_000, dtype=dtype)
        b, out = memory[: 8 * shape[1]].view(-1, 8), memory[: 8 * shape[0]].view(-1, 8)
        code = Workload.from_tensors(memory.as_strided(shape, strides), b, out).code
        assert (code.a_layout, code.a_align) == (layout, align)


def test_elements_of_four_bytes_are_aligned_as_far_as_torch_goes() -> None:
    shifted = torch.frombuffer(bytearray(66), dtype=torch.float32, count=16, offset=2)
    code = Workload.from_tensors(shifted.view(4, 4), torch.empty(4, 8), torch.empty(4, 8)).code
    assert code.a_align == 4


@pytest.mark.fault("B08")
def test_offsets_past_31_bits_are_wide() -> None:
    meta = torch.empty(2**31, 1, dtype=torch.float16, device="meta")
    for rows, stride, wide in ((64, 2**26, True), (32, 2**26, False), (33, 2**26, True)):
        a = meta.as_strided((rows, 64), (stride, 1))
        w = Workload.from_tensors(a, torch.empty(64, 8).half(), torch.empty(rows, 8).half())
        assert w.code.wide == wide, (rows, stride)
    assert Workload.dense(50_000, 50_000, 16).code.wide
    assert Workload.dense(40_960, 16, 128_256).code.wide
    assert not Workload.dense(40_000, 50_000, 16).code.wide


@pytest.mark.fault("B08")
def test_an_operand_of_exactly_31_bits_is_one_class_however_it_is_described() -> None:
    """Its last offset is 2**31 - 1: else a pin of sizes would not be met by operands."""
    for n, wide in ((2**15, False), (2**15 + 16, True)):
        a, b, out = (
            torch.empty(rows, cols, dtype=torch.float16, device="meta")
            for rows, cols in ((2**16, 16), (16, n), (2**16, n))
        )
        dense = Workload.dense(2**16, n, 16)
        assert dense.code.wide == wide
        assert Workload.from_tensors(a, b, out) == dense


# --- names ---------------------------------------------------------------------------------------


@given(workloads)
def test_round_trip_through_json(workload: Workload) -> None:
    assert Workload.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload


@pytest.mark.fault("B16")
@given(workloads, workloads, st.sets(st.sampled_from(list(Workload(1, 1, 1).to_dict()))))
def test_keys_are_equal_only_for_equal_workloads(
    one: Workload, other: Workload, taken_over: set[str]
) -> None:
    if taken_over & (coupled := {"dtype", "out_dtype", "tf32", "a_align", "b_align", "c_align"}):
        taken_over = taken_over | coupled  # which of these go together is not free
    changes = {name: other.to_dict()[name] for name in taken_over}
    near = Workload.from_dict(one.to_dict() | changes)
    assert (one.key() == near.key()) == (one == near)


# --- what cannot be used -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, MOST + 1, 2**31, 1.0, "16", None, True, float("nan")])
@pytest.mark.parametrize("name", ["m", "n", "k"])
def test_sizes_are_checked(name: str, value: Any) -> None:
    limit = f"expected an int from 0 to {MOST}, .*32 bits"
    with pytest.raises(ShapeError, match=f"{name}={value!r}: {limit}"):
        Workload(**{"m": 1, "n": 1, "k": 1, name: value})


@pytest.mark.fault("B57")
@pytest.mark.parametrize(
    "dtype",
    ["float64", "tf32", "int8", "complex64", "float8_e4m3fn", "float8_e5m2", "", "half",
     "__import__('os').system('true')"],
)  # fmt: skip
def test_dtypes_without_a_kernel(dtype: str) -> None:
    with pytest.raises(UnsupportedDtype, match="float16, bfloat16"):
        Workload.dense(1, 1, 1, dtype)
    with pytest.raises(TypeError):
        Workload.dense(1, 1, 1, out_dtype=dtype or "float")


@pytest.mark.fault("B57")
@pytest.mark.parametrize(
    "out_dtype", ["float16", "bfloat16", "int8", "tf32", 7, ["float16"], {"a": 1}]
)
def test_only_types_of_c_that_its_operands_have_are_offered(out_dtype: Any) -> None:
    for dtype in element_types():
        allowed = DATA_TYPES[dtype].results
        if out_dtype in allowed:
            continue
        for make in (CodeClass, lambda **types: Workload.dense(1, 1, 1, **types)):
            with pytest.raises(UnsupportedDtype, match=f"of {dtype} operands") as told:
                make(dtype=dtype, out_dtype=out_dtype)
            offered = str(told.value).split("expected ")[1].split(":")[0]
            assert offered == " or ".join(allowed)


@pytest.mark.parametrize("layout", ["colum", "ROW", "", None, 7, ["row"]])
def test_only_layouts_of_dense_operands_are_offered(layout: Any) -> None:
    for name in ("a_layout", "b_layout", "c_layout"):
        with pytest.raises(InvalidInput, match=f"{name}=.*: expected row or col"):
            Workload.dense(8, 8, 8, **{name: layout})
        with pytest.raises(InvalidInput, match=f"{name}='strided'.*from_tensors"):
            Workload.dense(8, 8, 8, **{name: "strided"})


@pytest.mark.fault("B57")
@pytest.mark.parametrize("kind", ["fp8", "", "TF32", None, 7])
def test_kinds_without_a_kernel(kind: Any) -> None:
    with pytest.raises(UnsupportedDtype, match="float16, bfloat16, float32, tf32"):
        kind_options(kind)


def test_what_is_multiplied_has_a_name() -> None:
    for kind in kinds():
        code = Workload.dense(8, 8, 8, **kind_options(kind)).code
        assert code.kind == kind
        assert code.tf32 == (kind == "tf32") == code.key().endswith("-tf32")
        assert code.itemsize == code.out_itemsize == DATA_TYPES[code.dtype].bytes
    assert Workload.dense(8, 8, 8, out_dtype="float32").code.kind == "float16"


@pytest.mark.parametrize(
    "change",
    [
        {"a_layout": "diagonal"}, {"b_align": 3}, {"c_align": 32}, {"activation": "tanh"},
        {"activation": "__import__('os')"}, {"tf32": True}, {"tf32": 1},
        {"tf32": True, "dtype": "bfloat16", "out_dtype": "bfloat16"},
        {"c_align": 2, "out_dtype": "float32"},
        {"a_align": 2, "dtype": "float32", "out_dtype": "float32"},
    ],
)  # fmt: skip
def test_code_classes_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"{next(iter(change))}="):
        CodeClass(**change)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"m": 1, "n": 1},
        {"m": 1, "n": 1, "k": 1, "extra": 2},
        {"m": "1", "n": 1, "k": 1},
        {"m": 1, "n": 1, "k": 1, "dtype": "__import__('os').system('true')"},
        {"m": 1, "n": 1, "k": 1, "__class__": "x\x1b[31m"},
    ],
)
def test_foreign_rows_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(CostModelError) as caught:
        Workload.from_dict(row)
    assert str(caught.value).isprintable()


def test_operands_that_do_not_fit_together() -> None:
    a, b = torch.empty(3, 4).half(), torch.empty(5, 6).half()
    with pytest.raises(ShapeError, match=r"\[3, 4\] @ B\[5, 6\]"):
        Workload.from_tensors(a, b, torch.empty(3, 6).half())
    with pytest.raises(ShapeError):
        Workload.from_tensors(a, torch.empty(4, 6).half(), torch.empty(6, 3).half())


def test_an_input_may_overlap_itself() -> None:
    a, b = torch.empty(1, 4).half().expand(3, 4), torch.empty(4, 6).half()
    assert Workload.from_tensors(a, b, torch.empty(3, 6).half())


# --- arithmetic ----------------------------------------------------------------------------------


def test_work_and_traffic() -> None:
    w = Workload.dense(2, 3, 5, bias=True)
    assert w.flops() == 60
    assert w.bytes() == 2 * (2 * 5 + 5 * 3 + 2 * 3 + 3)
    assert Workload.dense(2, 3, 5, "float32", bias=True).bytes() == 2 * w.bytes()
    wide = Workload.dense(2, 3, 5, bias=True, out_dtype="float32")
    assert wide.bytes() == w.bytes() + 2 * (2 * 3 + 3)
    assert w.nk == (3, 5)
    assert str(w) == w.key() == "2x3x5-float16-rrr-2.2.2-bias"
    assert Workload.dense(512, 512, 512).is_small()
    assert not any(Workload.dense(*s).is_small() for s in ((513, 1, 1), (1, 513, 1), (1, 1, 513)))


@given(
    st.tuples(st.integers(0, 7), st.integers(0, 7)),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_an_out_that_overlaps_itself_is_refused(
    shape: tuple[int, int], strides: tuple[int, int]
) -> None:
    """Against the definition: two elements at one offset."""
    (m, n), (row_stride, col_stride) = shape, strides
    out = torch.empty(200, dtype=torch.float16).as_strided(shape, strides)
    offsets = [i * row_stride + j * col_stride for i in range(m) for j in range(n)]
    a, b = torch.empty(m, 3).half(), torch.empty(3, n).half()
    if len(set(offsets)) < len(offsets):
        with pytest.raises(LayoutError, match="overlaps itself"):
            Workload.from_tensors(a, b, out)
    else:
        Workload.from_tensors(a, b, out)
