"""``matmul``: the hot path, and what else a program calls.

A call looks up what it has done with such operands before, and launches. Only the first call of a
kind validates, finds the winner (from memory, from disk or by tuning) and loads its binary.
"""

from __future__ import annotations

import logging
import os
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from costmodel import models
from costmodel.arguments import check_arguments, require_disjoint, span_bytes
from costmodel.batches import multiply_batches
from costmodel.cache import WinnerCache
from costmodel.candidates import CostModel
from costmodel.errors import CompileError, CostModelError, InvalidInput, LaunchError
from costmodel.launch import Plan, load
from costmodel.models.storage import CARD
from costmodel.models.xgb import XgbCostModel
from costmodel.prepared import Launch, TorchLaunch, TritonLaunch
from costmodel.ranking import named_model
from costmodel.ranks import epoch
from costmodel.space import legality
from costmodel.torch_product import torch_multiplies_in_tf32
from costmodel.tuner import check_mode
from costmodel.tuning_result import TuningResult
from costmodel.untrusted import as_path, file_errors, one_line
from costmodel.winners import Question, Winners
from costmodel.workload import Workload

__all__ = ["ModelLike", "forget_launches", "launch_for", "matmul", "question_of", "result_for",
           "use", "winners"]  # fmt: skip

ModelLike = CostModel | str | PathLike[str] | None

_KEPT_LAUNCHES = 4096

log = logging.getLogger("costmodel")
winners = Winners(WinnerCache())
# With the bytes that out, a, b and bias span.
_launches: dict[Any, tuple[Launch, tuple[int, ...]]] = {}


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    tf32: bool | None = None,
    out_dtype: torch.dtype | None = None,
    mode: str = "auto",
    model: ModelLike = None,
) -> torch.Tensor:
    """act(a @ b + bias), by the fastest configuration known for such operands.

    The first call of a kind tunes: it ranks the space, times the top 8 beside torch and keeps the
    winner on disk. Winners are shared by buckets of m. Where a process group of
    ``torch.distributed`` is initialised nothing is timed: each rank takes the model's first choice,
    or what the ranks agreed on in ``costmodel.warmup(..., group=...)``.

    A tensor that requires grad gets its gradient, and ``torch.compile`` traces it without a break;
    either goes by an operator of torch's, and takes the model of :func:`use` only.

    Args:
        a: [m, k]; b: [k, n]; both float16, bfloat16 or float32, any strides, on one NVIDIA GPU.
            Leading batch dimensions and vectors are as in ``torch.matmul``; where both have
            batches, torch multiplies.
        out: [m, n] to write to, of the type of a and b or float32; it may share no memory with the
            inputs.
        bias: [n] of the type of the result.
        activation: ``relu``, ``gelu`` (exact) or ``silu``; applied last.
        tf32: whether float32 operands are multiplied as TF32; else in IEEE float32. Default: as
            torch's switch has it, ``torch.backends.cuda.matmul.fp32_precision``.
        out_dtype: type of the result where there is no ``out``: that of a and b, the default, or
            float32.
        mode: ``auto``; ``predict`` (the model's first choice, untimed), ``heuristic`` (rules, no
            model) or ``exhaustive`` (time the whole space). Under
            ``torch.use_deterministic_algorithms``, ``auto`` predicts.
        model: a model, or the directory of one; default: that of :func:`use`, else the shipped.

    Returns:
        ``out``, or a new tensor [m, n]. Accumulation is in float32.

    Raises:
        InvalidInput, UnsupportedDtype, GradientError: operands that cannot be used.
        CostModelError: an untuned call while a CUDA graph is captured.
    """
    if torch.compiler.is_compiling():
        return _traced(a, b, out, bias, activation, tf32, out_dtype, mode, model)
    if tf32 is None:
        tf32 = _as_torch(a)
    mode = _deterministic(mode)
    key = _key(a, b, out, bias, activation, tf32, out_dtype, mode, model)
    found = _launches.get(key)
    if found is None:
        return _first_call(key, a, b, out, bias, activation, tf32, out_dtype, mode, model)
    launch, spans = found
    if out is None:
        shape = (a.shape[0], b.shape[1])  # a keyword less is half a microsecond less
        out = a.new_empty(shape) if out_dtype is None else a.new_empty(shape, dtype=out_dtype)
    else:
        for x, span, name in zip((a, b, bias), spans[1:], ("a", "b", "bias"), strict=True):
            if x is not None:
                require_disjoint(out, x, name, (spans[0], span))
    launch(a, b, out, bias)
    return out


def forget_launches() -> None:
    """Look up the winner again at the next call of each kind: another may have been found."""
    _launches.clear()


def use(model: str | Path | XgbCostModel | None) -> XgbCostModel | None:
    """Make a model answer in this process from now on, before any shipped one.

    Args:
        model: a directory that ``save()`` wrote, a model, or None to go back to the shipped ones.

    Raises:
        NoModel, CorruptFile, WrongVersion, SchemaMismatch, InvalidInput: then nothing changes.
    """
    if model is not None and not isinstance(model, XgbCostModel):
        model = as_path("model", model)
        with file_errors(model):
            model = models.load(model)
    chosen = models.use(model)
    winners.forget()
    forget_launches()
    return chosen


def result_for(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    tf32: bool | None = None,
    out_dtype: torch.dtype | None = None,
    mode: str = "auto",
    model: ModelLike = None,
) -> TuningResult | None:
    """What :func:`matmul` goes by for such operands; None before its first call, or if empty."""
    launch = launch_for(
        a, b, out=out, bias=bias, activation=activation, tf32=tf32, out_dtype=out_dtype, mode=mode,
        model=model,
    )  # fmt: skip
    return launch.result if launch is not None else None


def launch_for(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    tf32: bool | None = None,
    out_dtype: torch.dtype | None = None,
    mode: str = "auto",
    model: ModelLike = None,
) -> Launch | None:
    """What :func:`matmul` launches for such operands; None before its first call."""
    if tf32 is None:
        tf32 = _as_torch(a)
    mode = _deterministic(mode)
    found = _launches.get(_key(a, b, out, bias, activation, tf32, out_dtype, mode, model))
    return found[0] if found is not None else None


def question_of(workload: Workload, index: int, mode: str, model: ModelLike) -> Question:
    """What :func:`matmul` asks for a workload on a device, as torch's switches are now."""
    return Question(workload, index, _deterministic(mode), named_model(model), epoch=epoch())


def _deterministic(mode: str) -> str:
    """What was timed may be another choice, with other bits, in another run: nothing is then."""
    if mode == "auto" and torch.are_deterministic_algorithms_enabled():
        return "predict"
    return mode


def _as_torch(a: torch.Tensor) -> bool | None:
    """Whether torch itself would multiply by TF32; None where that is no question."""
    return torch_multiplies_in_tf32() if getattr(a, "dtype", None) is torch.float32 else None


def _key(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
    mode: str,
    model: ModelLike,
) -> Any:
    """All that a prepared launch depends on, as cheap to compute as it can be.

    Whether there is a gradient to lose is in it: such a call never gets past its validation.
    """
    try:
        return (
            a.shape, a.stride(), a.dtype, a.get_device(), a.data_ptr() & 15,
            b.shape, b.stride(), b.dtype, b.get_device(), b.data_ptr() & 15,
            (a.requires_grad or b.requires_grad) and torch.is_grad_enabled(),
            None if out is None else _described(out),
            None if bias is None else _described(bias),
            activation, tf32, out_dtype, mode, model if model is None else _identity(model),
            epoch(),
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):
        return None  # no dense tensors: the validation says what they are


def _described(x: torch.Tensor) -> Any:
    wants_grad = x.requires_grad and torch.is_grad_enabled()
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, wants_grad


def _identity(model: ModelLike) -> Any:
    """A model is compared by identity, a directory by its name and when it was last saved."""
    if not isinstance(model, str | PathLike):
        return model
    path = os.path.join(model, CARD)
    return path, os.stat(path).st_mtime_ns if os.path.exists(path) else 0


def _is_batch(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not getattr(a, "ndim", 2) == getattr(b, "ndim", 2) == 2


def _traced(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
    mode: str,
    model: ModelLike,
) -> torch.Tensor:
    """The product as an operator of torch's: what is traced, and what is to have a gradient."""
    if model is not None:
        raise InvalidInput(
            "model= with torch.compile or a tensor that requires grad: call costmodel.use(model) "
            "before instead"
        )
    if _is_batch(a, b):
        return multiply_batches(
            matmul, a, b, out, bias=bias, activation=activation, tf32=tf32, out_dtype=out_dtype,
            mode=mode,
        )  # fmt: skip
    operator = torch.ops.costmodel.matmul  # of costmodel.torch_ops
    found = operator(a, b, bias, activation or "none", tf32, out_dtype, mode)
    return found if out is None else out.copy_(found)


def _first_call(
    key: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    tf32: bool | None,
    out_dtype: torch.dtype | None,
    mode: str,
    model: ModelLike,
) -> torch.Tensor:
    check_mode(mode)
    if _is_batch(a, b):
        return multiply_batches(
            matmul, a, b, out, bias=bias, activation=activation, tf32=tf32, out_dtype=out_dtype,
            mode=mode, model=model,
        )  # fmt: skip
    check_arguments(a, b, out, bias, activation, tf32, out_dtype)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (a, b, bias) if x is not None):
        return _traced(a, b, out, bias, activation, tf32, out_dtype, mode, model)
    index = a.get_device()
    with torch.cuda.device(index):
        if torch.cuda.is_current_stream_capturing():
            raise CostModelError(
                f"the first product of a[{a.shape[0]}, {a.shape[1]}] and b[{b.shape[0]}, "
                f"{b.shape[1]}] came while a CUDA graph is captured, where nothing may be timed "
                f"or loaded: call matmul once before, or costmodel.warmup([(m, n, k)])"
            )
    result = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype) if out is None else out
    launch = _prepare(a, b, result, bias, activation or "none", bool(tf32), mode, model)
    if len(_launches) >= _KEPT_LAUNCHES:
        _launches.clear()
    if key is not None:
        operands = (result, a, b, bias)
        _launches[key] = launch, tuple(0 if x is None else span_bytes(x) for x in operands)
    launch(a, b, result, bias)
    return result


def _prepare(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    tf32: bool,
    mode: str,
    model: ModelLike,
) -> Launch:
    workload = Workload.from_tensors(
        a, b, out, bias=bias is not None, activation=activation, tf32=tf32
    )
    if not (workload.m and workload.n and workload.k):
        return TorchLaunch(activation, tf32=tf32)
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("", "0", "false", "off", "no"):
        raise CostModelError(
            "TRITON_INTERPRET is set: Triton would interpret the kernels on the CPU, and timings "
            "of that mean nothing; unset it before Triton is imported"
        )
    index = a.get_device()
    question = question_of(workload, index, mode, model)
    result = winners.find(question)
    launch = _load(result, workload, index, (a, b, out))
    if launch is None and not question.epoch:  # in a group none may choose anew by itself
        log.warning("%s no longer works for %s: tuning again", result.chosen, workload)
        result = winners.find(question, instead_of=result)
        launch = _load(result, workload, index, (a, b, out))
    if launch is None:
        warnings.warn(
            f"no configuration of {workload} can be loaded: torch computes it",
            RuntimeWarning,
            stacklevel=4,
        )
        return TorchLaunch(activation, result, tf32)
    return launch


def _load(
    result: TuningResult,
    workload: Workload,
    index: int,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> Launch | None:
    """The launch of a result; where that was only predicted, of the next choices too."""
    if result.config is None:
        return TorchLaunch(workload.code.activation, result, workload.code.tf32)
    configs = [result.config] if result.timed else [config for config, _ in result.ranked]
    for config in configs:
        if legality(config, workload, result.target.device):
            continue
        plan = Plan.of(workload, config, result.target.device.sm_count)
        try:
            kernel = load(plan.spec, result.target, index)
        except (CompileError, LaunchError) as error:
            log.info("%s: %s", config, one_line(error))
            continue
        return TritonLaunch(plan, kernel, index, operands, result)
    return None
