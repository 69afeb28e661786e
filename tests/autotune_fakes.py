"""A machine without a GPU on which any kernel is tuned: all but compiling and launching is real.

Triton binds, front ends run, the timings are kept on disk. A launch costs what a table says on a
clock of its own, and does to its arguments what a test wants.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton
import triton.language as tl
from fake_driver import fake_driver
from triton.runtime.autotuner import Autotuner as StockAutotuner

import costmodel
from costmodel.autotune.store import KernelStore
from costmodel.compile.compiler import Artifact
from costmodel.compile.ttir import KernelJob
from costmodel.hardware.target import Target

__all__ = ["Launch", "Machine", "add", "configs", "in_place_of_triton", "machine_without_gpu"]

compiling: Any = importlib.import_module("costmodel.autotune.compiling")
tuning: Any = importlib.import_module("costmodel.autotune.tuning")
runner: Any = importlib.import_module("costmodel.autotune.runner")
ttir: Any = importlib.import_module("costmodel.compile.ttir")


@contextmanager
def in_place_of_triton() -> Iterator[None]:
    """Have costmodel tune what Triton would; give every tuner its own ``run`` back at the end."""
    kinds = [StockAutotuner, *StockAutotuner.__subclasses__()]
    own = {kind: vars(kind)["run"] for kind in kinds if "run" in vars(kind)}
    costmodel.replace_triton_autotune()
    try:
        yield
    finally:
        for kind, run in own.items():
            kind.run = run
        del StockAutotuner.__init_subclass__


def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add y, if there is one, to x. Not a kernel yet: each test makes it a new one."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    if y_ptr is not None:
        x += tl.load(y_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x, mask=at < n)


def configs(*blocks: int, **options: Any) -> list[triton.Config]:
    """One configuration of each block size."""
    return [triton.Config({"BLOCK": block}, **options) for block in blocks]


@dataclass(frozen=True)
class Launch:
    """One launch: the compiler's options, the grid, Triton's hook, all arguments by name."""

    options: dict[str, Any]
    grid: tuple[int, int, int]
    hook: Any
    named: dict[str, Any]

    @property
    def block(self) -> int:
        return int(self.named["BLOCK"])


class Loaded(SimpleNamespace):
    """Stands for what Triton has loaded; with a grid in brackets it is launched."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *given: self.run(*grid, *[None] * 6, *given)


class Machine:
    """What the tests say of a machine, and what was done on it.

    Attributes:
        us: microseconds of a launch.
        effect: what a launch does; it may raise.
        outcome: what compiling a job gives: its artifact with another status, say.
        slow_s: real seconds that each launch sleeps.
        device, capturing, target: the current device, whether a graph is captured, the target.
        launches, jobs: all so far.
        broken: what using the CUDA context raises; of a launch that raises it, from then on.
        warm: the device has been kept busy.
        now_us: the clock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.us: Callable[[Launch], float] = lambda launch: float(launch.block)
        self.effect: Callable[[Launch], None] = lambda launch: None
        self.outcome: Callable[[KernelJob, Artifact], Artifact] = lambda job, artifact: artifact
        self.slow_s = 0.0
        self.device, self.capturing = 0, False
        self.target = Target.named("h100-sxm")
        self.launches: list[Launch] = []
        self.jobs: list[KernelJob] = []
        self.now_us = 0.0
        self.broken: torch.AcceleratorError | None = None
        self.warm = False

    def timed(self) -> set[int]:
        """Block sizes that were launched so far."""
        return {launch.block for launch in self.launches}

    def restart(self) -> None:
        """Forget what a new process would not know."""
        self.broken = None
        self.launches.clear()
        self.jobs.clear()
        tuning.store = KernelStore(self.folder)
        compiling._begun.clear()

    # --- Stand-ins --------------------------------------------------------------------------------

    size = 4

    def start(self, count: int) -> None:
        """As of a CompilePool."""

    def hurry(self, future: Future[Artifact], urgency: int) -> None:
        """As of a CompilePool."""

    def submit(self, key: str, spec: Any, compile_: Any, **_: Any) -> Future[Artifact]:
        job = compile_.args[0]
        self.jobs.append(job)
        future: Future[Artifact] = Future()
        future.set_result(self.outcome(job, Artifact(key, spec, ptx_hash=job.key[:16])))
        return future

    def compile(self, source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        """Return what Triton would have loaded."""
        return Loaded(
            run=lambda x, y, z, *rest: self.launch(source.fn, options, (x, y, z), rest),
            launch_metadata=lambda *_: None, function=None, packed_metadata=None, asm={"ptx": ""},
        )  # fmt: skip

    def launch(self, function: Any, options: Any, grid: Any, rest: Any) -> None:
        # stream, function, two kinds of metadata, two hooks, then the arguments
        named = dict(zip(function.arg_names, rest[6:], strict=True))
        launch = Launch(options, grid, rest[4], named)
        self.launches.append(launch)
        try:
            self.effect(launch)
        except torch.AcceleratorError as error:
            self.broken = error
            raise
        self.now_us += self.us(launch)
        time.sleep(self.slow_s)

    def synchronize(self, device: Any) -> None:
        if self.broken is not None:
            raise self.broken

    def event(self, **_: Any) -> Any:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now_us)
        event.elapsed_time = lambda other: (other.at - event.at) / 1e3
        return event

    def torch_of_runner(self) -> Any:
        cuda = SimpleNamespace(
            current_device=lambda: self.device, Event=self.event, _sleep=lambda cycles: None,
            synchronize=self.synchronize,
            get_device_properties=lambda device: SimpleNamespace(L2_cache_size=64),
        )  # fmt: skip
        return SimpleNamespace(
            cuda=cuda, device=lambda *_: "cpu", zeros=torch.zeros, int32=torch.int32,
            OutOfMemoryError=torch.OutOfMemoryError, AcceleratorError=torch.AcceleratorError,
        )  # fmt: skip


@contextmanager
def machine_without_gpu(folder: Path, patience_s: float = 60.0) -> Iterator[Machine]:
    """Make this process one that tunes kernels on CPU tensors; timings are kept in the folder.

    Args:
        patience_s: after so long a first call no longer waits for all configurations.
    """
    machine = Machine(folder)
    with pytest.MonkeyPatch.context() as patch, fake_driver() as driver:
        patch.setattr(driver, "get_current_device", lambda: machine.device)
        patch.setattr(triton.compiler, "compile", machine.compile)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: machine.device, raising=False)
        patch.setattr(torch.cuda, "current_device", lambda: machine.device)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
        patch.setattr(Target, "current", lambda index=None: machine.target)
        patch.setattr(compiling, "device_compilers", lambda: machine)
        patch.setattr(tuning, "store", KernelStore(folder))
        patch.setattr(runner, "torch", machine.torch_of_runner())
        patch.setattr(runner, "keep_warm", lambda: setattr(machine, "warm", True))
        patch.setattr(runner, "uuid_of", lambda device: f"test-{os.getpid()}")
        patch.setattr(compiling, "_begun", {})
        patch.setattr(tuning, "_PATIENCE_S", patience_s)
        patch.setattr(ttir, "build_launchers", lambda sources: Mock())
        yield machine


def main() -> None:
    """``autotune_fakes.py FOLDER BLOCKS SLOW_S``: tune once, and print what was done as JSON.

    Each configuration that is launched for the first time is told at once by a line.
    """
    folder, blocks, slow_s = Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
    import costmodel

    with machine_without_gpu(folder) as machine:
        machine.slow_s = slow_s
        kernel = costmodel.autotune(configs(*blocks), ["n"])(triton.jit(add))
        x = torch.zeros(64)
        kernel[(1,)](x, x, x, 64)
        print(json.dumps({
            "timed": sorted(machine.timed()), "launches": len(machine.launches),
            "compiled": len(machine.jobs), "best": kernel.best_config.kwargs["BLOCK"],
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
