"""What :func:`costmodel.matmul` accepts: each refusal says what was wrong and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from costmodel.errors import (
    DeviceError,
    GradientError,
    InvalidInput,
    LayoutError,
    ShapeError,
    UnsupportedDtype,
)
from costmodel.gemm.code_class import ACTIVATIONS
from costmodel.gemm.dtypes import DATA_TYPES, element_types

if TYPE_CHECKING:
    import torch

__all__ = [
    "check_arguments", "check_kinds", "may_share", "require_disjoint", "require_shape",
    "span_bytes",
]  # fmt: skip


def check_arguments(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    tf32: bool | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Refuse what no kernel can compute. Only metadata is read.

    Args:
        as of :func:`costmodel.matmul`, a and b matrices.

    Raises:
        as :func:`check_kinds`; ShapeError, LayoutError: see the message.
    """
    for name, x in (("a", a), ("b", b), ("out", out), ("bias", bias)):
        if x is not None:
            _check_dense(name, x)
    _check_shapes(a, b, out, bias)
    check_kinds(a, b, out, bias, activation, tf32, out_dtype)
    if out is not None:
        for name, x in (("a", a), ("b", b), ("bias", bias)):
            if x is not None:
                require_disjoint(out, x, name)


def check_kinds(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
) -> None:
    """Refuse operands for what they are, whatever their shapes.

    Raises:
        InvalidInput: no tensors, an unknown activation, or TF32 for 16-bit operands.
        UnsupportedDtype, LayoutError, GradientError, DeviceError: see the message.
    """
    import torch

    given = {"a": a, "b": b}
    given |= {name: x for name, x in (("out", out), ("bias", bias)) if x is not None}
    for name, x in given.items():
        _check_dense(name, x)
    _check_dtypes(given, tf32, out_dtype)
    if (activation or "none") not in ACTIVATIONS:
        raise InvalidInput(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    wants = [n for n, x in given.items() if x.requires_grad] if torch.is_grad_enabled() else []
    if wants and out is not None:
        raise GradientError(
            f"{', '.join(wants)} requires grad, and what is written to out has no gradient: leave "
            f"out away, or call it under torch.no_grad()"
        )
    _check_devices(given)


def _check_dense(name: str, x: torch.Tensor) -> None:
    import torch

    if not isinstance(x, torch.Tensor):
        raise InvalidInput(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
    if x.layout != torch.strided:
        raise LayoutError(f"{name} is {x.layout}: expected a dense tensor, e.g. x.to_dense()")


def require_disjoint(
    out: torch.Tensor, x: torch.Tensor, name: str, spans: tuple[int, int] | None = None
) -> None:
    """Refuse an ``out`` that shares memory with an input.

    Args:
        spans: :func:`span_bytes` of both, where they are known.

    Raises:
        LayoutError: they overlap, or lie so that this cannot be ruled out.
    """
    out_bytes, x_bytes = spans or (span_bytes(out), span_bytes(x))
    if not -x_bytes < x.data_ptr() - out.data_ptr() < out_bytes or _side_by_side(out, x):
        return
    raise LayoutError(
        f"out shares memory with {name}, which is read while out is written: pass an out of its "
        f"own, e.g. torch.empty(...)"
    )


def may_share(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    spans: tuple[int, ...],
) -> bool:
    """Whether :func:`require_disjoint` has to look: a quick look, since every call takes it.

    Args:
        spans: :func:`span_bytes` of out, a, b and bias.
    """
    out_bytes, a_bytes, b_bytes, bias_bytes = spans
    begin = out.data_ptr()
    end = begin + out_bytes
    if begin - a_bytes < a.data_ptr() < end or begin - b_bytes < b.data_ptr() < end:
        return True
    return bias is not None and begin - bias_bytes < bias.data_ptr() < end


def require_shape(name: str, x: torch.Tensor, shape: Sequence[int], more: str = "") -> None:
    """Refuse a tensor of another shape; ``more`` says what it is for.

    Raises:
        ShapeError: with both.
    """
    if tuple(x.shape) != tuple(shape):
        raise ShapeError(f"{name} has shape {list(x.shape)}: expected {list(shape)}{more}")


def _check_shapes(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    for name, x in (("a", a), ("b", b)):
        if x.ndim != 2:
            raise ShapeError(
                f"{name} has shape {list(x.shape)}: expected a matrix (2 dimensions); "
                f"reshape it, or loop over a batch"
            )
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        raise ShapeError(
            f"a{[m, k]} @ b{[k_b, n]}: expected as many columns in a ({k}) as rows in b ({k_b})"
        )
    if out is not None:
        require_shape("out", out, (m, n))
    if bias is not None:
        require_shape("bias", bias, (n,), ", one value a column")
    if bias is not None and n > 1 and bias.stride(0) != 1:
        raise LayoutError("bias is not contiguous: expected stride 1; call bias.contiguous()")


def _check_dtypes(
    given: dict[str, torch.Tensor], tf32: bool | None, out_dtype: torch.dtype | None
) -> None:
    names = {name: _name(x.dtype) for name, x in given.items()}
    expected = (
        f"expected one of {', '.join(element_types())}, the same for a and b: convert with x.to()"
    )
    for name, dtype in names.items():
        if dtype not in element_types():
            raise UnsupportedDtype(f"{name} is {dtype}, for which there is no kernel; {expected}")
    if names["a"] != names["b"]:
        raise UnsupportedDtype(f"a is {names['a']}, b is {names['b']}; {expected}")
    if tf32 is not None and type(tf32) is not bool:
        raise InvalidInput(f"tf32={tf32!r}: expected True, False, or None to follow torch's switch")
    if tf32 and names["a"] != "float32":
        raise InvalidInput(
            f"tf32=True with {names['a']} operands: expected float32 ones; leave it out, 16-bit "
            f"operands are on the tensor cores anyway"
        )
    result = _check_result(names, out_dtype)
    if names.get("bias", result) != result:
        raise UnsupportedDtype(
            f"bias is {names['bias']}, the result {result}: expected the same, bias is added to "
            f"the result; convert it with bias.to()"
        )


def _check_result(names: dict[str, str], out_dtype: torch.dtype | None) -> str:
    """The type of the result, by ``out``, ``out_dtype`` or the operands."""
    import torch

    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise InvalidInput(f"out_dtype={out_dtype!r}: expected a torch.dtype, as torch.float32")
    wanted = names.get("out", names["a"]) if out_dtype is None else _name(out_dtype)
    if names.get("out", wanted) != wanted:
        raise UnsupportedDtype(
            f"out is {names['out']}, out_dtype {wanted}: expected the same; leave out_dtype away "
            f"where there is an out"
        )
    results = DATA_TYPES[names["a"]].results
    if wanted not in results:
        raise UnsupportedDtype(
            f"{'out' if 'out' in names else 'out_dtype'} is {wanted}, a is {names['a']}: expected "
            f"a result of {' or '.join(results)}; convert it afterwards with x.to()"
        )
    return wanted


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_devices(given: dict[str, torch.Tensor]) -> None:
    for name, x in given.items():
        if x.device.type != "cuda":
            raise DeviceError(
                f"{name} is on {x.device}: expected an NVIDIA GPU; move it with x.cuda() (where "
                f"there is no GPU, rank, tune --replay and evaluate still work)"
            )
    if len({x.device for x in given.values()}) > 1:
        found = ", ".join(f"{name} is on {x.device}" for name, x in given.items())
        raise DeviceError(f"{found}: expected all on one GPU")


def span_bytes(x: torch.Tensor) -> int:
    """Bytes from the first address of a tensor to the one past its last; 0 where it is empty."""
    if x.numel() == 0:
        return 0
    elements = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return elements * x.element_size()


def _side_by_side(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two matrices are different columns of the same rows in memory."""
    if x.ndim != 2 or y.ndim != 2 or x.element_size() != y.element_size():
        return False
    if x.stride() != y.stride() or x.stride(1) != 1:
        return False
    row = x.stride(0)
    apart = (y.data_ptr() - x.data_ptr()) // x.element_size() % row if row else 0
    return x.shape[1] <= apart and apart + y.shape[1] <= row
