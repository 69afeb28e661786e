"""The launches that ``matmul`` keeps for the next calls of a kind, by key, and their outputs."""

import threading
from typing import Any

import torch
from torch import _C, Tensor

from costmodel.validation import drop_oldest

# Code made by Inductor allocates with this: it goes around torch's dispatcher, and so saves a
# microsecond or two.
_guards = getattr(getattr(_C, "_dynamo", None), "guards", None)
_empty_strided_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)


class NewOutput:
    """Makes uninitialised contiguous outputs for products of the same sizes, type and device."""

    __slots__ = ("_dtype", "_index", "_size", "_stride")

    def __init__(self, a: Tensor, n: int, dtype: torch.dtype | None):
        """Prepare for products like a [..., k] @ b [k, n]; a dtype of None is that of a."""
        self._size = (*a.shape[:-1], n)
        self._stride = torch.empty(self._size, device="meta").stride()
        self._dtype = a.dtype if dtype is None else dtype
        # -1 is no device: then `new_empty` allocates.
        self._index = a.get_device() if a.is_cuda and _empty_strided_cuda is not None else -1

    def __call__(self, a: Tensor) -> Tensor:
        """Return a new one on the device of ``a``, an operand of this kind."""
        # A subclass makes tensors of its own kind; the fast way knows only the current device.
        index = self._index
        if index >= 0 and type(a) is Tensor and index == _C._cuda_getDevice():
            return _empty_strided_cuda(self._size, self._stride, self._dtype)
        return a.new_empty(self._size, dtype=self._dtype)


class Launches:
    """A bounded number of launches by key, for the next calls of their kind; the oldest goes first.

    An entry of a product has the launch, the memory spans of its operands, and the maker of its
    output. The maker is None where the launch allocates its own result.

    Attributes:
        get: looks up a key. It is the dictionary's own method, so that a warm call pays for nothing
            else.
    """

    def __init__(self, at_most: int = 4096):
        self._at_most = at_most
        self._lock = threading.Lock()
        self.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self) -> dict[Any, Any]:
        """Return what :meth:`put` needs; call it before anything is looked up for the launch."""
        return self._entries

    def put(self, key: Any, entry: Any, begun: dict[Any, Any]) -> None:
        """Keep a launch, unless :meth:`clear` was called after its :meth:`begin`.

        In that case it goes into the old dictionary, which nobody reads any more.
        """
        with self._lock:
            begun[key] = entry
            drop_oldest(begun, self._at_most)

    def clear(self) -> None:
        """Forget all launches, those that are being made now included."""
        self._entries: dict[Any, Any] = {}
        self.get = self._entries.get
