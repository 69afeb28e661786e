"""Times a kernel in a child process, which may die of it: the program's CUDA context stays whole.

Triton binds the arguments and works out the grid in the program, on a copy of the function that
launches nothing. The child imports no module of the program's: it takes the binary from Triton's
cache, and launches it on arguments that are made like the program's (:func:`describe`). The user's
hooks before a launch run in the program, once for each configuration; the tensors that they write
are zeroed in the child before each launch. Hooks after a launch do not run.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import torch
import triton
from triton import knobs

from costmodel.autotune.arguments import tensors_of
from costmodel.autotune.call import KernelCall
from costmodel.autotune.remade import Described, Storage, describe, remake, remake_storage
from costmodel.autotune.runner import KernelRunner
from costmodel.compile.compile_pool import settings_of_triton
from costmodel.compile.compiler import reason
from costmodel.compile.triton_private import know_triton_key
from costmodel.compile.ttir import KernelJob, TextSource, front_end, recorded
from costmodel.data.measurement import NO_ROOM, Candidate, Measurement, Runner
from costmodel.errors import CompileError, CostModelError, HostError, InvalidInput, host_errors
from costmodel.processes import IDLE_S, Done, SupervisedWorker, TimedOut

LIMIT_S = 20.0
"""Seconds for all launches of a configuration; one that takes longer is taken to be endless."""


@dataclass(frozen=True)
class Launch:
    """One configuration: its binary, the types of its arguments, and what it is launched with.

    Attributes:
        zeroed: names of the tensors to zero before each launch.
    """

    name: str
    job: KernelJob
    signature: Mapping[str, Any]
    grid: tuple[int, int, int]
    values: tuple[Described, ...]
    zeroed: Sequence[str]


@dataclass(frozen=True)
class Request:
    """One thing that a child is to time.

    Attributes:
        token: of the call; another one has other arguments.
        launches: to be timed one after another, or in turn if ``rounds`` is over 0.
        storages: what the tensors of all launches lie in.
        restored, written: names of arguments: to restore before each launch, and those whose
            contents are results (None: all).
    """

    token: str
    launches: tuple[Launch, ...]
    storages: tuple[Storage, ...]
    restored: Sequence[str]
    written: set[str] | None
    agree: bool
    best_us: float = inf
    rounds: int = 0


Worker = SupervisedWorker["Request | None", list[Measurement]]


class IsolatedRunner(Runner):
    """Times the configurations of one call in a child; its arguments are those of `KernelRunner`.

    Args:
        worker: has the child; None: one that all calls share.

    Raises:
        InvalidInput: the arguments cannot be made again in another process.
    """

    def __init__(
        self,
        call: KernelCall,
        configs: Mapping[str, Any],
        note: Callable[[str, Measurement], None],
        *,
        agree: bool = False,
        worker: Worker | None = None,
    ) -> None:
        self._call, self._configs, self._note, self._agree = call, configs, note, agree
        self._token, self._storages = uuid4().hex, dict[int, Storage]()
        self._function = _apart(call.tuner.fn)
        for name in configs:
            with suppress(CompileError):
                self._launch(name)
                break
        self._worker = worker or _shared_worker(
            torch.cuda.current_device(), str(knobs.cache.dir), LIMIT_S
        )
        with host_errors():
            self._worker.start()

    def measure(
        self, workload: Any, candidates: Sequence[Candidate], best_us: float = inf
    ) -> list[Measurement]:
        """Time candidates: one measurement each, in order."""
        found = []
        for name in (candidate.config for candidate in candidates):
            measurement = self._ask([name], best_us)[0]
            self._note(name, measurement)
            if measurement.ok:
                best_us = min(best_us, measurement.latency_us)
            found.append(measurement)
        return found

    def compare(self, workload: Any, configs: Sequence[Any], rounds: int = 9) -> list[Measurement]:
        """Time a few in turn, against drift. For finalists."""
        found = self._ask(configs, rounds=rounds)
        if len(configs) > 1 and all(m.status in ("crashed", "timeout") for m in found):
            # One of them took the child along: each alone shows which.
            found = [self._ask([name])[0] for name in configs]
        for name, measurement in zip(configs, found, strict=True):
            self._note(name, measurement)
        return found

    def rest(self) -> None:
        """Have the child give back the memory that it holds."""
        with _one_at_a_time, host_errors():
            if self._worker.running:
                self._worker.run(None)

    def _launch(self, name: str) -> Launch:
        """Describe a launch."""
        call, config, launch = self._call, self._configs[name], _Recorded()
        tensors = tensors_of(call.named)
        before = {x: t._version for x, t in tensors.items() if not t.is_inference()}
        call.hook(config)
        if call.tuner.user_defined_pre_hook:
            call.tuner.pre_hook({**call.named, **config.all_kwargs()})
        zeroed = [x for x, version in before.items() if tensors[x]._version != version]
        try:
            found, _ = recorded(lambda: call.launch(config, self._function), launch)
        except (AssertionError, ValueError) as error:  # options that the backend checks
            raise CompileError(reason(error)) from error
        job = front_end().job(found[0])
        if "tt.int_to_ptr" in job.text:
            raise InvalidInput(f"{call} makes pointers of numbers, which another process cannot")
        types = dict(found[0].signature)
        values = tuple(
            describe(parameter, kind, value, self._storages)
            for (parameter, kind), value in zip(types.items(), launch.values, strict=True)
        )
        zeroed += call.tuner.reset_to_zero
        return Launch(name, job, types, launch.grid, values, zeroed)

    def _ask(
        self, names: Sequence[str], best_us: float = inf, rounds: int = 0
    ) -> list[Measurement]:
        try:
            launches = tuple(map(self._launch, names))
        except CostModelError as error:
            return [Measurement("launch_error", error=reason(error))] * len(names)
        request = Request(
            self._token, launches, tuple(self._storages.values()),
            self._call.tuner.restore_value, self._call.may_write, self._agree, best_us, rounds,
        )  # fmt: skip
        try:
            with _one_at_a_time, host_errors():
                outcome = self._worker.run(request)
        except RuntimeError as error:  # such as a GPU that one process may use at a time
            raise HostError(f"no child process can time kernels here: {error}") from error
        if isinstance(outcome, Done):
            return outcome.value
        if isinstance(outcome, TimedOut):
            lost = Measurement("timeout", error=f"over {outcome.limit_s:g} s")
        else:
            lost = Measurement("crashed", error=outcome.how[:500])
        return [lost] * len(names)


_one_at_a_time = threading.Lock()


@functools.cache
def _shared_worker(device_index: int, cache: str, limit_s: float) -> Worker:
    setup = functools.partial(begin, device_index, cache)
    return SupervisedWorker(
        answer, limit_s=limit_s, setup=setup, idle_s=IDLE_S, settings=settings_of_triton
    )


class _Recorded:
    """Stands for a kernel, and remembers the grid and the arguments of its launch."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        # stream, function, two kinds of metadata, two hooks, then the arguments
        self.grid, self.values = (x, y, z), rest[6:]


def _apart(function: Any) -> Any:
    """Copy a jitted function, with what wraps it: the copy knows no binary that it could launch."""
    made = copy.copy(function)
    if hasattr(function, "device_caches"):
        made.device_caches = defaultdict(made.create_binder)
    else:
        made.fn = _apart(function.fn)
    return made


# --- The child's side -----------------------------------------------------------------------------


class _RemadeCall(KernelCall):
    """A call of which there are binaries and arguments, and no function."""

    def launch(self, config: Any, function: Any = None, **options: Any) -> None:
        config.kernel[config.grid](*config.values)

    def hook(self, config: Any) -> None:
        for tensor in tensors_of(self.named, config.zeroed).values():
            tensor.zero_()


class _Timing:
    """The timing of one call."""

    def __init__(self, request: Request) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._storages: list[torch.Tensor] = []
        self._configs: dict[str, Any] = {}
        first = request.launches[0]
        self._load(request)
        tuner = SimpleNamespace(
            base_fn=SimpleNamespace(__name__=first.job.name), arg_names=list(first.signature),
            reset_to_zero=[], restore_value=request.restored,
            user_defined_pre_hook=False, user_defined_post_hook=False,
        )  # fmt: skip
        call = _RemadeCall(tuner, self._configs[first.name].values, {})
        if request.agree:
            call.keep(request.written)
        self._runner = KernelRunner(call, self._configs, lambda *_: None, agree=request.agree)

    def answer(self, request: Request) -> list[Measurement]:
        self._load(request)
        names = [launch.name for launch in request.launches]
        if request.rounds:
            return self._runner.compare(None, names, request.rounds)
        return self._runner.measure(None, list(map(Candidate, names)), request.best_us)

    def _load(self, request: Request) -> None:
        for storage in request.storages[len(self._storages) :]:
            self._storages.append(remake_storage(storage, self._device))
        for launch in request.launches:
            if launch.name not in self._configs:
                self._configs[launch.name] = loaded(launch, self._storages)


def loaded(launch: Launch, storages: Sequence[torch.Tensor]) -> Any:
    """Take a launch's binary from Triton's cache, and make its arguments."""
    source: Any = TextSource(launch.job)
    source.signature = launch.signature
    source.fn = SimpleNamespace(arg_names=list(launch.signature), launch_metadata=None)
    return SimpleNamespace(
        kernel=triton.compile(source, options=dict(launch.job.options)),
        grid=launch.grid,
        values=remake(launch.values, storages),
        zeroed=launch.zeroed,
    )


_timings: dict[str, _Timing] = {}  # by token; one at most


def begin(device_index: int, cache: str) -> None:
    """Set a fresh child up."""
    torch.cuda.set_device(device_index)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    knobs.cache.dir = cache
    know_triton_key()


def answer(request: Request | None) -> list[Measurement]:
    """Time what is asked for; None gives back memory. What breaks the context ends the process."""
    if request is None or request.token not in _timings:
        _timings.clear()
        torch.cuda.empty_cache()
    if request is None:
        return []
    try:
        timing = _timings.get(request.token) or _timings.setdefault(request.token, _Timing(request))
        return timing.answer(request)
    except torch.OutOfMemoryError as error:
        full = Measurement("out_of_resources", error=f"{NO_ROOM}: {error}"[:500])
        return [full] * len(request.launches)
    except Exception as error:
        try:
            torch.cuda.synchronize()
        except Exception as broken:
            print(f"the CUDA context is broken: {broken}", file=sys.stderr, flush=True)
            os._exit(1)
        return [Measurement("launch_error", error=reason(error))] * len(request.launches)
