"""Operands to time with: random numbers in device memory, a separate set for each launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_CHUNK = 2**26
_MOST_BYTES = 24 * 2**30


class NoRoom(Exception):
    """The device's memory does not hold even the operands that a timing needs at least."""


Problem = Any
"""A problem to time: its operands, its launches and its right result; comparable by value.

It has the attributes and methods of :class:`costmodel.launch.problem.GemmProblem`.
"""


def set_count(problem: Problem, l2_bytes: int, most: int, room_bytes: int) -> int:
    """Return how many sets of operands to time with: the cache loses a set before its next use.

    Two at least, if there is room for them; one will do if it is larger than the cache.

    Args:
        l2_bytes: size of the cache.
        most: launches of a replay, which use a set each.
        room_bytes: device memory that may be taken, for the operands and to check a result.

    Raises:
        NoRoom: the sets that exceed the cache do not fit; says how much is needed and free.
    """
    set_bytes, check_bytes = problem.set_bytes, problem.check_bytes
    least = min(-(-3 * l2_bytes // (2 * set_bytes)), most)
    left_bytes = min(room_bytes - check_bytes, _MOST_BYTES)
    if left_bytes < least * set_bytes:
        raise NoRoom(
            f"{problem} needs {(least * set_bytes + check_bytes) >> 20} MiB, "
            f"{max(room_bytes, 0) >> 20} MiB are free"
        )
    return min(max(least, 2), left_bytes // set_bytes, most)


@dataclass
class OperandPool:
    """Random numbers of unit variance in device memory, handed out as operands.

    Drawing them again for every problem would take longer than timing it. The pool grows to what
    the largest problem needs and is drawn again when it does.
    """

    device: torch.device
    seed: int
    _data: dict[str, Tensor] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Device memory that it holds."""
        return sum(data.numel() * data.element_size() for data in self._data.values())

    def draw(self, dtype: str, elements: int) -> Tensor:
        """Return at least this many numbers; to grow, the pool drops all types first."""
        import torch

        data = self._data.get(dtype)
        if data is None or data.numel() < elements:
            self._data.clear()
            data = torch.empty(elements, dtype=getattr(torch, dtype), device=self.device)
            self._data[dtype] = data
        generator = torch.Generator(self.device).manual_seed(self.seed)
        self.seed += 1
        # Results were written over parts of the pool: these must be random numbers again.
        for start in range(0, elements, _CHUNK):
            data[start : min(start + _CHUNK, elements)].normal_(generator=generator)
        return data
