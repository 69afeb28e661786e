"""Finds the launch of a first call: pinned, known, tuned, or interim.

Only final answers are kept. An interim one (inside a capture, if the winner is not loaded; while a
thread tunes; while this machine cannot compile) serves one call. The next call comes here again.
"""

import functools
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from costmodel.data.candidates import ModelLike
from costmodel.dispatch.background import Background
from costmodel.dispatch.check import Call
from costmodel.dispatch.loading import first_launch, is_loaded, loaded_configs, pins
from costmodel.errors import CompileError, CostModelError, HostError, InvalidInput, LaunchError
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
from costmodel.tuning.winners import Winners, warn_of_host
from costmodel.validation import log, one_line, warn_once

_OTHERS = 8  # at most, tried in place of a winner: each may take seconds to compile
_PAUSE_S = 60.0  # before this machine tries to compile again: that may take seconds


_retry_at = -inf


class Resolved(NamedTuple):
    """A launch, and whether the next call of its kind may take it too."""

    launch: Launch
    is_final: bool = True


def resolve_launch(call: Call, out: Tensor, winners: Winners, background: Background) -> Resolved:
    """Return the launch of a call that was checked; it is not queued here.

    In this order: what is pinned; inside a capture, what is loaded; the winner of the mode, if it
    is known; a winner that the mode finds now. In a process group the mode only predicts, and the
    disk is not read. While this machine cannot compile or load, a loaded winner is used, else
    torch, with a warning.

    Args:
        out: [m, n], the output that will be written.

    Raises:
        CostModelError: Triton's interpreter is switched on.
        LaunchError: what is pinned cannot be launched.
        InvalidInput: as in :meth:`Winners.find`.
    """
    global _retry_at
    workload = Workload.from_tensors(
        call.a, call.b, out, bias=call.bias is not None, activation=call.activation or "none",
        tf32=bool(call.tf32),
    )  # fmt: skip
    product = _Product(workload, call.a.get_device(), str(call.mode), call.model, winners)
    if workload.is_empty:
        return Resolved(product._by_torch(None))
    if interpreter_setting():
        raise CostModelError(
            "TRITON_INTERPRET is set: Triton would interpret the kernels on the CPU, and timings "
            "of that mean nothing; unset it before Triton is imported"
        )
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

    The mode itself finds the winner of the last key.
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


@dataclass
class _Product:
    """A product to be launched on a device."""

    workload: Workload
    index: int
    mode: str
    model: ModelLike
    winners: Winners

    @property
    def m(self) -> int:
        return self.workload.m

    @functools.cached_property
    def keys(self) -> list[TuningKey]:
        return keys_of(self.winners, self.workload, self.index, self.mode, self.model)

    @property
    def key(self) -> TuningKey:
        return self.keys[-1]

    def resolve(self, background: Background) -> Resolved:
        key = self.key  # first of all: it refuses a wrong model
        if (chosen := pins.get((self.workload, self.index))) is not None:
            return Resolved(self._launch_of_pin(chosen))
        if is_capturing(self.index):
            return self._known_and_loaded() or Resolved(self._fallback(), is_final=False)
        if time.monotonic() < _retry_at:
            return self.without_host()
        if self.mode == "background" and not key.epoch:
            return self._launch_or_job(background)
        if self.mode == "never":
            return Resolved(self._launch_untimed())
        return Resolved(self._launch_of_winner(key))

    def without_host(self) -> Resolved:
        """The winner if it is loaded, else torch for this call: this machine may recover."""
        try:
            if (found := self._known_and_loaded()) is not None:
                return found
            chosen = self._chosen(None, "nothing can be compiled or loaded here for now")
        except HostError:  # the toolchain itself does not run
            chosen = None
        return Resolved(self._by_torch(chosen), is_final=False)

    # --- the parts of an answer ---

    def _chosen(self, config: GemmConfig | None, why: str) -> TuningResult:
        """A result that no model ranked."""
        target = self.winners.target_of(self.index)
        return TuningResult.unranked(self.workload, target, self.mode, config, why)

    def _by_torch(self, result: TuningResult | None) -> TorchLaunch:
        code = self.workload.code
        return TorchLaunch(code.activation, result, code.tf32)

    def _configs(self, result: TuningResult) -> list[GemmConfig]:
        """The configurations that a result allows here, best first."""
        chosen = [result.config_at(self.m), result.config]
        configs = dict.fromkeys(config for config in chosen if config is not None)
        if configs and not result.timed:
            configs |= dict.fromkeys(config for config, _ in result.ranked)
        return [*configs]

    def _launch(self, result: TuningResult, *, only_loaded: bool = False) -> Launch:
        """The launch of a result, or of its next choices.

        Args:
            only_loaded: compile and load nothing.

        Raises:
            CompileError, LaunchError: none can be loaded; see :func:`first_launch`.
        """
        here, configs = result.at(self.m), self._configs(result)
        if here.config is None:
            return self._by_torch(here)
        if self.key.epoch and (only_loaded or result.timed):
            configs = configs[:1]  # the others that can be loaded differ from rank to rank
        if only_loaded:
            where = self.workload, result.target, self.index
            configs = [config for config in configs if is_loaded(config, *where)]
        try:
            return first_launch(configs, self.workload, self.index, here)
        except (CompileError, LaunchError):
            if result.config is not None or self.key.epoch:
                raise
        return self._by_torch(result)  # torch is the winner elsewhere in the bucket

    def _loaded(self, result: TuningResult | None) -> Launch | None:
        """The launch of a result without compiling or loading anything; None if there is none."""
        with suppress(CompileError, LaunchError):
            return None if result is None else self._launch(result, only_loaded=True)
        return None

    def _known_and_loaded(self) -> Resolved | None:
        """The launch of the first known winner, without compiling or loading anything."""
        for key in self.keys:
            if (found := self.winners.known(key)) is None:
                continue
            if (launch := self._loaded(found)) is None:
                return None
            wanted = found.config_at(self.m)
            # A later call of a prediction may launch a later choice, if the first cannot load.
            is_first = launch.config == wanted and (wanted is None or found.timed)
            may_time = self.mode != "never"
            is_final = self.winners.is_final(key, self.m, found, may_time=may_time)
            return Resolved(launch, is_first and is_final)
        return None

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
        known = next((key for key in self.keys if self.winners.known(key) is not None), None)
        with suppress(CompileError, LaunchError):
            if known is not None:
                return self._launch(self.winners.find(known, self.m, may_time=False))
        return self._launch_of_winner(replace(self.key, mode="predict"))

    def _launch_of_winner(self, key: TuningKey) -> Launch:
        """The launch of a winner; if it cannot be loaded, of another configuration, or torch."""
        result = self.winners.find(key, self.m)
        try:
            return self._launch(result)
        except (CompileError, LaunchError) as error:
            # A winner that this device has no memory for now may still be another process's winner.
            broken = isinstance(error, CompileError)
        if not key.epoch:  # in a group no rank may choose again by itself
            unwanted = result
            result = self.winners.replace(key, self.m, unwanted, broken=broken)
            with suppress(CompileError, LaunchError):
                if result is not unwanted:  # the same: it was replaced before, in vain
                    return self._launch(result)
            with suppress(CompileError, LaunchError):
                others = self._others(result)
                return first_launch(others, self.workload, self.index, result.at(self.m))
        why = f"no configuration of {self.workload} can be loaded: torch computes it"
        warnings.warn(why, RuntimeWarning, 6)
        return self._by_torch(result.at(self.m))

    def _others(self, result: TuningResult) -> list[GemmConfig]:
        """The best that were timed beside a winner, and faster than torch."""
        torch_us = result.torch.latency_us if result.torch and result.torch.ok else inf
        timed = {c: x.latency_us for c, x in result.measured if x.ok and x.latency_us < torch_us}
        return sorted(timed.keys() - self._configs(result), key=timed.__getitem__)[:_OTHERS]

    def _fallback(self) -> Launch:
        """The launch, in a capture, of the best configuration that is loaded, else torch.

        The loaded ones differ from rank to rank, so in a process group torch is taken.
        """
        count(makeshifts=1)
        key, workload = self.key, self.workload
        target = self.winners.target_of(self.index)
        configs = [] if key.epoch else loaded_configs(workload, target, self.index)
        if not configs:
            warn_once(
                f"the first product of {workload} came while a CUDA graph is captured, where "
                f"nothing may be timed or loaded: this graph has torch compute it (and any other "
                f"such, without a warning); call matmul once before, or "
                f"costmodel.warmup([(m, n, k)])",
                "a capture",
                stacklevel=7,
            )
            why = "inside a capture, with nothing loaded that is to compute it"
            return self._by_torch(self._chosen(None, why))
        best = configs[0]
        with suppress(InvalidInput):  # a table says that none of them fits
            best = rank(workload, target, key.model, 1, configs=configs).configs[0]
        why = f"first choice of the {len(configs)} that are loaded, inside a capture"
        return first_launch([best], workload, self.index, self._chosen(best, why))

    # --- in the background ---

    def _launch_or_job(self, background: Background) -> Resolved:
        """The winner if it is in memory; else what is loaded, and a job that finds the winner.

        The job reads the disk too: the key of a winner there needs the model, which takes seconds
        to load.
        """
        key, m, winners = self.key, self.m, self.winners
        # Looked up first: a job may find the winner meanwhile.
        tuning, planning = background.failed(key), background.failed((key, m))
        found = winners.known(key, on_disk=False)
        # A winner that was found and has left memory since is to be found again.
        is_done = bool(tuning) if found is None else planning is not None
        launch = self._loaded(found)
        if found is not None and launch is not None:
            is_winner = launch.config == found.config_at(m) and winners.is_final(key, m, found)
            if is_winner or is_done:
                return Resolved(launch)
        if not is_done:
            background.submit(key if found is None else (key, m), self._improve)
        if launch is None:
            launch = self._loaded(winners.known(replace(key, mode="predict"), on_disk=False))
        if launch is None:
            why = "torch answers until a configuration was predicted in the background"
            launch = self._by_torch(self._chosen(None, why))
        return Resolved(launch, is_final=is_done)

    def _improve(self) -> None:
        """Load what is ready soonest, for calls meanwhile; then find and load the winner.

        Raises:
            CompileError, LaunchError: neither the winner nor what was tuned instead can be loaded.
        """
        key, m, winners = self.key, self.m, self.winners
        soonest = winners.known(key) or winners.find(replace(key, mode="predict"), m)
        with suppress(CompileError, LaunchError):
            self._launch(soonest)
        found = winners.find(key, m, wait=False)
        try:
            self._launch(found)
        except (CompileError, LaunchError) as error:
            log.warning("%s no longer works: %s", found.chosen, one_line(error))
            broken = isinstance(error, CompileError)
            self._launch(winners.replace(key, m, found, broken=broken, wait=False))
