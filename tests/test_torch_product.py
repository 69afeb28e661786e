"""The product by torch, on the CPU: right in every type, and torch's switch is left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from costmodel.launch.fast import (
    float32_precision,
    reference_product,
    torch_multiplies_in_tf32,
    torch_product,
)

SWITCH: Any = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _switch() -> Iterator[None]:
    before = SWITCH.fp32_precision
    yield
    SWITCH.fp32_precision = before


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.float32, torch.float32), (torch.float16, torch.float16),
        (torch.float16, torch.float32), (torch.bfloat16, torch.float32),
    ],
)  # fmt: skip
def test_it_is_the_product(dtype: torch.dtype, out_dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(9, 30).to(dtype), torch.randn(30, 7).to(dtype)
    function = getattr(torch.nn.functional, activation, lambda x: x)
    for bias in (None, torch.randn(7).to(out_dtype)):
        out = torch.full((9, 7), float("nan"), dtype=out_dtype)
        torch_product(a, b, out, bias, activation)
        ref = function(a.double() @ b.double() + (0 if bias is None else bias.double()))
        tolerance = 1e-5 if out_dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out.double(), ref, atol=tolerance, rtol=tolerance)


class Watch(TorchDispatchMode):
    """Notes what torch's switch says at each product, which fails if ``error`` is set."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.seen: list[str] = []
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.seen.append(SWITCH.fp32_precision)
            if self.error:
                raise RuntimeError(self.error)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("switch", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("tf32", [False, True])
def test_the_precision_is_what_is_asked_for_and_then_what_it_was(switch: str, tf32: bool) -> None:
    SWITCH.fp32_precision = switch
    one = torch.ones(1, 1)
    with Watch() as watch:
        torch_product(one, one, torch.empty(1, 1), None, "none", tf32)
    assert [found == "tf32" for found in watch.seen] == [tf32]
    assert SWITCH.fp32_precision == switch
    with Watch("out of memory"), pytest.raises(RuntimeError, match="out of memory"):
        torch_product(one, one, torch.empty(1, 1), None, "none", tf32)
    assert SWITCH.fp32_precision == switch
    with Watch() as watch:
        torch.testing.assert_close(reference_product(one, one, None, "none"), one)
    assert watch.seen in (["ieee"], ["none"])
    assert SWITCH.fp32_precision == switch


def test_a_switch_that_says_the_same_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads multiply by it too."""
    SWITCH.fp32_precision = "tf32"
    monkeypatch.setattr(type(SWITCH), "__setattr__", lambda *_: pytest.fail("touched"))
    with float32_precision(tf32=True):
        assert torch_multiplies_in_tf32()
    monkeypatch.setattr(type(SWITCH), "__getattr__", lambda *_: pytest.fail("asked"))
    half = torch.ones(2, 2).half()  # which the switch says nothing of
    torch_product(half, half, torch.empty_like(half), None, "none")


@pytest.mark.parametrize("old_name", [False, True])
def test_either_name_of_the_switch_is_followed(old_name: bool) -> None:
    for tf32 in (True, False):
        if old_name:
            SWITCH.allow_tf32 = tf32
        else:
            SWITCH.fp32_precision = "tf32" if tf32 else "ieee"
        assert torch_multiplies_in_tf32() == tf32
