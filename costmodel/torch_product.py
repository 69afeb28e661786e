"""The product by torch: what kernels are timed against, and what computes where none serves."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["torch_product"]


def torch_product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> None:
    """Queue out = act(a @ b + bias) by ``torch.mm`` (cuBLAS), as fast as torch can."""
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)
    if activation == "relu":
        out.relu_()
    elif activation == "silu":
        functional.silu(out, inplace=True)
    elif activation == "gelu":
        out.copy_(functional.gelu(out))
