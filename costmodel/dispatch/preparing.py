"""From the first call of its kind to its launch: what is pinned, known, tuned, or else at hand."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch

from costmodel.dispatch.background import Background
from costmodel.dispatch.calls import Call
from costmodel.dispatch.capture import is_capturing
from costmodel.dispatch.loading import bring, first_launch, loaded_configs
from costmodel.dispatch.pins import pinned
from costmodel.errors import CompileError, CostModelError, HostError, InvalidInput, LaunchError
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import why_illegal
from costmodel.gemm.workload import Workload
from costmodel.launch.fast import Launch
from costmodel.launch.plan import Plan
from costmodel.launch.torch_product import TorchLaunch
from costmodel.models.baselines import RuleHeuristic
from costmodel.support.counters import count
from costmodel.support.host import warn_of_host
from costmodel.support.untrusted import one_line
from costmodel.tuning.modes import winners_of
from costmodel.tuning.ranking import named_model, rank
from costmodel.tuning.ranks import epoch
from costmodel.tuning.tuning_result import TuningResult
from costmodel.tuning.winners import Question, Winners

__all__ = ["Prepared", "prepare"]

_OTHERS = 8  # are tried in place of a winner: each may take seconds to compile

log = logging.getLogger("costmodel")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A launch, and for how long it is the answer.

    Attributes:
        keep: whether the next call of this kind may take it too.
        job: key of the job in the background that is to better it; None: there is none.
        switches: how often it had done so when this launch was looked up; None: its queue was full.
    """

    launch: Launch
    keep: bool = True
    job: Any = None
    switches: int | None = 0


@dataclass(frozen=True, slots=True)
class _Product:
    """What is asked, and the operands it is asked with (a, b, out)."""

    question: Question
    mode: str
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @property
    def workload(self) -> Workload:
        return self.question.workload

    def by_torch(self, result: TuningResult) -> TorchLaunch:
        code = self.workload.code
        return TorchLaunch(code.activation, result, code.tf32)

    def of(
        self,
        result: TuningResult,
        *,
        only_loaded: bool = False,
        refused: list[type[CostModelError]] | None = None,
    ) -> Launch | None:
        """The launch of a result, of its next choices where it was predicted; None if none works.

        Args:
            only_loaded: only what can be launched with nothing to be compiled or loaded.
            refused: as of :func:`costmodel.dispatch.loading.first_launch`.
        """
        here = result.at(self.workload.m)
        if here.config is None:
            return self.by_torch(here)
        index = self.question.device_index
        configs = _choices(result, self.workload)
        if self.question.epoch:  # which of the next ones can be loaded differs from rank to rank
            configs = configs[:1] if only_loaded or result.timed else configs
        if only_loaded:
            loaded = set(loaded_configs(self.workload, result.target, index))
            configs = [config for config in configs if config in loaded]
        launch = first_launch(configs, self.workload, index, self.operands, here, refused)
        if launch is None and result.config is None and not self.question.epoch:
            return self.by_torch(result)  # whose winner elsewhere in the bucket torch is
        return launch

    def of_others(self, result: TuningResult) -> Launch | None:
        """The launch of the best that was timed beside a winner, and faster than torch."""
        torch_us = result.torch.latency_us if result.torch and result.torch.ok else inf
        timed = {c: x.latency_us for c, x in result.measured if x.ok and x.latency_us < torch_us}
        configs = sorted(timed.keys() - _choices(result, self.workload), key=timed.__getitem__)
        index, here = self.question.device_index, result.at(self.workload.m)
        return first_launch(configs[:_OTHERS], self.workload, index, self.operands, here)


def _choices(result: TuningResult, workload: Workload) -> list[GemmConfig]:
    """What a result allows to be launched, the best first."""
    chosen = [result.at(workload.m).config, result.config]
    configs = dict.fromkeys(config for config in chosen if config is not None)
    if configs and result.ranked and not result.timed:
        configs |= dict.fromkeys(config for config, _ in result.ranked)
    return [*configs]


def prepare(call: Call, out: torch.Tensor, winners: Winners, background: Background) -> Prepared:
    """The launch of a call that was checked; it is not queued here.

    In this order: what is pinned; inside a capture, what is loaded; what is known of the mode; what
    the mode then does. In a process group that is to predict, at once and without the disk. Where
    this machine can compile or load nothing, torch computes it, with a warning.

    Args:
        out: [m, n] as the launch is to write.

    Raises:
        CostModelError: Triton's interpreter is switched on.
        LaunchError: what is pinned cannot be launched.
        InvalidInput: as of :meth:`Winners.find`.
    """
    workload = Workload.from_tensors(
        call.a, call.b, out, bias=call.bias is not None, activation=call.activation or "none",
        tf32=bool(call.tf32),
    )  # fmt: skip
    if not (workload.m and workload.n and workload.k):
        return Prepared(TorchLaunch(call.activation or "none", tf32=bool(call.tf32)))
    _refuse_the_interpreter()
    index = call.a.get_device()
    mode = str(call.mode)
    model = named_model(call.model)
    question = Question(workload, index, winners_of(mode)[-1], model, epoch=epoch())
    product = _Product(question, mode, (call.a, call.b, out))
    try:
        return _chosen(product, winners, background)
    except HostError as error:
        warn_of_host(error)
        return Prepared(_by_torch_here(product, winners))


def _chosen(product: _Product, winners: Winners, background: Background) -> Prepared:
    question, mode, workload = product.question, product.mode, product.workload
    index = question.device_index
    if (chosen := pinned(workload, index)) is not None:
        return Prepared(_pinned(product, chosen))
    if is_capturing(index):
        return _in_capture(product, winners)
    if mode == "background" and not question.epoch:
        return _meanwhile(product, winners, background)
    if mode == "never":
        known = _known(product, winners)
        if known is not None:
            # Which is spread over its bucket there.
            launch = product.of(winners.find(known[0], may_time=False))
            if launch is not None:
                return Prepared(launch)
        question = replace(question, mode="predict")
    return Prepared(_found(product, question, winners.find(question), winners))


def _refuse_the_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("", "0", "false", "off", "no"):
        raise CostModelError(
            "TRITON_INTERPRET is set: Triton would interpret the kernels on the CPU, and timings "
            "of that mean nothing; unset it before Triton is imported"
        )


def _by_torch_here(product: _Product, winners: Winners) -> Launch:
    """Return torch's launch, with what would be launched where kernels can be loaded."""
    workload, code = product.workload, product.workload.code
    try:
        known = _known(product, winners)
        target = winners.target_of(product.question.device_index)
    except HostError:  # the toolchain itself does not run
        return TorchLaunch(code.activation, tf32=code.tf32)
    why = "nothing can be compiled or loaded here"
    result = TuningResult.unranked(workload, target, product.mode, None, why)
    return product.by_torch(known[1].at(workload.m) if known else result)


def _pinned(product: _Product, chosen: TuningResult) -> Launch:
    launch = product.of(chosen)
    if launch is None:
        raise LaunchError(
            f"{chosen.config} is pinned for {product.workload} and can no longer be launched: "
            f"costmodel.unpin it, or pin another"
        )
    return launch


def _known(product: _Product, winners: Winners) -> tuple[Question, TuningResult] | None:
    """The winner of the mode, in memory or on disk, and the question that it answers."""
    for mode in winners_of(product.mode):
        question = replace(product.question, mode=mode)
        if (found := winners.known(question)) is not None:
            return question, found
    return None


def _found(product: _Product, question: Question, result: TuningResult, winners: Winners) -> Launch:
    """The launch of a winner; of another one, or torch, where it no longer works."""
    refused: list[type[CostModelError]] = []
    launch = product.of(result, refused=refused)
    if launch is None and not question.epoch:  # in a group none may choose anew by itself
        # What this device has no memory for now may be another process's winner.
        unwanted, broken = result, LaunchError not in refused
        result = winners.find(question, instead_of=unwanted, broken=broken)
        if result is not unwanted:  # which it is where that was done before, in vain
            launch = product.of(result)
        launch = launch or product.of_others(result)
    if launch is None:
        warnings.warn(
            f"no configuration of {product.workload} can be loaded: torch computes it",
            RuntimeWarning,
            stacklevel=5,
        )
        return product.by_torch(result.at(product.workload.m))
    return launch


# --- inside a capture ---------------------------------------------------------------------------


def _in_capture(product: _Product, winners: Winners) -> Prepared:
    """The winner if it is loaded; else the best of what is loaded, or torch, for this once.

    What else is loaded differs from rank to rank, so that in a process group it is torch.
    """
    known = _known(product, winners)
    if known is not None:
        question, found = known
        launch = product.of(found, only_loaded=True)
        if launch is not None:
            may_time = product.mode != "never"
            covers = winners.covers(question, found, may_time=may_time)
            return Prepared(launch, keep=covers and _is_final(found, launch, product.workload))
    count(makeshifts=1)
    return Prepared(_of_what_is_loaded(product, winners), keep=False)


def _is_final(result: TuningResult, launch: Launch, workload: Workload) -> bool:
    """Whether a result would launch the same with all the time in the world."""
    if result.at(workload.m).config != launch.config:
        return False
    return launch.config is None or result.timed  # of a prediction, perhaps a later choice


def _of_what_is_loaded(product: _Product, winners: Winners) -> Launch:
    question, workload = product.question, product.workload
    target = winners.target_of(question.device_index)
    why = "inside a capture, with nothing loaded that is to compute it"
    configs = loaded_configs(workload, target, question.device_index)
    if configs and not question.epoch:
        model = RuleHeuristic() if product.mode == "heuristic" else question.model
        try:
            best = rank(workload, target, model, 1, configs=configs).configs[0]
        except InvalidInput:  # a table has it that none of them fits
            best = configs[0]
        why = f"first choice of the {len(configs)} that are loaded, inside a capture"
        result = TuningResult.unranked(workload, target, product.mode, best, why)
        if (launch := product.of(result)) is not None:
            return launch
    _warn_of_torch(workload)
    return product.by_torch(TuningResult.unranked(workload, target, product.mode, None, why))


def _warn_of_torch(workload: Workload) -> None:
    global _warned
    with _lock:
        if _warned:
            return
        _warned = True
    warnings.warn(
        f"the first product of {workload} came while a CUDA graph is captured, where nothing may "
        f"be timed or loaded: this graph has torch compute it (and any other such, without a "
        f"warning); call matmul once before, or costmodel.warmup([(m, n, k)])",
        RuntimeWarning,
        stacklevel=7,
    )


_lock = threading.Lock()
_warned = False


# --- in the background --------------------------------------------------------------------------


def _meanwhile(product: _Product, winners: Winners, background: Background) -> Prepared:
    """The winner if it is in memory; else what is at hand, with a job to find it.

    Even what is on disk is left to the job: its key takes the model, which takes seconds to load.
    """
    question, workload = product.question, product.workload
    rows = winners.buckets.of(workload.m)
    key: tuple[Any, ...]
    key = rows, workload.n, workload.k, workload.code, question.device_index, question.model
    at_hand = None
    found = winners.known(question, on_disk=False)
    if found is not None:
        at_hand = product.of(found, only_loaded=True)
        wanted, covers = found.at(workload.m).config, winners.covers(question, found)
        key = *key, wanted, covers
        there = covers and at_hand is not None and at_hand.config == wanted
        if at_hand is not None and (there or background.has_tried(key)):
            return Prepared(at_hand)
    switches = background.submit(key, partial(_improve, question, winners))
    if at_hand is None:  # looked up after that, lest a switch is missed
        asked = (replace(question, mode=mode) for mode in (question.mode, "predict"))
        guesses = (winners.known(each, on_disk=False) for each in asked)
        launches = (product.of(guess, only_loaded=True) for guess in guesses if guess is not None)
        at_hand = next((launch for launch in launches if launch is not None), None)
    if at_hand is None:
        target = winners.target_of(question.device_index)
        why = "torch answers until a configuration was predicted in the background"
        result = TuningResult.unranked(workload, target, "background", None, why)
        at_hand = product.by_torch(result)
    return Prepared(at_hand, job=key, switches=switches)


def _improve(question: Question, winners: Winners, switch: Callable[[], None]) -> None:
    """The job: what is soonest there, then the winner, each loaded before it is switched to."""
    known = winners.known(question)
    if known is None:
        _bring(winners.find(replace(question, mode="predict")), question)
        switch()
    elif not winners.covers(question, known):  # it may run this m, until its part is timed
        with suppress(CompileError, LaunchError):  # of which below
            _bring(known, question)
            switch()
    found = winners.find(question, wait=False)
    try:
        _bring(found, question)
    except (CompileError, LaunchError) as error:
        log.warning("%s no longer works: %s", found.chosen, one_line(error))
        broken = isinstance(error, CompileError)
        _bring(winners.find(question, instead_of=found, broken=broken, wait=False), question)


def _bring(result: TuningResult, question: Question) -> None:
    """Load the first choice that can be, so that no call has to wait for it.

    Raises:
        CompileError, LaunchError: none can be.
    """
    if result.at(question.workload.m).config is None:
        return  # torch computes it, whether or not what was chosen elsewhere can be loaded
    refused: CompileError | LaunchError | None = None
    for config in _choices(result, question.workload):
        if why_illegal(config, question.workload, result.target.device):
            continue
        plan = Plan.of(question.workload, config, result.target.device.sm_count)
        try:
            bring(plan, result.target, question.device_index)
        except (CompileError, LaunchError) as error:
            refused = error
        else:
            return
    if refused is not None:
        raise refused
