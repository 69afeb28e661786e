"""``tune``, ``pin`` and ``unpin``: choices made before the first product."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from costmodel.data.measurement import Runner
from costmodel.dispatch import dispatch
from costmodel.dispatch.calls import Call
from costmodel.dispatch.check import check_matrices
from costmodel.dispatch.dispatch import ModelLike
from costmodel.dispatch.pins import pin_config, unpin_config
from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig, as_config
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.fast import torch_multiplies_in_tf32
from costmodel.tuning import modes
from costmodel.tuning.ranking import named_model
from costmodel.tuning.tuner import check_tuning
from costmodel.tuning.tuner import tune as tune_with
from costmodel.tuning.tuning_result import TuningResult


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
        config: a configuration, its short name (``"tma 128x256x64 w8 s4 g8"``), or ``"torch"``.
        problem, dtype, out_dtype, tf32, device: of :func:`tune`.
        bias, activation: of the calls that are meant; a :class:`Workload` has its own.

    Returns:
        What :func:`result_for` gives from now on.

    Raises:
        IllegalConfig: it cannot run this workload on this device; the message says why.
        CompileError, LaunchError: Triton, ptxas or the device refused it.
        HostError: no folder or C compiler to compile with.
        InvalidInput: neither a configuration nor ``"torch"``, or an empty product.
        ShapeError, UnsupportedDtype: of the problem.
        NoGpu: there is none to launch on.
    """
    by_torch = isinstance(config, str) and config == "torch"
    chosen = None if by_torch else as_config("config", config, ", 'torch'")
    workload, index = _pinnable(problem, dtype, out_dtype, tf32, bias, activation, device)
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

    Args:
        as of :func:`pin`, without the configuration.

    Returns:
        whether anything was pinned.

    Raises:
        NoGpu: there is none, so that nothing can be pinned.
        InvalidInput: an empty product. ShapeError, UnsupportedDtype: of the problem.
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
        mode: ``auto``, ``topk``, ``exhaustive``, ``predict`` or ``heuristic``, of
            :func:`costmodel.tuning.tuner.tune`. Default: as :func:`costmodel.matmul` has it;
            ``auto`` where that would be ``background`` or ``never``.
        model: a model, or the directory of one; default: that of :func:`use`, else the shipped
            one, else rules of thumb.
        k: how many working candidates to time.
        include_torch: ``torch.matmul`` (cuBLAS) is a candidate too, and may win: ``config`` of the
            result is None then. Untimed, it is taken where the model predicts that it is faster.
        budget_s: stop compiling and timing after about so many seconds; the best so far wins.
        runner: what times; with one, nothing is kept. A ``ReplayRunner`` needs no GPU.
        device: CUDA device; default: that of the matrices, or the current one.

    Returns:
        What was ranked, timed and chosen, and why; latencies are in us.

    Raises:
        InvalidInput: an unknown mode, k < 1, no seconds, or an empty product; before a GPU is
            looked for.
        ShapeError, UnsupportedDtype, LayoutError, DeviceError: of the problem.
        NoModel, CorruptFile, WrongVersion, SchemaMismatch: ``model`` is a path without a usable
            model.
        NoGpu: there is none to time on, and no ``runner``.
        HostError: no folder, process or C compiler to compile or time with.
        NotRecorded: the recording of a ``ReplayRunner`` does not hold this workload.
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
    check_tuning(workload, k, budget_s)  # so that a script can be checked without a GPU
    named = named_model(model)
    Target.current(device)  # raises NoGpu, which says more than torch would
    index = torch.cuda.current_device() if device is None else device
    key = dispatch.winners.key(
        workload, index, mode=mode, model=named, k=k, include_torch=include_torch
    )
    result = dispatch.winners.tune(key, workload.m, budget_s=budget_s)
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
            return Workload.dense(
                m, n, k, **matmul_types(dtype, out_dtype, tf32), **epilogue
            ), device
        case (torch.Tensor() as a, torch.Tensor() as b):
            result: Any = None if out_dtype is None else getattr(torch, out_dtype, out_dtype)
            check_matrices(Call(a, b, tf32=tf32, out_dtype=result))
            out = torch.empty((a.shape[0], b.shape[1]), dtype=result or a.dtype, device=a.device)
            multiplies = matmul_types(str(a.dtype).removeprefix("torch."), None, tf32)
            found = Workload.from_tensors(a, b, out, tf32=multiplies["tf32"], **epilogue)
            return found, a.get_device()
    raise InvalidInput(
        f"({', '.join(type(p).__name__ for p in problem)}): expected m, n, k, or a Workload, "
        f"or two matrices"
    )


def matmul_types(dtype: str, out_dtype: str | None, tf32: bool | None) -> dict[str, Any]:
    """The options of ``Workload.dense``; float32 follows torch's switch where nothing is said."""
    if tf32 is None:
        tf32 = dtype == "float32" and torch_multiplies_in_tf32()
    return {"dtype": dtype, "out_dtype": out_dtype, "tf32": tf32}
