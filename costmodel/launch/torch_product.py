"""The product by torch: what kernels are timed against, and what computes where none serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

__all__ = ["activated", "float32_precision", "torch_multiplies_in_tf32", "torch_product"]


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
        tf32: float32 operands are multiplied as TF32, else as IEEE, whatever torch's switch says.
    """
    if a.dtype is torch.float32:
        with float32_precision(tf32):
            _product(a, b, out, bias)
    elif out.dtype is a.dtype:
        _product(a, b, out, bias)
    elif a.is_cuda and a.numel() and b.numel():
        _widened_product(a, b, out, bias)
    else:  # cuBLAS alone widens its result; of nothing there is nothing to widen
        _product(a.float(), b.float(), out, bias)
    if activation == "relu":
        out.relu_()
    elif activation == "silu":
        functional.silu(out, inplace=True)
    elif activation == "gelu":
        out.copy_(functional.gelu(out))


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """act(x) by torch, in a tensor of its own unless the activation is ``none``."""
    return x if activation == "none" else getattr(functional, activation)(x)


def torch_multiplies_in_tf32() -> bool:
    """What torch's own switch says of float32 products on a GPU.

    ``allow_tf32`` and ``set_float32_matmul_precision`` set the same switch, and may not be read
    once the newer name was used.
    """
    return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


@contextmanager
def float32_precision(tf32: bool) -> Iterator[None]:
    """Products queued in here are TF32, or IEEE; the switch is put back as it was.

    The switch is the process's: a float32 product that another thread queues meanwhile by torch
    itself may go by it too. So it is touched only where it says otherwise.
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
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def _widened_product(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """As :func:`_product`, of 16-bit operands to float32, not rounded in between."""
    if bias is None:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(bias, a, b, out_dtype=out.dtype, out=out)
