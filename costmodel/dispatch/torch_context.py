"""What torch makes of a call beyond its operands' numbers: transforms, modes, autocast.

A kernel sees an address, sizes and strides. Some tensors are more than that, or have no memory of
their own, and some calls are watched: those are for torch itself, or for the operator that torch
sees. Almost no call is of these kinds, so the quick look that each one takes comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = [
    "count_modes", "has_tangent", "in_forward_level", "is_autocasting", "is_fake", "is_for_torch",
    "is_scripting", "is_watched", "keeps_elsewhere", "tracing_state", "without_autocast",
]  # fmt: skip

is_autocasting = torch._C._is_any_autocast_enabled
"""Whether ``torch.autocast`` is on for any kind of device."""

tracing_state = torch._C._get_tracing_state
"""What ``torch.jit.trace`` knows so far; None where it does not run."""
count_modes = torch._C._len_torch_dispatch_stack
"""How many modes of ``__torch_dispatch__`` there are: a quick look before :func:`is_watched`."""

_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_unpack_dual: Any = forward_ad.unpack_dual
_plain_dispatch = torch.Tensor.__torch_dispatch__


def without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """In here, products where this tensor is have the types of their operands."""
    # Made only where it is of use: it takes microseconds.
    return torch.autocast(x.device.type, enabled=False) if is_autocasting() else nullcontext()


def is_scripting() -> bool:
    """Whether ``torch.jit.trace`` writes down what is called: then sizes are tensors to it."""
    return tracing_state() is not None


def is_watched() -> bool:
    """Whether something looks at every call of torch, such as a tracer or a counter."""
    seen = count_modes() > 0 and not _is_excluded(torch._C.DispatchKey.Python)
    return seen or is_scripting()


def in_forward_level() -> bool:
    """Whether some thread takes forward-mode gradients: then an operand may have a tangent."""
    return forward_ad._current_level >= 0


def has_tangent(operands: Iterable[torch.Tensor | None]) -> bool:
    """Whether the product of these has a forward-mode gradient."""
    return in_forward_level() and any(
        isinstance(x, torch.Tensor) and _unpack_dual(x).tangent is not None for x in operands
    )


def is_for_torch(operands: Iterable[torch.Tensor | None]) -> bool:
    """Whether one of these is more than its memory, so that only torch can multiply it.

    That is what ``torch.func`` wraps, what has a tangent, what stands for the negative of its
    memory, and what a subclass such as ``DTensor`` or a quantised weight keeps elsewhere.
    """
    given = [x for x in operands if isinstance(x, torch.Tensor)]
    return any(map(_is_more_than_memory, given)) or has_tangent(given)


def keeps_elsewhere(x: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that says itself what torch's functions do with it."""
    return type(x).__torch_dispatch__ is not _plain_dispatch and not is_fake(x)


def _is_more_than_memory(x: torch.Tensor) -> bool:
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x):
        return True
    if is_fake(x):
        return False
    if keeps_elsewhere(x) or x.is_neg():
        return True
    has_memory = x.layout == torch.strided and x.device.type != "meta"
    return has_memory and x.data_ptr() == 0 and x.numel() > 0


def is_fake(x: torch.Tensor) -> bool:
    """Whether a tensor is one of those that tracing computes with: it has all but numbers."""
    return getattr(x, "fake_mode", None) is not None
