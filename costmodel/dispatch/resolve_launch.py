"""Finds the launch of a first call: pinned, known, tuned, or interim.

Only final answers are kept. An interim one (inside a capture; while a thread tunes; while this
machine can compile nothing) serves one call, and the next one comes here again.
"""

from __future__ import annotations

import logging
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import torch

from costmodel.dispatch.background import Background
from costmodel.dispatch.check import Call, ModelLike
from costmodel.dispatch.loading import first_launch, is_loaded, load_first, loaded_configs, pins
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
from costmodel.tuning.counters import count
from costmodel.tuning.modes import winners_of
from costmodel.tuning.ranking import rank
from costmodel.tuning.ranks import epoch
from costmodel.tuning.tuning_key import TuningKey
from costmodel.tuning.tuning_result import TuningResult
from costmodel.tuning.winners import Winners
from costmodel.validation import one_line

_OTHERS = 8  # are tried in place of a winner: each may take seconds to compile
_PAUSE_S = 60.0  # before this machine is asked again: an attempt may take seconds

log = logging.getLogger("costmodel")

_retry_at = -inf
_has_warned_of_capture = False


class Resolved(NamedTuple):
    """A launch, and whether the next call of its kind may take it too."""

    launch: Launch
    is_final: bool = True


def resolve_launch(
    call: Call, out: torch.Tensor, winners: Winners, background: Background
) -> Resolved:
    """The launch of a call that was checked; it is not queued here.

    In this order: what is pinned; inside a capture, what is loaded; the winner of the mode, known
    or found as the mode has it. In a process group that is to predict, at once and without the
    disk. While this machine can compile or load nothing, torch computes it, with a warning.

    Args:
        out: [m, n] as the launch is to write.

    Raises:
        CostModelError: Triton's interpreter is switched on.
        LaunchError: what is pinned cannot be launched.
        InvalidInput: as of :meth:`Winners.find`.
    """
    global _retry_at
    workload = Workload.from_tensors(
        call.a, call.b, out, bias=call.bias is not None, activation=call.activation or "none",
        tf32=bool(call.tf32),
    )  # fmt: skip
    if not (workload.m and workload.n and workload.k):
        return Resolved(TorchLaunch(workload.code.activation, tf32=workload.code.tf32))
    if interpreter_setting():
        raise CostModelError(
            "TRITON_INTERPRET is set: Triton would interpret the kernels on the CPU, and timings "
            "of that mean nothing; unset it before Triton is imported"
        )
    mode, index = str(call.mode), call.a.get_device()
    keys = keys_of(winners, workload, index, mode, call.model)
    product = _Product(workload, mode, keys, winners)
    try:
        return product.resolve(background)
    except HostError as error:
        warn_of_host(error)
        _retry_at = time.monotonic() + _PAUSE_S
        return product.without_host()


def keys_of(
    winners: Winners, workload: Workload, device_index: int, mode: str, model: ModelLike
) -> list[TuningKey]:
    """Return the keys of the winners that a mode takes if they are known, the most thorough first.

    The mode finds the winner of the last one itself.
    """
    key = winners.key(workload, device_index, model=model, epoch=epoch())
    return [replace(key, mode=each) for each in winners_of(mode)]


def is_capturing(device_index: int) -> bool:
    """Return True if this thread's current stream of the device is being captured.

    Then only loaded binaries are used: drivers before CUDA 12.3 refuse to load one ("operation not
    permitted when stream is capturing"), and a refusal spoils the whole graph.
    """
    with torch.cuda.device(device_index):
        return torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, slots=True)
class _Product:
    """A product to be launched.

    Attributes:
        mode: of the call.
        keys: of :func:`keys_of`.
    """

    workload: Workload
    mode: str
    keys: list[TuningKey]
    winners: Winners

    def resolve(self, background: Background) -> Resolved:
        key, index = self.keys[-1], self.keys[-1].device_index
        if (chosen := pins.get((self.workload, index))) is not None:
            return Resolved(self._launch_of_pin(chosen))
        if is_capturing(index):
            return self._known_and_loaded() or Resolved(self._fallback(), is_final=False)
        if time.monotonic() < _retry_at:
            return self.without_host()
        if self.mode == "background" and not key.epoch:
            return self._launch_or_job(background)
        if self.mode == "never":
            return Resolved(self._launch_untimed())
        return Resolved(self._launch_of_winner(key))

    def without_host(self) -> Resolved:
        """The winner if it is loaded, else torch for this call: a fault of the machine may pass."""
        code = self.workload.code
        try:
            if (found := self._known_and_loaded()) is not None:
                return found
            chosen = self._chosen(None, "nothing can be compiled or loaded here for now")
        except HostError:  # the toolchain itself does not run
            chosen = None
        return Resolved(TorchLaunch(code.activation, chosen, code.tf32), is_final=False)

    # --- the parts of an answer ---

    def _known(self) -> tuple[TuningKey, TuningResult] | None:
        """The first winner that is in memory or on disk, and its key."""
        found = ((key, self.winners.known(key)) for key in self.keys)
        return next(((key, result) for key, result in found if result is not None), None)

    def _chosen(self, config: GemmConfig | None, why: str) -> TuningResult:
        """A result that no model ranked."""
        key = self.keys[-1]
        target = self.winners.target_of(key.device_index)
        mode = self.mode if self.mode == "background" and not key.epoch else key.mode
        return TuningResult.unranked(self.workload, target, mode, config, why)

    def _by_torch(self, result: TuningResult) -> TorchLaunch:
        code = self.workload.code
        return TorchLaunch(code.activation, result, code.tf32)

    def _configs(self, result: TuningResult) -> list[GemmConfig]:
        """The configurations that a result allows here, best first."""
        chosen = [result.config_at(self.workload.m), result.config]
        configs = dict.fromkeys(config for config in chosen if config is not None)
        if configs and not result.timed:
            configs |= dict.fromkeys(config for config, _ in result.ranked)
        return [*configs]

    def _launch(self, result: TuningResult) -> Launch:
        """The launch of a result, or of its next choices.

        Raises:
            CompileError, LaunchError: none can be loaded; see :func:`load_first`.
        """
        here, key = result.at(self.workload.m), self.keys[-1]
        if here.config is None:
            return self._by_torch(here)
        configs = self._configs(result)
        if key.epoch and result.timed:  # which others can be loaded differs from rank to rank
            configs = configs[:1]
        try:
            return first_launch(configs, self.workload, key.device_index, here)
        except (CompileError, LaunchError):
            if result.config is not None or key.epoch:
                raise
        return self._by_torch(result)  # which is the winner elsewhere in the bucket

    def _loaded(self, result: TuningResult) -> Launch | None:
        """Like :meth:`_launch`, with nothing to be compiled or loaded; None if there is none."""
        here, key = result.at(self.workload.m), self.keys[-1]
        if here.config is None:
            return self._by_torch(here)
        configs = self._configs(result)[: 1 if key.epoch else None]
        where = self.workload, result.target, key.device_index
        for config in configs:
            if is_loaded(config, *where):
                return first_launch([config], self.workload, key.device_index, here)
        return self._by_torch(result) if result.config is None and not key.epoch else None

    def _known_and_loaded(self) -> Resolved | None:
        """The launch of a known winner with nothing to be compiled or loaded."""
        known = self._known()
        launch = None if known is None else self._loaded(known[1])
        if known is None or launch is None:
            return None
        key, found = known
        m = self.workload.m
        wanted = found.config_at(m)
        # Of a prediction, a later call may launch a later choice, if the first cannot be loaded.
        is_first = launch.config == wanted and (wanted is None or found.timed)
        may_time = self.mode != "never"
        return Resolved(
            launch, is_first and self.winners.is_final(key, m, found, may_time=may_time)
        )

    # --- how each mode answers ---

    def _launch_of_pin(self, chosen: TuningResult) -> Launch:
        try:
            return self._launch(chosen)
        except (CompileError, LaunchError) as error:
            raise LaunchError(
                f"{chosen.config} is pinned for {self.workload} and can no longer be launched: "
                f"costmodel.unpin it, or pin another ({one_line(error)})"
            ) from None

    def _launch_untimed(self) -> Launch:
        """The launch of a winner of earlier tuning; else of the prediction."""
        if (known := self._known()) is not None:
            with suppress(CompileError, LaunchError):
                return self._launch(self.winners.find(known[0], self.workload.m, may_time=False))
        return self._launch_of_winner(replace(self.keys[-1], mode="predict"))

    def _launch_of_winner(self, key: TuningKey) -> Launch:
        """The launch of a winner; of another one, or torch, where it cannot be loaded."""
        m = self.workload.m
        result = self.winners.find(key, m)
        try:
            return self._launch(result)
        except (CompileError, LaunchError) as error:
            # What this device has no memory for now may be another process's winner.
            broken = isinstance(error, CompileError)
        if not key.epoch:  # in a group none may choose again by itself
            unwanted = result
            result = self.winners.replace(key, m, unwanted, broken=broken)
            with suppress(CompileError, LaunchError):
                if result is not unwanted:  # which it is where that was done before, in vain
                    return self._launch(result)
            with suppress(CompileError, LaunchError):
                others = self._others(result)
                return first_launch(others, self.workload, key.device_index, result.at(m))
        warnings.warn(
            f"no configuration of {self.workload} can be loaded: torch computes it",
            RuntimeWarning,
            stacklevel=6,
        )
        return self._by_torch(result.at(m))

    def _others(self, result: TuningResult) -> list[GemmConfig]:
        """The best that were timed beside a winner, and faster than torch."""
        torch_us = result.torch.latency_us if result.torch and result.torch.ok else inf
        timed = {c: x.latency_us for c, x in result.measured if x.ok and x.latency_us < torch_us}
        return sorted(timed.keys() - self._configs(result), key=timed.__getitem__)[:_OTHERS]

    def _fallback(self) -> Launch:
        """The launch, in a capture, of the best configuration that is loaded, else torch.

        What is loaded differs from rank to rank, so that in a process group it is torch.
        """
        count(makeshifts=1)
        key, workload = self.keys[-1], self.workload
        target = self.winners.target_of(key.device_index)
        configs = [] if key.epoch else loaded_configs(workload, target, key.device_index)
        if not configs:
            _warn_of_capture(workload)
            why = "inside a capture, with nothing loaded that is to compute it"
            return self._by_torch(self._chosen(None, why))
        best = configs[0]
        with suppress(InvalidInput):  # a table has it that none of them fits
            best = rank(workload, target, key.model, 1, configs=configs).configs[0]
        why = f"first choice of the {len(configs)} that are loaded, inside a capture"
        return first_launch([best], workload, key.device_index, self._chosen(best, why))

    # --- in the background ---

    def _launch_or_job(self, background: Background) -> Resolved:
        """The winner if it is in memory; else what is loaded, with a job to find the winner.

        Even what is on disk is left to the job: its key takes the model, which takes seconds to
        load.
        """
        key, m, winners = self.keys[-1], self.workload.m, self.winners
        found, lacks, is_done = self._look_up(background)
        launch = None if found is None else self._loaded(found)
        if found is not None and launch is not None:
            is_winner = launch.config == found.config_at(m) and winners.is_final(key, m, found)
            if is_winner or is_done:
                return Resolved(launch)
        if not is_done:
            background.submit(key, lacks, self._improve)
        if launch is None:
            predicted = winners.known(replace(key, mode="predict"), on_disk=False)
            launch = None if predicted is None else self._loaded(predicted)
        if launch is None:
            why = "torch answers until a configuration was predicted in the background"
            launch = self._by_torch(self._chosen(None, why))
        return Resolved(launch, is_final=is_done)

    def _look_up(self, background: Background) -> tuple[TuningResult | None, object, bool]:
        """The winner in memory, what this m lacks, and whether the job that sees to that is done.

        One job serves all m of a bucket that lack the same.
        """
        key, m, winners = self.keys[-1], self.workload.m, self.winners
        while True:
            found = winners.known(key, on_disk=False)
            lacks = found and (found.config_at(m), winners.is_final(key, m, found))
            is_done = background.has_finished(key, lacks)
            if not is_done or winners.known(key, on_disk=False) is found:
                return found, lacks, is_done  # else the job has just found it

    def _improve(self) -> None:
        """The job: load what is soonest there, for calls meanwhile; then find and load the winner.

        Raises:
            CompileError, LaunchError: it cannot be loaded, and neither can what was tuned instead.
        """
        key, m, winners = self.keys[-1], self.workload.m, self.winners
        soonest = winners.known(key) or winners.find(replace(key, mode="predict"), m)
        with suppress(CompileError, LaunchError):
            self._launch_ahead(soonest)
        found = winners.find(key, m, wait=False)
        try:
            self._launch_ahead(found)
        except (CompileError, LaunchError) as error:
            log.warning("%s no longer works: %s", found.chosen, one_line(error))
            broken = isinstance(error, CompileError)
            self._launch_ahead(winners.replace(key, m, found, broken=broken, wait=False))

    def _launch_ahead(self, result: TuningResult) -> None:
        """Load the first choice that can be, so that no call has to wait for it."""
        if result.config_at(self.workload.m) is not None:  # else torch computes it
            where = self.workload, result.target, self.keys[-1].device_index
            load_first(self._configs(result), *where)


def _warn_of_capture(workload: Workload) -> None:
    global _has_warned_of_capture
    if not _has_warned_of_capture:
        _has_warned_of_capture = True
        warnings.warn(
            f"the first product of {workload} came while a CUDA graph is captured, where nothing "
            f"may be timed or loaded: this graph has torch compute it (and any other such, without "
            f"a warning); call matmul once before, or costmodel.warmup([(m, n, k)])",
            RuntimeWarning,
            stacklevel=7,
        )
