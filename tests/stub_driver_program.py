"""Compiles, loads and launches by Triton's own C code and the driver of ``stub_driver.c``.

Run with the folder of that driver in ``LD_LIBRARY_PATH`` and ``TRITON_LIBCUDA_PATH``; prints JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia import driver
from triton.compiler import CompiledKernel
from triton.runtime import build

from costmodel.compile.triton_private import build_launchers
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import artifact_key, source
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.launch import fast
from costmodel.launch import kernel as loading
from costmodel.launch.fast import TritonLaunch
from costmodel.launch.kernel import Kernel, load
from costmodel.launch.plan import Plan, Workspace
from costmodel.tuning.tuning_result import TuningResult

CONFIGS = {
    "pointer": GemmConfig("pointer", 64, 64, 64, 4, 2),
    "split": GemmConfig("pointer", 64, 64, 64, 4, 2, split_k=2),
    "tma": GemmConfig("tma", 64, 64, 64, 4, 2),
}
TARGET = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))


def pretend_a_device() -> Any:
    """What torch says of a device; the driver, through which its calls may be counted."""
    cuda: Any = torch.cuda
    cuda.device = lambda index: contextlib.nullcontext()
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (9, 0)
    stub = ctypes.CDLL("libcuda.so.1")

    def is_capturing() -> bool:
        ctypes.c_int.in_dll(stub, "has_context").value = 1
        return False

    cuda.is_current_stream_capturing = is_capturing
    core: Any = torch._C
    core._cuda_getDevice = lambda: 0
    core._cuda_getCurrentRawStream = lambda index: 0
    on_the_cpu = Workspace(torch.device("cpu"))
    fast.workspace_of = lambda index, stream: on_the_cpu  # type: ignore[assignment]
    driver.CudaDriver.is_active = staticmethod(lambda: True)
    return stub


def planned(name: str) -> tuple[Plan, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    a, b, out = (torch.zeros(256, 256, dtype=torch.float16) for _ in range(3))
    workload = Workload.from_tensors(a, b, out)
    return Plan(workload, CONFIGS[name], TARGET.device.sm_count), (a, b, out)


def build_ahead() -> dict[str, Any]:
    """Build the launchers of all, and say what was loaded by that."""
    build_launchers(source(planned(name)[0].spec)[0] for name in CONFIGS).join()
    return {
        "loaded": [m for m in sys.modules if m in ("__triton_launcher", "cuda_utils")],
        "built": len([*Path(knobs.cache.dir).rglob("__triton_launcher*.so")]),
        "maps": driver.PyCUtensorMap is not None,
    }


def launch_all(stub: Any) -> dict[str, Any]:
    """Load each and launch it three times: launches by Triton's wrappers, and all of the driver."""
    said: dict[str, Any] = {}
    for name in CONFIGS:
        plan, (a, b, out) = planned(name)
        result = TuningResult.unranked(plan.workload, TARGET, "pinned", plan.config, "a test")
        kernel = load(plan.spec, TARGET, 0)
        launch = TritonLaunch(plan, kernel, 0, result)
        wrapped = counted(kernel)
        before = ctypes.c_int.in_dll(stub, "launches").value
        ctypes.c_int.in_dll(stub, "has_context").value = 0  # as in a fresh thread
        for c in (out, out, torch.zeros_like(out)):
            launch(a, b, c, None)
        said[name] = {
            "wrapped": len(wrapped),
            "launches": ctypes.c_int.in_dll(stub, "launches").value - before,
            "programs": ctypes.c_int.in_dll(stub, "programs").value == plan.blocks,
        }
    return said | {"kernels": [m for m in sys.modules if m.startswith("costmodel.kernels.")]}


def launch_with_hooks() -> dict[str, Any]:
    """Set hooks of Triton before a first launch, and later; return what they are told."""
    said: dict[str, Any] = {}
    chains = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    for name in CONFIGS:
        plan, (a, b, out) = planned(name)
        result = TuningResult.unranked(plan.workload, TARGET, "pinned", plan.config, "a test")
        kernel = load(plan.spec, TARGET, 0)
        told: list[dict[str, Any]] = []

        def hook(metadata: Any, told: list[dict[str, Any]] = told) -> None:
            told.append(dict(metadata.get()))

        counts = []
        for order in ("hooked", "plain", "hooked"), ("plain", "hooked", "plain"):
            launch = TritonLaunch(plan, kernel, 0, result)
            for state in order:
                for chain in chains:
                    chain.add(hook) if state == "hooked" else chain.remove(hook)
                told.clear()
                for c in (out, out, torch.zeros_like(out)):
                    launch(a, b, c, None)
                counts.append(len(told))
                right = {"name": kernel.binary.name, "function": kernel.function, "stream": 0}
                if any(found != right for found in told):
                    counts.append(-1)
        said[name] = counts
    return said


def counted(kernel: Kernel) -> list[object]:
    """The launches of a kernel that Triton's wrappers bring to an end."""
    run, calls = type(kernel.run), []
    wrapped = run.__call__

    def call(self: Any, *arguments: Any) -> None:
        if self is kernel.run:
            calls.append(arguments)
        wrapped(self, *arguments)

    run.__call__ = call
    return calls


def load_by_threads(times: int = 10) -> dict[str, Any]:
    """Two threads load one kernel each, again and again, and launch it; errors of theirs."""
    errors: list[str] = []
    load_module = build._load_module_from_path

    def slowly(name: str, path: str) -> Any:
        found = load_module(name, path)
        time.sleep(0.005)  # before Triton takes from it what it wants
        return found

    def again(found: CompiledKernel, *_: object) -> CompiledKernel:
        return CompiledKernel(found.src, found.metadata_group, found.hash)

    def work(name: str) -> None:
        plan, (a, b, out) = planned(name)
        arguments = plan.arguments(a, b, out)
        # Addresses: of a tensor the driver would be asked.
        arguments = {k: v.data_ptr() if hasattr(v, "data_ptr") else v for k, v in arguments.items()}
        try:
            for _ in range(times):
                kernel: Kernel = loading.load.__wrapped__(plan.spec, TARGET, 0)
                kernel(plan.blocks, 0, arguments)
        except TypeError as error:
            errors.append(f"{name}: {error}")

    made = {}
    for name in ("pointer", "tma"):
        spec = planned(name)[0].spec
        found = loading.compiled(functools.partial(source, spec), name, TARGET)
        found._init_handles()  # a launcher of its own, the first time
        made[artifact_key(spec, TARGET)] = found
    build._load_module_from_path = slowly
    loading.recalled = lambda key, *_: again(made[key])  # type: ignore
    threads = [threading.Thread(target=work, args=(name,)) for name in ("pointer", "tma")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"errors": errors}


def main() -> None:
    stub = pretend_a_device()
    if sys.argv[1] == "threads":
        said = load_by_threads()
    elif sys.argv[1] == "hooks":
        said = launch_with_hooks()
    else:
        said = build_ahead() if sys.argv[1] == "ahead" else {}
        said |= launch_all(stub)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
