"""One call of ``matmul``: the key of its launch, what torch makes of it, and what torch computes.

A kernel sees an address, sizes and strides. Some tensors are more than that, or have no memory of
their own, and some calls are observed. Torch itself computes those, or the operator that torch
sees. Such calls are rare, so a warm call makes only the cheapest checks here.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from costmodel.data.candidates import ModelLike
from costmodel.dispatch.check import Call, check_kinds, require_shape
from costmodel.errors import LayoutError, ShapeError, UnsupportedDtype
from costmodel.launch.fast import (
    activated,
    float32_precision,
    is_autocasting,
    torch_multiplies_in_tf32,
    without_autocast,
)
from costmodel.models.storage import card_stamp
from costmodel.tuning import modes
from costmodel.tuning.ranks import epoch

_NONE = 16  # stands for "no tensor" where a key has an address modulo 16
_FLOAT32 = torch.float32
_CAST = (_FLOAT32, torch.float16, torch.bfloat16)  # what autocast casts

# The function inside torch's wrapper: the wrapper would take as long again at every call.
is_deterministic = torch._C._get_deterministic_algorithms


def by_autocast(call: Call) -> Call | None:
    """Return the call in the types of ``torch.autocast``; None if that changes nothing.

    As in torch, a call with an ``out`` keeps its types, and 16-bit operands stay as they are.
    """
    a, b, bias = call.a, call.b, call.bias
    if not is_autocasting() or call.out is not None:
        return None
    given = [x for x in (a, b, bias) if x is not None]
    if not all(isinstance(x, Tensor) for x in given):
        return None
    kind = a.device.type
    if not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    of_result = dtype if call.out_dtype is None else call.out_dtype
    types = [a.dtype, b.dtype]
    if bias is not None and of_result is not _FLOAT32:
        types.append(bias.dtype)
    if dtype is _FLOAT32 or _FLOAT32 not in types or not all(t in _CAST for t in types):
        return None
    a, b = a.to(dtype), b.to(dtype)
    if a.dtype is not dtype or b.dtype is not dtype:
        return None  # a subclass that takes this for a move to another device
    bias = None if bias is None else bias.to(of_result)
    return replace(call, a=a, b=b, bias=bias, tf32=None)


def settled(call: Call) -> Call:
    """Return the call with torch's switches applied: autocast, TF32, deterministic algorithms."""
    call = by_autocast(call) or call
    if call.tf32 is None and getattr(call.a, "dtype", None) is _FLOAT32:
        call = replace(call, tf32=torch_multiplies_in_tf32())
    return replace(call, mode=modes.deterministic(call.mode)) if is_deterministic() else call


def key_of(
    a: Tensor,
    b: Tensor,
    out: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
    mode: str | None,
    model: ModelLike,
) -> Any:
    """Return all that a launch depends on; None if no launch can serve the call.

    Operands that require grad have keys of their own: their results need a gradient.
    """
    # Written out, since each call of a Python function takes a hundredth of a warm call.
    rare = count_modes() or tracing_state() is not None or forward_ad._current_level >= 0
    if rare and (is_watched() or has_tangent((a, b, out, bias))):
        return None
    try:
        a_address, b_address = a.data_ptr(), b.data_ptr()
        return (
            type(a), a.shape, a.stride(), a.dtype, a.get_device(),
            a_address & 15 or (not a_address and _NONE),
            type(b), b.shape, b.stride(), b.dtype, b.get_device(),
            b_address & 15 or (not b_address and _NONE),
            a.is_neg(), b.is_neg(),  # True for the imaginary part of conjugate numbers
            (a.requires_grad or b.requires_grad) and torch.is_grad_enabled() and 1 + in_functorch(),
            None if out is None else _described(out),
            None if bias is None else _described(bias),
            activation, tf32, out_dtype, mode, model if model is None else _identity(model),
            epoch(),
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):
        return None  # no dense tensors: the checks say what is wrong


def launch_key(call: Call) -> Any:
    """Return :func:`key_of` a call."""
    return key_of(*(getattr(call, name) for name in Call.__slots__))


def _described(x: Tensor) -> Any:
    wants_grad = x.requires_grad and torch.is_grad_enabled() and 1 + in_functorch()
    address = x.data_ptr()
    return (
        type(x), x.shape, x.stride(), x.dtype, x.get_device(),
        address & 15 or (not address and _NONE), x.is_neg(), wants_grad,
    )  # fmt: skip


def _identity(model: ModelLike) -> Any:
    """Return a model itself, or the name of a directory and when it was last saved."""
    if not isinstance(model, str | PathLike):
        return model
    path = os.fspath(model)
    try:
        return path, card_stamp(path)
    except OSError:
        return path


# --- what torch makes of a call -------------------------------------------------------------------

tracing_state = torch._C._get_tracing_state
"""Returns the state of ``torch.jit.trace``; None if it does not run."""

count_modes = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes: a quick look before :func:`is_watched`."""

in_functorch = torch._C._are_functorch_transforms_active
"""Returns True inside a transform of ``torch.func``: tensors that it wraps have no memory."""

_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_unpack_dual: Any = forward_ad.unpack_dual
_plain_dispatch = Tensor.__torch_dispatch__


def is_scripting() -> bool:
    """Return True if ``torch.jit.trace`` records calls: then sizes are tensors."""
    return tracing_state() is not None


def is_watched() -> bool:
    """Return True if a dispatch mode (a tracer, a FLOP counter) or a trace observes torch calls."""
    seen = count_modes() > 0 and not _is_excluded(torch._C.DispatchKey.Python)
    return seen or is_scripting()


def in_forward_level() -> bool:
    """Return True if any thread takes forward-mode gradients: an operand may have a tangent."""
    return forward_ad._current_level >= 0


def has_tangent(operands: Iterable[Tensor | None]) -> bool:
    """Return True if the product of these operands has a forward-mode gradient."""
    return in_forward_level() and any(
        isinstance(x, Tensor) and _unpack_dual(x).tangent is not None for x in operands
    )


def is_for_torch(operands: Iterable[Tensor | None]) -> bool:
    """Return True if an operand is more than its memory, so that only torch can multiply it.

    This is a tensor that ``torch.func`` wraps, that has a tangent, or that is the negative of its
    memory, or a tensor of a subclass (``DTensor``, a quantised weight) that keeps its numbers
    elsewhere.
    """
    given = [x for x in operands if isinstance(x, Tensor)]
    return any(map(_is_more_than_memory, given)) or has_tangent(given)


def keeps_elsewhere(x: Tensor) -> bool:
    """Return True if a subclass itself defines what torch's functions do with its tensors."""
    return type(x).__torch_dispatch__ is not _plain_dispatch and not is_fake(x)


def _is_more_than_memory(x: Tensor) -> bool:
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x):
        return True
    if is_fake(x):
        return False
    if keeps_elsewhere(x) or x.is_neg():
        return True
    has_memory = x.layout == torch.strided and x.device.type != "meta"
    try:
        return has_memory and x.data_ptr() == 0 and x.numel() > 0
    except RuntimeError:  # raised under the vmap of torch.autograd, as in batched gradients
        return True


def is_fake(x: Tensor) -> bool:
    """Return True for a tensor that tracing computes with: it has everything except numbers."""
    return getattr(x, "fake_mode", None) is not None


# --- what torch computes --------------------------------------------------------------------------

Matmul = Callable[..., Tensor]
"""act(a @ b + bias) of two matrices, with the keywords of :func:`costmodel.matmul`."""


def multiply_batches(matmul: Matmul, call: Call) -> Tensor:
    """Return act(a @ b + bias) for vectors, and for operands with leading batch dimensions.

    A batch of A with one matrix B is one product of all its rows. Torch multiplies two batches.

    Args:
        matmul: multiplies two matrices.
        call: with a [..., m, k] or [k], and b [..., k, n] or [k]; ``out`` has the shape of the
            result, and all its leading dimensions together must be the rows of one matrix.

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


def _rows_of(out: Tensor) -> Tensor:
    """Return a result as the matrix that is written: all dimensions but the last become one."""
    try:
        return out.view(prod(out.shape[:-1]), out.shape[-1])
    except RuntimeError:
        raise LayoutError(
            f"out of shape {list(out.shape)} has strides {out.stride()}, whose leading dimensions "
            f"are no rows of one matrix: pass a contiguous out, or none"
        ) from None


def multiply_by_torch(call: Call) -> Tensor:
    """Return act(a @ b + bias) by ``torch.matmul``, with its rules of shapes.

    Raises:
        UnsupportedDtype: the result has another type than a: torch does not compute it.
        ShapeError: ``out`` has another shape than the result, or the bias is not a row of it.
        InvalidInput, LayoutError, GradientError, DeviceError: see the message.
    """
    a, b, out, bias = call.operands
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
    # Autocast was applied before; a subclass applies it in its own way.
    own_way = keeps_elsewhere(a) or keeps_elsewhere(b)
    with precision, nullcontext() if own_way else without_autocast(a):
        found = torch.matmul(a, b)
    if out is not None:
        require_shape("out", out, found.shape)
    if bias is not None:
        found = found + bias
    found = activated(found, call.activation or "none")
    return found if out is None else out.copy_(found)
