"""The product as an operator of torch's: for tracing, for gradients, and for Inductor.

``torch.ops.costmodel.matmul`` is what :func:`costmodel.matmul` calls under ``torch.compile`` and
where a gradient is wanted; all other calls go straight to the dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch

from costmodel.dispatch.batches import multiply_by_torch
from costmodel.dispatch.dispatch import matmul
from costmodel.dispatch.torch_context import in_forward_level, without_autocast
from costmodel.errors import ShapeError

__all__ = ["external_matmul", "matmul"]


# For every device: elsewhere than on a GPU its own refusal says more than torch's.
@torch.library.custom_op("costmodel::matmul", mutates_args=())
def _matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
    mode: str | None,
) -> torch.Tensor:
    """act(a @ b + bias) of a[m, k] and b[k, n]; see :func:`costmodel.matmul`."""
    # What autocast wants was done before the operator, whose result has the types that it says.
    with torch.no_grad(), without_autocast(a):
        return matmul(
            a, b, bias=bias, activation=activation, tf32=tf32, out_dtype=out_dtype, mode=mode
        )


@_matmul.register_fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
    mode: str | None,
) -> torch.Tensor:
    if not a.dim() == b.dim() == 2 or a.shape[1] != b.shape[0]:
        raise ShapeError(f"a{list(a.shape)} @ b{list(b.shape)}: expected [m, k] @ [k, n]")
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, bias, activation, tf32, _, mode = inputs
    of_a, of_b = ctx.needs_input_grad[:2]
    if activation == "none":  # a frozen weight, or the input of a first layer, asks for less
        ctx.save_for_backward(a if of_b else None, b if of_a else None, None)
    else:
        ctx.save_for_backward(a, b, bias)
    ctx.options = activation, tf32, mode, a.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of a, b and bias. What went into the activation is computed again."""
    a, b, bias = ctx.saved_tensors
    activation, tf32, mode, dtype = ctx.options
    if activation != "none":
        before = _product(a, b, bias, tf32, grad.dtype, mode)
        grad = _through(activation, grad, before)
    of_a = of_b = of_bias = None
    if ctx.needs_input_grad[2]:
        of_bias = grad.sum(0)
    # A sum's gradient is one number with strides of 0, which no kernel is made for.
    grad = grad.to(dtype).contiguous()
    if ctx.needs_input_grad[0]:
        of_a = _product(grad, b.T, None, tf32, None, mode)
    if ctx.needs_input_grad[1]:
        of_b = _product(a.T, grad, None, tf32, None, mode)
    return of_a, of_b, of_bias, None, None, None, None


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
    mode: str | None,
) -> torch.Tensor:
    """a @ b + bias by the operator, or by torch where it is to have a forward-mode gradient."""
    if not in_forward_level():
        found: torch.Tensor = _matmul(a, b, bias, "none", tf32, out_dtype, mode)
        return found
    if out_dtype not in (None, a.dtype):
        a, b, tf32 = a.to(out_dtype), b.to(out_dtype), None
    return multiply_by_torch(a, b, None, bias=bias, tf32=tf32)


def _through(activation: str, grad: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The gradient before an activation, by torch's own formulas."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad, before, 0)  # type: ignore[no-any-return]
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(grad, before)  # type: ignore[no-any-return]
    # Written out, since torch's own cannot be differentiated again.
    x = before.to(torch.promote_types(before.dtype, torch.float32))
    sigmoid = torch.sigmoid(x)
    return grad * (sigmoid * (1 + x * (1 - sigmoid))).to(grad.dtype)


_matmul.register_autograd(_backward, setup_context=_keep)


def external_matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """out = a @ b, as Inductor wants it of an external product.

    ``torch._inductor.config.external_matmul.append(external_matmul)`` makes it a candidate of
    ``mode="max-autotune"``.
    """
    return matmul(a, b, out=out)
