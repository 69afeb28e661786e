"""One call of ``matmul``, what torch's switches make of it, and the key of its launch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch.autograd import forward_ad

from costmodel.data.candidates import CostModel
from costmodel.dispatch.torch_context import (
    count_modes,
    has_tangent,
    is_autocasting,
    is_watched,
    tracing_state,
)
from costmodel.launch.fast import torch_multiplies_in_tf32
from costmodel.models.storage import card_stamp
from costmodel.tuning import modes
from costmodel.tuning.ranks import epoch

ModelLike = CostModel | str | PathLike[str] | None
_NONE = 16  # in place of how far an address is past a multiple of 16: there is no memory
_FLOAT32 = torch.float32
_CAST = (_FLOAT32, torch.float16, torch.bfloat16)  # what autocast casts

# Without torch's wrapper, which costs every call as much again.
is_deterministic = torch._C._get_deterministic_algorithms


@dataclass(slots=True, eq=False)
class Call:
    """The arguments of :func:`costmodel.matmul`, as they came."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    activation: str | None = None
    tf32: bool | None = None
    out_dtype: torch.dtype | None = None
    mode: str | None = None
    model: ModelLike = None

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors of the call."""
        return self.a, self.b, self.out, self.bias

    @property
    def is_batch(self) -> bool:
        """True if an operand is a tensor, but no matrix."""
        return not getattr(self.a, "ndim", 2) == getattr(self.b, "ndim", 2) == 2

    @property
    def key(self) -> Any:
        """The key of its launch; see :func:`key_of`."""
        return key_of(
            self.a, self.b, self.out, self.bias, self.activation, self.tf32, self.out_dtype,
            self.mode, self.model,
        )  # fmt: skip

    def options(self) -> dict[str, Any]:
        """Return the keywords of :func:`costmodel.matmul` without ``out``."""
        return {
            "bias": self.bias, "activation": self.activation, "tf32": self.tf32,
            "out_dtype": self.out_dtype, "mode": self.mode, "model": self.model,
        }  # fmt: skip


def by_autocast(call: Call) -> Call | None:
    """Return the call in the types of ``torch.autocast``; None if that changes nothing.

    As in torch, a call with an ``out`` keeps its types, and 16-bit operands stay as they are.
    """
    a, b, bias = call.a, call.b, call.bias
    if not is_autocasting() or call.out is not None:
        return None
    given: list[Any] = [x for x in (a, b, bias) if x is not None]
    if not all(isinstance(x, torch.Tensor) for x in given):
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
    """Return the call after torch's switches: autocast, TF32 and deterministic algorithms."""
    call = by_autocast(call) or call
    if call.tf32 is None and getattr(call.a, "dtype", None) is _FLOAT32:
        call = replace(call, tf32=torch_multiplies_in_tf32())
    return replace(call, mode=modes.deterministic(call.mode)) if is_deterministic() else call


def key_of(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
    mode: str | None,
    model: ModelLike,
) -> Any:
    """Return all that a launch depends on; None if no launch can serve the call.

    Operands that require grad have keys of their own: their calls are never launched.
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
            a.is_neg(), b.is_neg(),  # of the imaginary part of conjugate numbers
            (a.requires_grad or b.requires_grad) and torch.is_grad_enabled(),
            None if out is None else _described(out),
            None if bias is None else _described(bias),
            activation, tf32, out_dtype, mode, model if model is None else _identity(model),
            epoch(),
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):
        return None  # no dense tensors: the checks say what is wrong


def _described(x: torch.Tensor) -> Any:
    wants_grad = x.requires_grad and torch.is_grad_enabled()
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
