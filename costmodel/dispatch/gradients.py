"""Gradients of a product: the formulas, and the autograd function of eager calls.

Traced calls differentiate the operator of :mod:`costmodel.torch_ops` by the same formulas.
"""

import copy
from collections.abc import Callable
from functools import partial
from math import isnan
from typing import Any, Self

import torch
from torch import Tensor

from costmodel.dispatch.calls import in_forward_level, multiply_by_torch
from costmodel.dispatch.check import Call
from costmodel.tuning.tuning_result import PINNED

# Host time in us, by torch and by costmodel, of a product in an eager training step, with all the
# work around it. It is that of an H200's host: models of the package transformers took some 200 for
# each of three products a layer.
_HOST_US = 200.0, 210.0


def is_gain(result: Any, host_us: tuple[float, float] = _HOST_US) -> bool:
    """Return True if a winner is faster than torch even when the host time of its call counts.

    A call takes the longer of its host time and its device time. A result that was pinned, or that
    has no known time, counts as a gain. If torch has no time, a result counts as a gain where its
    device time is the longer one.

    Args:
        host_us: host time of a call by torch and by costmodel.
    """
    of_torch, of_us = host_us
    ours = result.latency_us if result.timed else dict(result.ranked).get(result.config)
    if result.source == PINNED or not ours or isnan(ours):
        return True
    by_torch = result.torch.latency_us if result.torch and result.torch.ok else 2 * ours
    return bool(max(ours, of_us) < max(by_torch, of_torch) and (result.torch or ours > of_us))


class WithGradients:
    """A launch whose result autograd can differentiate.

    Args:
        launch: computes the product.
        new_output: makes an output for an operand A.
        matmul: :func:`costmodel.matmul`, for the products of the backward pass.
        call: the call whose options it takes.
    """

    def __init__(
        self, launch: Any, new_output: Callable[[Tensor], Tensor], matmul: Callable[..., Tensor],
        call: Call,
    ):  # fmt: skip
        self.launch, self.new_output, self.matmul = launch, new_output, matmul
        self.config, self.result = launch.config, launch.result
        self.activation, self.tf32 = call.activation or "none", call.tf32
        self.mode, self.is_layer = call.mode, False

    def multiplied(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """Return act(a @ b + bias) with its gradient.

        Autograd always saves matrices: checkpointing compares what two calls have saved.
        """
        rows = a if a.ndim == 2 else a.reshape(-1, a.shape[-1])
        b = b.T if self.is_layer else b
        product = _Product.apply(rows, b, bias, self)  # type: ignore[no-untyped-call]
        return product if a.ndim == 2 else product.view(*a.shape[:-1], b.shape[1])

    def of_layer(self) -> Self:
        """Return the same product for a B that is given as the weight [n, k] of a layer."""
        made = copy.copy(self)
        made.is_layer = True
        return made


class _Product(torch.autograd.Function):
    """A launch as an autograd function. Without ``setup_context`` it takes half the host time."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, product: WithGradients
    ) -> Tensor:
        keep(ctx, a, b, bias, product.activation)
        ctx.product = product
        out = product.new_output(a)
        product.launch(a, b, out, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of = ctx.product
        by_kernel = partial(of.matmul, tf32=of.tf32, mode=of.mode)
        return *gradients(ctx, grad, of.activation, of.tf32, by_kernel), None


def keep(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, activation: str) -> None:
    """Save for the backward pass what it needs, and no more."""
    of_a, of_b = ctx.needs_input_grad[:2]
    if activation == "none":  # a frozen weight, or the input of a first layer, needs less
        ctx.save_for_backward(a if of_b else None, b if of_a else None, None)
    else:
        ctx.save_for_backward(a, b, bias)
    ctx.dtype, ctx.by_columns = a.dtype, b.stride(0) == 1 < b.stride(1)


def gradients(
    ctx: Any, grad: Tensor, activation: str, tf32: bool | None, by_kernel: Callable[..., Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of a, b and bias; recompute the input of the activation.

    Args:
        ctx: after :func:`keep`.
        grad: of the result.
        by_kernel: returns x @ y + bias of two matrices, in ``out_dtype``; both are keywords.
    """
    a, b, bias = ctx.saved_tensors

    def product(x: Tensor, y: Tensor, bias: Any = None, out_dtype: Any = None) -> Any:
        """x @ y + bias, by torch if it may have a forward-mode gradient."""
        if not in_forward_level():
            return by_kernel(x, y, bias=bias, out_dtype=out_dtype)
        if out_dtype in (None, x.dtype):
            return multiply_by_torch(Call(x, y, bias=bias, tf32=tf32))
        return multiply_by_torch(Call(x.to(out_dtype), y.to(out_dtype), bias=bias))

    if activation != "none":
        grad = _through(activation, grad, product(a, b, bias, grad.dtype))
    of_a = of_b = of_bias = None
    if ctx.needs_input_grad[2]:
        of_bias = grad.sum(0)
    # The gradient of a sum is one number with strides of 0: no kernel reads that.
    grad = grad.to(ctx.dtype).contiguous()
    if ctx.needs_input_grad[0]:
        of_a = product(grad, b.T)
    if ctx.needs_input_grad[1]:  # laid out as b is: autograd copies another layout
        of_b = product(grad.T, a).T if ctx.by_columns else product(a.T, grad)
    return of_a, of_b, of_bias


def _through(activation: str, grad: Tensor, before: Tensor) -> Tensor:
    """Return the gradient before an activation, by torch's own formulas."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad, before, 0)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(grad, before)
    # Written out: torch's own silu_backward cannot be differentiated again.
    x = before.to(torch.promote_types(before.dtype, torch.float32))
    sigmoid = torch.sigmoid(x)
    return grad * (sigmoid * (1 + x * (1 - sigmoid))).to(grad.dtype)
