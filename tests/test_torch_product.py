"""The product by torch, on the CPU: right in every type, and torch's switch is left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from costmodel.launch import fast as module
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


@pytest.mark.parametrize("switch", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("tf32", [False, True])
def test_the_precision_is_what_is_asked_for_and_then_what_it_was(
    monkeypatch: pytest.MonkeyPatch, switch: str, tf32: bool
) -> None:
    SWITCH.fp32_precision = switch
    seen = []

    def product(*operands: object) -> None:
        seen.append(torch_multiplies_in_tf32())
        if len(seen) == 2:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "_product", product)
    one = torch.ones(1, 1)
    torch_product(one, one, one, None, "none", tf32)
    assert SWITCH.fp32_precision == switch
    with pytest.raises(RuntimeError, match="out of memory"):
        torch_product(one, one, one, None, "none", tf32)
    assert SWITCH.fp32_precision == switch
    assert seen == [tf32, tf32]


def test_a_switch_that_says_the_same_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads multiply by it too."""
    SWITCH.fp32_precision = "tf32"
    monkeypatch.setattr(type(SWITCH), "__setattr__", lambda *_: pytest.fail("touched"))
    with float32_precision(tf32=True):
        assert torch_multiplies_in_tf32()


def test_16_bits_do_not_ask_for_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch_multiplies_in_tf32", lambda: pytest.fail("asked"))
    half = torch.ones(2, 2).half()
    torch_product(half, half, torch.empty_like(half), None, "none")


@pytest.mark.parametrize("old_name", [False, True])
def test_either_name_of_the_switch_is_followed(old_name: bool) -> None:
    for tf32 in (True, False):
        if old_name:
            SWITCH.allow_tf32 = tf32
        else:
            SWITCH.fp32_precision = "tf32" if tf32 else "ieee"
        assert torch_multiplies_in_tf32() == tf32


def test_the_reference_is_ieee_whatever_the_switch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    SWITCH.fp32_precision = "tf32"
    seen = []
    monkeypatch.setattr(
        "costmodel.launch.fast.torch_multiplies_in_tf32",
        lambda: bool(seen.append(SWITCH.fp32_precision)) or SWITCH.fp32_precision == "tf32",
    )
    a = torch.randn(4, 8)
    torch.testing.assert_close(reference_product(a, a.T, None, "none"), a @ a.T)
    assert seen == ["tf32"]
    assert SWITCH.fp32_precision == "tf32"
