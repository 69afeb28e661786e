"""Scratch memory of launches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Workspace:
    """Scratch memory of one stream: split-K's partial sums and arrival counters, aligned copies.

    It grows and is kept, so that a launch allocates nothing. Launches on one stream may share it;
    two streams may not.

    Args:
        apart: allocate outside a memory pool of the calling thread, such as one of CUDA graphs
            (``torch.cuda.use_mem_pool``): the pool is for results, and this memory is kept.
    """

    def __init__(self, device: torch.device, *, apart: bool = False) -> None:
        self._device, self._apart = device, apart
        self._memory: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._scratch: tuple[tuple[torch.Tensor, torch.Tensor] | None, int, int] = (None, 0, 0)

    def get(self, size_bytes: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 [size_bytes / 4] of anything, and int32 [tiles] of zeros; or more."""
        scratch, most_bytes, most_tiles = self._scratch
        if scratch is not None and size_bytes <= most_bytes and tiles <= most_tiles:
            return scratch
        import torch

        partial_sums = self._at_least("partial", size_bytes // 4, torch.float32)
        scratch = partial_sums, self._at_least("arrivals", tiles, torch.int32)
        # Every launch asks, so that the found pair is kept.
        self._scratch = scratch, 4 * scratch[0].numel(), scratch[1].numel()
        return scratch

    def copy_of(self, name: str, x: torch.Tensor, code_layout: str, elements: int) -> torch.Tensor:
        """Return a matrix like ``x`` with aligned rows, or columns for a ``col`` layout.

        Args:
            name: which operand: each has a place of its own.
            elements: its size with the padding, from :func:`costmodel.gemm.space.repack_elements`.
        """
        memory = self._at_least(name, elements, x.dtype)[:elements]
        rows, cols = x.shape
        if code_layout == "col":
            return memory.view(cols, -1)[:, :rows].T
        return memory.view(rows, -1)[:, :cols]

    def _at_least(self, name: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
        import torch

        key = name, dtype
        found = self._memory.get(key)
        if found is None or found.numel() < elements:
            make = partial(torch.zeros, elements, dtype=dtype, device=self._device)
            found = _outside_pools(make, self._device) if self._apart else make()
            self._memory[key] = found
        return found


def _outside_pools(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Allocate on this thread's stream, in another thread: a memory pool belongs to a thread."""
    import torch

    stream = torch.cuda.current_stream(device)

    def run() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1, "costmodel-allocate") as threads:
        try:
            made = threads.submit(run)
        except RuntimeError:  # this process may start no more threads
            return make()
        return made.result()
