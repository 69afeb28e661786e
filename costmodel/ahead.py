"""What a program may do before its first product: tune, compile and load, or pin a choice."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

import torch

from costmodel import dispatch, modes
from costmodel.arguments import check_arguments
from costmodel.config import GemmConfig
from costmodel.dispatch import ModelLike
from costmodel.errors import InvalidInput
from costmodel.measurement import Runner
from costmodel.pins import pin_config, unpin_config
from costmodel.ranking import named_model
from costmodel.space import legality
from costmodel.target import Target
from costmodel.torch_product import torch_multiplies_in_tf32
from costmodel.tuner import tune as tune_with
from costmodel.tuning_result import TuningResult
from costmodel.winners import Question
from costmodel.workload import CodeClass, Workload

__all__ = ["pin", "tune", "unpin", "warmup"]

Problem = tuple[int, int, int] | Workload


def warmup(
    problems: Iterable[Problem],
    *,
    dtype: str = "float16",
    out_dtype: str | None = None,
    tf32: bool | None = None,
    device: int | None = None,
    bias: bool = False,
    activation: str | None = None,
    mode: str | None = None,
    model: ModelLike = None,
) -> list[TuningResult | None]:
    """Tune, compile and load ahead, so that no request has to wait for it.

    Afterwards nothing is tuned, compiled or loaded for any m of the same buckets, as long as the
    class of code is the same: of row-major operands it is. ``background`` is tuned here and now.

    Args:
        problems: (m, n, k) with row-major operands of ``dtype``, or workloads with dense ones.
        dtype: float16, bfloat16 or float32; out_dtype: of the result, default: the same.
        tf32: as :func:`costmodel.matmul` has it: None follows torch's switch.
        device: CUDA device; default: the current one.
        mode, model: of :func:`costmodel.matmul`.

    Returns:
        What was chosen for each (None for an empty product).

    Raises:
        NoGpu: there is none to warm up.
    """
    target = Target.current(device)
    index = torch.cuda.current_device() if device is None else device
    mode = modes.default_mode() if mode is None else mode
    results = []
    for problem in problems:
        workload = _workload(problem, _types(dtype, out_dtype, tf32), bias, activation)
        result = _warm(workload, index, mode, model)
        last = _last_of_bucket(workload)
        if result is not None and last is not None:
            config = result.config
            if last.code != workload.code or (config and legality(config, last, target.device)):
                _warm(last, index, mode, model)
        results.append(result)
    return results


def _warm(workload: Workload, index: int, mode: str, model: ModelLike) -> TuningResult | None:
    """One product of whatever is in memory, as the calls to come will have it."""
    act = workload.code.activation
    a, b, out, row = _blank_operands(workload, index)
    options: dict[str, Any] = {
        "out": out if workload.code.c_layout == "col" else None, "bias": row,
        "activation": None if act == "none" else act, "model": model,
        **_precision(workload.code),
    }  # fmt: skip
    if mode == "background":
        dispatch.matmul(a, b, mode="auto", **options)  # whose winners it goes by
    dispatch.matmul(a, b, mode=mode, **options)
    return dispatch.result_for(a, b, mode=mode, **options)


def _last_of_bucket(workload: Workload) -> Workload | None:
    """The largest product of row-major operands that is to share the winner of this one."""
    code = workload.code
    if (code.a_layout, code.c_layout) != ("row", "row") or not workload.m:
        return None  # the alignment of columns differs from m to m
    _, last = dispatch.winners.buckets.of(workload.m)
    return Workload.dense(
        last, workload.n, workload.k, code.dtype, out_dtype=code.out_dtype, tf32=code.tf32,
        b_layout=code.b_layout, bias=code.bias, activation=code.activation,
    )  # fmt: skip


def pin(
    config: GemmConfig | str,
    *problem: Any,
    dtype: str = "float16",
    out_dtype: str | None = None,
    tf32: bool | None = None,
    bias: bool = False,
    activation: str | None = None,
    device: int | None = None,
) -> TuningResult:
    """Have :func:`matmul` launch one configuration for one workload, whatever its mode.

    It holds in this process, for this workload alone (not for its bucket), until it is unpinned
    or replaced. It is compiled and loaded now.

    Args:
        config: a configuration, or ``"torch"``.
        problem, dtype, out_dtype, tf32, device: of :func:`tune`.
        bias, activation: of the calls that are meant; a :class:`Workload` has its own.

    Returns:
        What :func:`result_for` gives from now on.

    Raises:
        IllegalConfig: it cannot run this workload on this device; the message says why.
        CompileError, LaunchError: Triton, ptxas or the device refused it.
        InvalidInput: neither a configuration nor ``"torch"``, or an empty product.
        NoGpu: there is none to launch on.
    """
    if not isinstance(config, GemmConfig) and config != "torch":
        raise InvalidInput(f"config={config!r:.80}: expected a GemmConfig, or 'torch'")
    workload, index = _pinnable(problem, dtype, out_dtype, tf32, bias, activation, device)
    chosen = config if isinstance(config, GemmConfig) else None
    result = pin_config(chosen, workload, Target.current(index), index)
    dispatch.forget_launches()
    return result


def unpin(
    *problem: Any,
    dtype: str = "float16",
    out_dtype: str | None = None,
    tf32: bool | None = None,
    bias: bool = False,
    activation: str | None = None,
    device: int | None = None,
) -> bool:
    """Undo :func:`pin` for a workload.

    Returns:
        whether anything was pinned.
    """
    workload, index = _pinnable(problem, dtype, out_dtype, tf32, bias, activation, device)
    found = unpin_config(workload, index)
    dispatch.forget_launches()
    return found


def _pinnable(
    problem: tuple[Any, ...],
    dtype: str,
    out_dtype: str | None,
    tf32: bool | None,
    bias: bool,
    activation: str | None,
    device: int | None,
) -> tuple[Workload, int]:
    workload, device = _problem(problem, dtype, out_dtype, tf32, device, bias, activation)
    if not (workload.m and workload.n and workload.k):
        raise InvalidInput(f"{workload}: expected sizes over 0, torch computes empty products")
    Target.current(device)  # raises NoGpu, which says more than torch would
    return workload, torch.cuda.current_device() if device is None else device


def tune(
    *problem: Any,
    dtype: str = "float16",
    out_dtype: str | None = None,
    tf32: bool | None = None,
    mode: str | None = None,
    model: ModelLike = None,
    k: int = 8,
    include_torch: bool = True,
    budget_s: float = inf,
    runner: Runner | None = None,
    device: int | None = None,
) -> TuningResult:
    """Tune one product now, and keep the winner for :func:`matmul`.

    Args:
        problem: ``m, n, k``, or a :class:`Workload`, or two matrices on a GPU.
        dtype: float16, bfloat16 or float32, for ``m, n, k``; out_dtype: of the result, default:
            that of the operands; tf32: as :func:`costmodel.matmul` has it: None follows torch's
            switch. A :class:`Workload` has its own.
        mode: of :func:`costmodel.tuner.tune`. Default: as :func:`costmodel.matmul` has it;
            ``auto`` where that would be ``background`` or ``never``.
        runner: what times; with one, nothing is kept. A ``ReplayRunner`` needs no GPU.
        device: CUDA device; default: that of the matrices, or the current one.

    The others are those of :func:`costmodel.tuner.tune`.
    """
    if mode is None:
        default = modes.default_mode()
        mode = default if default in modes.TUNING_MODES else "auto"
    modes.check_tuning_mode(mode)
    workload, device = _problem(problem, dtype, out_dtype, tf32, device)
    if runner is not None:
        return tune_with(
            workload, runner=runner, model=model, k=k, mode=mode, include_torch=include_torch,
            budget_s=budget_s,
        )  # fmt: skip
    Target.current(device)  # raises NoGpu, which says more than torch would
    index = torch.cuda.current_device() if device is None else device
    question = Question(workload, index, mode, named_model(model), k, include_torch)
    result = dispatch.winners.tune(question, budget_s=budget_s)
    dispatch.forget_launches()
    return result


def _problem(
    problem: tuple[Any, ...],
    dtype: str,
    out_dtype: str | None,
    tf32: bool | None,
    device: int | None,
    bias: bool = False,
    activation: str | None = None,
) -> tuple[Workload, int | None]:
    epilogue: dict[str, Any] = {"bias": bias, "activation": activation or "none"}
    match problem:
        case (Workload() as workload,):
            return workload, device
        case (int() as m, int() as n, int() as k):
            return Workload.dense(m, n, k, **_types(dtype, out_dtype, tf32), **epilogue), device
        case (torch.Tensor() as a, torch.Tensor() as b):
            result: Any = None if out_dtype is None else getattr(torch, out_dtype, out_dtype)
            check_arguments(a, b, None, None, None, tf32, result)
            out = torch.empty((a.shape[0], b.shape[1]), dtype=result or a.dtype, device=a.device)
            multiplies = _types(str(a.dtype).removeprefix("torch."), None, tf32)
            found = Workload.from_tensors(a, b, out, tf32=multiplies["tf32"], **epilogue)
            return found, a.get_device()
    raise InvalidInput(
        f"({', '.join(type(p).__name__ for p in problem)}): expected m, n, k, or a Workload, "
        f"or two matrices"
    )


def _types(dtype: str, out_dtype: str | None, tf32: bool | None) -> dict[str, Any]:
    """The options of ``Workload.dense``; float32 follows torch's switch where nothing is said."""
    if tf32 is None:
        tf32 = dtype == "float32" and torch_multiplies_in_tf32()
    return {"dtype": dtype, "out_dtype": out_dtype, "tf32": tf32}


def _precision(code: CodeClass) -> dict[str, Any]:
    """The options that make ``matmul`` compute this class; None where a call without them does."""
    widened = code.out_dtype != code.dtype
    return {
        "tf32": code.tf32 if code.dtype == "float32" else None,
        "out_dtype": getattr(torch, code.out_dtype) if widened else None,
    }


def _workload(
    problem: Problem, types: dict[str, Any], bias: bool, activation: str | None
) -> Workload:
    if isinstance(problem, Workload):
        return problem
    m, n, k = problem
    return Workload.dense(m, n, k, **types, bias=bias, activation=activation or "none")


def _blank_operands(
    workload: Workload, index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Operands of a workload with dense layouts, of whatever numbers are in memory."""
    code = workload.code

    def blank(rows: int, cols: int, layout: str, dtype: str) -> torch.Tensor:
        shape = (cols, rows) if layout == "col" else (rows, cols)
        x = torch.empty(shape, dtype=getattr(torch, dtype), device=f"cuda:{index}")
        return x.T if layout == "col" else x

    m, n, k = workload.m, workload.n, workload.k
    return (
        blank(m, k, code.a_layout, code.dtype),
        blank(k, n, code.b_layout, code.dtype),
        blank(m, n, code.c_layout, code.out_dtype),
        blank(1, n, "row", code.out_dtype)[0] if code.bias else None,
    )
