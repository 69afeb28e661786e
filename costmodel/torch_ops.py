"""The product as a torch operator: for tracing, for gradients, and for Inductor.

:func:`costmodel.matmul` calls ``torch.ops.costmodel.matmul`` under ``torch.compile`` and where a
gradient is wanted; all other calls launch without it.
"""

from __future__ import annotations

from typing import Any

import torch

from costmodel.dispatch.calls import in_forward_level, multiply_by_torch, without_autocast
from costmodel.dispatch.check import Call
from costmodel.dispatch.dispatch import matmul as matmul
from costmodel.errors import ShapeError


# For every device: on a CPU its own error says more than torch's.
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
    # Autocast is done before the operator, so that its result has the types that it declares.
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
    if activation == "none":  # a frozen weight, or the input of a first layer, needs less
        ctx.save_for_backward(a if of_b else None, b if of_a else None, None)
    else:
        ctx.save_for_backward(a, b, bias)
    ctx.options = activation, tf32, mode, a.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradients of a, b and bias; recompute the input of the activation."""
    a, b, bias = ctx.saved_tensors
    activation, tf32, mode, dtype = ctx.options

    def product(x: torch.Tensor, y: torch.Tensor, bias: Any = None, out_dtype: Any = None) -> Any:
        """x @ y + bias by the operator, or by torch if it may have a forward-mode gradient."""
        if not in_forward_level():
            return _matmul(x, y, bias, "none", tf32, out_dtype, mode)
        if out_dtype in (None, x.dtype):
            return multiply_by_torch(Call(x, y, bias=bias, tf32=tf32))
        return multiply_by_torch(Call(x.to(out_dtype), y.to(out_dtype), bias=bias))

    if activation != "none":
        grad = _through(activation, grad, product(a, b, bias, grad.dtype))
    of_a = of_b = of_bias = None
    if ctx.needs_input_grad[2]:
        of_bias = grad.sum(0)
    # The gradient of a sum is one number with strides of 0: no kernel reads that.
    grad = grad.to(dtype).contiguous()
    if ctx.needs_input_grad[0]:
        of_a = product(grad, b.T)
    if ctx.needs_input_grad[1]:
        of_b = product(a.T, grad)
    return of_a, of_b, of_bias, None, None, None, None


def _through(activation: str, grad: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the gradient before an activation, by torch's own formulas."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad, before, 0)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(grad, before)
    # Written out: torch's own silu_backward cannot be differentiated again.
    x = before.to(torch.promote_types(before.dtype, torch.float32))
    sigmoid = torch.sigmoid(x)
    return grad * (sigmoid * (1 + x * (1 - sigmoid))).to(grad.dtype)


_matmul.register_autograd(_backward, setup_context=_keep)


def external_matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Compute out = a @ b, with the signature that Inductor needs.

    ``torch._inductor.config.external_matmul.append(external_matmul)`` makes it a candidate of
    ``mode="max-autotune"``.
    """
    return matmul(a, b, out=out)
