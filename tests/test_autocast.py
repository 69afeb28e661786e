"""Under ``torch.autocast`` a product has the types that it has of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_fakes import Machine
from memory_fakes import Elsewhere, K, M, N, machine_of_memory, pair, random

import costmodel
from costmodel.errors import UnsupportedDtype

# No model has learned float32: the rules rank.
pytestmark = pytest.mark.filterwarnings("ignore:.*was trained on:RuntimeWarning")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    yield from machine_of_memory(monkeypatch, tmp_path)


@pytest.mark.parametrize("types", ["32 32", "16 32", "32 16", "16 16"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_autocast_gives_what_it_gives_of_torch(types: str, with_bias: bool) -> None:
    dtypes = {"32": torch.float32, "16": torch.float16}
    first, second = types.split()
    a, b = random(M, K, dtype=dtypes[first]), random(K, N, dtype=dtypes[second])
    bias = random(N) if with_bias else None
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            found = costmodel.matmul(a, b, bias=bias)
            expected = torch.matmul(a, b)
        if bias is not None:
            expected = expected + bias.half()
        assert found.dtype is torch.float16
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    if types == "32 32":
        assert costmodel.matmul(a, b).dtype is torch.float32, "outside of it"


def test_autocast_leaves_an_output_and_double_numbers_alone() -> None:
    a, b = pair()
    out = torch.zeros(M, N)
    with torch.autocast("cpu", dtype=torch.float16):
        costmodel.matmul(a, b, out=out)
        with pytest.raises(UnsupportedDtype):
            costmodel.matmul(a.double(), b)
    torch.testing.assert_close(out, a @ b)


class Moved(Elsewhere):
    """Quantised weights take ``to`` for a move to another device: the type that they say stays."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._to_copy.default:
            return Moved(args[0].inner)
        if function is torch.ops.aten.mm.default and isinstance(args[1], Moved):
            return function(args[0], args[1].inner.to(args[0].dtype))
        return super().__torch_dispatch__(function, types, args, kwargs)


def test_what_cannot_be_cast_is_left_to_torch() -> None:
    a, b = pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = costmodel.matmul(a, Moved(b))
    torch.testing.assert_close(found.float(), a @ b, rtol=5e-2, atol=5e-2)


def test_autocast_is_the_same_of_batches_on_both_sides() -> None:
    a, b = random(3, M, K), random(3, K, N)
    out = torch.zeros(3, M, N)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        costmodel.matmul(a, b, out=out)
        cast = costmodel.matmul(a, b)
        halves = costmodel.matmul(a.half(), b.half(), bias=random(N, dtype=torch.float16))
    torch.testing.assert_close(out, a @ b)
    assert (cast.dtype, halves.dtype) == (torch.bfloat16, torch.float16)


def test_the_result_under_autocast_is_that_of_the_product_that_is_computed() -> None:
    a, b = pair()
    costmodel.matmul(a, b)
    with torch.autocast("cpu", dtype=torch.float16):
        assert costmodel.result_for(a, b) is None
        costmodel.matmul(a, b)
        result = costmodel.result_for(a, b)
    assert result is not None
    assert result.workload.code.dtype == "float16"


def test_autocast_passes_gradients_and_whole_modules() -> None:
    layers = [torch.nn.Linear(K, N), torch.nn.LayerNorm(N), torch.nn.Linear(N, 8)]
    model = torch.nn.Sequential(*layers)
    x = random(M, K)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            found = model(x)
        found.float().square().sum().backward()
        return [found.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = step()
    assert costmodel.nn.replace_linear(model) == 2
    found = step()
    assert found[0].dtype is torch.float16
    for ours, theirs in zip(found, expected, strict=True):
        scale = theirs.float().abs().max()
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=float(scale) / 50)
