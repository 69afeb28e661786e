"""The class of code that may serve a product: all that the compiled code depends on."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal, get_args

from costmodel.errors import InvalidInput, UnsupportedDtype

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "KINDS",
    "OUT_DTYPES",
    "CodeClass",
    "Layout",
    "alignment_class",
    "require_dtypes",
]

Layout = Literal["row", "col", "strided"]
"""Which dimension is contiguous: the last (``row``), the first (``col``), or neither."""

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Element types of A, B and C, with their size in bytes. All accumulate in float32."""

KINDS = (*DTYPES, "tf32")
"""What is multiplied: an element type, which for float32 means IEEE, or float32 as TF32."""

OUT_DTYPES = {
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float32": ("float32",),
}
"""Which types C may have, by the type of A and B; the first is the default."""

ACTIVATIONS = ("none", "relu", "gelu", "silu")
ALIGNMENTS = (16, 8, 4, 2)


def alignment_class(*values_bytes: int, item: int = 2) -> int:
    """The widest of 16, 8, 4 or 2 bytes that divides every given address, stride and extent.

    Args:
        item: bytes of an element, to which all of them are aligned in any case.
    """
    return max(gcd(16, *values_bytes), item)


def require_dtypes(dtype: object, out_dtype: object) -> None:
    """Refuse types, and pairs of types, for which there is no kernel."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedDtype(
            f"dtype={dtype!r} has no kernel; expected one of {', '.join(DTYPES)}: "
            f"convert the operands first"
        )
    allowed = OUT_DTYPES[dtype]
    if not isinstance(out_dtype, str) or out_dtype not in allowed:
        raise UnsupportedDtype(
            f"out_dtype={out_dtype!r} of {dtype} operands has no kernel; expected "
            f"{' or '.join(allowed)}: convert the result afterwards"
        )


@dataclass(frozen=True, slots=True, order=True)
class CodeClass:
    """What the compiled code depends on, besides the configuration and the toolchain.

    Attributes:
        dtype: element type of A and B.
        out_dtype: element type of C, one of ``OUT_DTYPES[dtype]``.
        a_layout: layout of A[m, k]; likewise ``b_layout`` of B[k, n] and ``c_layout`` of C[m, n].
        a_align: alignment of A in bytes (16, 8, 4 or 2): what divides its address, its leading
            stride and the extent of its contiguous dimension; likewise ``b_align``, ``c_align``.
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
        for name in ("a_align", "b_align", "c_align"):
            value = getattr(self, name)
            if type(value) is not int or value not in ALIGNMENTS:
                raise InvalidInput(f"{name}={value!r}: expected 16, 8, 4 or 2 bytes")
            item = DTYPES[self.out_dtype if name == "c_align" else self.dtype]
            if value < item:
                raise InvalidInput(f"{name}={value}: expected at least an element, {item} bytes")
        for name in ("wide", "bias", "tf32"):
            if type(getattr(self, name)) is not bool:
                raise InvalidInput(f"{name}={getattr(self, name)!r}: expected true or false")
        if self.activation not in ACTIVATIONS:
            raise InvalidInput(
                f"activation={self.activation!r}: expected one of {', '.join(ACTIVATIONS)}"
            )
        if self.tf32 and self.dtype != "float32":
            raise InvalidInput(
                f"tf32=True with {self.dtype} operands: expected float32 ones; leave it out, "
                f"16-bit operands are on the tensor cores anyway"
            )

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def kind(self) -> str:
        """What is multiplied, one of ``KINDS``: each has a speed and an exactness of its own."""
        return "tf32" if self.tf32 else self.dtype

    @property
    def out_itemsize(self) -> int:
        return DTYPES[self.out_dtype]

    @functools.lru_cache(maxsize=256)  # noqa: B019 - classes are few, and asked a thousand times
    def repacked(self) -> CodeClass:
        """The class after A and B are copied, where need be, into rows aligned to 16 bytes."""
        return replace(
            self,
            a_layout="row" if self.a_layout == "strided" else self.a_layout,
            b_layout="row" if self.b_layout == "strided" else self.b_layout,
            a_align=16,
            b_align=16,
        )

    def needs_repack(self) -> tuple[bool, bool]:
        """Whether A, and whether B, lies so that TMA cannot address it."""
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
