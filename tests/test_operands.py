"""Operands to time with: of the workload's kind, apart from each other, and numbers throughout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from code_classes import TYPES
from hypothesis import given
from hypothesis import strategies as st

from costmodel.gemm.workload import Workload
from costmodel.launch.problem import GemmProblem
from costmodel.measure.operands import NoRoom, OperandPool, set_count


@pytest.mark.parametrize(("dtype", "out_dtype", "tf32"), TYPES)
@pytest.mark.parametrize("b_layout", ["row", "col"])
def test_sets_are_what_the_workload_says_and_share_nothing(
    dtype: str, out_dtype: str, tf32: bool, b_layout: Any
) -> None:
    pool = OperandPool(torch.device("cpu"), 0)
    for size in ((33, 70, 50), (5, 7, 3), (16, 64, 32)):
        workload = Workload.dense(
            *size, dtype, out_dtype=out_dtype, tf32=tf32, b_layout=b_layout, bias=True
        )
        sets = GemmProblem(workload).operands(pool.draw, 3)
        spans = []
        for a, b, out, bias in sets:
            assert bias is not None
            assert Workload.from_tensors(a, b, out, bias=True, tf32=tf32) == workload
            assert bias.dtype == out.dtype
            for x in (a, b, bias):
                assert x.isfinite().all()
                assert x.abs().max() < 10
            out.fill_(7.0)  # as a launch does
            for x in (a, b, out, bias):
                start = x.data_ptr()
                spans.append((start, start + x.numel() * x.element_size()))
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        a, b, _, bias = GemmProblem(workload).operands(pool.draw, 3)[2]
        assert a.float().std() == pytest.approx(1, abs=0.5)
        assert bias is not None
        assert not (a == 7).any()


GIB = 2**30
L2 = 50 * 2**20


@pytest.mark.fault("B44")
@pytest.mark.parametrize(
    ("size", "count"),
    [
        ((64, 64, 64), 40),  # as many as a replay has launches
        ((1024, 1024, 1024), 13),  # 6 MiB each: one and a half times the cache
        ((4096, 4096, 4096), 2),
        ((32768, 32768, 4096), 2),
    ],
)
def test_sets_outlast_the_cache(size: tuple[int, int, int], count: int) -> None:
    assert set_count(GemmProblem(Workload.dense(*size)), L2, 40, 80 * GIB) == count


@given(
    st.tuples(*[st.integers(1, 40_000)] * 3), st.integers(0, 100 * GIB), st.booleans(),
    st.sampled_from(["float16", "float32"]),
)  # fmt: skip
def test_what_is_taken_fits_or_there_is_no_room(
    size: tuple[int, int, int], room_bytes: int, bias: bool, dtype: str
) -> None:
    workload = Workload.dense(*size, dtype, bias=bias)
    m, n, k = size
    check_bytes = 4 * (m * k + k * n + 2 * m * n)
    try:
        count = set_count(GemmProblem(workload), L2, 40, room_bytes)
    except NoRoom:
        least = min(1.5 * L2 / workload.bytes() + 2, 40)
        padding = 4 * 512 * least
        needed_bytes = least * workload.bytes() + check_bytes + padding
        assert min(room_bytes, 24 * GIB + check_bytes) < needed_bytes
        return
    assert 1 <= count <= 40
    assert count * workload.bytes() + check_bytes <= room_bytes
    assert count == 40 or count * (workload.bytes() + 1024) >= 1.5 * L2


def test_one_set_will_do_where_two_do_not_fit() -> None:
    large = Workload.dense(16384, 16384, 16384)  # 1.5 GiB a set, and 4 GiB to check it
    assert set_count(GemmProblem(large), L2, 40, 8 * GIB) == 2
    assert set_count(GemmProblem(large), L2, 40, 6 * GIB) == 1
    with pytest.raises(NoRoom, match="needs 5632 MiB, 5120 MiB are free"):
        set_count(GemmProblem(large), L2, 40, 5 * GIB)
