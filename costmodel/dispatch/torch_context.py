"""Calls that concern torch: transforms, dispatch modes, autocast, subclasses, fake tensors.

A kernel sees an address, sizes and strides. Some tensors are more than that, or have no memory of
their own, and some calls are observed: torch itself multiplies those, or the operator that torch
sees. Such calls are rare, so a warm call asks only the cheapest questions here.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

is_autocasting = torch._C._is_any_autocast_enabled
"""Returns True if ``torch.autocast`` is on for any kind of device."""

tracing_state = torch._C._get_tracing_state
"""Returns the state of ``torch.jit.trace``; None if it does not run."""

count_modes = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes: a quick look before :func:`is_watched`."""

_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_unpack_dual: Any = forward_ad.unpack_dual
_plain_dispatch = torch.Tensor.__torch_dispatch__


def without_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """Switch autocast off on the device of a tensor."""
    # Made only if it is needed: it takes microseconds.
    return torch.autocast(x.device.type, enabled=False) if is_autocasting() else nullcontext()


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


def has_tangent(operands: Iterable[torch.Tensor | None]) -> bool:
    """Return True if the product of these operands has a forward-mode gradient."""
    return in_forward_level() and any(
        isinstance(x, torch.Tensor) and _unpack_dual(x).tangent is not None for x in operands
    )


def is_for_torch(operands: Iterable[torch.Tensor | None]) -> bool:
    """Return True if an operand is more than its memory, so that only torch can multiply it.

    Such are tensors that ``torch.func`` wraps, that have a tangent, that are the negative of their
    memory, or whose subclass (``DTensor``, a quantised weight) keeps its numbers elsewhere.
    """
    given = [x for x in operands if isinstance(x, torch.Tensor)]
    return any(map(_is_more_than_memory, given)) or has_tangent(given)


def keeps_elsewhere(x: torch.Tensor) -> bool:
    """Return True if a subclass defines itself what torch's functions do with its tensors."""
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
    """Return True for the tensors that tracing computes with: they have all but numbers."""
    return getattr(x, "fake_mode", None) is not None
