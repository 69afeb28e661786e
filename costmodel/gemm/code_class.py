"""The class of code that may serve a product: all that the compiled code depends on."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal, get_args

from costmodel.errors import InvalidInput, UnsupportedDtype
from costmodel.gemm.dtypes import DATA_TYPES, DataType, element_types

Layout = Literal["row", "col", "strided"]
"""Which dimension is contiguous: the last (``row``), the first (``col``), or neither."""

ACTIVATIONS = ("none", "relu", "gelu", "silu")


def alignment_class(*values_bytes: int, item: int = 2) -> int:
    """Return the widest power of two up to 16 that divides each address, stride and extent.

    Args:
        item: bytes of an element, to which all of them are aligned in any case.
    """
    return max(gcd(16, *values_bytes), item)


def require_dtypes(dtype: object, out_dtype: object) -> None:
    """Refuse types, and pairs of types, for which there is no kernel."""
    if not isinstance(dtype, str) or dtype not in element_types():
        raise UnsupportedDtype(
            f"dtype={dtype!r} has no kernel; expected one of {', '.join(element_types())}: "
            f"convert the operands first"
        )
    allowed = DATA_TYPES[dtype].results
    if not isinstance(out_dtype, str) or out_dtype not in allowed:
        raise UnsupportedDtype(
            f"out_dtype={out_dtype!r} of {dtype} operands has no kernel; expected "
            f"{' or '.join(allowed)}: convert the result afterwards"
        )


@dataclass(frozen=True, slots=True, order=True)
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
        for name in ("a_layout", "b_layout", "c_layout"):
            if getattr(self, name) not in get_args(Layout):
                raise InvalidInput(f"{name}={getattr(self, name)!r}: expected row, col or strided")
        allowed = _alignments()
        for name in ("a_align", "b_align", "c_align"):
            value = getattr(self, name)
            if type(value) is not int or value not in allowed:
                expected = f"{', '.join(map(str, allowed[:-1]))} or {allowed[-1]} bytes"
                raise InvalidInput(f"{name}={value!r}: expected {expected}")
            item = self.out_itemsize if name == "c_align" else self.itemsize
            if value < item:
                raise InvalidInput(f"{name}={value}: expected at least an element, {item} bytes")
        for name in ("wide", "bias", "tf32"):
            if type(getattr(self, name)) is not bool:
                raise InvalidInput(f"{name}={getattr(self, name)!r}: expected true or false")
        if self.activation not in ACTIVATIONS:
            raise InvalidInput(
                f"activation={self.activation!r}: expected one of {', '.join(ACTIVATIONS)}"
            )
        if self.tf32 and self.dtype != self.data_type.element:
            raise InvalidInput(
                f"tf32=True with {self.dtype} operands: expected float32 ones; leave it out, "
                f"16-bit operands are on the tensor cores anyway"
            )

    @property
    def kind(self) -> str:
        """The kind of operand: each has a speed and an exactness of its own."""
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

    @functools.lru_cache(maxsize=256)  # noqa: B019 - classes are few, and asked a thousand times
    def repacked(self) -> CodeClass:
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
        return (
            self.a_layout == "strided" or self.a_align < 16,
            self.b_layout == "strided" or self.b_align < 16,
        )

    @functools.lru_cache(maxsize=256)  # noqa: B019
    def key(self) -> str:
        """A readable name, unique to the class."""
        layouts = "".join(x[0] for x in (self.a_layout, self.b_layout, self.c_layout))
        out = "" if self.out_dtype == self.dtype else f">{self.out_dtype}"
        extras = ("-wide" * self.wide) + ("-bias" * self.bias)
        tf32 = "-tf32" * self.tf32
        act = "" if self.activation == "none" else f"-{self.activation}"
        aligns = f"{self.a_align}.{self.b_align}.{self.c_align}"
        return f"{self.dtype}{out}-{layouts.replace('s', 'x')}-{aligns}{extras}{act}{tf32}"


def _alignments() -> tuple[int, ...]:
    """Alignments in bytes: from the 16 that TMA asks for down to the smallest element."""
    smallest = min(row.bytes for row in DATA_TYPES.values())
    return tuple(align for align in (16, 8, 4, 2, 1) if align >= smallest)
