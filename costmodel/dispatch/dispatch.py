"""``matmul``: the hot path, and what a program sets for all calls.

A warm call looks up its launch and queues it. Only the first call of a kind checks its operands,
finds the winner (in memory, on disk or by tuning) and loads its binary. The first of these that
exists computes a product:

1. what :func:`costmodel.pin` has pinned for exactly this workload;
2. the winner of the mode in this process, then the one on disk;
3. a winner that the mode finds now, by timing or by prediction;
4. torch, where no configuration works.

In an initialised process group of ``torch.distributed``, 2 is the winner that the ranks agreed on
in ``costmodel.warmup(..., group=...)``, and 3 is the model's first choice: nothing is timed, and
the disk is not read. In the capture of a CUDA graph nothing is timed, compiled or loaded: the known
winner is used if its binary is loaded, else the model's best among the loaded configurations, else
torch with a warning. The next call outside a capture tunes.
"""

import threading
from dataclasses import replace
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from costmodel import models
from costmodel.autotune.prior import use_for_kernels
from costmodel.data.candidates import CostModel, ModelLike
from costmodel.dispatch.background import Background
from costmodel.dispatch.calls import (
    by_autocast,
    in_forward_level,
    in_functorch,
    is_deterministic,
    is_fake,
    is_for_torch,
    is_scripting,
    is_watched,
    key_of,
    launch_key,
    multiply_batches,
    multiply_by_torch,
    settled,
)
from costmodel.dispatch.check import (
    Call,
    Spans,
    check_kinds,
    check_matrices,
    require_apart,
    require_shape,
    spans_of,
)
from costmodel.dispatch.gradients import WithGradients, is_gain
from costmodel.dispatch.launches import Launches, NewOutput
from costmodel.dispatch.resolve_launch import resolve_launch
from costmodel.errors import InvalidInput
from costmodel.gemm.kernels import FAMILIES
from costmodel.launch.fast import Launch, TorchLaunch, is_autocasting, torch_multiplies_in_tf32
from costmodel.tuning import modes
from costmodel.tuning.counters import count
from costmodel.tuning.ranking import named_model
from costmodel.tuning.tuning_key import Buckets
from costmodel.tuning.tuning_result import TuningResult
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners

if TYPE_CHECKING:
    from costmodel.autotune.model import KernelModel

# These would otherwise be imported inside the first call, while a request may wait for it.
for _module in ("msgspec", "platformdirs", *FAMILIES):
    import_module(_module)

_is_compiling = torch.compiler.is_compiling
# Tells autograd that an output was written to: autograd may have saved it before.
_written = torch.autograd.graph.increment_version
_FLOAT32 = torch.float32

_NOWHERE = 0, 0, 0, 0
_Entry = tuple[Any, Spans, NewOutput | None]

winners = Winners(WinnerCache())
launches = Launches()
layers: WeakSet[Any] = WeakSet()  # of costmodel.nn.Linear, which know their launches
layers_lock = threading.Lock()
_background = Background()


def matmul(
    a: Tensor, b: Tensor, *, out: Tensor | None = None,
    bias: Tensor | None = None, activation: str | None = None, tf32: bool | None = None,
    out_dtype: torch.dtype | None = None, mode: str | None = None, model: ModelLike = None,
) -> Tensor:  # fmt: skip
    """Return act(a @ b + bias), by the fastest configuration known for such operands.

    The first call of a kind tunes: it ranks the space, times the top 8 beside torch and keeps the
    winner on disk, for all m of a bucket. Autograd, ``torch.compile``, ``torch.autocast``,
    ``torch.func`` and tensor subclasses work as with ``torch.matmul``. docs/tuning.md tells more.

    Args:
        a, b: [m, k] and [k, n] in float16, bfloat16 or float32, any strides, on one NVIDIA GPU.
            Vectors and batches as in ``torch.matmul``; torch multiplies two batches.
        out: [m, n] to write to, apart from the inputs. bias: [n] of the type of the result.
        activation: ``relu``, ``gelu`` (exact) or ``silu``; applied last.
        tf32: multiply float32 as TF32 or IEEE; default: as torch's switch is set.
        out_dtype: of a result without ``out``: that of a and b (default), or float32.
        mode: ``auto``, ``predict``, ``topk``, ``exhaustive``, ``heuristic``, ``background`` or
            ``never``; default: that of :func:`set_mode`, else ``COSTMODEL_MODE``, else ``auto``.
        model: a model or its directory; default: that of :func:`use`, else the shipped one.

    Raises:
        InvalidInput, UnsupportedDtype, GradientError: operands or options that cannot be used.
    """
    if _is_compiling():
        return _compiled(Call(a, b, out, bias, activation, tf32, out_dtype, mode, model))
    if getattr(a, "dtype", None) is _FLOAT32:  # other types have no such switches
        if is_autocasting():
            call = Call(a, b, out, bias, activation, tf32, out_dtype, mode, model)
            if (cast := by_autocast(call)) is not None:
                return matmul(cast.a, cast.b, **cast.options())
        if tf32 is None:
            tf32 = torch_multiplies_in_tf32()
    if is_deterministic():
        mode = modes.deterministic(mode)
    key = key_of(a, b, out, bias, activation, tf32, out_dtype, mode, model)
    try:
        found = launches.get(key)
    except TypeError:  # an option that cannot be hashed is wrong: the checks refuse it
        key = found = None
    if found is None:
        return _first_call(key, Call(a, b, out, bias, activation, tf32, out_dtype, mode, model))
    launch, spans, new_output = found
    if new_output is None:
        return launch.multiplied(a, b, bias)
    if out is None:
        out = new_output(a)
        launch(a, b, out, bias)
        return out
    require_apart(out, a, b, bias, spans)
    launch(a, b, out, bias)
    _written(out)
    return out


def forget_launches() -> None:
    """Have the next call of each kind look up its winner again."""
    launches.clear()
    with layers_lock:
        found = [*layers]
    for layer in found:
        layer.forget_launches()
    _background.forget()


def use(model: str | Path | CostModel | None) -> "CostModel | KernelModel | None":
    """Use a model in this process from now on, in place of the shipped ones.

    Args:
        model: a directory that ``save()`` or ``costmodel train`` wrote, a model, or None to go back
            to the shipped ones. The directory of a model of kernels is for tuning kernels.

    Raises:
        NoModel, CorruptFile, WrongVersion, SchemaMismatch, InvalidInput: the model cannot be used;
            then nothing changes.
    """
    if (of_kernels := use_for_kernels(model)) is not None:
        return of_kernels
    chosen = models.use(model)
    winners.forget()
    forget_launches()
    return chosen


def set_mode(mode: str | None) -> None:
    """Set the mode of all calls without ``mode``; see :func:`matmul`.

    Args:
        mode: None: that of ``COSTMODEL_MODE``, else ``auto``.

    Raises:
        InvalidInput: no mode of this name; then nothing changes.
    """
    modes.set_default_mode(mode)
    forget_launches()


def set_buckets(steps: int = 4, bounds: tuple[int, ...] = ()) -> None:
    """Set which m share a winner; see :class:`costmodel.tuning.tuning_key.Buckets`.

    Winners on disk stay, each with the bucket that it was tuned for.

    Args:
        steps: ranges in each octave of m above 128.
        bounds: your own upper ends of ranges, ascending; above the last, ``steps`` applies.

    Raises:
        InvalidInput: the steps or bounds are wrong; then nothing changes.
    """
    winners.buckets = Buckets(steps, bounds)
    winners.forget()
    forget_launches()


def result_for(a: Tensor, b: Tensor, **options: Any) -> TuningResult | None:
    """Return the tuning result that :func:`matmul` uses for these operands.

    Args:
        options: those of :func:`matmul`.

    Returns:
        What was chosen and why. None before the first call, for empty operands, for two batches,
        and in traces and under torch.func.

    Raises:
        as :func:`matmul` for such operands and options.
    """
    call = settled(Call(a, b, **options))
    if _computed_by(call) == "batches":
        check_kinds(call)
    if not isinstance(call.model, str | PathLike):  # a directory is read only to choose
        named_model(call.model)
    found = launches.get(launch_key(call))
    return None if found is None else found[0].result


def launch_of(call: Call) -> Launch:
    """Return the launch of two matrices; tune if need be. Nothing is computed."""
    call = settled(call)
    check_matrices(call)
    call = replace(call, mode=modes.chosen_mode(call.mode))
    out = NewOutput(call.a, call.b.size(1), call.out_dtype)(call.a)
    return resolve_launch(call, out, winners, _background).launch


def entry_for(a: Tensor, b: Tensor, **options: Any) -> _Entry | None:
    """Return the entry that :func:`matmul` keeps for these operands; None if it keeps none.

    Args:
        options: those of :func:`matmul`.
    """
    return launches.get(launch_key(settled(Call(a, b, **options))))


def _computed_by(call: Call) -> str:
    """Check a call and return how it is computed.

    ``torch``, ``operator``, ``batches``, ``kernel``, or ``gradients``: a kernel in autograd. The
    operands of a batch are checked later, as matrices.
    """
    modes.chosen_mode(call.mode)
    if is_for_torch(call.operands):
        return "torch"
    if is_scripting() and call.model is None:
        return "operator"
    if call.is_batch:
        return "batches"
    check_matrices(call)
    given = [x for x in call.operands if x is not None]
    if any(map(is_fake, given)) or (is_watched() and call.model is None):
        return "operator"
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        return "kernel"
    # Under torch.func an autograd function without setup_context fails.
    return "operator" if call.model is not None or in_functorch() else "gradients"


def _first_call(key: object, call: Call) -> Tensor:
    begun = launches.begin()
    if (cast := by_autocast(call)) is not None:
        return matmul(cast.a, cast.b, **cast.options())
    who = _computed_by(call)
    if call.mode is None:
        call.mode = modes.default_mode()
    if who == "torch":
        return multiply_by_torch(call)
    if who == "operator":
        return _by_operator(call)
    if who == "batches":
        product = multiply_batches(matmul, call)
        if key is not None and (entry := _entry_of_batch(call)) is not None:
            launches.put(key, entry, begun)
        return product
    return _first_of_matrices(key, call, begun, with_gradients=who == "gradients")


def _first_of_matrices(
    key: object, call: Call, begun: dict[Any, _Entry], *, with_gradients: bool
) -> Tensor:
    a, b, out, bias = call.operands
    new_output = NewOutput(a, b.size(1), call.out_dtype)
    if out is None:
        out = new_output(a)
    found = resolve_launch(call, out, winners, _background)
    count(prepared=1)
    spans = spans_of(out, a, b, bias)
    entry: _Entry = found.launch, spans, new_output
    if call.out is None and (made := _returning(found.launch, new_output, call, with_gradients)):
        entry = made, spans, None
    if key is not None and found.is_final:
        launches.put(key, entry, begun)
    if entry[2] is None:
        return entry[0].multiplied(a, b, bias)
    found.launch(a, b, out, bias)
    if call.out is not None:
        _written(out)
    return out


def _returning(
    launch: Launch, new_output: NewOutput, call: Call, with_gradients: bool
) -> TorchLaunch | WithGradients | None:
    """Return the launch that allocates its own result; None if that would gain nothing."""
    is_plain = call.out_dtype in (None, call.a.dtype)
    if with_gradients and launch.config is not None and not is_gain(launch.result):
        code = launch.result.workload.code
        launch = TorchLaunch(code.activation, launch.result, code.tf32)
    # Torch's own gradient of float32 would follow torch's switch at the time of the backward pass.
    follows = with_gradients and call.a.dtype is _FLOAT32
    if isinstance(launch, TorchLaunch) and is_plain and not follows:
        return launch
    return WithGradients(launch, new_output, matmul, call) if with_gradients else None


def _entry_of_batch(call: Call) -> _Entry | None:
    """Return the entry of a batch, made from that of its rows; None if there is none to keep."""
    a, b, n = call.a, call.b, call.b.shape[-1]
    if call.out is not None or b.ndim < 2:
        return None
    if b.ndim > 2:
        is_plain = call.out_dtype in (None, a.dtype) and a.dtype is not _FLOAT32
        return (TorchLaunch(call.activation or "none"), _NOWHERE, None) if is_plain else None
    try:
        rows = a.view(-1, a.shape[-1])
    except RuntimeError:  # they are no rows of one matrix, and are copied
        return None
    found = launches.get(launch_key(replace(call, a=rows)))
    if found is None:
        return None
    launch, spans, new_output = found
    return launch, spans, new_output and NewOutput(a, n, call.out_dtype)


def _compiled(call: Call) -> Tensor:
    """Return the product as ``torch.compile`` traces it."""
    call = by_autocast(call) or call
    if in_forward_level():  # the operator has no forward-mode gradient
        return multiply_by_torch(call)
    return _by_operator(call)


def _by_operator(call: Call) -> Tensor:
    """Return the product by a torch operator, which can be traced and differentiated."""
    if call.model is not None:
        raise InvalidInput(
            "model= with torch.compile or a tensor that requires grad: call costmodel.use(model) "
            "before instead"
        )
    if call.is_batch:
        return multiply_batches(matmul, call)
    out, out_dtype = call.out, call.out_dtype
    if out is not None:
        require_shape("out", out, (call.a.shape[0], call.b.shape[1]))
        out_dtype = out.dtype if out_dtype is None else out_dtype
    operator = torch.ops.costmodel.matmul  # of costmodel.torch_ops
    found = operator(
        call.a, call.b, call.bias, call.activation or "none", call.tf32, out_dtype, call.mode
    )
    return found if out is None else out.copy_(found)
