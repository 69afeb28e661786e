"""Operands to time with: views into one pool of random numbers, many sets, none shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodel.errors import InvalidInput
from costmodel.gemm.workload import Layout, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["NoRoom", "OperandPool", "Operands", "set_count"]

_GRAIN_BYTES = 256
_CHUNK = 2**26
_MOST_BYTES = 24 * 2**30


class NoRoom(Exception):
    """Not even the operands that a timing needs at least fit the device's memory."""


def set_count(workload: Workload, l2_bytes: int, most: int, room_bytes: int) -> int:
    """How many sets of operands to time with: one after another, each out of the cache again.

    Two at least, where there is room for them; beyond the cache one will do.

    Args:
        l2_bytes: size of the cache.
        most: launches of a replay, which use a set each.
        room_bytes: device memory that may be taken, for the operands and to check a result.

    Raises:
        NoRoom: the sets that outlast the cache do not fit; says how much is lacking.
    """
    w = workload
    set_bytes = sum(extent.size_bytes for extent in _extents(workload))
    # In float32: the operands and their product, once more transposed.
    check_bytes = 4 * (w.m * w.k + w.k * w.n + 2 * w.m * w.n)
    least = min(-(-3 * l2_bytes // (2 * set_bytes)), most)
    left_bytes = min(room_bytes - check_bytes, _MOST_BYTES)
    if left_bytes < least * set_bytes:
        raise NoRoom(
            f"{workload} needs {(least * set_bytes + check_bytes) >> 20} MiB, "
            f"{max(room_bytes, 0) >> 20} MiB are free"
        )
    return min(max(least, 2), left_bytes // set_bytes, most)


class Operands(tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor | None"]):
    """(a[m, k], b[k, n], out[m, n], bias[n] or None) of one launch."""

    __slots__ = ()


class OperandPool:
    """Random numbers of unit variance in device memory, handed out as operands.

    Drawing them anew for every workload would take longer than timing it. The pool grows to what
    the largest workload needs and is drawn anew when it does.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._seed = seed
        self._data: dict[str, torch.Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """What it holds of the device's memory."""
        return sum(data.numel() * data.element_size() for data in self._data.values())

    def sets(self, workload: Workload, count: int) -> list[Operands]:
        """``count`` disjoint sets of operands, with the layouts and alignments of the workload."""
        import torch

        code = workload.code
        extents = _extents(workload)
        per_set_bytes = sum(e.size_bytes for e in extents)
        in_data = self._draw(code.dtype, per_set_bytes * count // code.itemsize)
        out_data = in_data.view(getattr(torch, code.out_dtype))
        result = []
        start = 0
        for _ in range(count):
            views = []
            for extent, data in zip(extents, (in_data, in_data, out_data, out_data), strict=True):
                views.append(extent.view(data, start))
                start += extent.size_bytes
            a, b, out, bias = views
            if out_data.dtype != in_data.dtype and code.bias:
                bias.normal_()  # the bits of the other type would be any number
            result.append(Operands((a, b, out, bias if code.bias else None)))
        return result

    def _draw(self, dtype: str, elements: int) -> torch.Tensor:
        """At least this many numbers; the pool of another type makes room first."""
        import torch

        data = self._data.get(dtype)
        if data is None or data.numel() < elements:
            self._data.clear()
            data = torch.empty(elements, dtype=getattr(torch, dtype), device=self._device)
            self._data[dtype] = data
        generator = torch.Generator(self._device).manual_seed(self._seed)
        self._seed += 1
        # Results were written over parts of the pool: those must be numbers again.
        for start in range(0, elements, _CHUNK):
            data[start : min(start + _CHUNK, elements)].normal_(generator=generator)
        return data


def _extents(workload: Workload) -> tuple[_Extent, _Extent, _Extent, _Extent]:
    """Of A, B, the result and the bias, which may be empty."""
    w, code = workload, workload.code
    return (
        _Extent(w.m, w.k, code.a_layout, code.a_align, code.itemsize),
        _Extent(w.k, w.n, code.b_layout, code.b_align, code.itemsize),
        _Extent(w.m, w.n, code.c_layout, code.c_align, code.out_itemsize),
        _Extent(1 if code.bias else 0, w.n, "row", code.out_itemsize, code.out_itemsize),
    )


class _Extent:
    """Where one operand lies: rows of ``lead`` elements, shifted to be aligned as asked."""

    def __init__(self, rows: int, cols: int, layout: Layout, align: int, item: int) -> None:
        if layout == "strided":
            raise InvalidInput("operands without a contiguous dimension cannot be drawn for timing")
        self._shape = (rows, cols) if layout == "row" else (cols, rows)
        self._transposed = layout == "col"
        # A shift of `align` bytes is aligned to that, and to no wider class below 16.
        self._shift = (align % 16) // item
        self._item = item
        size_bytes = (self._shape[0] * self._shape[1] + self._shift) * item
        self.size_bytes = -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES

    def view(self, data: torch.Tensor, start_bytes: int) -> torch.Tensor:
        rows, cols = self._shape
        first = start_bytes // self._item + self._shift
        x = data[first : first + rows * cols].view(rows, cols)
        return x.T if self._transposed else x
