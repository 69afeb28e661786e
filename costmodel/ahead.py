"""What a program may do before its first product: tune, compile and load."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from costmodel import dispatch
from costmodel.arguments import check_arguments
from costmodel.dispatch import ModelLike
from costmodel.errors import InvalidInput, LaunchError, RankError
from costmodel.measurement import Runner
from costmodel.prepared import Launch, TorchLaunch
from costmodel.ranking import named_model
from costmodel.ranks import Ranks
from costmodel.target import Target
from costmodel.torch_product import torch_multiplies_in_tf32
from costmodel.tuner import check_mode
from costmodel.tuner import tune as tune_with
from costmodel.tuning_result import TuningResult
from costmodel.winners import Question
from costmodel.workload import CodeClass, Workload

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["tune", "warmup"]

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
    mode: str = "auto",
    model: ModelLike = None,
    group: ProcessGroup | None = None,
) -> list[TuningResult | None]:
    """Tune, compile and load ahead, so that no request has to wait for it.

    Args:
        problems: (m, n, k) with row-major operands of ``dtype``, or workloads with dense ones.
        dtype: float16, bfloat16 or float32; out_dtype: of the result, default: the same.
        tf32: as :func:`costmodel.matmul` has it: None follows torch's switch.
        device: CUDA device; default: the current one.
        group: a process group of ``torch.distributed``, all of whose ranks make this call. Its
            first rank decides, from its cache or by tuning, and all take what it chose.

    Returns:
        What was chosen for each (None for an empty product).

    Raises:
        NoGpu: there is none to warm up.
        RankError: with ``group``: a rank failed, or they differ; on all ranks, and nothing holds.
    """
    listed = functools.cache(lambda: list(problems))

    def calls() -> Iterator[_Call]:
        """One at a time: operands take memory."""
        Target.current(device)
        index = torch.cuda.current_device() if device is None else device
        check_mode(mode)
        for problem in listed():
            workload = _workload(problem, _types(dtype, out_dtype, tf32), bias, activation)
            yield _Call.blank(workload, index, mode, model)

    if group is not None:
        return _together(Ranks(group), calls)
    return [call.launched().result for call in calls()]


@dataclass(frozen=True)
class _Call:
    """A call of ``matmul`` as a program will make it."""

    a: torch.Tensor
    b: torch.Tensor
    options: Mapping[str, Any]
    question: Question

    @classmethod
    def blank(cls, workload: Workload, index: int, mode: str, model: ModelLike) -> _Call:
        """With operands of whatever numbers are in memory."""
        code = workload.code
        a, b, out, row = _blank_operands(workload, index)
        activation = None if code.activation == "none" else code.activation
        options = {
            "out": out if code.c_layout == "col" else None, "bias": row, "activation": activation,
            "mode": mode, "model": model, **_precision(code),
        }  # fmt: skip
        found = Workload.from_tensors(
            a, b, out, bias=row is not None, activation=code.activation, tf32=code.tf32
        )
        return cls(a, b, options, dispatch.question_of(found, index, mode, model))

    @property
    def is_empty(self) -> bool:
        workload = self.question.workload
        return not (workload.m and workload.n and workload.k)

    def launched(self) -> Launch:
        dispatch.matmul(self.a, self.b, **self.options)
        launch = dispatch.launch_for(self.a, self.b, **self.options)
        if launch is None:  # four thousand others were prepared meanwhile, by other threads
            return TorchLaunch(self.question.workload.code.activation)
        return launch


def _together(ranks: Ranks, calls: Callable[[], Iterator[_Call]]) -> list[TuningResult | None]:
    """The first rank decides; the others take it, or all fail."""
    winners = dispatch.winners
    questions = ranks.each(lambda: [call.question for call in calls() if not call.is_empty])
    ranks.require_same(ranks.each(lambda: [winners.key(question) for question in questions]))

    def decision(question: Question) -> Any:
        alone = replace(question, epoch=0)
        return ranks.decided(lambda: winners.find(alone).to_dict())

    # One by one, so that the time limit of a collective is that of one tuning.
    decisions = [decision(question) for question in questions]

    def take() -> list[TuningResult | None]:
        for question, told in zip(questions, decisions, strict=True):
            winners.agree(question, TuningResult.from_dict(told))
        dispatch.forget_launches()
        return [_taken(call) for call in calls()]

    try:
        return ranks.each(take)
    except RankError:
        for question in questions:
            winners.disagree(question)
        dispatch.forget_launches()
        raise


def _taken(call: _Call) -> TuningResult | None:
    launch = call.launched()
    result = launch.result
    if result is not None and launch.config != result.config:
        raise LaunchError(
            f"{result.chosen}, which the first rank chose for {call.question.workload}, cannot be "
            f"loaded here"
        )
    return result


def tune(
    *problem: Any,
    dtype: str = "float16",
    out_dtype: str | None = None,
    tf32: bool | None = None,
    mode: str = "auto",
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
        runner: what times; with one, nothing is kept. A ``ReplayRunner`` needs no GPU.
        device: CUDA device; default: that of the matrices, or the current one.

    The others are those of :func:`costmodel.tuner.tune`.
    """
    check_mode(mode)
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
) -> tuple[Workload, int | None]:
    match problem:
        case (Workload() as workload,):
            return workload, device
        case (int() as m, int() as n, int() as k):
            return Workload.dense(m, n, k, **_types(dtype, out_dtype, tf32)), device
        case (torch.Tensor() as a, torch.Tensor() as b):
            result: Any = None if out_dtype is None else getattr(torch, out_dtype, out_dtype)
            check_arguments(a, b, None, None, None, tf32, result)
            out = torch.empty((a.shape[0], b.shape[1]), dtype=result or a.dtype, device=a.device)
            multiplies = _types(str(a.dtype).removeprefix("torch."), None, tf32)
            return Workload.from_tensors(a, b, out, tf32=multiplies["tf32"]), a.get_device()
    raise InvalidInput(
        f"tune({', '.join(type(p).__name__ for p in problem)}): expected m, n, k, or a Workload, "
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
