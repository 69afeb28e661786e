"""What torch makes of a call beyond its operands' numbers: transforms, modes, autocast.

A kernel sees an address, sizes and strides. Some tensors are more than that, or have no memory of
their own, and some calls are watched: those are for torch itself, or for the operator that torch
sees. Almost no call is of these kinds, so the quick look that each one takes comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["is_autocasting", "is_for_torch", "is_traced", "is_watched"]

is_autocasting = torch._C._is_any_autocast_enabled
"""Whether ``torch.autocast`` is on for any kind of device."""

_count_modes = torch._C._len_torch_dispatch_stack
_unpack_dual: Any = forward_ad.unpack_dual
_plain_dispatch = torch.Tensor.__torch_dispatch__


def is_watched() -> bool:
    """Whether something looks at every call of torch: a tracer, a counter, forward gradients."""
    return _count_modes() > 0 or forward_ad._current_level >= 0


def is_for_torch(operands: Iterable[torch.Tensor | None]) -> bool:
    """Whether one of these is more than its memory, so that only torch can multiply it.

    That is what ``torch.func`` wraps, what has a tangent, what stands for the negative of its
    memory, and what a subclass such as ``DTensor`` or a quantised weight keeps elsewhere.
    """
    return any(isinstance(x, torch.Tensor) and _is_more_than_memory(x) for x in operands)


def _is_more_than_memory(x: torch.Tensor) -> bool:
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x):
        return True
    if _is_fake(x):
        return False
    if type(x).__torch_dispatch__ is not _plain_dispatch or x.is_neg():
        return True
    if forward_ad._current_level >= 0 and _unpack_dual(x).tangent is not None:
        return True
    has_memory = x.layout == torch.strided and x.device.type != "meta"
    return has_memory and x.numel() > 0 and x.data_ptr() == 0


def _is_fake(x: torch.Tensor) -> bool:
    """Whether a tensor is one of those that tracing computes with: it has all but numbers."""
    return getattr(x, "fake_mode", None) is not None


def is_traced(operands: Iterable[torch.Tensor | None]) -> bool:
    """Whether the call is to go by the operator, which a tracer or a counter sees."""
    return _count_modes() > 0 or any(x is not None and _is_fake(x) for x in operands)
