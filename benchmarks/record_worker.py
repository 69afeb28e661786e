"""One process of a recording: makes calls, and times each list that they reach in full."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import triton
from recorded_calls import OURS, Call, may_judge, may_learn
from triton.runtime.jit import JITFunction

import costmodel
from costmodel.autotune import compiling, tuning
from costmodel.autotune.options import Options
from costmodel.autotune.store import config_name
from costmodel.autotune.tuner import state_of

BROKEN = 3
"""Exit code: a kernel broke the CUDA context."""

LAG = 12
"""Number of calls that are compiled ahead of the timed one: so many keep 16 cores busy."""

_LISTED = "_listed"  # the attribute of a tuner that keeps its list as its author made it
_PLAIN = (int, float, str, triton.language.dtype, type(None))
_MEMORY, _LEFT_LYING = 40 * 2**30, 8 * 2**30

DISTRIBUTIONS = {"fla": "fla-core", "flag_gems": "flag-gems", "hopper": "flag-gems",
                 "torchao": "torchao", "liger_kernel": "liger-kernel",
                 **dict.fromkeys(OURS, "costmodel")}  # fmt: skip


def package_of(module: str) -> tuple[str, str]:
    """Return the distribution that a kernel's module belongs to, and its version."""
    name = DISTRIBUTIONS[module.split(".")[0]]
    try:
        return name, version(name)
    except PackageNotFoundError:  # costmodel itself may only be on the path
        return name, costmodel.__version__


def neighbours(configs: list[Any], at_most: int) -> list[Any]:
    """Configurations that a list lacks: half and twice the warps, one stage more and less.

    Sizes of blocks stay as they are: kernels rely on them. The nearest come first.
    """
    from triton import Config

    def options(config: Any) -> tuple[Any, ...]:
        kwargs = json.dumps(config.kwargs, sort_keys=True, default=str)
        return kwargs, config.num_warps, config.num_stages, config.num_ctas, config.maxnreg

    seen = {options(config) for config in configs}
    found = []
    for warps, stages in ((2, 0), (0.5, 0), (1, 1), (1, -1), (2, 1), (0.5, -1)):
        for config in configs:
            number = int(config.num_warps * (warps or 1))
            made = Config(
                dict(config.kwargs), num_warps=number, num_stages=config.num_stages + stages,
                num_ctas=config.num_ctas, maxnreg=config.maxnreg, pre_hook=config.pre_hook,
            )  # fmt: skip
            fits = 1 <= number <= 16 and 1 <= made.num_stages <= 6
            if fits and config.ir_override is None and options(made) not in seen:
                seen.add(options(made))
                found.append(made)
    return found[: max(at_most - len(configs), 0)]


class Recorder:
    """Stands in front of the ``run`` of every tuner.

    Args:
        allowed: tells whether the kernels of a module may be called and recorded.
        others: what is done with a kernel that may not be recorded: ``launch`` its first
            configuration that works, or ``refuse`` it.
        wide: shorter lists are filled with neighbours up to this number.
        write: called with a line about a list.
    """

    def __init__(
        self, allowed: Callable[[str], bool], others: str, wide: int, write: Callable[..., None]
    ) -> None:
        self.allowed, self.others, self.wide, self.write = allowed, others, wide, write
        self.case = ""
        self.is_dry = False  # nothing is launched, all is compiled
        self.written: set[str] = set()

    def wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``run`` method that times all of a list."""

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            module = tuner.base_fn.__module__
            if not self.allowed(module):
                return self.launch(tuner, args, kwargs)
            if (len(tuner.configs) > 1 or self.wide) and not hasattr(tuner, _LISTED):
                self.take(tuner, args, kwargs)
            if len(tuner.configs) > 1:
                forget_binaries(tuner)
                self.note(tuner)
                if self.is_dry:
                    compile_ahead(tuner, args, kwargs)
                    tuner.best_config = tuner.configs[0]
                    return None
            return inner(tuner, *args, **kwargs)

        return run

    def launch(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch the first configuration that works, untuned."""
        module = tuner.base_fn.__module__
        if self.others == "refuse" or not (may_learn(module) or may_judge(module)):
            raise RuntimeError(f"{module} may not be called here: take the call out")
        failed: Exception | None = None
        for config in tuner.configs:
            try:
                if config.pre_hook is not None:
                    named = dict(zip(tuner.arg_names, args, strict=False))
                    config.pre_hook({**named, **kwargs, **config.all_kwargs()})
                result = tuner.fn.run(*args, **kwargs, **config.all_kwargs())
            except Exception as error:
                failed = error
                continue
            tuner.best_config = config
            return result
        raise failed or RuntimeError(f"{module}: no configurations")

    def take(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put all plain values into the key of a tuner, and neighbours into its list.

        The key of a tuner may leave out a size, and then the second shape would not be timed.
        """
        setattr(tuner, _LISTED, list(tuner.configs))
        if self.wide:
            tuner.configs = [*tuner.configs, *neighbours(tuner.configs, self.wide)]
        named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
        plain = [n for n in tuner.arg_names if isinstance(named.get(n, named), _PLAIN)]
        # Seeds differ from call to call.
        drawn = [n for n in plain if "seed" in n or "offset" in n]
        tuner.keys = [*tuner.keys, *(n for n in plain if n not in (*drawn, *tuner.keys))]
        tuner.strategy = None  # FlagGems rounds sizes in its keys
        state_of(tuner).options = Options("exhaustive")

    def note(self, tuner: Any) -> None:
        """Write what the store does not know of a list, once for each kernel and call."""
        kernel = f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"
        line: dict[str, Any] = {"kernel": kernel, "case": self.case}
        if kernel not in self.written:
            package, of_package = package_of(tuner.base_fn.__module__)
            line |= {"package": package, "version": of_package}
            if self.wide:
                line["listed"] = [config_name(config) for config in getattr(tuner, _LISTED)]
        if f"{kernel} {self.case}" not in self.written:
            self.write(**line)
        self.written |= {kernel, f"{kernel} {self.case}"}


def compile_ahead(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Begin to compile what the store has no timings of; nothing is launched, or timed."""
    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    key = state_of(tuner).key_of(tuple(named.get(name) for name in tuner.arg_names), {})
    whole = tuning.Tuning(tuner, Options(), key, args, kwargs)
    known = tuning.store.read(whole._key).measured
    left = [config for name, config in whole._by_name.items() if name not in known]
    if left:
        tuning.Tuning(tuner, Options(), key, args, kwargs, left).compiling.begin_all()


def forget_binaries(tuner: Any) -> None:
    """Make a kernel ask for its binaries again, so that each key has its own row of them.

    They stay in Triton's cache on disk; a child reads one in a few milliseconds.
    """
    function = tuner.fn
    while not hasattr(function, "device_caches"):
        function = function.fn
    for cache in function.device_caches.values():
        cache[0].clear()


def switch_on(recorder: Recorder) -> None:
    """Put costmodel's tuner and the recorder in place of every tuner's ``run``."""
    from triton.runtime.autotuner import Autotuner

    import_module("costmodel.autotune.replace").replace_triton_autotune()
    classes: list[Any] = [Autotuner]
    if "flag_gems" in sys.modules:
        library = sys.modules["flag_gems.utils.libentry"]
        classes.append(library.LibTuner)
        forget_first(library.LibEntry)
    for cls in classes:
        cls.run = recorder.wrap(cls.run)
    launch = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_dry and not kwargs.get("warmup"):
            return None
        return launch(self, *args, **kwargs)

    JITFunction.run = run


def forget_first(entry: Any) -> None:
    """Let each call reach the tuner: FlagGems keeps what the first one launched."""
    run = entry.run

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> Any:
        for cache in self.kernel_cache:
            cache.clear()
        return run(self, *args, **kwargs)

    entry.run = forgetful


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file; one that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def in_turns(names: list[str], lag: int) -> Iterator[tuple[str, bool]]:
    """Yield each name twice: with True, and ``lag`` other names later with False."""
    waiting: deque[str] = deque()
    for name in names:
        yield name, True
        waiting.append(name)
        if len(waiting) > lag:
            yield waiting.popleft(), False
    for name in waiting:
        yield name, False


def work(calls: dict[str, Call], names: list[str], folder: Path, args: argparse.Namespace) -> None:
    """Make the calls of this process; if one fails, write its error and go on."""
    lists = (folder / "lists.jsonl").open("a", buffering=1)
    progress = (folder / "calls.jsonl").open("a", buffering=1)

    def write(file: Any, **line: Any) -> None:
        file.write(json.dumps(line) + "\n")

    for package in ("fla.ops", "flag_gems"):
        if any(calls[name].package == package.split(".")[0] for name in names):
            import_module(package)
    allowed = may_judge if args.judges else may_learn
    recorder = Recorder(allowed, "launch" if args.judges else "refuse", args.wide,
                        lambda **line: write(lists, **line))  # fmt: skip
    switch_on(recorder)
    torch.cuda.set_per_process_memory_fraction(
        min(_MEMORY / torch.cuda.get_device_properties(0).total_memory, 1.0)
    )
    ended = {line["ended"] for line in lines_of(folder / "calls.jsonl") if "ended" in line}
    # The largest number compiles first: the call that is timed, then the oldest that is ahead.
    ahead, now = itertools.count(-1, -1), itertools.count(1)
    for name, is_dry in in_turns(names, LAG):
        if time.time() > args.until:
            break
        if is_dry and name in ended:  # as a dry call it may use results that were not computed
            continue
        recorder.case, recorder.is_dry, begin = name, is_dry, time.time()
        compiling._numbers = ahead if is_dry else now
        write(progress, began=name)
        error = ""
        try:
            calls[name]()
            torch.cuda.synchronize()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"[:300]
            if not is_dry:  # else results that were not computed may be the cause
                traceback.print_exc()
        try:
            torch.cuda.synchronize()
            if torch.cuda.memory_allocated() > _LEFT_LYING:
                gc.collect()
            if torch.cuda.memory_reserved() > 2 * _LEFT_LYING:
                torch.cuda.empty_cache()
        except RuntimeError:
            os._exit(BROKEN)  # this process can use the GPU no more
        stats = costmodel.stats()
        write(progress, **{"ahead" if is_dry else "done": name}, error=error,
              seconds=round(time.time() - begin, 2), compiled=stats.compiled,
              timed=stats.timed, wide=args.wide)  # fmt: skip
