"""Operands to time with: of the workload's kind, apart from each other, and numbers throughout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from code_classes import TYPES

from costmodel.runner.operands import OperandPool
from costmodel.workload import Workload


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
        sets = pool.sets(workload, 3)
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
        a, b, _, bias = pool.sets(workload, 3)[2]
        assert a.float().std() == pytest.approx(1, abs=0.5)
        assert bias is not None
        assert not (a == 7).any()
