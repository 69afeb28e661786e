"""Configurations that the caller has chosen: launched whatever a model or a timing says."""

from __future__ import annotations

from costmodel.dispatch.loading import ensure_loaded
from costmodel.errors import IllegalConfig
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import why_illegal
from costmodel.gemm.specialize import kernel_trouble
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.plan import Plan
from costmodel.tuning.tuning_result import PINNED, TuningResult


def pin_config(
    config: GemmConfig | None, workload: Workload, target: Target, device_index: int
) -> TuningResult:
    """Launch this configuration (None: torch) for exactly this workload, from now on.

    It is compiled and loaded now, so that it serves inside a CUDA graph's capture too.

    Raises:
        IllegalConfig: it cannot run this workload on this target; the message says why.
        CompileError, LaunchError: Triton, ptxas or the device refused it.
    """
    if config is not None:
        reason = kernel_trouble(config.kernel, target.toolchain)
        if reason := reason or why_illegal(config, workload, target.device):
            raise IllegalConfig(
                f"{config} cannot run {workload} on {target.device.name}: {reason}; "
                f"SearchSpace.of(workload, target).configs lists those that can"
            )
        ensure_loaded(Plan(workload, config, target.device.sm_count), target, device_index)
    result = TuningResult.unranked(
        workload, target, "pinned", config, "pinned by the caller", PINNED
    )
    _pins[workload, device_index] = result
    return result


def unpin_config(workload: Workload, device_index: int) -> bool:
    """Choose for this workload as for any other again; whether anything was pinned."""
    return _pins.pop((workload, device_index), None) is not None


def pinned(workload: Workload, device_index: int) -> TuningResult | None:
    """Return what is pinned for a workload; None if nothing is."""
    return _pins.get((workload, device_index))


_pins: dict[tuple[Workload, int], TuningResult] = {}
