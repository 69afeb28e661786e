"""The problem: C[m, n] = act(A[m, k] @ B[k, n] + bias[n]).

The compiled code does not depend on the sizes, only on what :class:`CodeClass` holds. That is
why a workload is split in two: the sizes, and the class of code that may serve it.
"""

import re
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, get_args

from costmodel.errors import InvalidInput, LayoutError, ShapeError, UnsupportedDtype
from costmodel.files import Named
from costmodel.gemm.dtypes import DATA_TYPES, DataType, kinds, require_dtypes, require_tf32

if TYPE_CHECKING:
    from torch import Tensor

    from costmodel.hardware.target import Device

LARGEST = 4096
"""The largest number of a configuration, such as the side of a tile."""

MOST_OFFSET = 2**31 - 1
"""The largest offset of an element that 32 bits hold."""

MOST = MOST_OFFSET + 1 - LARGEST
"""The largest size: kernels round sizes up to whole tiles in 32 bits, whatever the tile."""

Layout = Literal["row", "col", "strided"]
"""Which dimension is contiguous: the last (``row``), the first (``col``), or neither."""

ACTIVATIONS = ("none", "relu", "gelu", "silu")


def require_activation(name: str) -> None:
    """Refuse, by InvalidInput, a name that is not one of ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise InvalidInput(f"activation={name!r}: expected one of {', '.join(ACTIVATIONS)}")


def alignment_class(*values_bytes: int, item: int = 2) -> int:
    """Return the widest power of two up to 16 that divides each address, stride and extent.

    Args:
        item: bytes of an element, to which all of them are aligned in any case.
    """
    return max(gcd(16, *values_bytes), item)


class Matrix(NamedTuple):
    """The properties of one matrix of a product that the compiled code depends on.

    Attributes:
        name: ``a``, ``b`` or ``c``.
        rows, cols: names of its dimensions: those of A are ``m`` and ``k``.
        layout, align, dtype: as in :class:`CodeClass`.
    """

    name: str
    rows: str
    cols: str
    layout: Layout
    align: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return DATA_TYPES[self.dtype].bytes

    @property
    def in_memory(self) -> tuple[str, str]:
        """The names of its dimensions, the contiguous one last."""
        return (self.cols, self.rows) if self.layout == "col" else (self.rows, self.cols)


@dataclass(frozen=True, order=True)
class CodeClass:
    """All that the compiled code depends on, besides the configuration and the toolchain.

    Attributes:
        dtype: element type of A and B.
        out_dtype: element type of C, one of ``DATA_TYPES[dtype].results``.
        a_layout: layout of A[m, k]; likewise ``b_layout`` of B[k, n] and ``c_layout`` of C[m, n].
        a_align: alignment of A in bytes (16, 8, 4, ...): it divides the address, the leading
            stride and the extent of the contiguous dimension; likewise ``b_align``, ``c_align``.
            At least the size of an element.
        wide: offsets into some operand may pass 2**31 elements, so they are 64-bit.
        bias: a row vector bias[n] is added.
        activation: applied last, one of ``ACTIVATIONS``.
        tf32: float32 operands are rounded to TF32 (10 bits of mantissa) and multiplied on the
            tensor cores; otherwise float32 is IEEE throughout.
    """

    dtype: str = "float16"
    out_dtype: str = "float16"
    a_layout: Layout = "row"
    b_layout: Layout = "row"
    c_layout: Layout = "row"
    a_align: int = 16
    b_align: int = 16
    c_align: int = 16
    wide: bool = False
    bias: bool = False
    activation: str = "none"
    tf32: bool = False

    def __post_init__(self) -> None:
        require_dtypes(self.dtype, self.out_dtype)
        for x in self.matrices:
            if x.layout not in get_args(Layout):
                raise InvalidInput(f"{x.name}_layout={x.layout!r}: expected row, col or strided")
            # From the 16 bytes that TMA asks for down to an element.
            allowed = [align for align in (16, 8, 4, 2, 1) if align >= x.itemsize]
            if type(x.align) is not int or x.align not in allowed:
                raise InvalidInput(
                    f"{x.name}_align={x.align!r}: expected {' or '.join(map(str, allowed))} bytes, "
                    f"at least an element"
                )
        for name in ("wide", "bias", "tf32"):
            if type(getattr(self, name)) is not bool:
                raise InvalidInput(f"{name}={getattr(self, name)!r}: expected true or false")
        require_activation(self.activation)
        require_tf32(self.tf32, self.dtype)

    @property
    def kind(self) -> str:
        """The kind of operand: each kind has its own speed and precision."""
        return "tf32" if self.tf32 else self.dtype

    @property
    def data_type(self) -> DataType:
        """The row of its kind."""
        return DATA_TYPES[self.kind]

    @property
    def itemsize(self) -> int:
        return DATA_TYPES[self.dtype].bytes

    @property
    def out_itemsize(self) -> int:
        return DATA_TYPES[self.out_dtype].bytes

    @property
    def is_strided(self) -> bool:
        """True if a matrix has no contiguous dimension."""
        return "strided" in (self.a_layout, self.b_layout, self.c_layout)

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        """A, B and C."""
        return (
            Matrix("a", "m", "k", self.a_layout, self.a_align, self.dtype),
            Matrix("b", "k", "n", self.b_layout, self.b_align, self.dtype),
            Matrix("c", "m", "n", self.c_layout, self.c_align, self.out_dtype),
        )

    @lru_cache(maxsize=256)  # noqa: B019 - classes are few, and asked a thousand times
    def repacked(self) -> Self:
        """Return the class after A and B are copied, if need be, into rows aligned to 16 bytes."""
        return replace(
            self,
            a_layout="row" if self.a_layout == "strided" else self.a_layout,
            b_layout="row" if self.b_layout == "strided" else self.b_layout,
            a_align=16,
            b_align=16,
        )

    def needs_repack(self) -> tuple[bool, bool]:
        """Return True for A, and for B, if TMA cannot address it."""
        a, b = (x.layout == "strided" or x.align < 16 for x in self.matrices[:2])
        return a, b

    @lru_cache(maxsize=256)  # noqa: B019
    def key(self) -> str:
        """A readable name, unique to the class."""
        layouts = "".join(x.layout[0] for x in self.matrices)
        out = "" if self.out_dtype == self.dtype else f">{self.out_dtype}"
        extras = ("-wide" * self.wide) + ("-bias" * self.bias)
        tf32 = "-tf32" * self.tf32
        act = "" if self.activation == "none" else f"-{self.activation}"
        aligns = f"{self.a_align}.{self.b_align}.{self.c_align}"
        return f"{self.dtype}{out}-{layouts.replace('s', 'x')}-{aligns}{extras}{act}{tf32}"


_DEFAULT_CODE = CodeClass()


def kind_options(kind: str) -> Named:
    """Return the options of :meth:`Workload.dense` for a kind of operand: ``dtype``, ``tf32``.

    Raises:
        UnsupportedDtype: no such kind.
    """
    if kind not in kinds():
        raise UnsupportedDtype(
            f"dtype={kind!r} has no kernel; expected one of {', '.join(kinds())}: "
            f"costmodel.scaled_mm multiplies fp8 and int8"
        )
    element = DATA_TYPES[kind].element
    return {"dtype": element} if element == kind else {"dtype": element, kind: True}


@dataclass(frozen=True, order=True)
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
        cls, m: int, n: int, k: int, dtype: str = "float16", *, a_layout: Layout = "row",
        b_layout: Layout = "row", c_layout: Layout = "row", bias: bool = False,
        activation: str = "none", out_dtype: str | None = None, tf32: bool = False,
    ) -> Self:  # fmt: skip
        """The workload of freshly allocated operands: no gaps between rows, aligned bases.

        Args:
            m, n, k: the sizes; dtype: the element type of A and B.
            a_layout, b_layout, c_layout: ``row`` or ``col``.
            out_dtype: element type of C; default: ``dtype``.
            bias, activation, tf32: as in :class:`CodeClass`.

        Raises:
            ShapeError, UnsupportedDtype, InvalidInput: the message says what is wrong.
        """
        sized = cls(m, n, k)  # validates the sizes before they are multiplied
        for name, layout in zip("abc", (a_layout, b_layout, c_layout)):
            if layout not in ("row", "col"):
                hint = "; Workload.from_tensors(a, b) takes strided operands" * (
                    layout == "strided"
                )
                raise InvalidInput(
                    f"{name}_layout={layout!r}: expected row or col, the dimension whose elements "
                    f"lie side by side in memory{hint}"
                )
        code = CodeClass(
            dtype, out_dtype or dtype, a_layout, b_layout, c_layout,
            # The first offset is 0, so the largest is one less than there are elements.
            wide=max(m * k, k * n, m * n) - 1 > MOST_OFFSET,
            bias=bias, activation=activation, tf32=tf32,
        )  # fmt: skip
        aligns: Named = {}
        for x in code.matrices:
            extent_bytes = getattr(sized, x.in_memory[1]) * x.itemsize
            aligns[f"{x.name}_align"] = alignment_class(extent_bytes, item=x.itemsize)
        return cls(m, n, k, replace(code, **aligns))

    @classmethod
    def from_tensors(
        cls,
        a: "Tensor",
        b: "Tensor",
        out: "Tensor",
        *,
        bias: bool = False,
        activation: str = "none",
        tf32: bool = False,
    ) -> Self:
        """The workload of these operands, from their sizes, strides and addresses.

        Args:
            a: [m, k]; b: [k, n]; out: [m, n]. Only metadata is read, on any device.

        Raises:
            ShapeError: the shapes do not fit together. LayoutError: ``out`` overlaps itself.
            UnsupportedDtype: there is no kernel for these types.
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
        wide = max(a_span, b_span, c_span) > MOST_OFFSET
        dtype, out_dtype = (str(x.dtype).removeprefix("torch.") for x in (a, out))
        code = CodeClass(
            dtype, out_dtype, a_layout, b_layout, c_layout, a_align, b_align,
            c_align, wide, bias, activation, tf32,
        )  # fmt: skip
        return cls(m, n, k, code)

    @property
    def dtype(self) -> str:
        return self.code.dtype

    @property
    def nk(self) -> tuple[int, int]:
        """The pair that datasets are split by."""
        return self.n, self.k

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes in their order: m, n, k."""
        return self.m, self.n, self.k

    @property
    def is_empty(self) -> bool:
        """True if a size is 0."""
        return 0 in self.sizes

    def flops(self) -> int:
        """Multiplications and additions of the product, the epilogue not counted."""
        return 2 * self.m * self.n * self.k

    def bytes(self) -> int:
        """The least traffic with device memory: each input read once, C written once."""
        item, out_item = self.code.itemsize, self.code.out_itemsize
        m, n, k = self.sizes
        bias = n * out_item if self.code.bias else 0
        return (m * k + k * n) * item + m * n * out_item + bias

    def roofline_us(self, device: "Device") -> float:
        """The least time that a device needs for the arithmetic and for the traffic."""
        return device.roofline_us(self.flops(), self.bytes(), self.code.kind)

    def is_small(self) -> bool:
        """Every side ≤ 512: tuning would cost more than it gives."""
        return max(self.sizes) <= 512

    def key(self) -> str:
        """A readable name, unique to the workload."""
        return f"{self.m}x{self.n}x{self.k}-{self.code.key()}"

    __str__ = key

    def to_dict(self) -> Named:
        """Flat, JSON-ready: the sizes and the fields of the code class."""
        return {"m": self.m, "n": self.n, "k": self.k, **asdict(self.code)}

    @classmethod
    def from_dict(cls, row: Named) -> Self:
        """The inverse of :meth:`to_dict`; unknown keys are refused.

        Raises:
            InvalidInput, ShapeError, UnsupportedDtype: the message says what is wrong.
        """
        names = CodeClass.__dataclass_fields__.keys()
        sizes = {"m", "n", "k"}
        if not isinstance(row, dict) or not sizes <= set(row) <= names | sizes:
            raise InvalidInput(f"not a workload: {re.sub(r'[^ -~]', '?', str(row))[:200]}")
        code = CodeClass(**{k: v for k, v in row.items() if k in names})
        return cls(row["m"], row["n"], row["k"], code)


def _memory(x: "Tensor") -> tuple[Layout, int, int]:
    """Return the layout, the alignment class in bytes and the largest offset of a matrix."""
    rows, cols = x.shape
    row_stride, col_stride = x.stride()
    item = x.element_size()
    span = max(rows - 1, 0) * row_stride + max(cols - 1, 0) * col_stride
    layout: Layout
    # A stride along a dimension of size 1 is never used: it may be anything.
    if col_stride == 1 or (cols == 1 and row_stride != 1):
        layout, lead, extent = "row", row_stride * (rows > 1), cols
    elif row_stride == 1 or rows == 1:
        layout, lead, extent = "col", col_stride * (cols > 1), rows
    else:
        return "strided", item, span
    return layout, alignment_class(x.data_ptr(), lead * item, extent * item, item=item), span


def _overlaps_itself(x: "Tensor") -> bool:
    """Return True if two elements of a matrix have the same place in memory."""
    (rows, cols), (row_stride, col_stride) = x.shape, x.stride()
    if rows == 0 or cols == 0:
        return False
    if rows == 1 or cols == 1:
        return (rows > 1 and row_stride == 0) or (cols > 1 and col_stride == 0)
    # i * row_stride + j * col_stride repeats after col_stride / g rows and row_stride / g columns.
    g = gcd(row_stride, col_stride)
    return g == 0 or (col_stride // g < rows and row_stride // g < cols)
