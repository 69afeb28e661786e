"""``warmup``: does the work of first calls ahead; in a process group, one rank decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from costmodel.data.candidates import ModelLike
from costmodel.dispatch import dispatch
from costmodel.dispatch.ahead import device_index, matmul_types
from costmodel.dispatch.calls import is_deterministic
from costmodel.dispatch.resolve_launch import keys_of
from costmodel.errors import HostError, InvalidInput, LaunchError, RankError
from costmodel.files import Named
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.launch.fast import Launch
from costmodel.tuning import modes
from costmodel.tuning.ranking import named_model
from costmodel.tuning.ranks import Ranks
from costmodel.tuning.tuning_key import TuningKey
from costmodel.tuning.tuning_result import TuningResult
from costmodel.tuning.winners import warn_of_host

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

    Afterwards nothing is tuned, compiled or loaded for any m of the same buckets, if its class of
    code is the same: with row-major operands it is. Mode ``background`` is tuned here and now.

    Args:
        problems: (m, n, k) with row-major operands of ``dtype``, or workloads with dense ones.
        dtype: float16, bfloat16 or float32.
        out_dtype: of the result; default: that of the operands.
        tf32: as in :func:`costmodel.matmul`: None follows torch's switch.
        device: CUDA device; default: the current one.
        bias, activation: as the calls will have them; a :class:`Workload` has its own.
        mode, model: as in :func:`costmodel.matmul`.
        group: a process group of ``torch.distributed``, all of whose ranks make this call. Its
            first rank decides, from its cache or by tuning, and all ranks take what it chose.

    Returns:
        What was chosen for each (None for an empty product).

    Raises:
        InvalidInput: wrong problems, or an unknown mode or activation.
        ShapeError, UnsupportedDtype: a problem has wrong sizes or types. These, as InvalidInput,
            come before a GPU is looked for, and before any work.
        NoModel, CorruptFile, WrongVersion, SchemaMismatch: ``model`` is a path without a usable
            model.
        NoGpu: there is no GPU to warm up.
        RankError: with ``group``, on all ranks: a rank failed, or the ranks differ. Then no choice
            is kept.
    """

    def calls() -> list[_Call]:
        called = modes.chosen_mode(mode)
        called = modes.deterministic(called) if is_deterministic() else called
        types = matmul_types(dtype, out_dtype, tf32)
        types |= {"bias": bias, "activation": activation or "none"}
        workloads = [_workload(problem, types) for problem in _listed(problems)]
        named_model(model)
        index = device_index(device)  # last, so that a script can be checked without a GPU
        return [_Call(_dense(workload), index, called, model) for workload in workloads]

    if group is not None:
        return _together(Ranks(group), calls)
    return [_warm(call) for call in calls()]


@dataclass(frozen=True)
class _Call:
    """A call of ``matmul`` as a program will make it, with dense operands."""

    workload: Workload
    index: int
    mode: str
    model: ModelLike

    @property
    def is_alone(self) -> bool:
        """True if no other m shares its winner: the alignment of columns differs from m to m."""
        code = self.workload.code
        return self.workload.is_empty or (code.a_layout, code.c_layout) != ("row", "row")

    def at(self, m: int) -> _Call:
        """The same call with another m."""
        return replace(self, workload=_dense(replace(self.workload, m=m)))

    def classes(self) -> list[_Call]:
        """The call, and one with the bucket's last m if that has another class of code."""
        last = self if self.is_alone else self.at(self.last_m())
        return [self] if last.workload.code == self.workload.code else [self, last]

    def last_m(self) -> int:
        """The last m of the bucket in any class of code: a large m may need 64-bit offsets."""
        workload = self.workload
        wide = replace(workload, code=replace(workload.code, wide=True))
        return dispatch.winners.buckets.range_of(wide)[1]

    def keys(self) -> list[TuningKey]:
        return keys_of(dispatch.winners, self.workload, self.index, self.mode, self.model)

    def told(self) -> Named:
        """Return the settings that all ranks must share."""
        return dispatch.winners.disk_key(self.keys()[-1]) | {"mode": self.mode}

    def decide(self) -> tuple[str, Named]:
        """Return the mode whose winner is to be taken, and the winner. Only the first rank does."""
        winners, may_time = dispatch.winners, self.mode != "never"
        alone = [replace(key, epoch=0) for key in self.keys()]
        key = alone[-1]
        if not may_time:
            known = (each for each in alone if winners.known(each) is not None)
            key = next(known, replace(key, mode="predict"))
        result = winners.find(key, self.workload.m, whole=True, may_time=may_time)
        return key.mode, result.to_dict()

    def launched(self) -> Launch | None:
        """Make the call and return its launch.

        None if other threads prepared thousands of other launches meanwhile.
        """
        code = self.workload.code
        a, b, out, row = _blank_operands(self.workload, f"cuda:{self.index}")
        options: Named = {
            "out": out if code.c_layout == "col" else None, "bias": row, "model": self.model,
            "activation": None if code.activation == "none" else code.activation,
            # None where a call without them computes this class.
            "tf32": code.tf32 if code.dtype == "float32" else None,
            "out_dtype": getattr(torch, code.out_dtype) if code.out_dtype != code.dtype else None,
        }  # fmt: skip
        if self.mode == "background":  # it uses the winners of `auto`
            dispatch.matmul(a, b, mode="auto", **options)
        dispatch.matmul(a, b, mode=self.mode, **options)
        entry = dispatch.entry_for(a, b, mode=self.mode, **options)
        return entry and entry[0]


def _warm(
    call: _Call, check: Callable[[Launch], None] = lambda launch: None
) -> TuningResult | None:
    """Make a call, and others of its bucket, until all that any m of it launches is loaded."""
    launch = call.launched()
    if launch is None or launch.result is None:
        return None
    check(launch)
    for other in () if call.is_alone else _others_of_bucket(call):
        with suppress(torch.OutOfMemoryError):  # a bucket may end beyond what the device holds
            if (found := other.launched()) is not None:
                check(found)
    return launch.result


def _others_of_bucket(call: _Call) -> Iterator[_Call]:
    """A call for each other choice of the bucket, in each class of code that its m may have."""
    if (last := call.last_m()) != call.workload.m:
        yield call.at(last)
    for each in call.classes():
        yield from map(each.at, _m_of_each_choice(each))


def _m_of_each_choice(call: _Call) -> list[int]:
    """Return an m for each choice of the bucket, except the choice at the call's own m."""
    keys, winners, m = call.keys(), dispatch.winners, call.workload.m
    for key in (*keys, replace(keys[-1], mode="predict")):
        if (found := winners.known(key)) is not None:
            break
    else:
        return []
    if not key.epoch:  # else it was planned when it was agreed on
        try:
            found = winners.find(key, m, whole=True, may_time=call.mode != "never")
        except HostError as error:  # the call of each product handles this
            warn_of_host(error)
    chosen: dict[GemmConfig | None, int] = {}
    first = key.m_range[0]
    for segment in found.plan.segments if found.plan else ():
        # The m that was tuned has its own winner, whatever its segment has.
        last = segment.last - (segment.last == found.workload.m)
        if last >= first:
            chosen.setdefault(segment.config, last)
        first = segment.last + 1
    chosen.setdefault(found.config, found.workload.m)
    chosen.pop(found.config_at(m), None)
    return [*chosen.values()]


def _together(ranks: Ranks, make: Callable[[], list[_Call]]) -> list[TuningResult | None]:
    """The first rank decides for all ranks of a group. All take its choices, or all fail."""
    winners = dispatch.winners

    def ask() -> tuple[list[_Call], list[_Call], list[TuningKey], list[Named]]:
        calls = make()
        asked = [each for call in calls if not call.workload.is_empty for each in call.classes()]
        return calls, asked, [each.keys()[-1] for each in asked], [each.told() for each in asked]

    calls, asked, own_keys, told = ranks.each(ask)
    ranks.require_same(told)
    # One by one, so that the time limit of a collective applies to the tunings of one bucket.
    decisions = [ranks.decided(each.decide) for each in asked]
    # Made before any rank takes a winner: after a failure no rank may keep what was agreed on.
    keys = [replace(key, mode=mode) for key, (mode, _) in zip(own_keys, decisions)]

    def take() -> list[TuningResult | None]:
        for key, (_, result) in zip(keys, decisions):
            winners.memory.agreed[key] = TuningResult.from_dict(result)
        dispatch.forget_launches()
        return [_warm(call, _require_chosen) for call in calls]

    try:
        return ranks.each(take)
    except RankError:
        for key in keys:
            winners.memory.agreed.pop(key, None)
        dispatch.forget_launches()
        raise


def _require_chosen(launch: Launch) -> None:
    """Refuse, by LaunchError, a launch of another configuration than was chosen."""
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


def _workload(problem: Problem, types: Named) -> Workload:
    if isinstance(problem, Workload):
        return problem
    if not isinstance(problem, Sequence) or isinstance(problem, str) or len(problem) != 3:
        raise InvalidInput(f"problem {problem!r:.80}: expected (m, n, k), or a Workload")
    return Workload.dense(*problem, **types)


def _dense(workload: Workload) -> Workload:
    """The workload of freshly allocated operands with the same sizes, types and layouts."""
    a, b, out, _ = _blank_operands(workload, "meta")
    code = workload.code
    return Workload.from_tensors(
        a, b, out, bias=code.bias, activation=code.activation, tf32=code.tf32
    )


def _blank_operands(
    workload: Workload, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Uninitialised operands of a workload, with dense layouts."""
    code = workload.code

    def blank(rows: int, cols: int, layout: str, dtype: str) -> Tensor:
        shape = (cols, rows) if layout == "col" else (rows, cols)
        x = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        return x.T if layout == "col" else x

    m, n, k = workload.sizes
    return (
        blank(m, k, code.a_layout, code.dtype),
        blank(k, n, code.b_layout, code.dtype),
        blank(m, n, code.c_layout, code.out_dtype),
        blank(1, n, "row", code.out_dtype)[0] if code.bias else None,
    )
