"""``tune``, ``pin`` and ``unpin``: choices made before the first product."""

from math import inf
from typing import Any

import torch
from torch import Tensor

from costmodel.data.candidates import ModelLike
from costmodel.data.measurement import Runner
from costmodel.dispatch import dispatch
from costmodel.dispatch.check import Call, check_matrices
from costmodel.dispatch.loading import ensure_loaded, pins
from costmodel.errors import IllegalConfig, InvalidInput
from costmodel.files import Named
from costmodel.gemm.config import GemmConfig, as_config
from costmodel.gemm.space import why_illegal
from costmodel.gemm.specialize import kernel_trouble
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.fast import torch_multiplies_in_tf32
from costmodel.launch.plan import Plan
from costmodel.tuning import modes
from costmodel.tuning.ranking import named_model
from costmodel.tuning.tuner import check_tuning
from costmodel.tuning.tuner import tune as tune_with
from costmodel.tuning.tuning_result import PINNED, TuningResult


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
    """Have :func:`matmul` launch one configuration for one workload, in every mode.

    The pin holds in this process, for this workload alone (not for its bucket), until it is
    unpinned or replaced. The configuration is compiled and loaded now, so that it can also be
    launched inside a CUDA graph's capture.

    Args:
        config: a configuration, its short name (``"tma 128x256x64 w8 s4 g8"``), or ``"torch"``.
        problem, dtype, out_dtype, tf32, device: as in :func:`tune`.
        bias, activation: as the calls will have them; a :class:`Workload` has its own.

    Returns:
        The result that :func:`result_for` returns from now on.

    Raises:
        IllegalConfig: the configuration cannot run this workload on this device; the message says
            why.
        CompileError, LaunchError: Triton, ptxas or the device refused the configuration.
        HostError: there is no folder or no C compiler to compile with.
        InvalidInput: neither a configuration nor ``"torch"``, or an empty product.
        ShapeError, UnsupportedDtype: the problem has wrong shapes or types.
        NoGpu: there is no GPU to launch on.
    """
    by_torch = isinstance(config, str) and config == "torch"
    chosen = None if by_torch else as_config("config", config, ", 'torch'")
    workload, index = _pinnable(problem, device, dtype, out_dtype, tf32, bias, activation)
    target = Target.current(index)
    if chosen is not None:
        reason = kernel_trouble(chosen.kernel, target.toolchain)
        if reason := reason or why_illegal(chosen, workload, target.device):
            raise IllegalConfig(
                f"{chosen} cannot run {workload} on {target.device.name}: {reason}; "
                f"SearchSpace.of(workload, target).configs lists those that can"
            )
        ensure_loaded(Plan(workload, chosen, target.device.sm_count), target, index)
    why = "pinned by the caller"
    pins[workload, index] = TuningResult.unranked(workload, target, "pinned", chosen, why, PINNED)
    dispatch.forget_launches()
    return pins[workload, index]


def unpin(*problem: Any, device: int | None = None, **types: Any) -> bool:
    """Undo :func:`pin` for a workload.

    Args:
        problem, device, types: as in :func:`pin`, without the configuration.

    Returns:
        whether anything was pinned.

    Raises:
        NoGpu: there is no GPU, so nothing can be pinned.
        InvalidInput: an empty product.
        ShapeError, UnsupportedDtype: the problem has wrong shapes or types.
    """
    found = pins.pop(_pinnable(problem, device, **types), None)
    dispatch.forget_launches()
    return found is not None


def _pinnable(
    problem: tuple[Any, ...], device: int | None, *types: Any, **named: Any
) -> tuple[Workload, int]:
    workload, device = _problem(problem, device, *types, **named)
    if workload.is_empty:
        raise InvalidInput(f"{workload}: expected sizes over 0, torch computes empty products")
    return workload, device_index(device)


def tune(
    *problem: Any, dtype: str = "float16", out_dtype: str | None = None, tf32: bool | None = None,
    mode: str | None = None, model: ModelLike = None, k: int = 8, include_torch: bool = True,
    budget_s: float = inf, runner: Runner | None = None, device: int | None = None,
) -> TuningResult:  # fmt: skip
    """Tune one product now, and keep the winner for :func:`matmul`.

    Args:
        problem: ``m, n, k``, or a :class:`Workload`, or two matrices on a GPU.
        dtype: of the operands, for ``m, n, k``: float16, bfloat16 or float32.
        out_dtype: of the result; default: that of the operands.
        tf32: as in :func:`costmodel.matmul`: None follows torch's switch. A :class:`Workload` has
            its own ``dtype``, ``out_dtype`` and ``tf32``.
        mode: ``auto``, ``topk``, ``exhaustive``, ``predict`` or ``heuristic``, as in
            :func:`costmodel.tuning.tuner.tune`. Default: that of :func:`costmodel.matmul`, or
            ``auto`` if that is ``background`` or ``never``.
        model: a model or its directory; default: that of :func:`use`, else the shipped one, else
            rules of thumb.
        k: how many working candidates to time.
        include_torch: make ``torch.matmul`` (cuBLAS) a candidate too. If it wins, ``config`` of the
            result is None. Where nothing is timed, it wins if the model predicts that it is clearly
            faster.
        budget_s: stop compiling and timing after about this many seconds; the best so far wins.
        runner: times the candidates; if it is given, the winner is not kept. A ``ReplayRunner``
            needs no GPU.
        device: CUDA device; default: that of the matrices, or the current one.

    Returns:
        What was ranked, timed and chosen, and why; latencies are in us.

    Raises:
        InvalidInput: an unknown mode, k < 1, a budget that is not over 0 s, or an empty product;
            before a GPU is looked for.
        ShapeError, UnsupportedDtype, LayoutError, DeviceError: the problem cannot be used.
        NoModel, CorruptFile, WrongVersion, SchemaMismatch: ``model`` is a path without a usable
            model.
        NoGpu: there is no GPU to time on, and no ``runner``.
        HostError: there is no folder, process or C compiler to compile or time with.
        NotRecorded: the recording of a ``ReplayRunner`` does not hold this workload.
    """
    if mode is None:
        mode = default if (default := modes.default_mode()) in modes.TUNING_MODES else "auto"
    modes.check_tuning_mode(mode)
    workload, device = _problem(problem, device, dtype, out_dtype, tf32)
    options: Named = {"mode": mode, "k": k, "include_torch": include_torch}
    if runner is not None:
        return tune_with(workload, runner=runner, model=model, budget_s=budget_s, **options)
    check_tuning(workload, k, budget_s)  # so that a script can be checked without a GPU
    named = named_model(model)
    key = dispatch.winners.key(workload, device_index(device), model=named, **options)
    result = dispatch.winners.tune(key, workload.m, budget_s=budget_s)
    dispatch.forget_launches()
    return result


def _problem(
    problem: tuple[Any, ...],
    device: int | None,
    dtype: str = "float16",
    out_dtype: str | None = None,
    tf32: bool | None = None,
    bias: bool = False,
    activation: str | None = None,
) -> tuple[Workload, int | None]:
    epilogue: Named = {"bias": bias, "activation": activation or "none"}
    match problem:
        case (Workload() as workload,):
            return workload, device
        case (int() as m, int() as n, int() as k):
            types = matmul_types(dtype, out_dtype, tf32)
            return Workload.dense(m, n, k, **types, **epilogue), device
        case (Tensor() as a, Tensor() as b):
            result: Any = None if out_dtype is None else getattr(torch, out_dtype, out_dtype)
            check_matrices(Call(a, b, tf32=tf32, out_dtype=result))
            out = torch.empty((a.shape[0], b.shape[1]), dtype=result or a.dtype, device=a.device)
            tf32 = matmul_types(str(a.dtype).removeprefix("torch."), None, tf32)["tf32"]
            return Workload.from_tensors(a, b, out, tf32=bool(tf32), **epilogue), a.get_device()
    raise InvalidInput(
        f"({', '.join(type(p).__name__ for p in problem)}): expected m, n, k, or a Workload, "
        f"or two matrices"
    )


def matmul_types(dtype: str, out_dtype: str | None, tf32: bool | None) -> Named:
    """Return the options of ``Workload.dense``; float32 without ``tf32`` follows torch's switch."""
    if tf32 is None:
        tf32 = dtype == "float32" and torch_multiplies_in_tf32()
    return {"dtype": dtype, "out_dtype": out_dtype, "tf32": tf32}


def device_index(device: int | None) -> int:
    """Return a CUDA device; None is the current one. Raises: NoGpu, which says more than torch."""
    Target.current(device)
    return torch.cuda.current_device() if device is None else device
