"""``matmul`` on a CPU: latencies are made up in place of timing, and torch computes for kernels."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from random_model import RandomModel

from costmodel import validation
from costmodel.compile.compiler import Artifact
from costmodel.data.measurement import Candidate, Measurement, Runner
from costmodel.dispatch import dispatch, loading, resolve_launch, warmup
from costmodel.dispatch.background import Background
from costmodel.dispatch.launches import Launches
from costmodel.dispatch.resolve_launch import Resolved
from costmodel.errors import CompileError, CostModelError
from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.specialize import artifact_key
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.launch.plan import Plan
from costmodel.tuning.tuning_result import TuningResult
from costmodel.tuning.winner_cache import WinnerCache
from costmodel.tuning.winners import Winners

__all__ = ["H100", "MODEL", "Bench", "Machine", "find", "on_the_cpu", "operands", "result_of",
           "wait_until"]  # fmt: skip

H100 = Target.named("h100-sxm", Toolchain("3.6.0", "12.8"))
MODEL = RandomModel()


class Bench(Runner):
    """Makes latencies up: torch is the slowest.

    Attributes:
        timed: what was timed, in order; compared: what was timed side by side, as finalists are.
        waited: whether the device was to be idle, by use.
        before: called before anything is timed; it may wait, or raise.
        latency_us: of a configuration, None being torch, for a workload.
    """

    def __init__(self) -> None:
        self.timed: list[Workload] = []
        self.compared: list[Workload] = []
        self.waited: list[bool] = []
        self.before: Callable[[], object] = lambda: None
        self.latency_us: Callable[[Workload, GemmConfig | None], float] = _made_up_us

    @contextmanager
    def runner(self, wait: bool = True) -> Iterator[Bench]:
        self.waited.append(wait)
        self.before()
        yield self

    def measure(
        self, workload: Workload, candidates: Sequence[Candidate], best_us: float = inf
    ) -> list[Measurement]:
        self.timed += [workload] * len(candidates)
        return [_ok(self.latency_us(workload, c.config)) for c in candidates]

    def measure_torch(self, workload: Workload) -> Measurement:
        return _ok(self.latency_us(workload, None))

    def compare(
        self, workload: Workload, configs: Sequence[GemmConfig | None], rounds: int = 9
    ) -> list[Measurement]:
        self.compared += [workload] * len(configs)
        return [_ok(self.latency_us(workload, config)) for config in configs]

    @property
    def timings(self) -> int:
        return len(self.timed) + len(self.compared)


def _made_up_us(workload: Workload, config: GemmConfig | None) -> float:
    return 99.0 if config is None else 50.0 + crc32(str(config).encode()) % 997 / 100


def _ok(us: float) -> Measurement:
    return Measurement("ok", us, us, us, 5)


def compiled(specs: Sequence[Specialization], target: Target) -> Iterable[Artifact]:
    keys = [artifact_key(spec, target) for spec in specs]
    return [Artifact(key, spec, ptx_hash=key) for key, spec in zip(keys, specs, strict=True)]


class FakeLaunch:
    """What ``TritonLaunch`` is on a GPU; torch computes."""

    def __init__(self, plan: Plan, kernel: object, index: int, result: TuningResult) -> None:
        self.plan, self.config, self.result = plan, plan.config, result
        self._activation, self._is_layer = plan.workload.code.activation, False

    def of_layer(self) -> FakeLaunch:
        made = copy.copy(self)
        made._is_layer = True
        return made

    @torch.no_grad()  # autograd sees nothing of a kernel
    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        found = a.float() @ (b.T if self._is_layer else b).float()
        if bias is not None:
            found += bias
        out.copy_(found if self._activation == "none" else torch.relu(found))


def on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """An H100 whose operands lie on the CPU, for what is done ahead of the first product."""
    blank = warmup._blank_operands

    def on_cpu(workload: Workload, device: str) -> Any:
        return blank(workload, device if device == "meta" else "cpu")

    patch.setattr(warmup, "_blank_operands", on_cpu)
    patch.setattr(Target, "current", classmethod(lambda cls, index=None: H100))
    patch.setattr(torch.cuda, "current_device", lambda: -1)  # as CPU tensors have it
    patch.setattr("costmodel.dispatch.check._check_devices", lambda _: None)


class Machine:
    """All that ``matmul`` has of a machine.

    Attributes:
        bench: what times.
        loaded: binaries in the order in which they were loaded.
        refuses: whether a binary cannot be loaded; with ``refusal``, an error.
        capturing: whether a CUDA graph is being captured.
        latest: the one that was made last.
    """

    latest: Machine

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.bench = Bench()
        self.loaded: list[Specialization] = []
        self.refuses: Callable[[Specialization], bool] = lambda _: False
        self.refusal: type[CostModelError] = CompileError
        self.capturing = False
        self._resolved = threading.local()
        Machine.latest = self
        self._patch, self._folder = monkeypatch, folder
        patch = monkeypatch.setattr
        on_the_cpu(monkeypatch)
        patch("costmodel.tuning.tuner.compile_for_device", compiled)
        patch(resolve_launch, "is_capturing", lambda _: self.capturing)
        told = {"a capture", "the machine"}
        patch(validation, "_warned", validation._warned - told)
        patch(resolve_launch, "_retry_at", -inf)
        patch(dispatch, "resolve_launch", self._resolve)
        patch(loading, "load", self._load)
        patch(loading, "TritonLaunch", FakeLaunch)
        patch(loading, "Repack", lambda *_: None)
        # A pinned or set thing lasts for a process, and each test is to be one.
        loading.pins.clear()
        patch("costmodel.tuning.modes._set", None)
        patch("costmodel.tuning.modes._read", None)
        self.restart()

    def restart(self) -> None:
        """As a new process: nothing in memory, the disk as it was."""
        winners = Winners(
            WinnerCache(self._folder),
            target_of=lambda _: H100,
            process_of=lambda _: self.bench,
            compile_=compiled,
        )
        self._patch.setattr(loading, "_loaded", {})
        self._patch.setattr(dispatch, "winners", winners)
        self._patch.setattr(dispatch, "launches", Launches())
        for layer in [*dispatch.layers]:
            layer.forget_launches()
        self._patch.setattr(dispatch, "_background", Background())

    def _resolve(self, *arguments: Any) -> Resolved:
        self._resolved.latest = resolve_launch.resolve_launch(*arguments)
        return self._resolved.latest

    def take_resolved(self) -> Resolved | None:
        """What the last first call of this thread launched, and whether that is kept; once."""
        found: Resolved | None = getattr(self._resolved, "latest", None)
        self._resolved.latest = None
        return found

    def _load(self, spec: Specialization, target: Target, index: int) -> Any:
        assert not self.capturing, "loaded inside a capture"
        if self.refuses(spec):
            raise self.refusal(f"{spec.config_binary} is refused")
        self.loaded.append(spec)
        return object()


def find(
    workload: Workload, mode: str = "auto", model: Any = MODEL, index: int = -1, **options: Any
) -> TuningResult:
    """The winner of a product on the machine; -1 is the "device" of CPU tensors."""
    key = dispatch.winners.key(workload, index, mode=mode, model=model)
    return dispatch.winners.find(key, workload.m, **options)


def result_of(call: Callable[[], TuningResult | None]) -> TuningResult:
    """What a call went by, whether or not that is kept.

    Args:
        call: multiplies, and gives what is kept of that.
    """
    machine = Machine.latest
    machine.take_resolved()
    kept = call()
    resolved = machine.take_resolved()
    result = resolved.launch.result if resolved else kept
    assert result is not None
    assert kept in (None, result)
    return result


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask again and again until something is so, for a minute at most."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Half-precision a[m, k] and b[k, n]."""
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randn(s, generator=generator) / 8 for s in ((m, k), (k, n)))
    return a.half(), b.half()
