"""Arguments of a kernel, pickled so that another process makes ones like them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from costmodel.autotune.arguments import span
from costmodel.errors import InvalidInput

_COPIED = 1 << 20
"""Bytes of a tensor that are copied, and repeated in the rest of it: they may be indices."""
_ALIGNMENT = 256  # no kernel is compiled for more, and no access is wider

memory: dict[Any, torch.Tensor] = {}
"""Made for tensors that were unpickled, by the place of the storages that it stands for."""


def pickled(values: object) -> bytes:
    """Pickle arguments. Unpickled, they lie in other memory and hold what they hold now.

    Raises:
        InvalidInput: another process cannot make them.
    """
    file = io.BytesIO()
    _Pickler(file).dump(values)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_cpu and torch.cuda.is_available():
                raise InvalidInput("a tensor is in the host's memory: expected one on the device")
            storage = value.untyped_storage()
            place = value.device, storage.data_ptr(), storage.nbytes()
            view = int(value.storage_offset()), tuple(value.shape), value.stride()
            content = span(value)[:_COPIED].cpu().numpy().tobytes()
            return _remade, (place, value.dtype, view, content)
        module = getattr(value, "__module__", type(value).__module__)
        if module.split(".")[0] not in ("copyreg", "costmodel", "torch", "triton"):
            raise InvalidInput(f"{value!r:.100} is an argument: expected a tensor or a number")
        return NotImplemented


def _remade(place: tuple[Any, int, int], dtype: torch.dtype, view: Any, content: bytes) -> Any:
    """Make a tensor: tensors that shared a storage do so again."""
    device, address, nbytes = place
    if place not in memory:
        room = torch.zeros(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
        memory[place] = room[(address - room.data_ptr()) % _ALIGNMENT :]
    offset, shape, stride = view
    offset += memory[place].storage_offset() // dtype.itemsize
    made = torch.empty(0, dtype=dtype, device=device)
    made.set_(memory[place].untyped_storage(), offset, shape, stride)
    held, done = span(made), len(content)
    if content:
        held[:done].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    while 0 < done < len(held):
        part = held[done : 2 * done]
        part.copy_(held[: len(part)])
        done *= 2
    return made
