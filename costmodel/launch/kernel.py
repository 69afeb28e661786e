"""Loading a binary, by parts of Triton's loader and launcher that are private to Triton."""

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import CellType, FunctionType
from typing import Any

from costmodel.compile.triton_private import compiled, recalled
from costmodel.errors import LaunchError, host_errors
from costmodel.files import Named
from costmodel.gemm.config import Specialization
from costmodel.gemm.specialize import SOURCES, Repacking, artifact_key, source
from costmodel.hardware.target import Target

_TRITONS = ("3.6.", "3.7.", "3.8.", "3.9.")  # versions of Triton whose launchers are known
STREAM = 3
"""Place of the stream among the arguments of a C launcher."""

_STREAM_MARK = 0x5EED


def _hooks() -> tuple[Named, Any, Any]:
    """Return the runtime knobs of Triton that users have set, and its lists of launch hooks."""
    from triton import knobs

    kind = type(knobs.runtime)
    return vars(knobs.runtime), kind.launch_enter_hook, kind.launch_exit_hook


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Triton's C launcher, and what it is called with.

    Attributes:
        base: arguments of the launch itself, which come before the kernel's own. From Triton 3.7 on
            the kernel's own are one argument, a list; before, ``arguments`` has both, and ``base``
            is empty.
        arguments: the kernel's own arguments.
        places: places in ``arguments`` of what each launch fills in; -1 if the kernel lacks it.
    """

    launcher: Callable[..., None]
    base: tuple[Any, ...]
    arguments: list[Any]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A binary loaded on a device.

    Attributes:
        names: its arguments, in order, including those that are part of the binary.
        run, function, metadata: Triton's launcher, and what it needs of the binary.
        binary: Triton's object, which keeps the binary on the device: Triton 3.8 unloads it with
            the last reference to this object.
        hooks: where Triton's hooks are found; if all three are empty, none is set.
    """

    names: tuple[str, ...]
    run: Callable[..., None]
    function: int
    metadata: tuple[int, ...]
    binary: Any = None
    hooks: tuple[Named, Any, Any] = field(default_factory=_hooks)

    def __call__(self, blocks: int, stream: int, arguments: Named) -> None:
        """Queue it on a raw stream handle; addresses may be tensors or integers."""
        values = [arguments.get(name) for name in self.names]
        seen_by = None, None, None
        if hooks := self.launch_hooks():
            seen_by = self.binary.launch_metadata((blocks, 1, 1), stream, *values), *hooks
        self.run(blocks, 1, 1, stream, self.function, self.metadata, *seen_by, *values)

    def launch_hooks(self) -> tuple[Any, ...]:
        """Return the hooks that Triton calls before and after a launch (Proton's); () if unset."""
        own, enter, leave = self.hooks
        enter = own.get("launch_enter_hook", enter)
        leave = own.get("launch_exit_hook", leave)
        # In place of a list of hooks, users may have put a function or None.
        is_set = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        return (enter, leave) if is_set else ()

    def _c_launcher(self) -> Callable[..., None]:
        """Return the C function that Triton's wrappers call.

        Triton 3.6 has one for each signature, later ones a single one for all kernels.

        Raises:
            LookupError: this Triton, or this kernel, is not launched in a known way.
        """
        import triton

        run: Any = self.run
        extras = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")
        is_plain = hasattr(run, "launch") and not any(getattr(run, name, 0) for name in extras)
        if is_plain and triton.__version__.startswith(_TRITONS):
            return _c_function(run.launch)
        raise LookupError(f"an unknown launcher of Triton {triton.__version__}")

    def record(self, blocks: int, arguments: Named, open_names: Sequence[str]) -> Recording:
        """Return what Triton would pass to its C launcher; nothing is queued.

        Args:
            arguments: as for a launch, without ``open_names``.
            open_names: the arguments that each launch fills in; None in the recording.

        Raises:
            LookupError: Triton launches this kernel in an unknown way.
        """
        launcher = self._c_launcher()
        marks = {name: object() for name in open_names if name in self.names}
        caught = []
        run: Any = copy.copy(self.run)
        run.launch = _with_function(run.launch, lambda *arguments: caught.append(arguments))
        unseen = replace(self, run=run, hooks=({}, None, None))  # no launch yet
        unseen(blocks, _STREAM_MARK, arguments | marks)
        if len(caught) != 1 or caught[0][: STREAM + 1] != (blocks, 1, 1, _STREAM_MARK):
            raise LookupError(f"an unknown launch: {caught!r:.200}")
        base = ()
        values: Any = caught[0]
        if isinstance(values[-1], list | tuple):  # from Triton 3.7 on
            *base, values = values
        places = {id(value): place for place, value in enumerate(values)}
        if not all(id(mark) in places for mark in marks.values()):
            raise LookupError(f"an unknown launch: {caught!r:.200}")
        open_places = tuple(places[id(marks[n])] if n in marks else -1 for n in open_names)
        filled = [None if place in open_places else v for place, v in enumerate(values)]
        return Recording(launcher, tuple(base), filled, open_places)


@functools.lru_cache(maxsize=8192)
def load(
    spec: Specialization | Repacking, target: Target, device_index: int, *, remember: bool = True
) -> Kernel:
    """Compile (or take from Triton's cache) and load a binary; remembered.

    Args:
        remember: note where the binary is in Triton's cache, for later processes too. False for
            what is tried only once.

    Raises:
        CompileError: Triton or ptxas refused.
        LaunchError: the device lacks the resources, or the memory for it.
        HostError: no folder to compile in, or no C compiler.
    """
    import torch
    from triton.runtime.errors import OutOfResources

    name = "repack" if isinstance(spec, Repacking) else spec.config_binary
    make_source = functools.partial(source, spec)
    with host_errors():
        if remember:
            kernel = recalled(artifact_key(spec, target), make_source, name, target, SOURCES)
        else:
            kernel = compiled(make_source, name, target)
    with torch.cuda.device(device_index), _loading, host_errors():
        try:
            kernel._init_handles()
        except OutOfResources as error:
            raise LaunchError(f"{name} does not fit the device: {error}") from None
        except RuntimeError as error:  # of the driver; another configuration helps only here
            if "out of memory" not in str(error):
                raise
            raise LaunchError(f"{name} cannot be loaded: {error}") from None
    kernel.asm = kernel.kernel = None  # megabytes of text and code, which the device has now
    names = tuple(kernel.src.fn.arg_names)
    return Kernel(names, kernel.run, kernel.function, kernel.packed_metadata, kernel)


# Python gives one module to all C launchers that it loads again, so that Triton could take from it
# what another thread has just loaded.
_loading = threading.Lock()


def _c_function(launch: Any) -> Callable[..., None]:
    """Return what Triton's wrapper for descriptors calls in the end; another function as it is."""
    if not isinstance(launch, FunctionType):
        return launch
    return _cells(launch)["launcher"].cell_contents


def _with_function(launch: Any, function: Callable[..., None]) -> Callable[..., None]:
    """Return the wrapper with another function to call in the end."""
    if not isinstance(launch, FunctionType):
        return function
    cells = _cells(launch) | {"launcher": CellType(function)}
    closure = tuple(cells[name] for name in launch.__code__.co_freevars)
    return FunctionType(launch.__code__, launch.__globals__, closure=closure)


def _cells(function: FunctionType) -> dict[str, CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
