"""The product as a torch operator: for tracing, for gradients in traces, and for Inductor.

:func:`costmodel.matmul` calls ``torch.ops.costmodel.matmul`` under ``torch.compile``, in traces and
under ``torch.func``; all other calls launch without it.
"""

from typing import Any

import torch
from torch import Tensor

from costmodel.dispatch.dispatch import matmul as matmul
from costmodel.dispatch.gradients import gradients, keep
from costmodel.dispatch.inductor import lower_operator
from costmodel.errors import ShapeError
from costmodel.launch.fast import without_autocast


# Registered for every device: on a CPU, costmodel's own error says more than torch's.
@torch.library.custom_op("costmodel::matmul", mutates_args=())
def _matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
    mode: str | None,
) -> Tensor:
    """act(a @ b + bias) of a[m, k] and b[k, n]; see :func:`costmodel.matmul`."""
    # Autocast was applied before the operator, whose result must have the declared type.
    with torch.no_grad(), without_autocast(a):
        return matmul(
            a, b, bias=bias, activation=activation, tf32=tf32, out_dtype=out_dtype, mode=mode
        )


@_matmul.register_fake
def _(a: Tensor, b: Tensor, *options: Any) -> Tensor:
    _, _, _, out_dtype, _ = options
    if not a.dim() == b.dim() == 2 or a.shape[1] != b.shape[0]:
        raise ShapeError(f"a{list(a.shape)} @ b{list(b.shape)}: expected [m, k] @ [k, n]")
    lower_operator()  # here: Inductor is imported by now, and lowers what is traced
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, activation, tf32, _, mode = inputs
    keep(ctx, a, b, bias, activation)
    ctx.options = activation, tf32, mode


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    activation, tf32, mode = ctx.options
    found = gradients(
        ctx, grad, activation, tf32,
        lambda x, y, bias, out_dtype: _matmul(x, y, bias, "none", tf32, out_dtype, mode),
    )  # fmt: skip
    return *found, None, None, None, None


_matmul.register_autograd(_backward, setup_context=_keep)


def external_matmul(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Compute out = a @ b, with the signature that Inductor needs.

    ``torch._inductor.config.external_matmul.append(external_matmul)`` makes it a candidate of
    ``mode="max-autotune"``.
    """
    return matmul(a, b, out=out)
