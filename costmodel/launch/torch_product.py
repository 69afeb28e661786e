"""The product by torch: the baseline of timings, and the fallback where no kernel serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from costmodel.gemm.config import GemmConfig


class TorchLaunch:
    """The product by ``torch.mm`` (cuBLAS), where torch was chosen or a size is 0.

    Attributes:
        config: None: no configuration.
        result: the choice that this launch follows, a ``TuningResult``; None without a choice.
    """

    config: GemmConfig | None = None

    def __init__(self, activation: str, result: Any = None, tf32: bool = False) -> None:
        self.result = result
        self._activation, self._tf32 = activation, tf32

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Queue it on the current stream of the operands' device."""
        torch_product(a, b, out, bias, self._activation, self._tf32)


def torch_product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    tf32: bool = False,
) -> None:
    """Queue out = act(a @ b + bias) by ``torch.mm`` (cuBLAS), as fast as torch can.

    Args:
        a: [m, k]; b: [k, n]; out: [m, n], float32 or of the type of a and b.
        bias: [n] of the type of ``out``, or None.
        tf32: multiply float32 operands in TF32, else in IEEE, whatever torch's switch is.
    """
    if a.dtype is torch.float32:
        with float32_precision(tf32):
            _product(a, b, out, bias)
    elif out.dtype is a.dtype:
        _product(a, b, out, bias)
    elif a.is_cuda and a.numel() and b.numel():
        _product(a, b, out, bias, out_dtype=out.dtype)  # 16-bit to float32, not rounded in between
    else:  # only cuBLAS widens its result, and not an empty one
        _product(a.float(), b.float(), out, bias)
    if activation == "relu":
        out.relu_()
    elif activation == "silu":
        functional.silu(out, inplace=True)
    elif activation == "gelu":
        out.copy_(functional.gelu(out))


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(x) by torch, in a new tensor unless the activation is ``none``."""
    return x if activation == "none" else getattr(functional, activation)(x)


def torch_multiplies_in_tf32() -> bool:
    """Return True if torch's own switch sets float32 products on a GPU to TF32.

    ``allow_tf32`` and ``set_float32_matmul_precision`` set the same switch, and may not be read
    once the newer name was used.
    """
    return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


@contextmanager
def float32_precision(tf32: bool) -> Iterator[None]:
    """Have torch multiply float32 in TF32 or IEEE inside; restore its switch afterwards.

    The switch belongs to the process: it also affects float32 products that other threads queue
    meanwhile. So it is touched only if it differs.
    """
    if torch_multiplies_in_tf32() == tf32:
        yield
        return
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        switch.fp32_precision = before


def _product(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, **widened: Any
) -> None:
    if bias is None:
        torch.mm(a, b, out=out, **widened)
    else:
        torch.addmm(bias, a, b, out=out, **widened)
