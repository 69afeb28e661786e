"""Finds the launch of a first call: pinned, known, tuned, or interim.

Only final answers are kept. An interim one (inside a capture; while a thread tunes) serves one
call, and the next one comes here again.
"""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch

from costmodel.dispatch.background import Background
from costmodel.dispatch.calls import Call
from costmodel.dispatch.capture import is_capturing
from costmodel.dispatch.loading import ensure_loaded, first_launch, is_loaded, loaded_configs
from costmodel.dispatch.pins import pinned
from costmodel.errors import (
    CompileError,
    CostModelError,
    HostError,
    InvalidInput,
    LaunchError,
    warn_of_host,
)
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.installed import interpreter_setting
from costmodel.launch.fast import Launch, TorchLaunch
from costmodel.launch.plan import Plan
from costmodel.models.baselines import RuleHeuristic
from costmodel.tuning.counters import count
from costmodel.tuning.modes import winners_of
from costmodel.tuning.ranking import rank
from costmodel.tuning.ranks import epoch
from costmodel.tuning.tuning_key import TuningKey
from costmodel.tuning.tuning_result import TuningResult
from costmodel.tuning.winners import Winners
from costmodel.validation import one_line

_OTHERS = 8  # are tried in place of a winner: each may take seconds to compile

log = logging.getLogger("costmodel")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A launch, and whether the next call of its kind may take it too."""

    launch: Launch
    is_final: bool = True


def resolve_launch(
    call: Call, out: torch.Tensor, winners: Winners, background: Background
) -> Resolved:
    """The launch of a call that was checked; it is not queued here.

    In this order: what is pinned; inside a capture, what is loaded; the winner of the mode, known
    or found as the mode has it. In a process group that is to predict, at once and without the
    disk. Where this machine can compile or load nothing, torch computes it, with a warning.

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
        return Resolved(TorchLaunch(call.activation or "none", tf32=bool(call.tf32)))
    _refuse_the_interpreter()
    index, mode = call.a.get_device(), str(call.mode)
    # The last is the one that the mode finds itself; the others are taken if they are known.
    *others, own = winners_of(mode)
    key = winners.key(workload, index, mode=own, model=call.model, epoch=epoch())
    keys = [*(replace(key, mode=other) for other in others), key]
    product = _Product(workload, keys)
    try:
        return _resolved(product, mode, winners, background)
    except HostError as error:
        warn_of_host(error)
        return Resolved(_launch_of_torch(product, winners), is_final=not is_capturing(index))


def _resolved(product: _Product, mode: str, winners: Winners, background: Background) -> Resolved:
    key, index = product.key, product.key.device_index
    if (chosen := pinned(product.workload, index)) is not None:
        return Resolved(_pinned_launch(product, chosen))
    if is_capturing(index):
        return _launch_in_capture(product, winners, may_time=mode != "never")
    if mode == "background" and not key.epoch:
        return _interim_or_final(product, winners, background)
    if mode == "never":
        return Resolved(_launch_untimed(product, winners))
    return Resolved(_launch_of_winner(product, key, winners))


@dataclass(frozen=True, slots=True)
class _Product:
    """A product to be launched.

    Attributes:
        keys: of the winners that its mode takes, the most thorough first.
    """

    workload: Workload
    keys: list[TuningKey]

    @property
    def key(self) -> TuningKey:
        """The one whose winner the mode finds."""
        return self.keys[-1]

    def known(self, winners: Winners) -> tuple[TuningKey, TuningResult] | None:
        """The first winner that is in memory or on disk, and its key."""
        for key in self.keys:
            if (found := winners.known(key)) is not None:
                return key, found
        return None

    def by_torch(self, result: TuningResult) -> TorchLaunch:
        code = self.workload.code
        return TorchLaunch(code.activation, result, code.tf32)

    def chosen(
        self, mode: str, config: GemmConfig | None, why: str, winners: Winners
    ) -> TuningResult:
        """A result that no model ranked."""
        target = winners.target_of(self.key.device_index)
        return TuningResult.unranked(self.workload, target, mode, config, why)

    def launch(
        self,
        result: TuningResult,
        *,
        only_loaded: bool = False,
        refused: list[type[CostModelError]] | None = None,
    ) -> Launch | None:
        """The launch of a result, or of its next choices; None if none can be loaded.

        Args:
            only_loaded: only what can be launched with nothing to be compiled or loaded.
            refused: as of :func:`costmodel.dispatch.loading.first_launch`.
        """
        here = result.at(self.workload.m)
        if here.config is None:
            return self.by_torch(here)
        index = self.key.device_index
        configs = _choices(result, self.workload.m)
        if self.key.epoch:  # which of the next ones can be loaded differs from rank to rank
            configs = configs[:1] if only_loaded or result.timed else configs
        if only_loaded:
            here_too = (self.workload, result.target, index)
            configs = [config for config in configs if is_loaded(config, *here_too)][:1]
        launch = first_launch(configs, self.workload, index, here, refused)
        if launch is None and result.config is None and not self.key.epoch:
            return self.by_torch(result)  # which is the winner elsewhere in the bucket
        return launch

    def launch_of_others(self, result: TuningResult) -> Launch | None:
        """The launch of the best that was timed beside a winner, and faster than torch."""
        m, torch_us = self.workload.m, inf
        if result.torch is not None and result.torch.ok:
            torch_us = result.torch.latency_us
        timed = {c: x.latency_us for c, x in result.measured if x.ok and x.latency_us < torch_us}
        configs = sorted(timed.keys() - _choices(result, m), key=timed.__getitem__)
        index = self.key.device_index
        return first_launch(configs[:_OTHERS], self.workload, index, result.at(m))


def _choices(result: TuningResult, m: int) -> list[GemmConfig]:
    """The configurations that a result allows for an m, best first."""
    chosen = [result.config_at(m), result.config]
    configs = dict.fromkeys(config for config in chosen if config is not None)
    if configs and not result.timed:
        configs |= dict.fromkeys(config for config, _ in result.ranked)
    return [*configs]


def _refuse_the_interpreter() -> None:
    if interpreter_setting():
        raise CostModelError(
            "TRITON_INTERPRET is set: Triton would interpret the kernels on the CPU, and timings "
            "of that mean nothing; unset it before Triton is imported"
        )


def _launch_of_torch(product: _Product, winners: Winners) -> Launch:
    """torch's launch, with the result of what would be launched where kernels can be loaded."""
    workload, why = product.workload, "nothing can be compiled or loaded here"
    try:
        if (known := product.known(winners)) is not None:
            return product.by_torch(known[1].at(workload.m))
        return product.by_torch(product.chosen(product.key.mode, None, why, winners))
    except HostError:  # the toolchain itself does not run
        return TorchLaunch(workload.code.activation, tf32=workload.code.tf32)


def _pinned_launch(product: _Product, chosen: TuningResult) -> Launch:
    launch = product.launch(chosen)
    if launch is None:
        raise LaunchError(
            f"{chosen.config} is pinned for {product.workload} and can no longer be launched: "
            f"costmodel.unpin it, or pin another"
        )
    return launch


def _launch_untimed(product: _Product, winners: Winners) -> Launch:
    """The launch of a winner of earlier tuning; else of the prediction."""
    m = product.workload.m
    if (known := product.known(winners)) is not None:
        launch = product.launch(winners.find(known[0], m, may_time=False))
        if launch is not None:
            return launch
    return _launch_of_winner(product, replace(product.key, mode="predict"), winners)


def _launch_of_winner(product: _Product, key: TuningKey, winners: Winners) -> Launch:
    """The launch of a winner; of another one, or torch, where it cannot be loaded."""
    m = product.workload.m
    result = winners.find(key, m)
    refused: list[type[CostModelError]] = []
    launch = product.launch(result, refused=refused)
    if launch is None and not key.epoch:  # in a group none may choose again by itself
        # What this device has no memory for now may be another process's winner.
        unwanted, broken = result, LaunchError not in refused
        result = winners.replace(key, m, unwanted, broken=broken)
        if result is not unwanted:  # which it is where that was done before, in vain
            launch = product.launch(result)
        launch = launch or product.launch_of_others(result)
    if launch is None:
        warnings.warn(
            f"no configuration of {product.workload} can be loaded: torch computes it",
            RuntimeWarning,
            stacklevel=5,
        )
        return product.by_torch(result.at(m))
    return launch


# --- inside a capture ---------------------------------------------------------------------------


def _launch_in_capture(product: _Product, winners: Winners, *, may_time: bool) -> Resolved:
    """The winner if it is loaded; else, for this call, the best of what is loaded, or torch.

    What else is loaded differs from rank to rank, so that in a process group it is torch.
    """
    m = product.workload.m
    known = product.known(winners)
    if known is not None:
        key, found = known
        launch = product.launch(found, only_loaded=True)
        if launch is not None:
            wanted = found.config_at(m)
            # Of a prediction, a call outside may launch a later choice, if the first cannot load.
            is_first = launch.config == wanted and (wanted is None or found.timed)
            is_final = is_first and winners.is_final(key, m, found, may_time=may_time)
            return Resolved(launch, is_final)
    count(makeshifts=1)
    return Resolved(_fallback(product, winners), is_final=False)


def _fallback(product: _Product, winners: Winners) -> Launch:
    """The launch of the best configuration that is loaded, else torch."""
    key, workload = product.key, product.workload
    target = winners.target_of(key.device_index)
    why = "inside a capture, with nothing loaded that is to compute it"
    configs = loaded_configs(workload, target, key.device_index)
    if configs and not key.epoch:
        model = RuleHeuristic() if key.mode == "heuristic" else key.model
        try:
            best = rank(workload, target, model, 1, configs=configs).configs[0]
        except InvalidInput:  # a table has it that none of them fits
            best = configs[0]
        why = f"first choice of the {len(configs)} that are loaded, inside a capture"
        launch = product.launch(product.chosen(key.mode, best, why, winners))
        if launch is not None:
            return launch
    _warn_of_torch(workload)
    return product.by_torch(product.chosen(key.mode, None, why, winners))


def _warn_of_torch(workload: Workload) -> None:
    global _has_warned
    with _lock:
        if _has_warned:
            return
        _has_warned = True
    warnings.warn(
        f"the first product of {workload} came while a CUDA graph is captured, where nothing may "
        f"be timed or loaded: this graph has torch compute it (and any other such, without a "
        f"warning); call matmul once before, or costmodel.warmup([(m, n, k)])",
        RuntimeWarning,
        stacklevel=7,
    )


_lock = threading.Lock()
_has_warned = False


# --- in the background --------------------------------------------------------------------------


def _interim_or_final(product: _Product, winners: Winners, background: Background) -> Resolved:
    """The winner if it is in memory; else what is loaded, with a job to find the winner.

    Even what is on disk is left to the job: its key takes the model, which takes seconds to load.
    """
    key, m = product.key, product.workload.m
    found, lacks, is_done = _look_up(key, m, winners, background)
    launch = None if found is None else product.launch(found, only_loaded=True)
    if found is not None and launch is not None:
        is_winner = launch.config == found.config_at(m) and winners.is_final(key, m, found)
        if is_winner or is_done:
            return Resolved(launch)
    if not is_done:
        background.submit(key, lacks, partial(_improve, key, m, winners))
    if launch is None:
        predicted = winners.known(replace(key, mode="predict"), on_disk=False)
        if predicted is not None:
            launch = product.launch(predicted, only_loaded=True)
    if launch is None:
        why = "torch answers until a configuration was predicted in the background"
        launch = product.by_torch(product.chosen("background", None, why, winners))
    return Resolved(launch, is_final=is_done)


def _look_up(
    key: TuningKey, m: int, winners: Winners, background: Background
) -> tuple[TuningResult | None, object, bool]:
    """The winner in memory, what this m lacks, and whether the job that sees to that is done.

    One job serves all m of a bucket that lack the same.
    """
    while True:
        found = winners.known(key, on_disk=False)
        lacks = found and (found.config_at(m), winners.is_final(key, m, found))
        is_done = background.has_finished(key, lacks)
        if not is_done or winners.known(key, on_disk=False) is found:
            return found, lacks, is_done  # else the job has just found it


def _improve(key: TuningKey, m: int, winners: Winners) -> None:
    """The job: load what is soonest there, for the calls meanwhile; then find and load the winner.

    Raises:
        CompileError, LaunchError: it cannot be loaded, and neither can what was tuned instead.
    """
    soonest = winners.known(key) or winners.find(replace(key, mode="predict"), m)
    with suppress(CompileError, LaunchError):
        _ensure_loaded(soonest, key, m)
    found = winners.find(key, m, wait=False)
    try:
        _ensure_loaded(found, key, m)
    except (CompileError, LaunchError) as error:
        log.warning("%s no longer works: %s", found.chosen, one_line(error))
        broken = isinstance(error, CompileError)
        _ensure_loaded(winners.replace(key, m, found, broken=broken, wait=False), key, m)


def _ensure_loaded(result: TuningResult, key: TuningKey, m: int) -> None:
    """Load the first choice that can be, so that no call has to wait for it.

    Raises:
        CompileError, LaunchError: none can be.
    """
    if result.config_at(m) is None:
        return  # torch computes it, whether or not what was chosen elsewhere can be loaded
    refused: CompileError | LaunchError | None = None
    for config in _choices(result, m):
        plan = Plan(key.workload(m), config, result.target.device.sm_count)
        try:
            ensure_loaded(plan, result.target, key.device_index)
        except (CompileError, LaunchError) as error:
            refused = error
        else:
            return
    if refused is not None:
        raise refused
