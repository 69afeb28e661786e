"""The arguments of a call, and the checks that :func:`costmodel.matmul` makes of them.

Each error says what was wrong and what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from costmodel.data.candidates import ModelLike
from costmodel.errors import (
    DeviceError,
    GradientError,
    InvalidInput,
    LayoutError,
    ShapeError,
    UnsupportedDtype,
)
from costmodel.files import Named
from costmodel.gemm.dtypes import DATA_TYPES, element_types, require_tf32
from costmodel.gemm.workload import require_activation

Spans = tuple[int, int, int, int]
"""Bytes that out, A, B and the bias span in memory; 0 for one that is absent or empty."""


@dataclass(slots=True, eq=False)
class Call:
    """The arguments of :func:`costmodel.matmul`, as they came."""

    a: Tensor
    b: Tensor
    out: Tensor | None = None
    bias: Tensor | None = None
    activation: str | None = None
    tf32: bool | None = None
    out_dtype: torch.dtype | None = None
    mode: str | None = None
    model: ModelLike = None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """All tensors of the call."""
        return self.a, self.b, self.out, self.bias

    @property
    def is_batch(self) -> bool:
        """True if an operand is a tensor, but not a matrix."""
        return not getattr(self.a, "ndim", 2) == getattr(self.b, "ndim", 2) == 2

    def options(self) -> Named:
        """Return the keywords of :func:`costmodel.matmul` without ``out``."""
        return {
            "bias": self.bias, "activation": self.activation, "tf32": self.tf32,
            "out_dtype": self.out_dtype, "mode": self.mode, "model": self.model,
        }  # fmt: skip


def check_matrices(call: Call) -> None:
    """Refuse what no kernel can compute. Only metadata is read.

    Raises:
        ShapeError, LayoutError: see the message; others as :func:`check_kinds`.
    """
    _check_shapes(call)
    check_kinds(call)
    a, b, out, bias = call.operands
    if out is not None:
        require_apart(out, a, b, bias, spans_of(out, a, b, bias))


def check_kinds(call: Call) -> None:
    """Refuse types, devices and options, whatever the shapes.

    Raises:
        InvalidInput: no tensors, an unknown activation, or TF32 for 16-bit operands.
        UnsupportedDtype, LayoutError, GradientError, DeviceError: see the message.
    """
    given = _given(call)
    names = {name: _name(x.dtype) for name, x in given.items()}
    known, tf32 = element_types(), call.tf32
    expected = f"expected one of {', '.join(known)}, the same for a and b: convert with x.to()"
    for name, dtype in names.items():
        if dtype not in known:
            raise UnsupportedDtype(f"{name} is {dtype}, for which there is no kernel; {expected}")
    if names["a"] != names["b"]:
        raise UnsupportedDtype(f"a is {names['a']}, b is {names['b']}; {expected}")
    if tf32 is not None and type(tf32) is not bool:
        raise InvalidInput(f"tf32={tf32!r}: expected True, False, or None to follow torch's switch")
    require_tf32(tf32, names["a"])
    _check_result_type(call.out_dtype, names)
    require_activation(call.activation or "none")
    wants = [n for n, x in given.items() if x.requires_grad] if torch.is_grad_enabled() else []
    if wants and call.out is not None:
        raise GradientError(
            f"{', '.join(wants)} requires grad, and what is written to out has no gradient: leave "
            f"out away, or call it under torch.no_grad()"
        )
    _check_devices(given)


def require_apart(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, spans: Spans) -> None:
    """Refuse an ``out`` that shares memory with an input. Every call with an ``out`` checks this.

    Raises:
        LayoutError: they overlap, or lie so that this cannot be ruled out.
    """
    out_bytes, a_bytes, b_bytes, bias_bytes = spans
    begin = out.data_ptr()
    end = begin + out_bytes
    if begin - a_bytes < a.data_ptr() < end:
        _require_columns_apart(out, a, "a")
    if begin - b_bytes < b.data_ptr() < end:
        _require_columns_apart(out, b, "b")
    if bias is not None and begin - bias_bytes < bias.data_ptr() < end:
        _require_columns_apart(out, bias, "bias")


def require_shape(name: str, x: torch.Tensor, shape: Sequence[int], more: str = "") -> None:
    """Refuse a tensor of another shape; ``more`` says what the shape is for.

    Raises:
        ShapeError: with both shapes.
    """
    if tuple(x.shape) != tuple(shape):
        raise ShapeError(f"{name} has shape {list(x.shape)}: expected {list(shape)}{more}")


def spans_of(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Spans:
    """Return the memory spans for :func:`require_apart`."""
    return _span(out), _span(a), _span(b), 0 if bias is None else _span(bias)


def _span(x: Tensor) -> int:
    """Bytes from the first address of a tensor to the one past its last; 0 if it is empty."""
    if x.numel() == 0:
        return 0
    elements = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    return elements * x.element_size()


def _require_columns_apart(out: Tensor, x: Tensor, name: str) -> None:
    """Refuse a tensor whose span meets that of ``out``, unless they are columns side by side."""
    if out.ndim == x.ndim == 2 and out.element_size() == x.element_size():
        row = out.stride(0)
        if out.stride() == x.stride() and out.stride(1) == 1 and row:
            apart = (x.data_ptr() - out.data_ptr()) // out.element_size() % row
            if out.shape[1] <= apart and apart + x.shape[1] <= row:
                return
    raise LayoutError(
        f"out shares memory with {name}, which is read while out is written: pass an out of its "
        f"own, e.g. torch.empty(...)"
    )


def _given(call: Call) -> dict[str, Tensor]:
    """Return the dense tensors of a call by name; refuse everything else."""
    found = {"a": call.a, "b": call.b}
    found |= {n: x for n, x in (("out", call.out), ("bias", call.bias)) if x is not None}
    for name, x in found.items():
        if not isinstance(x, Tensor):
            raise InvalidInput(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
        if x.layout != torch.strided:
            raise LayoutError(f"{name} is {x.layout}: expected a dense tensor, e.g. x.to_dense()")
    return found


def _check_shapes(call: Call) -> None:
    _given(call)
    for name, x in (("a", call.a), ("b", call.b)):
        if x.ndim != 2:
            raise ShapeError(
                f"{name} has shape {list(x.shape)}: expected a matrix (2 dimensions); "
                f"reshape it, or loop over a batch"
            )
    (m, k), (k_b, n) = call.a.shape, call.b.shape
    if k != k_b:
        raise ShapeError(
            f"a{[m, k]} @ b{[k_b, n]}: expected as many columns in a ({k}) as rows in b ({k_b})"
        )
    if call.out is not None:
        require_shape("out", call.out, (m, n))
    if (bias := call.bias) is not None:
        require_shape("bias", bias, (n,), ", one value a column")
        if n > 1 and bias.stride(0) != 1:
            raise LayoutError("bias is not contiguous: expected stride 1; call bias.contiguous()")


def _check_result_type(out_dtype: torch.dtype | None, names: dict[str, str]) -> None:
    """Refuse a type of ``out``, ``out_dtype`` or bias that the operands' result cannot have."""
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise InvalidInput(f"out_dtype={out_dtype!r}: expected a torch.dtype, as torch.float32")
    result = names.get("out", names["a"]) if out_dtype is None else _name(out_dtype)
    if names.get("out", result) != result:
        raise UnsupportedDtype(
            f"out is {names['out']}, out_dtype {result}: expected the same; leave out_dtype away "
            f"where there is an out"
        )
    allowed = DATA_TYPES[names["a"]].results
    if result not in allowed:
        raise UnsupportedDtype(
            f"{'out' if 'out' in names else 'out_dtype'} is {result}, a is {names['a']}: expected "
            f"a result of {' or '.join(allowed)}; convert it afterwards with x.to()"
        )
    if names.get("bias", result) != result:
        raise UnsupportedDtype(
            f"bias is {names['bias']}, the result {result}: expected the same, bias is added to "
            f"the result; convert it with bias.to()"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_devices(given: dict[str, Tensor]) -> None:
    for name, x in given.items():
        if x.device.type != "cuda":
            raise DeviceError(
                f"{name} is on {x.device}: expected an NVIDIA GPU; move it with x.cuda() (where "
                f"there is no GPU, rank, tune --replay and evaluate still work)"
            )
    if len({x.device for x in given.values()}) > 1:
        found = ", ".join(f"{name} is on {x.device}" for name, x in given.items())
        raise DeviceError(f"{found}: expected all on one GPU")
