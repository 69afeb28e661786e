"""``costmodel.scaled_mm``: products of fp8 and int8 operands, with the scales that torch has."""

from math import ceil
from typing import Any

import torch
from torch import Tensor

from costmodel.autotune.tuner import state_of
from costmodel.errors import (
    DeviceError,
    GradientError,
    InvalidInput,
    LayoutError,
    ShapeError,
    UnsupportedDtype,
)
from costmodel.gemm.workload import MOST, require_activation
from costmodel.hardware.installed import interpreter_setting
from costmodel.scaled.configs import BY_BLOCK, BY_ROW, ROW, STEP, TENSOR
from costmodel.scaled.launch import repeated, tuned
from costmodel.tuning.ranks import epoch
from costmodel.validation import drop_oldest, require

MaybeTensor = Tensor | None

_AT_MOST = 4096  # kinds of calls that are launched again without checks

EIGHT_BITS = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
_RESULTS = (torch.bfloat16, torch.float16, torch.float32)
_RECIPES = {
    TENSOR: "TensorWise", ROW: "RowWise", BY_ROW: "BlockWise1x128", BY_BLOCK: "BlockWise128x128",
}  # fmt: skip


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: MaybeTensor = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Any = (),
    use_fast_accum: bool = False,
    *,
    activation: str | None = None,
    out: MaybeTensor = None,
) -> Tensor:
    """Multiply scaled 8-bit matrices: ``torch.nn.functional.scaled_mm``, tuned.

    The first call of a kind tunes: torch and kernels of our own are timed, and the fastest is
    kept on disk. Values of m up to the next power of two (over 64: or 3/4 of it) share a choice.

    Args:
        mat_a: [m, k], row-major: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        mat_b: [k, n], column-major, as ``weight.T`` is; of the same kind.
        scale_a, scale_b: float32. ``TensorWise``: one element. ``RowWise``: [m, 1] and [1, n].
            ``BlockWise1x128``: [m, k / 128] and [n, k / 128]. ``BlockWise128x128``: [k / 128,
            rows / 128], where k / 128 may be rounded up to a multiple of 4. Any strides.
        scale_recipe_a, scale_recipe_b: ``torch.nn.functional.ScalingType``: ``TensorWise`` and
            ``RowWise`` in any mix, or ``BlockWise`` for both, which only fp8 operands can have.
        swizzle_a, swizzle_b, contraction_dim: torch's defaults only.
        bias: [n], of a float type, contiguous.
        output_dtype: bfloat16, float16 or float32; None is bfloat16.
        use_fast_accum: leave all sums of fp8 products to the tensor cores, which keep some 14 bits
            of them on Hopper; else sums are promoted to float32 after each 128 of k.
        activation: applied last: ``relu``, ``gelu`` or ``silu``.
        out: [m, n], to write the result to; row-major, and of ``output_dtype``.

    Raises:
        InvalidInput, UnsupportedDtype: an argument that cannot be used; the message says why.
        GradientError: a tensor requires grad.
        CompileError: no kernel works on this device.
    """
    if not (swizzle_a is swizzle_b is None and contraction_dim == ()):
        for name, value in {
            "swizzle_a": swizzle_a, "swizzle_b": swizzle_b, "contraction_dim": contraction_dim,
        }.items():  # fmt: skip
            if getattr(one := _one(value), "value", one) not in (None, 0, (), []):
                raise InvalidInput(f"{name}={value!r}: expected None or (), leave it out")
    tensors = {
        "a": mat_a, "mat_b": mat_b, "scale_a": _one(scale_a), "scale_b": _one(scale_b),
        "bias": bias, "out": out,
    }  # fmt: skip
    return _launched(
        scaled_call, tensors, recipe_a=_one(scale_recipe_a), recipe_b=_one(scale_recipe_b),
        output_dtype=output_dtype, fast=bool(use_fast_accum), activation=activation or "none",
    )  # fmt: skip


def scaled_call(
    a: Tensor, mat_b: Tensor, scale_a: Any, recipe_a: Any, scale_b: Any, recipe_b: Any,
    bias: MaybeTensor = None, output_dtype: torch.dtype | None = None, fast: bool = False,
    activation: str = "none", out: MaybeTensor = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Check the arguments of :func:`scaled_mm`; return those of a launch."""
    scales = _scale("scale_a", scale_a), _scale("scale_b", scale_b)
    recipes = _recipe("a", recipe_a), _recipe("b", recipe_b)
    dtype = output_dtype or torch.bfloat16
    if dtype not in _RESULTS:
        raise UnsupportedDtype(f"output_dtype={dtype}: expected bfloat16, float16 or float32")
    by_blocks = recipes[0] >= BY_ROW
    if by_blocks != (recipes[1] >= BY_ROW):
        raise InvalidInput(
            f"{' with '.join(_RECIPES[recipe] for recipe in recipes)}: expected block-wise scales "
            f"for both operands, or for none"
        )
    shape = _check_operands(a, mat_b)
    if a.dtype == torch.int8 and by_blocks:
        raise UnsupportedDtype("int8 operands have no block-wise scales: use RowWise or TensorWise")
    require_activation(activation)
    if bias is not None:
        require("bias", bias, Tensor, "a tensor [n] or None")
        if bias.shape != shape[1:] or not bias.is_contiguous() or bias.dtype not in _RESULTS:
            raise InvalidInput(
                f"bias is {bias.dtype} {list(bias.shape)}: expected a contiguous float [{shape[1]}]"
            )
    out = _output(out, a, shape, dtype)
    fast = fast and not by_blocks  # they need each block's sum by itself
    return _call(a, mat_b, scales, recipes, bias, out, fast, activation)


def int_mm(mat_a: Tensor, mat_b: Tensor, *, out: MaybeTensor = None) -> Tensor:
    """Multiply int8 matrices exactly, to int32: ``torch._int_mm``, tuned, for any m.

    Args:
        mat_a: [m, k], row-major; mat_b: [k, n], column-major, as ``weight.T`` is.
        out: [m, n] int32, row-major, to write the result to.

    Raises:
        InvalidInput, UnsupportedDtype: an argument that cannot be used; the message says why.
    """
    return _launched(int_call, {"a": mat_a, "mat_b": mat_b, "out": out})


def int_call(a: Tensor, mat_b: Tensor, out: MaybeTensor = None) -> tuple[Any, ...]:
    """Check the arguments of :func:`int_mm`; return those of a launch."""
    shape = _check_operands(a, mat_b)
    if a.dtype != torch.int8:
        raise UnsupportedDtype(f"mat_a is {a.dtype}: expected int8; scaled_mm multiplies fp8")
    out = _output(out, a, shape, torch.int32)
    return _call(a, mat_b, (None, None), (TENSOR, TENSOR), None, out)


def _call(
    a: Tensor, mat_b: Tensor, scales: tuple[Any, Any], recipes: tuple[int, int],
    bias: MaybeTensor, out: Tensor, fast: bool = False, activation: str = "none",
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of a launch, in the order of ``scaled_product``."""
    (m, k), b = a.shape, mat_b.T
    n = len(b)
    strides_a = _scale_strides("a", scales[0], recipes[0], m, k)
    strides_b = _scale_strides("b", scales[1], recipes[1], n, k)
    for name, x in zip(
        ("mat_a", "mat_b", "scale_a", "scale_b", "bias", "out"),
        (a, mat_b, *scales, bias, out),
    ):  # fmt: skip
        if x is None:
            continue
        if x.device != a.device:
            raise DeviceError(f"{name} is on {x.device}, mat_a on {a.device}: expected one device")
        if x.requires_grad and torch.is_grad_enabled():
            raise GradientError(f"{name} requires grad: scaled products have none, use no_grad()")
    return (
        a, b, *scales, bias, out, m, n, k, a.stride(0), b.stride(0), out.stride(0), *strides_a,
        *strides_b, *recipes, fast, activation, _bucket(m), _is_torchs(a, b, scales, recipes, out),
    )  # fmt: skip


def _is_torchs(a: Tensor, b: Tensor, scales: Any, recipes: Any, out: Tensor) -> bool:
    """Return True if all tensors lie as torch wants: torch does not check all strides it needs."""
    found = (
        out.is_contiguous()
        and (a.is_contiguous() or not a.stride(0) % 16)
        and (b.is_contiguous() or not b.stride(0) % 16)
    )
    for scale, recipe in zip(scales, recipes):
        if recipe == ROW:
            found &= scale.is_contiguous()
        elif recipe >= BY_ROW:  # m must be a multiple of 4
            found &= scale.stride() in ((1, len(scale)), (1, 1))  # (1, 1): of one column
            found &= len(scale) % 4 == len(a) % 4 == 0
    return found


def _bucket(m: int) -> int:
    """Return the largest m that shares a choice: a power of two, over 64 also 3/4 of one."""
    power = 1 << (m - 1).bit_length()
    return 3 * power // 4 if 64 < m <= 3 * power // 4 else power


def _launched(checked: Any, tensors: dict[str, Any], **options: Any) -> Tensor:
    if torch.compiler.is_dynamo_compiling():  # it would trace, and guard, the checks of each m
        return torch.compiler.disable(_launched)(checked, tensors, **options)  # type: ignore[no-untyped-call]
    state = state_of(tuned)
    kind = *options.values(), epoch(), torch.is_grad_enabled(), *map(_layout, tensors.values())
    try:
        repeat = state.repeats.get(kind)
    except TypeError:  # an argument that has no hash is wrong, as the checks say
        repeat = None
    if repeat is not None:  # such a call was checked before
        again, shape, dtype = repeat
        a, mat_b, *others, out = tensors.values()
        if out is None:
            out = a.new_empty(shape, dtype=dtype)
        with torch.cuda.device(a.get_device()):
            again((a, mat_b.T, *(others or (None, None, None)), out))
        return out
    call = checked(**tensors, **options)
    a, out = call[0], call[5]
    if a.device.type != "cuda":
        raise DeviceError(f"the operands are on {a.device}: expected them on a GPU")
    if interpreter_setting():
        raise InvalidInput("TRITON_INTERPRET is set: unset it before Triton is imported")
    if out.numel():
        with torch.cuda.device(a.get_device()):
            tuned.run(*call, warmup=False)
            if found := state.launches.get(state.key_of(call, {})):
                # Another thread may have found it since, so this was perhaps another binary.
                loaded = tuned.fn.run(*call, warmup=True, **found[1])
                again = repeated(call, loaded=loaded, **found[1])
                state.repeats[kind] = again, out.shape, out.dtype
                drop_oldest(state.repeats, _AT_MOST)
    return out


def _layout(x: Any) -> Any:
    """Return all of a tensor that a launch depends on, beside its content and its address."""
    if not isinstance(x, Tensor):
        return x
    at_16 = x.data_ptr() % 16
    return type(x), x.dtype, x.device, x.shape, x.stride(), x.requires_grad, at_16


def _check_operands(a: Tensor, b: Tensor) -> tuple[int, int]:
    """Return m and n of operands that kernels can read."""
    for name, x in (("mat_a", a), ("mat_b", b)):
        if require(name, x, Tensor, "a tensor").ndim != 2:
            raise ShapeError(f"{name} has shape {list(x.shape)}: expected a matrix")
        if x.dtype not in EIGHT_BITS:
            raise UnsupportedDtype(
                f"{name} is {x.dtype}: expected float8_e4m3fn, float8_e5m2 or int8"
            )
    if a.dtype != b.dtype and torch.int8 in (a.dtype, b.dtype):
        raise UnsupportedDtype(f"{a.dtype} by {b.dtype}: expected both fp8 or both int8")
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or not k:
        raise ShapeError(
            f"mat_a {list(a.shape)} @ mat_b {list(b.shape)}: expected [m, k] @ [k, n], k over 0"
        )
    if max(m, n, k) > MOST:
        raise ShapeError(f"[{m}, {k}] @ [{k}, {n}]: expected sizes up to {MOST}")
    if not _has_rows(a):
        raise LayoutError(
            f"mat_a has strides {a.stride()}: expected a row-major matrix; use .contiguous()"
        )
    if not _has_rows(b.T):
        raise LayoutError(
            f"mat_b has strides {b.stride()}: expected a column-major matrix, as the .T of a "
            f"weight [n, k] is; use mat_b.T.contiguous().T once"
        )
    return m, n


def _has_rows(x: Tensor) -> bool:
    """Return True if a matrix is row-major, perhaps with gaps between rows."""
    rows, columns = x.shape
    return (columns <= 1 or x.stride(1) == 1) and (rows <= 1 or x.stride(0) >= columns)


def _output(out: MaybeTensor, a: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    if out is None:
        return a.new_empty(shape, dtype=dtype)
    require("out", out, Tensor, "a tensor or None")
    if out.shape != shape or out.dtype != dtype:
        raise ShapeError(f"out is {out.dtype} {list(out.shape)}: expected {dtype} {list(shape)}")
    if not _has_rows(out):
        raise LayoutError(f"out has strides {out.stride()}: expected a row-major matrix")
    return out


def _one(value: Any) -> Any:
    """Return what a list holds alone; torch takes both."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _scale(name: str, scale: Any) -> Tensor:
    if require(name, scale, Tensor, "a tensor").dtype != torch.float32:
        raise UnsupportedDtype(f"{name} is {scale.dtype}: expected float32")
    return scale


def _recipe(name: str, recipe: Any) -> int:
    value = getattr(recipe, "value", recipe)
    if not isinstance(value, int) or value not in _RECIPES:
        raise InvalidInput(
            f"scale_recipe_{name}={recipe!r}: expected ScalingType.* of "
            f"{', '.join(_RECIPES.values())}"
        )
    return value


def _scale_strides(name: str, scale: Any, recipe: int, rows: int, k: int) -> tuple[int, int]:
    """Return the strides of a scale along the rows of its operand, and along blocks of K.

    The rows of B are the columns of ``mat_b``.
    """
    if scale is None:
        return 0, 0
    if recipe == TENSOR:
        if scale.numel() != 1:
            raise ShapeError(f"scale_{name} has {scale.numel()} elements: expected 1 (TensorWise)")
        return 0, 0
    steps, blocks = ceil(k / STEP), ceil(rows / STEP)
    shapes = {
        ROW: [(rows, 1) if name == "a" else (1, rows)],
        BY_ROW: [(rows, steps)],
        BY_BLOCK: [(steps, blocks), (ceil(steps / 4) * 4, blocks)],
    }[recipe]
    if tuple(scale.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ShapeError(
            f"scale_{name} is {list(scale.shape)}: expected {expected} ({_RECIPES[recipe]})"
        )
    first, second = scale.stride()
    along_first = recipe == BY_ROW or (recipe == ROW and name == "a")
    return (first, second) if along_first else (second, first)
