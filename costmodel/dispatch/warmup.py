"""``warmup``: what first calls would do, done ahead; in a process group, one rank decides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from costmodel.dispatch import dispatch
from costmodel.dispatch.ahead import matmul_types
from costmodel.dispatch.dispatch import ModelLike
from costmodel.errors import HostError, InvalidInput, LaunchError, RankError, warn_of_host
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import CodeClass, Workload
from costmodel.hardware.target import Target
from costmodel.launch.fast import Launch
from costmodel.tuning import modes
from costmodel.tuning.ranking import named_model
from costmodel.tuning.ranks import Ranks, epoch
from costmodel.tuning.tuning_key import TuningKey
from costmodel.tuning.tuning_result import TuningResult

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
    group: ProcessGroup | None = None,
) -> list[TuningResult | None]:
    """Tune, compile and load ahead, so that no request has to wait for it.

    Afterwards nothing is tuned, compiled or loaded for any m of the same buckets, as long as the
    class of code is the same: of row-major operands it is. ``background`` is tuned here and now.

    Args:
        problems: (m, n, k) with row-major operands of ``dtype``, or workloads with dense ones.
        dtype: float16, bfloat16 or float32; out_dtype: of the result, default: the same.
        tf32: as :func:`costmodel.matmul` has it: None follows torch's switch.
        device: CUDA device; default: the current one.
        bias, activation: of the calls that are meant; a :class:`Workload` has its own.
        mode, model: of :func:`costmodel.matmul`.
        group: a process group of ``torch.distributed``, all of whose ranks make this call. Its
            first rank decides, from its cache or by tuning, and all take what it chose.

    Returns:
        What was chosen for each (None for an empty product).

    Raises:
        InvalidInput: problems that are none, or an unknown mode or activation; ShapeError,
            UnsupportedDtype: of a problem. All before a GPU is looked for, and before any work.
        NoModel, CorruptFile, WrongVersion, SchemaMismatch: ``model`` is a path without a usable
            model.
        NoGpu: there is none to warm up.
        RankError: with ``group``: a rank failed, or they differ; on all ranks, and nothing holds.
    """
    listed = functools.cache(lambda: _listed(problems))

    def calls() -> Iterator[_Call]:
        """One at a time: operands take memory."""
        called = modes.default_mode() if mode is None else mode
        modes.check_mode(called)
        types = matmul_types(dtype, out_dtype, tf32)
        workloads = [_workload(problem, types, bias, activation) for problem in listed()]
        named_model(model)
        Target.current(device)  # last, so that a script can be checked without a GPU
        index = torch.cuda.current_device() if device is None else device
        for workload in workloads:
            yield _Call.blank(workload, index, called, model)

    if group is not None:
        return _together(Ranks(group), calls)
    return [_result(_warm(call)) for call in calls()]


@dataclass(frozen=True)
class _Call:
    """A call of ``matmul`` as a program will make it, with operands of whatever is in memory."""

    workload: Workload
    index: int
    mode: str
    a: torch.Tensor
    b: torch.Tensor
    options: Mapping[str, Any]

    @classmethod
    def blank(cls, workload: Workload, index: int, mode: str, model: ModelLike) -> _Call:
        code = workload.code
        a, b, out, row = _blank_operands(workload, index)
        activation = None if code.activation == "none" else code.activation
        options = {
            "out": out if code.c_layout == "col" else None, "bias": row, "activation": activation,
            "model": model, **_precision(code),
        }  # fmt: skip
        found = Workload.from_tensors(
            a, b, out, bias=row is not None, activation=code.activation, tf32=code.tf32
        )
        return cls(found, index, mode, a, b, options)

    @property
    def is_empty(self) -> bool:
        return not (self.workload.m and self.workload.n and self.workload.k)

    def with_last_m(self) -> Workload | None:
        """The largest product of row-major operands that is to share the winner of this one."""
        workload, code = self.workload, self.workload.code
        if (code.a_layout, code.c_layout) != ("row", "row") or self.is_empty:
            return None  # the alignment of columns differs from m to m
        # Of either class of code: larger products may need 64-bit offsets.
        wide = replace(workload, code=replace(code, wide=True))
        _, last = dispatch.winners.buckets.range_of(wide)
        return Workload.dense(
            last, workload.n, workload.k, code.dtype, out_dtype=code.out_dtype, tf32=code.tf32,
            b_layout=code.b_layout, bias=code.bias, activation=code.activation,
        )  # fmt: skip

    def of(self, workload: Workload) -> _Call:
        """A call like this one of another product."""
        return _Call.blank(workload, self.index, self.mode, self.options["model"])

    def classes(self) -> list[_Call]:
        """The call, and one of the bucket's last m where that is of another class of code."""
        last = self.with_last_m()
        return [self] if last is None or last.code == self.workload.code else [self, self.of(last)]

    def mode_now(self) -> str:
        """The mode that the call has, as torch's switches are now."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        return modes.deterministic(self.mode) if deterministic else self.mode

    def keys(self) -> list[TuningKey]:
        """Those whose winners the call takes, the most thorough first; it finds the last itself."""
        model = self.options["model"]
        return [
            dispatch.winners.key(self.workload, self.index, mode=mode, model=model, epoch=epoch())
            for mode in modes.winners_of(self.mode_now())
        ]

    def launched(self) -> Launch | None:
        """None if thousands of others were prepared meanwhile, by other threads."""
        if self.mode == "background":  # whose winners it goes by
            dispatch.matmul(self.a, self.b, mode="auto", **self.options)
        dispatch.matmul(self.a, self.b, mode=self.mode, **self.options)
        return dispatch.launch_for(self.a, self.b, mode=self.mode, **self.options)


def _result(launch: Launch | None) -> TuningResult | None:
    return launch.result if launch is not None else None


def _warm(call: _Call, check: Callable[[Launch], None] = lambda launch: None) -> Launch | None:
    """Make a call, and others of its bucket until all that its m launch is there."""
    launch = call.launched()
    if launch is None or launch.result is None:
        return launch
    check(launch)
    for other in _others_of_bucket(call):
        if (found := other.launched()) is not None:
            check(found)
    return launch


def _others_of_bucket(call: _Call) -> Iterator[_Call]:
    """A call for each other choice of the bucket, in each class of code that its m may have."""
    last = call.with_last_m()
    if last is None:
        return
    if last.m != call.workload.m:
        yield call.of(last)
    for each in call.classes():
        yield from (call.of(replace(each.workload, m=m)) for m in _m_of_each_choice(each))


def _m_of_each_choice(call: _Call) -> list[int]:
    """An m of each choice of the bucket that is another than that of the call's own m."""
    keys, winners = call.keys(), dispatch.winners
    for key in (*keys, replace(keys[-1], mode="predict")):
        if (found := winners.known(key)) is None:
            continue
        m = call.workload.m
        if not key.epoch:  # else it was planned when it was agreed on
            try:
                found = winners.find(key, m, whole=True, may_time=call.mode_now() != "never")
            except HostError as error:  # what each product then is, its own call sees to
                warn_of_host(error)
        chosen = _an_m_of_each(found, key.m_range[0])
        chosen.pop(found.config_at(m), None)
        return [*chosen.values()]
    return []


def _an_m_of_each(found: TuningResult, first: int) -> dict[GemmConfig | None, int]:
    """An m that it computes, by choice; the bucket begins at ``first``."""
    chosen: dict[GemmConfig | None, int] = {}
    for segment in found.plan.segments if found.plan else ():
        # What was tuned has its winner, whatever its segment has.
        last = segment.last - (segment.last == found.workload.m)
        if last >= first:
            chosen.setdefault(segment.config, last)
        first = segment.last + 1
    chosen.setdefault(found.config, found.workload.m)
    return chosen


# --- all ranks of a group -----------------------------------------------------------------------


def _together(ranks: Ranks, calls: Callable[[], Iterator[_Call]]) -> list[TuningResult | None]:
    """The first rank decides; the others take it, or all fail."""
    winners = dispatch.winners
    asked = ranks.each(lambda: list(_to_decide(calls())))
    ranks.require_same(ranks.each(lambda: [each.told() for each in asked]))
    # One by one, so that the time limit of a collective is that of a bucket's tunings.
    decisions = [ranks.decided(each.decide) for each in asked]
    agreed: list[TuningKey] = []

    def take() -> list[TuningResult | None]:
        for each, (mode, result) in zip(asked, decisions, strict=True):
            agreed.append(replace(each.keys[-1], mode=mode))
            winners.memory.agreed[agreed[-1]] = TuningResult.from_dict(result)
        dispatch.forget_launches()
        return [_result(_warm(call, _require_chosen)) for call in calls()]

    try:
        return ranks.each(take)
    except RankError:
        for key in agreed:
            winners.memory.agreed.pop(key, None)
        dispatch.forget_launches()
        raise


@dataclass(frozen=True)
class _ToDecide:
    """A bucket, and class of code, that the ranks are to decide on.

    Attributes:
        keys: of the winners that the call takes.
        m: of the call; it is tuned where none is known.
        mode: of the call.
    """

    keys: list[TuningKey]
    m: int
    mode: str

    def told(self) -> dict[str, Any]:
        """Return what the ranks must have in common."""
        return dispatch.winners.disk_key(self.keys[-1]) | {"mode": self.mode}

    def decide(self) -> tuple[str, dict[str, Any]]:
        """Return the mode whose winner is to be taken, and the winner: on the first rank only."""
        winners = dispatch.winners
        alone = [replace(key, epoch=0) for key in self.keys]
        key, may_time = alone[-1], self.mode != "never"
        if not may_time:
            known = (each for each in alone if winners.known(each) is not None)
            key = next(known, replace(key, mode="predict"))
        result = winners.find(key, self.m, whole=True, may_time=may_time)
        return key.mode, result.to_dict()


def _to_decide(calls: Iterable[_Call]) -> Iterator[_ToDecide]:
    for call in calls:
        if call.is_empty:
            continue
        last = call.with_last_m()
        classes = (
            [call] if last is None or last.code == call.workload.code else [call, call.of(last)]
        )
        for each in classes:
            yield _ToDecide(each.keys(), each.workload.m, each.mode_now())


def _require_chosen(launch: Launch) -> None:
    """Raises: LaunchError: another configuration is launched than was chosen."""
    result = launch.result
    if result is not None and launch.config != result.config:
        raise LaunchError(
            f"{result.chosen}, which the first rank chose for {result.workload}, cannot be loaded "
            f"here"
        )


# --- operands -----------------------------------------------------------------------------------


def _listed(problems: Iterable[Problem]) -> list[Problem]:
    if isinstance(problems, Iterable) and not isinstance(problems, str | bytes):
        return list(problems)
    raise InvalidInput(f"problems is a {type(problems).__name__}: expected a list of (m, n, k)")


def _workload(
    problem: Problem, types: dict[str, Any], bias: bool, activation: str | None
) -> Workload:
    if isinstance(problem, Workload):
        return problem
    if not isinstance(problem, Sequence) or isinstance(problem, str) or len(problem) != 3:
        raise InvalidInput(f"problem {problem!r:.80}: expected (m, n, k), or a Workload")
    m, n, k = problem
    return Workload.dense(m, n, k, **types, bias=bias, activation=activation or "none")


def _precision(code: CodeClass) -> dict[str, Any]:
    """The options that make ``matmul`` compute this class; None where a call without them does."""
    widened = code.out_dtype != code.dtype
    return {
        "tf32": code.tf32 if code.dtype == "float32" else None,
        "out_dtype": getattr(torch, code.out_dtype) if widened else None,
    }


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
