"""``matmul``: the hot path, and what a program sets for all calls.

A call looks up what it has done with such operands before, and launches. Only the first call of a
kind validates, finds the winner (from memory, from disk or by tuning) and loads its binary.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch

from costmodel import models
from costmodel.data.candidates import CostModel
from costmodel.dispatch.arguments import (
    check_arguments,
    check_kinds,
    may_share,
    require_disjoint,
    require_shape,
    span_bytes,
)
from costmodel.dispatch.background import Background
from costmodel.dispatch.batches import multiply_batches, multiply_by_torch
from costmodel.dispatch.calls import Call, ModelLike, by_autocast, key_of
from costmodel.dispatch.launches import Launches
from costmodel.dispatch.outputs import NewOutput
from costmodel.dispatch.preparing import prepare
from costmodel.dispatch.torch_context import (
    in_forward_level,
    is_autocasting,
    is_fake,
    is_for_torch,
    is_scripting,
    is_watched,
)
from costmodel.errors import InvalidInput
from costmodel.launch.fast import Launch
from costmodel.launch.torch_product import torch_multiplies_in_tf32
from costmodel.support.counters import count
from costmodel.support.untrusted import as_path, file_errors
from costmodel.tuning import modes
from costmodel.tuning.buckets import Buckets
from costmodel.tuning.cache import WinnerCache
from costmodel.tuning.ranking import named_model
from costmodel.tuning.tuning_result import TuningResult
from costmodel.tuning.winners import Winners

__all__ = [
    "ModelLike", "forget_launches", "launch_for", "matmul", "result_for", "set_buckets", "set_mode",
    "use", "winners",
]  # fmt: skip

winners = Winners(WinnerCache())
launches = Launches()
_background = Background(launches.discard)
# Without torch's wrapper, which costs every call as much again.
_deterministic = torch._C._get_deterministic_algorithms
_is_compiling = torch.compiler.is_compiling
# So that autograd notices if it has kept what was in an output before.
_written = torch.autograd.graph.increment_version
_FLOAT32 = torch.float32


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    tf32: bool | None = None,
    out_dtype: torch.dtype | None = None,
    mode: str | None = None,
    model: ModelLike = None,
) -> torch.Tensor:
    """act(a @ b + bias), by the fastest configuration known for such operands.

    The first call of a kind tunes: it ranks the space, times the top 8 beside torch and keeps the
    winner on disk. Winners are shared by buckets of m. What computes it is, in this order:

    1. what :func:`costmodel.pin` has pinned for exactly this workload;
    2. the winner of the mode in this process, then the one on disk;
    3. what the mode then does: time, or predict;
    4. torch, where no configuration works.

    Where a process group of ``torch.distributed`` is initialised, 2 is what the ranks agreed on in
    ``costmodel.warmup(..., group=...)``, and 3 the model's first choice: nothing is timed, and the
    disk is not read.

    Inside a CUDA graph's capture nothing is timed, compiled or loaded: it is the first of these
    whose binary is loaded, else the best of the loaded ones, else torch with a warning. Such a
    makeshift is not kept: the next call outside tunes.

    A tensor that requires grad gets its gradient, and ``torch.compile`` traces it without a break;
    either goes by an operator of torch's, and takes the model of :func:`use` only. Under
    ``torch.autocast`` float32 operands are cast as torch would. What is more than its memory is
    multiplied by torch: under ``torch.func``, with forward-mode gradients, of subclasses that keep
    their numbers elsewhere (``DTensor``, quantised weights).

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
        mode: ``auto``; ``predict`` (the model's first choice, untimed), ``topk`` (time the top 8,
            small products too), ``exhaustive`` (time the whole space), ``heuristic`` (rules, no
            model), ``background`` (torch, then the prediction, answer while a thread tunes) or
            ``never`` (a winner of earlier tuning, else the prediction). Default: that of
            :func:`set_mode`, else of ``COSTMODEL_MODE``, else ``auto``. Under
            ``torch.use_deterministic_algorithms``, ``auto``, ``background`` and ``never`` predict.
        model: a model, or the directory of one; default: that of :func:`use`, else the shipped.

    Returns:
        ``out``, or a new tensor [m, n]. Accumulation is in float32.

    Raises:
        InvalidInput, UnsupportedDtype, GradientError: operands that cannot be used.
        InvalidInput: ``topk`` or ``exhaustive`` in a process group, not agreed on.
    """
    if _is_compiling():
        call = Call(a, b, out, bias, activation, tf32, out_dtype, mode, model)
        call = by_autocast(call) or call
        if in_forward_level():  # of which the operator knows nothing
            return multiply_by_torch(call.a, call.b, call.out, **call.options())
        return _traced(call)
    if getattr(a, "dtype", None) is _FLOAT32:  # else these are no questions
        if is_autocasting():
            call = Call(a, b, out, bias, activation, tf32, out_dtype, mode, model)
            if (cast := by_autocast(call)) is not None:
                return matmul(cast.a, cast.b, **cast.options())
        if tf32 is None:
            tf32 = torch_multiplies_in_tf32()
    if _deterministic():
        mode = modes.deterministic(mode)
    key = key_of(a, b, out, bias, activation, tf32, out_dtype, mode, model)
    try:
        found = launches.get(key)
    except TypeError:  # an option that cannot be hashed is wrong: the checks refuse it
        key = found = None
    if found is None:
        return _first_call(key, Call(a, b, out, bias, activation, tf32, out_dtype, mode, model))
    launch, spans, new_output = found
    if out is None:
        out = new_output(a)
        launch(a, b, out, bias)
        return out
    if may_share(out, a, b, bias, spans):
        for x, span, name in zip((a, b, bias), spans[1:], ("a", "b", "bias"), strict=True):
            if x is not None:
                require_disjoint(out, x, name, (spans[0], span))
    launch(a, b, out, bias)
    _written(out)
    return out


def forget_launches() -> None:
    """Look up the winner again at the next call of each kind: another may have been found."""
    launches.clear()
    _background.forget_failures()


def use(model: str | Path | CostModel | None) -> CostModel | None:
    """Make a model answer in this process from now on, before any shipped one.

    Args:
        model: a directory that ``save()`` wrote, a model, or None to go back to the shipped ones.

    Raises:
        NoModel, CorruptFile, WrongVersion, SchemaMismatch, InvalidInput: then nothing changes.
    """
    if model is not None and not isinstance(model, CostModel):
        model = as_path("model", model)
        with file_errors(model):
            model = models.load(model)
    chosen = models.use(model)
    winners.forget()
    forget_launches()
    return chosen


def set_mode(mode: str | None) -> None:
    """Set the mode of all calls that name none; see :func:`matmul`.

    Args:
        mode: None: as ``COSTMODEL_MODE`` has it, else ``auto``.

    Raises:
        InvalidInput: no mode of this name; then nothing changes.
    """
    modes.set_default_mode(mode)
    forget_launches()


def set_buckets(steps: int = 4, bounds: tuple[int, ...] = ()) -> None:
    """Set which m share a winner, as :class:`costmodel.tuning.buckets.Buckets` has it.

    Winners on disk stay, and are found by the buckets that they are of.

    Args:
        steps: ranges that each octave of m above 128 has.
        bounds: upper ends of one's own, ascending; past the last, ``steps`` go on.

    Raises:
        InvalidInput: with what is wrong; then nothing changes.
    """
    winners.buckets = Buckets(steps, bounds)
    winners.forget()
    forget_launches()


def result_for(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    tf32: bool | None = None,
    out_dtype: torch.dtype | None = None,
    mode: str | None = None,
    model: ModelLike = None,
) -> TuningResult | None:
    """What :func:`matmul` goes by for such operands.

    Args:
        as of :func:`matmul`.

    Returns:
        What was chosen and why. None before the first call, where the operands are empty, and
        where it goes by another product than of these: for batches, and where a gradient is
        wanted.

    Raises:
        What :func:`matmul` refuses of such operands and options.
    """
    _check_call(Call(a, b, out, bias, activation, tf32, out_dtype, mode, model))
    launch = launch_for(
        a, b, out=out, bias=bias, activation=activation, tf32=tf32, out_dtype=out_dtype, mode=mode,
        model=model,
    )  # fmt: skip
    return launch.result if launch is not None else None


def launch_for(a: torch.Tensor, b: torch.Tensor, **options: Any) -> Launch | None:
    """What :func:`matmul` launches for such operands; None before its first call.

    Args:
        options: those of :func:`matmul`.
    """
    call = Call(a, b, **options)
    call = by_autocast(call) or call
    a, b, tf32 = call.a, call.b, call.tf32
    if tf32 is None and getattr(a, "dtype", None) is _FLOAT32:
        tf32 = torch_multiplies_in_tf32()
    mode = modes.deterministic(call.mode) if _deterministic() else call.mode
    key = key_of(a, b, call.out, call.bias, call.activation, tf32, call.out_dtype, mode, call.model)
    found = launches.get(key)
    return found[0] if found is not None else None


def _check_call(call: Call) -> None:
    """Refuse what :func:`matmul` refuses of a first call."""
    call = by_autocast(call) or call
    modes.check_mode(modes.default_mode() if call.mode is None else call.mode)
    a, b, out, bias = call.a, call.b, call.out, call.bias
    if is_for_torch((a, b, out, bias)):
        return
    check = check_kinds if _is_batch(a, b) else check_arguments
    check(a, b, out, bias, call.activation, call.tf32, call.out_dtype)
    if not isinstance(call.model, str | PathLike):  # such is read when it is to choose
        named_model(call.model)


def _is_batch(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not getattr(a, "ndim", 2) == getattr(b, "ndim", 2) == 2


def _traced(call: Call) -> torch.Tensor:
    """The product as an operator of torch's: what is traced, and what is to have a gradient."""
    if call.model is not None:
        raise InvalidInput(
            "model= with torch.compile or a tensor that requires grad: call costmodel.use(model) "
            "before instead"
        )
    if _is_batch(call.a, call.b):
        return multiply_batches(matmul, call.a, call.b, call.out, **call.options())
    out, out_dtype = call.out, call.out_dtype
    if out is not None:
        require_shape("out", out, (call.a.shape[0], call.b.shape[1]))
        out_dtype = out.dtype if out_dtype is None else out_dtype
    operator = torch.ops.costmodel.matmul  # of costmodel.torch_ops
    found = operator(
        call.a, call.b, call.bias, call.activation or "none", call.tf32, out_dtype, call.mode
    )
    return found if out is None else out.copy_(found)


def _first_call(key: object, call: Call) -> torch.Tensor:
    begun = launches.begin()
    if (cast := by_autocast(call)) is not None:
        return matmul(cast.a, cast.b, **cast.options())
    call.mode = modes.default_mode() if call.mode is None else call.mode
    modes.check_mode(call.mode)
    a, b, bias = call.a, call.b, call.bias
    if is_for_torch((a, b, call.out, bias)):
        return multiply_by_torch(a, b, call.out, **call.options())
    if is_scripting() and call.model is None:
        return _traced(call)
    if _is_batch(a, b):
        return multiply_batches(matmul, a, b, call.out, **call.options())
    check_arguments(a, b, call.out, bias, call.activation, call.tf32, call.out_dtype)
    operands = (a, b, bias)
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands if x is not None):
        return _traced(call)
    if any(x is not None and is_fake(x) for x in (*operands, call.out)):
        return _traced(call)
    if is_watched() and call.model is None:
        return _traced(call)
    new_output = NewOutput(a, b, call.out_dtype)
    out = new_output(a) if call.out is None else call.out
    found = prepare(call, out, winners, _background)
    count(prepared=1)
    if key is not None and found.keep:
        spans = tuple(0 if x is None else span_bytes(x) for x in (out, *operands))
        launches.put(key, (found.launch, spans, new_output), begun)
        if found.job is not None and not _background.hold(found.job, key, found.switches):
            launches.discard([key])  # there is a better one meanwhile
    found.launch(a, b, out, bias)
    if call.out is not None:
        _written(out)
    return out
