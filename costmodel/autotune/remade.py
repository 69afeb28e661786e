"""Arguments of a kernel, described so that another process can make ones like them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from costmodel.errors import InvalidInput

_COPIED = 1 << 20
"""Bytes up to which a storage is copied: its numbers may be indices, lengths or a schedule."""
_ALIGNMENT = 256  # no kernel is compiled for more, and no access is wider

Described = Any
"""A described argument: a number, None, a `Placed` tensor, or a tuple or a descriptor of these."""


@dataclass(frozen=True)
class Storage:
    """The memory that tensors lie in.

    Attributes:
        address: modulo 256.
        dtype: of the numbers to fill it with.
        span: the least and the greatest of them; None: they are normal.
        content: what it holds, where that is copied.
    """

    nbytes: int
    address: int
    dtype: torch.dtype
    span: tuple[int, int] | None
    content: bytes | None


@dataclass(frozen=True)
class Placed:
    """A tensor: a view of the storage of that index."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def describe(name: str, kind: Any, value: Any, storages: dict[int, Storage]) -> Described:
    """Describe an argument.

    Args:
        name: for messages.
        kind: its type in a kernel's signature.
        storages: by address; those of its tensors are added.

    Raises:
        InvalidInput: it cannot be made again in another process.
    """
    if kind == "constexpr":  # part of the binary
        return None
    if isinstance(value, tuple):
        return tuple(
            describe(f"{name}[{i}]", *each, storages)
            for i, each in enumerate(zip(kind, value, strict=True))
        )
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, torch.Tensor):
        return _placed(name, value, storages)
    if type(value).__module__.startswith("triton.") and hasattr(value, "base"):
        base = describe(name, kind, value.base, storages)
        if not hasattr(value, "block_shape"):  # a tensor that is read as another type
            return base
        made = copy.copy(value)  # a descriptor
        made.base = base
        return made
    raise InvalidInput(f"{name} is a {type(value).__name__}: expected a tensor or a number")


def _placed(name: str, tensor: torch.Tensor, storages: dict[int, Storage]) -> Placed:
    if tensor.is_cpu and torch.cuda.is_available():
        raise InvalidInput(f"{name} is in the host's memory: expected one on the device")
    memory = tensor.untyped_storage()
    address = memory.data_ptr()
    if address not in storages:
        storages[address] = _storage(tensor.detach(), memory)
    at = list(storages).index(address)
    shape, stride = tuple(tensor.shape), tensor.stride()
    return Placed(at, tensor.dtype, shape, stride, int(tensor.storage_offset()))


def _storage(tensor: torch.Tensor, memory: torch.UntypedStorage) -> Storage:
    span = content = None
    size, dtype = memory.nbytes(), tensor.dtype
    if size <= _COPIED:
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory, 0, (size,), (1,))
        content = raw.cpu().numpy().tobytes()
    elif dtype.is_floating_point and dtype.itemsize == 1:  # torch makes no random ones
        dtype, span = torch.uint8, (0, 63)  # from 0 to 2 in most formats
    elif not (dtype.is_floating_point or dtype.is_complex):
        # Numbers in the same range: an index stays one.
        dtype = dtype if dtype.is_signed else _INTEGERS[tensor.itemsize]
        low, high = tensor.view(dtype).aminmax() if tensor.numel() else (0, 0)
        span = max(int(low), -_FAR), min(int(high), _FAR)
    return Storage(size, memory.data_ptr() % _ALIGNMENT, dtype, span, content)


_FAR = 1 << 62  # torch takes no wider range
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def remake_storage(storage: Storage, device: Any) -> torch.Tensor:
    """Make memory like that which was described, as a tensor of bytes."""
    room = torch.empty(storage.nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
    made = room[(storage.address - room.data_ptr()) % _ALIGNMENT :][: storage.nbytes]
    if storage.content is not None:
        if storage.content:
            made.copy_(torch.frombuffer(bytearray(storage.content), dtype=torch.uint8))
        return made
    itemsize = storage.dtype.itemsize
    values = made[: storage.nbytes // itemsize * itemsize].view(storage.dtype)
    if storage.span is not None:
        low, high = storage.span
        values.random_(low, high + 1) if high > low else values.fill_(low)
    else:
        values.normal_()
    return made


def remake(value: Described, storages: Sequence[torch.Tensor]) -> Any:
    """Make an argument like that which was described, in memory that was made for it."""
    if isinstance(value, tuple):
        return tuple(remake(part, storages) for part in value)
    if isinstance(value, Placed):
        memory = storages[value.storage]
        offset = memory.storage_offset() // value.dtype.itemsize + value.offset
        empty = torch.empty(0, dtype=value.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), offset, value.shape, value.stride)
    if hasattr(value, "base"):
        made = copy.copy(value)
        made.base = remake(value.base, storages)
        return made
    return value
