"""Vectors, batches, and operands that no kernel can read, by the rules of ``torch.matmul``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import prod

import torch

from costmodel.dispatch.calls import Call
from costmodel.dispatch.check import check_kinds, require_shape
from costmodel.dispatch.torch_context import keeps_elsewhere, without_autocast
from costmodel.errors import LayoutError, ShapeError, UnsupportedDtype
from costmodel.launch.fast import activated, float32_precision

Matmul = Callable[..., torch.Tensor]
"""act(a @ b + bias) of two matrices, with the keywords of :func:`costmodel.matmul`."""


def multiply_batches(matmul: Matmul, call: Call) -> torch.Tensor:
    """Return act(a @ b + bias) for vectors, and for operands with leading batch dimensions.

    A batch of A with one matrix B is one product of all its rows. Torch multiplies two batches.

    Args:
        matmul: multiplies two matrices.
        call: with a [..., m, k] or [k], and b [..., k, n] or [k]; ``out`` has the shape of the
            result, and the rows of a batch in it must be those of one matrix.

    Raises:
        ShapeError, LayoutError, UnsupportedDtype, DeviceError: see the message.
    """
    a, b, out = call.a, call.b, call.out
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(
            f"a has shape {list(a.shape)}, b {list(b.shape)}: expected vectors, matrices or batches"
        )
    if b.ndim > 2:
        return multiply_by_torch(call)
    is_vector = b.ndim == 1
    shape = a.shape[:-1] if is_vector else (*a.shape[:-1], b.shape[1])
    if out is not None:
        require_shape("out", out, shape)
    if is_vector:
        b = b.unsqueeze(1)
    rows = None if out is None else _rows_of(out.unsqueeze(-1) if is_vector else out)
    a = a.reshape(prod(a.shape[:-1]), a.shape[-1])
    found = matmul(a, b, out=rows, **call.options())
    return found.view(shape) if out is None else out


def _rows_of(out: torch.Tensor) -> torch.Tensor:
    """Return a result as the matrix that is written: all dimensions but the last become one."""
    try:
        return out.view(prod(out.shape[:-1]), out.shape[-1])
    except RuntimeError:
        raise LayoutError(
            f"out of shape {list(out.shape)} has strides {out.stride()}, whose leading dimensions "
            f"are no rows of one matrix: pass a contiguous out, or none"
        ) from None


def multiply_by_torch(call: Call) -> torch.Tensor:
    """Return act(a @ b + bias) by ``torch.matmul``, with its rules of shapes.

    Raises:
        UnsupportedDtype: a result of another type than a: torch does not compute it.
        ShapeError: an ``out`` of another shape than the result, a bias that is no row of it.
        InvalidInput, LayoutError, GradientError, DeviceError: see the message.
    """
    a, b, out, bias = call.a, call.b, call.out, call.bias
    for name, dtype in (("out_dtype", call.out_dtype), ("out", out if out is None else out.dtype)):
        if dtype not in (None, a.dtype):
            raise UnsupportedDtype(
                f"{name} is {dtype}, a {a.dtype}: expected the same where torch computes: batches "
                f"on both sides, or operands under torch.func or of a subclass; convert the result"
            )
    check_kinds(call)
    if bias is not None:
        require_shape("bias", bias, (b.shape[-1] if b.ndim > 1 else 1,))
    precision = float32_precision(call.tf32) if call.tf32 is not None else nullcontext()
    # Autocast is done; a subclass has its own way with it.
    own_way = keeps_elsewhere(a) or keeps_elsewhere(b)
    with precision, nullcontext() if own_way else without_autocast(a):
        found = torch.matmul(a, b)
    if out is not None:
        require_shape("out", out, found.shape)
    if bias is not None:
        found = found + bias
    found = activated(found, call.activation or "none")
    return found if out is None else out.copy_(found)
