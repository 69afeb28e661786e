"""New tensors for results: the part of a warm call that takes torch longest."""

from __future__ import annotations

from typing import Any

import torch
from torch import _C

# Inductor's code allocates by this: it saves a microsecond or two by passing torch's dispatcher.
_compiled = getattr(getattr(_C, "_dynamo", None), "guards", None)
_empty_strided_cuda: Any = getattr(_compiled, "_empty_strided_cuda", None)
_Tensor = torch.Tensor


class NewOutput:
    """Makes uninitialised contiguous [m, n] for products of the same sizes, type and device."""

    __slots__ = ("_dtype", "_index", "_size", "_stride")

    def __init__(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Prepare for products like a [m, k] @ b [k, n]; a dtype of None is that of a."""
        m, n = a.size(0), b.size(1)
        self._size, self._stride = (m, n), (n or 1, 1)
        self._dtype = a.dtype if dtype is None else dtype
        # -1 is no device: then torch's usual way allocates.
        self._index = a.get_device() if a.is_cuda and _empty_strided_cuda is not None else -1

    def __call__(self, a: torch.Tensor) -> torch.Tensor:
        """Return a new one on the device of ``a``, an operand of this kind."""
        # A subclass makes tensors of its own kind; the short way knows only the current device.
        index = self._index
        if index >= 0 and type(a) is _Tensor and index == _C._cuda_getDevice():
            found: torch.Tensor = _empty_strided_cuda(self._size, self._stride, self._dtype)
            return found
        return a.new_empty(self._size, dtype=self._dtype)
