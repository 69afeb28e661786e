"""Data types: one row for each kind of operand. docs/extending.md says what else a new one needs.

A kind is an element type of A and B, or a way to multiply one: float32 operands may be multiplied
as they are (IEEE), or as TF32. All accumulate in :attr:`DataType.accumulator`.
"""

from dataclasses import dataclass

from costmodel.errors import InvalidInput, UnsupportedDtype


@dataclass(frozen=True)
class DataType:
    """One kind of operand.

    Attributes:
        name: the kind; also the key of its rate in ``Architecture.tensor_rates``.
        bytes: size of an element, which is also its least alignment.
        triton: the name of the elements in a Triton signature.
        results: element types that C may have; empty for a type that only C may have.
        element: element type of A and B, a dtype of torch; default: the name of the kind.
        precision: ``input_precision`` of Triton's ``dot``; only float32 operands have a choice.
        accumulator: Triton's name of the type of partial sums.
    """

    name: str
    bytes: int
    triton: str
    results: tuple[str, ...]
    element: str = ""
    precision: str = "ieee"
    accumulator: str = "fp32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "element", self.element or self.name)


_ROWS = (
    DataType("float16", 2, "fp16", ("float16", "float32")),
    DataType("bfloat16", 2, "bf16", ("bfloat16", "float32")),
    DataType("float32", 4, "fp32", ("float32",)),
    DataType("tf32", 4, "fp32", ("float32",), element="float32", precision="tf32"),
)
DATA_TYPES = {row.name: row for row in _ROWS}
"""All rows, by kind."""


def kinds() -> tuple[str, ...]:
    """Return all kinds of operands."""
    return tuple(row.name for row in DATA_TYPES.values() if row.results)


def element_types() -> tuple[str, ...]:
    """Return the element types that A and B may have."""
    return tuple(dict.fromkeys(row.element for row in DATA_TYPES.values() if row.results))


def require_tf32(tf32: bool | None, dtype: str) -> None:
    """Refuse TF32 for operands that are not float32."""
    if tf32 and dtype != "float32":
        raise InvalidInput(
            f"tf32=True with {dtype} operands: expected float32 ones; leave it out, 16-bit "
            f"operands are on the tensor cores anyway"
        )


def require_dtypes(dtype: object, out_dtype: object) -> None:
    """Refuse types, and pairs of types, for which there is no kernel."""
    if not isinstance(dtype, str) or dtype not in element_types():
        raise UnsupportedDtype(
            f"dtype={dtype!r} has no kernel; expected one of {', '.join(element_types())}: "
            f"convert the operands first; costmodel.scaled_mm multiplies fp8 and int8"
        )
    allowed = DATA_TYPES[dtype].results
    if not isinstance(out_dtype, str) or out_dtype not in allowed:
        raise UnsupportedDtype(
            f"out_dtype={out_dtype!r} of {dtype} operands has no kernel; expected "
            f"{' or '.join(allowed)}: convert the result afterwards"
        )
