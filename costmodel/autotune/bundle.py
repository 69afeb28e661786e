"""Bundles of users' kernels: compiled without a GPU, timed by a machine that compiles nothing.

A function of the user makes the calls, on the CPU when compiling and on the GPU when timing. A
bundle holds the binaries, in the form of Triton's cache, and the hash of the function's file. No
code is run from a bundle.
"""

import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from costmodel.autotune import tuner, tuning
from costmodel.autotune.call import KernelCall
from costmodel.autotune.compiling import Compiling
from costmodel.autotune.options import Options
from costmodel.autotune.store import KernelStore, config_name
from costmodel.collect.bundle import pack
from costmodel.errors import CostModelError, InvalidInput, MissingData, MixedData
from costmodel.files import Named, digest, encode, file_errors, make_folder, read_json
from costmodel.hardware.target import Target
from costmodel.validation import log

_CALLS = "calls.json"


def write_kernel_bundle(
    file: Path, place: str, target: Target, folder: Path, dump: Path | None = None
) -> Named:
    """Compile all configurations of a function's calls of tuned kernels; launch nothing.

    The reason why a configuration did not compile is logged. If none did, no file is written.

    Args:
        place: ``FILE.py:FUNCTION``, a function without arguments. Its tensors may be on the CPU.
        folder: an empty folder to work in.
        dump: a folder for PTX and SASS; the bundle gets a copy.

    Returns:
        the plan: ``calls``, ``binaries``, and ``failed``, those that did not compile.

    Raises:
        InvalidInput: it calls no tuned kernel, or raises. MissingData: no such function.
    """
    found, launch = [], JITFunction.run

    def compiled(tuned: Any, *args: Any, **kwargs: Any) -> None:
        call = KernelCall(tuned, args, kwargs)
        by_name = {config_name(c): c for c in tuned.configs}
        begun = Compiling(call, by_name, dump).begin_all()
        found.append((call, [*zip(by_name.values(), begun)]))

    def only_compiled(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return launch(kernel, *args, **kwargs) if kwargs.get("warmup") else None

    host = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", target.device.arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    failed = 0
    with (
        _instead(compiled, folder),
        patch.object(driver, "_active", host),
        patch.object(JITFunction, "run", only_compiled),
    ):
        function, source = _function(place)
        function()
        for call, begun in found:
            for config, future in begun:
                if (made := future.result()) is not None and not made.ok:
                    failed += 1
                    log.warning("%s: %s: %s: %s", call, config, made.status, made.error)
    if not found:
        raise InvalidInput(f"{place} calls no kernel that costmodel or Triton tunes")
    binaries = sum(len(begun) for _, begun in found)
    plan = {"calls": len(found), "binaries": binaries, "failed": failed}
    (folder / _CALLS).write_bytes(encode({"source": source}))
    return plan if failed == binaries else pack(folder, file, target, plan, dump)


def collect_kernels(place: str, folder: Path, out: Path, number: int = 1, parts: int = 1) -> None:
    """Make the calls that an unpacked bundle was compiled from, and time all configurations.

    Args:
        out: a folder of timings, such as ``COSTMODEL_CACHE_DIR/kernels``; what it has is kept.
        number, parts: time one part of the kinds of calls, counted from 1. The other calls are
            launched with the first configuration that the driver takes.

    Raises:
        MixedData: the function's file has changed since the bundle was made.
    """
    function, source = _function(place)
    if read_json(folder / _CALLS, dict[str, str])["source"] != source:
        raise MixedData(f"{place} has changed since the bundle was made: compile it again")

    turns: dict[Any, int] = {}

    def timed(tuned: Any, *args: Any, **kwargs: Any) -> Any:
        state = tuner.state_of(tuned)
        state.options = Options(mode="exhaustive", isolate="timing")
        turn = turns.setdefault((id(tuned), state.key_of(args, kwargs)), len(turns))
        if turn % parts == number - 1:
            return tuner.run(tuned, *args, **kwargs)
        call = KernelCall(tuned, args, kwargs)
        left = tuning.Tuning(tuned, state.options, (), args, kwargs).configs
        return call.launch(next((c for c in left if not call.refused(c)), left[0]))

    with _instead(timed, folder), patch.object(tuning, "store", KernelStore(out)):
        function()


def merge_kernels(out: Path, *folders: Path) -> int:
    """Add the timings of folders to ``out``, and return the number of files.

    Merging the same folders again adds nothing.
    """
    files = [file for path in folders for file in path.glob("*.jsonl")]
    make_folder(out)
    for file in files:
        with file_errors(out), open(out / file.name, "ab+") as there:
            there.seek(0)
            known = {*there.read().split(b"\n")}
            lines = file.read_bytes().split(b"\n")
            there.write(b"".join(b"\n" + line for line in lines if line not in known))
    return len({file.name for file in files})


@contextmanager
def _instead(run: Callable[..., Any], folder: Path) -> Iterator[None]:
    """Call ``run`` in place of the ``run`` of all tuners; the folder is Triton's cache."""
    ours, theirs = tuner.Autotuner.__mro__[:2]
    with knobs.cache.scope(), patch.object(ours, "run", run), patch.object(theirs, "run", run):
        knobs.cache.dir = str(folder / "cache")
        yield


def _function(place: str) -> tuple[Callable[[], None], str]:
    """Return a function of the user, and the hash of its file.

    Raises:
        MissingData: no such file or function. InvalidInput: the file raises.
    """
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not path.is_file():
        what = f"there is no file {file}" if file else place
        raise MissingData(f"{what}: expected FILE.py:FUNCTION")
    sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script
    with _errors_in(file, place):
        found = runpy.run_path(file, run_name=path.stem)
    if not callable(function := found.get(name)):
        there = [x for x, f in found.items() if isfunction(f) and f.__module__ == path.stem]
        raise MissingData(
            f"{file} has no function {name} (it has {', '.join(there) or 'none'}): "
            "expected FILE.py:FUNCTION"
        )
    return _errors_in(file, place)(function), digest(path.read_bytes(), 64)


@contextmanager
def _errors_in(file: str, place: str) -> Iterator[None]:
    """Turn an error of the user's file into InvalidInput with the frames of that file alone."""
    try:
        yield
    except CostModelError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        shown = "".join(traceback.format_list([f for f in frames if f.filename == file]))
        text = f"{place} raised {type(error).__name__}: {error}\n{shown}"
        raise InvalidInput(text.rstrip()) from error
