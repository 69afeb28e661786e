"""The problem: C[m, n] = act(A[m, k] @ B[k, n] + bias[n]).

The compiled code does not depend on the sizes, only on what :class:`CodeClass` holds. That is
why a workload is split in two: the sizes, and the class of code that may serve it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from costmodel.errors import InvalidInput, LayoutError, ShapeError, UnsupportedDtype
from costmodel.gemm.code_class import (
    ACTIVATIONS,
    CodeClass,
    Layout,
    alignment_class,
    require_dtypes,
)
from costmodel.gemm.config import LARGEST
from costmodel.gemm.dtypes import DATA_TYPES, kinds

if TYPE_CHECKING:
    import torch

__all__ = [
    "ACTIVATIONS",
    "MOST",
    "MOST_OFFSET",
    "CodeClass",
    "Layout",
    "Workload",
    "alignment_class",
    "kind_options",
]

MOST_OFFSET = 2**31 - 1
"""The largest offset of an element that 32 bits hold."""

MOST = MOST_OFFSET + 1 - LARGEST
"""The largest size: kernels round sizes up to whole tiles in 32 bits, whatever the tile."""

_DEFAULT_CODE = CodeClass()


def kind_options(kind: str) -> dict[str, Any]:
    """Return the options of :meth:`Workload.dense` for a kind of operand: ``dtype``, ``tf32``.

    Raises:
        UnsupportedDtype: no such kind.
    """
    if kind not in kinds():
        raise UnsupportedDtype(
            f"dtype={kind!r} has no kernel; expected one of {', '.join(kinds())}"
        )
    element = DATA_TYPES[kind].element
    return {"dtype": element} if element == kind else {"dtype": element, kind: True}


@dataclass(frozen=True, slots=True, order=True)
class Workload:
    """One matrix product: the sizes, and the class of code that may serve it.

    :meth:`dense` makes one of sizes and types, :meth:`from_tensors` one of operands.

    Attributes:
        m: rows of A and C; n: columns of B and C; k: columns of A, rows of B. 0 to :data:`MOST`.
        code: types, layouts, alignments and epilogue: what may be in a binary.
    """

    m: int
    n: int
    k: int
    code: CodeClass = _DEFAULT_CODE

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            value = getattr(self, name)
            if type(value) is not int or value < 0 or value > MOST:
                raise ShapeError(
                    f"{name}={value!r}: expected an int from 0 to {MOST}, since kernels count in "
                    f"32 bits; cut a larger product into parts"
                )
        if not isinstance(self.code, CodeClass):
            raise InvalidInput(f"code={self.code!r}: expected a CodeClass, see Workload.dense()")

    @classmethod
    def dense(
        cls,
        m: int,
        n: int,
        k: int,
        dtype: str = "float16",
        *,
        a_layout: Layout = "row",
        b_layout: Layout = "row",
        c_layout: Layout = "row",
        bias: bool = False,
        activation: str = "none",
        out_dtype: str | None = None,
        tf32: bool = False,
    ) -> Workload:
        """The workload of freshly allocated operands: no gaps between rows, aligned bases.

        Args:
            m, n, k: the sizes; dtype: the element type of A and B.
            a_layout, b_layout, c_layout: ``row`` or ``col``.
            out_dtype: element type of C; default: ``dtype``.
            bias, activation, tf32: as :class:`CodeClass` has them.

        Raises:
            ShapeError, UnsupportedDtype, InvalidInput: with what is wrong.
        """
        shape = cls(m, n, k)  # validates the sizes before they are multiplied
        layouts = {"a_layout": a_layout, "b_layout": b_layout, "c_layout": c_layout}
        for name, layout in layouts.items():
            if layout == "strided":
                raise InvalidInput(
                    f"{name}='strided': a dense operand is row or col; strided ones need "
                    f"from_tensors()"
                )
            if layout not in ("row", "col"):
                raise InvalidInput(f"{name}={layout!r}: expected row or col")
        require_dtypes(dtype, out_dtype or dtype)  # before their sizes are looked up
        item, out_item = (DATA_TYPES[name].bytes for name in (dtype, out_dtype or dtype))

        def align(rows: int, cols: int, layout: Layout, size: int) -> int:
            return alignment_class((cols if layout == "row" else rows) * size, item=size)

        code = CodeClass(
            dtype=dtype,
            out_dtype=out_dtype or dtype,
            a_layout=a_layout,
            b_layout=b_layout,
            c_layout=c_layout,
            a_align=align(m, k, a_layout, item),
            b_align=align(k, n, b_layout, item),
            c_align=align(m, n, c_layout, out_item),
            wide=max(m * k, k * n, m * n) > MOST_OFFSET,
            bias=bias,
            activation=activation,
            tf32=tf32,
        )
        return replace(shape, code=code)

    @classmethod
    def from_tensors(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: bool = False,
        activation: str = "none",
        tf32: bool = False,
    ) -> Workload:
        """The workload of these operands, from their sizes, strides and addresses.

        Args:
            a: [m, k]; b: [k, n]; out: [m, n]. Only metadata is read, on any device.
        """
        (m, k), (k_b, n) = a.shape, b.shape
        if k != k_b or tuple(out.shape) != (m, n):
            raise ShapeError(
                f"A{list(a.shape)} @ B{list(b.shape)} -> C{list(out.shape)}: expected "
                f"[m, k] @ [k, n] -> [m, n]"
            )
        a_layout, a_align, a_span = _memory(a)
        b_layout, b_align, b_span = _memory(b)
        c_layout, c_align, c_span = _memory(out)
        if _overlaps_itself(out):
            raise LayoutError("out overlaps itself: expected distinct elements, e.g. torch.empty")
        code = CodeClass(
            dtype=_name(a.dtype),
            out_dtype=_name(out.dtype),
            a_layout=a_layout,
            b_layout=b_layout,
            c_layout=c_layout,
            a_align=a_align,
            b_align=b_align,
            c_align=c_align,
            wide=max(a_span, b_span, c_span) > MOST_OFFSET,
            bias=bias,
            activation=activation,
            tf32=tf32,
        )
        return cls(m, n, k, code)

    @property
    def dtype(self) -> str:
        return self.code.dtype

    @property
    def nk(self) -> tuple[int, int]:
        """The pair that datasets are split by."""
        return self.n, self.k

    def flops(self) -> int:
        """Multiplications and additions of the product, the epilogue not counted."""
        return 2 * self.m * self.n * self.k

    def bytes(self) -> int:
        """The least traffic with device memory: each input read once, C written once."""
        item, out_item = self.code.itemsize, self.code.out_itemsize
        bias = self.n * out_item if self.code.bias else 0
        return (self.m * self.k + self.k * self.n) * item + self.m * self.n * out_item + bias

    def is_small(self) -> bool:
        """Every side ≤ 512: tuning would cost more than it gives."""
        return max(self.m, self.n, self.k) <= 512

    def key(self) -> str:
        """A readable name, unique to the workload."""
        return f"{self.m}x{self.n}x{self.k}-{self.code.key()}"

    def to_dict(self) -> dict[str, Any]:
        """Flat, JSON-ready: the sizes and the fields of the code class."""
        return {"m": self.m, "n": self.n, "k": self.k, **asdict(self.code)}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Workload:
        """The inverse of :meth:`to_dict`; unknown keys are refused.

        Raises:
            InvalidInput, ShapeError, UnsupportedDtype: with what is wrong.
        """
        names = {f.name for f in fields(CodeClass)}
        sizes = {"m", "n", "k"}
        if not isinstance(row, dict) or not sizes <= set(row) <= names | sizes:
            raise InvalidInput(f"not a workload: {re.sub(r'[^ -~]', '?', str(row))[:200]}")
        code = CodeClass(**{k: v for k, v in row.items() if k in names})
        return cls(row["m"], row["n"], row["k"], code)

    def __str__(self) -> str:
        return self.key()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory(x: torch.Tensor) -> tuple[Layout, int, int]:
    """Return the layout, the alignment class in bytes and the largest offset of a matrix."""
    rows, cols = x.shape
    row_stride, col_stride = x.stride()
    item = x.element_size()
    span = max(rows - 1, 0) * row_stride + max(cols - 1, 0) * col_stride
    # A stride along a dimension of size 1 is never used: it may be anything.
    if col_stride == 1 or (cols == 1 and row_stride != 1):
        lead = row_stride if rows > 1 else 0
        contiguous: tuple[Layout, int] = ("row", cols)
    elif row_stride == 1 or rows == 1:
        lead = col_stride if cols > 1 else 0
        contiguous = ("col", rows)
    else:
        return "strided", alignment_class(item, item=item), span
    layout, extent = contiguous
    return layout, alignment_class(x.data_ptr(), lead * item, extent * item, item=item), span


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Return True if two elements of a matrix are one in memory."""
    (rows, cols), (row_stride, col_stride) = x.shape, x.stride()
    if rows == 0 or cols == 0:
        return False
    if rows == 1 or cols == 1:
        return (rows > 1 and row_stride == 0) or (cols > 1 and col_stride == 0)
    # i * row_stride + j * col_stride repeats after col_stride / g rows and row_stride / g columns.
    g = gcd(row_stride, col_stride)
    return g == 0 or (col_stride // g < rows and row_stride // g < cols)
