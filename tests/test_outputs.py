"""New tensors for results, where torch makes them; on a GPU: ``tests/gpu/test_dispatch_gpu.py``."""

from __future__ import annotations

import pytest
import torch

from costmodel.dispatch.launches import NewOutput


class Named(torch.Tensor):
    """A user's kind of tensor, which torch's own functions give back."""


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize(("m", "n"), [(3, 5), (1, 1), (3, 0), (0, 5)])
def test_it_is_where_and_what_the_operands_are(m: int, n: int, dtype: torch.dtype | None) -> None:
    a, b = torch.zeros(m, 2).half(), torch.zeros(2, n).half()
    out = NewOutput(a, b.shape[1], dtype)(a)
    assert (out.shape, out.dtype) == ((m, n), dtype or torch.float16)
    assert out.is_contiguous()
    assert NewOutput(a.to("meta"), b.shape[1], dtype)(a.to("meta")).device.type == "meta"


def test_a_subclass_makes_its_own_kind() -> None:
    a = torch.zeros(3, 2).as_subclass(Named)
    assert type(NewOutput(a, 5, None)(a)) is Named
