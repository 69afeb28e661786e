"""Loads binaries for a launch; knows which are on the device, and what is pinned."""

import threading
from collections.abc import Sequence

from costmodel.errors import CompileError, CostModelError, LaunchError
from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.space import SearchSpace
from costmodel.gemm.workload import CodeClass, Workload
from costmodel.hardware.target import Target
from costmodel.launch.fast import TritonLaunch
from costmodel.launch.kernel import Kernel, load
from costmodel.launch.plan import Plan, Repack
from costmodel.tuning.counters import count
from costmodel.tuning.tuning_result import TuningResult
from costmodel.validation import drop_oldest, log, one_line

pins: dict[tuple[Workload, int], TuningResult] = {}
"""What the caller has pinned, by workload and device index."""

_KEPT = 8192
# Aligned copies are made by another binary, which depends on the operands before the copy.
_Key = tuple[Specialization, CodeClass | None, Target, int]

_lock = threading.Lock()
# Configurations that differ only in how they are launched share a binary.
_loaded: dict[_Key, Kernel] = {}


def first_launch(
    configs: Sequence[GemmConfig], workload: Workload, device_index: int, result: TuningResult
) -> TritonLaunch:
    """Return the launch of the first configuration that can be loaded.

    Args:
        configs: legal ones, in order of preference.
        result: the tuning result that the launch belongs to.

    Raises:
        LaunchError: none can be loaded, but at least one compiles.
        CompileError: none compiles.
    """
    kind: type[CostModelError] = CompileError
    told, target = "there is no configuration to load", result.target
    for config in configs:
        plan = Plan(workload, config, target.device.sm_count)
        try:
            kernel = ensure_loaded(plan, target, device_index)
        except (CompileError, LaunchError) as error:
            told = one_line(error)
            log.info("%s: %s", config, told)
            kind = LaunchError if isinstance(error, LaunchError) else kind
        else:
            return TritonLaunch(plan, kernel, device_index, result)
    raise kind(told)


def ensure_loaded(plan: Plan, target: Target, device_index: int) -> Kernel:
    """Compile (or take from Triton's cache) and load all that a plan launches; remembered.

    Raises:
        CompileError, LaunchError: as :func:`costmodel.launch.kernel.load`.
    """
    key = _key(plan, target, device_index)
    found = _loaded.get(key)
    if found is None:
        kernel = load(plan.spec, target, device_index)
        if plan.config.repack:
            Repack(plan, target, device_index)
        with _lock:
            if key not in _loaded:
                count(loaded=1)
            found = _loaded.setdefault(key, kernel)
            drop_oldest(_loaded, _KEPT)
    return found


def is_loaded(config: GemmConfig, workload: Workload, target: Target, device_index: int) -> bool:
    """Return True if the configuration can run without compiling or loading anything."""
    plan = Plan(workload, config, target.device.sm_count)
    return _key(plan, target, device_index) in _loaded


def loaded_configs(workload: Workload, target: Target, device_index: int) -> list[GemmConfig]:
    """The configurations that can run a workload without compiling or loading anything."""
    space = SearchSpace.of(workload, target)
    return [c for c in space.configs if is_loaded(c, workload, target, device_index)]


def _key(plan: Plan, target: Target, device_index: int) -> _Key:
    code = plan.workload.code if plan.config.repack else None
    return plan.spec, code, target, device_index
