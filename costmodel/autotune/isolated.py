"""Times a kernel in a child process, which may die of it: the program's CUDA context stays whole.

In the program, Triton binds the arguments and works out the grid, on a copy of the function that
launches nothing. The child imports no module of the program: it takes the binary from Triton's
cache, and launches it on arguments that are made like those of the program. Hooks and resets before
a launch run in the program, once for each configuration; before each launch in the child, the
arguments hold what they held then. Hooks after a launch do not run.
"""

import copy
import functools
import io
import itertools
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs

from costmodel.autotune.arguments import Snapshot, span, tensors_of
from costmodel.autotune.call import KernelCall
from costmodel.autotune.runner import BrokenContext, KernelRunner
from costmodel.compile.compile_pool import settings_of_triton
from costmodel.compile.compiler import reason
from costmodel.compile.triton_private import know_triton_key
from costmodel.compile.ttir import KernelJob, TextSource, front_end, recorded
from costmodel.data.measurement import NO_ROOM, Batch, Candidate, Measurement, Measurements
from costmodel.errors import CompileError, CostModelError, HostError, InvalidInput
from costmodel.measure.device import ChildRunner
from costmodel.processes import IDLE_S, SupervisedWorker

LIMIT_S = 20.0
"""Seconds for all launches of a configuration; one that takes longer counts as endless."""

# Bytes of a tensor that are copied, and repeated in the rest of it, as it may hold indices.
_COPIED = 1 << 20


@dataclass(frozen=True)
class Launch:
    """One configuration: its binary, and the types, grid and values of its launch.

    Attributes:
        values: the arguments, pickled.
    """

    name: str
    job: KernelJob
    signature: Mapping[str, Any]
    grid: tuple[int, int, int]
    values: bytes


@dataclass(frozen=True)
class Request:
    """Launches that a child is to time, one after another, or in turn if ``rounds`` is over 0.

    Without launches it asks who is outvoted; the answer is pairs of a name and its outcome.

    Attributes:
        token: number of the call; another call has other arguments.
        may_write: names of the arguments whose contents are results; None: all.
        agree: as for `KernelRunner`.
        best_us: a latency that is known, in us; far slower configurations stop early.
    """

    token: int
    launches: tuple[Launch, ...]
    may_write: set[str] | None
    agree: bool
    best_us: float
    rounds: int


Worker = SupervisedWorker[Request | None, Measurements]


@dataclass(eq=False)
class IsolatedRunner(ChildRunner):
    """Times the configurations of one call in a child; other attributes are as of `KernelRunner`.

    Attributes:
        worker: owns the child; None: one that all calls share.

    Raises:
        InvalidInput: another process cannot make these arguments.
    """

    call: KernelCall
    by_name: Mapping[str, Any]
    note: Callable[[str, Measurement], None]
    agree: bool = False
    worker: Worker | None = None

    def __post_init__(self) -> None:
        self._token = next(_tokens)
        self._function = apart(self.call.tuner.fn)
        for name, config in self.by_name.items():
            with suppress(CompileError):
                self.call.hook(config)
                self._described(name)
                break
        super().__init__(
            self.worker
            or _shared_worker(torch.cuda.current_device(), str(knobs.cache.dir), LIMIT_S)
        )
        self.start()

    def measure(self, workload: Any, candidates: Batch, best_us: float = inf) -> Measurements:
        """Time candidates: one measurement each, in order."""
        return self._timed([candidate.config for candidate in candidates], best_us)

    def compare(self, workload: Any, configs: Sequence[Any], rounds: int = 9) -> Measurements:
        """Time a few finalists in turn, so that drift meets all alike."""
        return self._timed(configs, rounds=rounds)

    def outvoted(self) -> dict[str, Any]:
        """Return an outcome for each name whose results differ from those of most."""
        return dict(self._asked((), inf))  # type: ignore[arg-type]

    def get_ready(self) -> None:
        """Do nothing: the child warms its device itself when it times."""

    def _described(self, name: str) -> Launch:
        """Describe a launch on the arguments as they are now."""
        call, config, launch = self.call, self.by_name[name], _Recorded()
        try:
            found, _ = recorded(lambda: call.launch(config, self._function), launch)
        except (AssertionError, KeyError, ValueError) as error:  # unknown names, wrong options
            raise CompileError(reason(error)) from error
        job, types = front_end().job(found[0]), found[0].signature
        if "tt.int_to_ptr" in job.text:
            raise InvalidInput(f"{call} makes pointers of numbers, which another process cannot")
        values = _passed(tuple(types.values()), launch.values)
        return Launch(name, job, dict(types), launch.grid, pickled(values))

    def _timed(self, names: Sequence[str], best_us: float = inf, rounds: int = 0) -> Measurements:
        found = self._asked(names, best_us, rounds)
        if len(names) > 1 and not any(m.ok for m in found):
            # One of them may have killed the child: timing each alone shows which.
            found = [self._asked([name], best_us)[0] for name in names]
        for name, measurement in zip(names, found):
            self.note(name, measurement)
        return found

    def _asked(self, names: Sequence[str], best_us: float, rounds: int = 0) -> Measurements:
        launches = []
        try:
            for name in names:
                self.call.prepare(self.by_name[name])
                launches.append(self._described(name))
        except CostModelError as error:
            return [Measurement("launch_error", error=reason(error))] * len(names)
        request = Request(
            self._token, tuple(launches), self.call.may_write, self.agree, best_us, rounds
        )
        try:
            return self._ask(request, len(names))
        except RuntimeError as error:  # for example, only one process at a time may use the GPU
            raise HostError(f"no child process can time kernels here: {error}") from error


_tokens = itertools.count()


@functools.cache
def _shared_worker(device_index: int, cache: str, limit_s: float) -> Worker:
    setup = functools.partial(begin, device_index, cache)
    return SupervisedWorker(
        answer, limit_s=limit_s, setup=setup, idle_s=IDLE_S, settings=settings_of_triton
    )


class _Recorded:
    """Takes the place of a kernel, and remembers the grid and the arguments of its launch."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        # stream, function, two kinds of metadata, two hooks, then the arguments
        self.grid, self.values = (x, y, z), rest[6:]


def apart(function: Any) -> Any:
    """Copy a jitted function and its wrappers; the copy has no binary that it could launch."""
    made = copy.copy(function)
    if hasattr(function, "device_caches"):
        made.device_caches = defaultdict(made.create_binder)
    else:
        made.fn = apart(function.fn)
    return made


def _passed(kind: Any, value: Any) -> Any:
    """Return an argument without its constants, which are part of the binary."""
    if isinstance(kind, tuple):
        return tuple(map(_passed, kind, value))
    return None if kind == "constexpr" else value


def pickled(values: object) -> bytes:
    """Pickle arguments. Once unpickled, they are in other memory and hold their present values.

    Raises:
        InvalidInput: another process cannot make them.
    """
    file = io.BytesIO()
    _Pickler(file).dump(values)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            place = value.device, storage.data_ptr(), storage.nbytes()
            view = int(value.storage_offset()), tuple(value.shape), value.stride()
            content = span(value)[:_COPIED].cpu().numpy().tobytes()
            return _remade, (place, value.dtype, view, content)
        module = getattr(value, "__module__", type(value).__module__)
        if module.split(".")[0] not in ("copyreg", "costmodel", "torch", "triton"):
            raise InvalidInput(f"{value!r:.100} is an argument: expected a tensor or a number")
        return NotImplemented


# --- The child's side -----------------------------------------------------------------------------


def _remade(place: tuple[Any, int, int], dtype: torch.dtype, view: Any, content: bytes) -> Any:
    """Make a tensor; tensors that shared a storage share one again."""
    device, _, nbytes = place
    if place not in _memory:
        pinned = device.type == "cpu" and torch.cuda.is_available()
        _memory[place] = torch.zeros(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    made = torch.empty(0, dtype=dtype, device=device)
    made.set_(_memory[place].untyped_storage(), *view)
    held, done = span(made), len(content)
    if content:
        held[:done].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    while 0 < done < len(held):
        part = held[done : 2 * done]
        part.copy_(held[: len(part)])
        done *= 2
    return made


@dataclass
class _RemadeCall:
    """Takes the place of a `KernelCall`, with binaries and pickled arguments."""

    may_write: set[str] | None

    def prepare(self, config: Any) -> None:
        self._named = dict(zip(config.signature, pickle.loads(config.values), strict=True))

    def launch(self, config: Any) -> None:
        config.kernel[config.grid](*self._named.values())

    def written(self) -> Snapshot:
        return Snapshot(tensors_of(self._named, self.may_write))

    def finish(self, *_: object) -> None:
        """Do nothing."""

    restore = finish


def loaded(launch: Launch) -> Any:
    """Load a launch's binary from Triton's cache, and make memory for its arguments."""
    source: Any = TextSource(launch.job)
    source.signature = launch.signature
    source.fn = SimpleNamespace(arg_names=list(launch.signature), launch_metadata=None)
    kernel = triton.compile(source, options=dict(launch.job.options))
    pickle.loads(launch.values)
    return SimpleNamespace(kernel=kernel, ir_override=launch.job.override, **vars(launch))


_runners: dict[int, KernelRunner] = {}  # by token; one at most
_memory: dict[Any, torch.Tensor] = {}  # by the storage in the program that it replaces


def begin(device_index: int, cache: str) -> None:
    """Set up a fresh child."""
    torch.cuda.set_device(device_index)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    knobs.cache.dir = cache
    know_triton_key()


def answer(request: Request | None) -> Measurements:
    """Time the launches of a request; None frees memory. A broken context ends the process."""
    if request is None or request.token not in _runners:
        _runners.clear()
        _memory.clear()
        torch.cuda.empty_cache()
    if request is None:
        return []
    try:
        return _timed(request)
    except torch.OutOfMemoryError as error:
        outcome = Measurement("out_of_resources", error=f"{NO_ROOM}: {error}"[:500])
    except BrokenContext as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    except Exception as error:
        outcome = Measurement("launch_error", error=reason(error))
    return [outcome] * len(request.launches)


def _timed(request: Request) -> Measurements:
    if request.token not in _runners:
        call: Any = _RemadeCall(request.may_write)
        _runners[request.token] = KernelRunner(call, {}, lambda *_: None, agree=request.agree)
    runner = _runners[request.token]
    runner.by_name = {launch.name: loaded(launch) for launch in request.launches}
    if not request.launches:  # asked for those whose results differ from those of most
        return [*runner.outvoted().items()]  # type: ignore[list-item]
    if request.rounds:
        return runner.compare(None, [*runner.by_name], request.rounds)
    return runner.measure(None, [*map(Candidate, runner.by_name)], request.best_us)
