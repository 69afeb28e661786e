"""One process of the benchmark ``autotune``: makes calls and writes what each tuner took.

Sides: ``stock`` (Triton's own tuner) and ``ours`` tune. ``everything`` is ours without a model: it
times all of each list. ``again`` is ours with all caches filled. ``single`` is stock with one
configuration left of each list. ``compare`` times two winners of each kernel in turn. ``ours`` and
``everything`` start their compiling processes before they tune.

With ``--keys`` the calls of KEYS follow each case. For the second key, ``#2`` stands after the
kernel's name. Kernels that are not asked for are not tuned: their first configuration that works
is launched.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from autotune_cases import ALLOWED, CASES, Tensors, within
from autotune_keys import KEYS
from triton.runtime.autotuner import Autotuner

_FLUSH_BYTES = 256 * 2**20
_CYCLES_PER_US = 2000  # at the highest clock of any NVIDIA GPU: never too short
_ROUNDS, _COMPARE_S = 200, 0.7
OURS = ("ours", "everything", "again")
BROKEN = 3
"""Exit code: a kernel broke the CUDA context, and the next case needs another process."""

PACKAGES = {"fla": "fla.ops", "flag": "flag_gems", "liger": "liger_kernel.ops"}


def name_of(tuner: Any) -> str:
    return f"{tuner.base_fn.__module__}:{tuner.base_fn.__name__}"


def options_of(config: Any) -> dict[str, Any]:
    """Return what tells the configurations of a list apart, in a form that JSON can hold."""
    return json.loads(json.dumps(config.all_kwargs(), default=str))


def find_config(tuner: Any, options: dict[str, Any]) -> Any:
    """The configuration of the list that has these options."""
    return next(c for c in tuner.configs if options_of(c) == options)


def key_of(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The values of a tuner's key, for people."""
    values = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    return " ".join(f"{k}={values[k]}" for k in tuner.keys if k in values)


def launch(tuner: Any, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Launch one configuration as the stock tuner does after tuning."""
    options = config.all_kwargs()
    if config.pre_hook is not None:
        config.pre_hook({**dict(zip(tuner.arg_names, args, strict=False)), **kwargs, **options})
    return tuner.fn.run(*args, **kwargs, **options)


def compare(launches: list[Callable[[], Any]]) -> list[float]:
    """Return the median us of launches in turn, each after the L2 was filled with other data.

    The GPU is busy until the host has queued the launch, so that the host is not timed.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    begin = time.perf_counter()
    for call in launches:
        call()
    host_us = 1e6 * (time.perf_counter() - begin) / len(launches)
    torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in launches]
    end = time.perf_counter() + _COMPARE_S
    for turn in range(_ROUNDS):
        order = [(turn + i) % len(launches) for i in range(len(launches))]
        events = []
        for i in order:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(int(_CYCLES_PER_US * (1.5 * host_us + 10)))
            start.record()
            launches[i]()
            stop.record()
            events.append((i, start, stop))
        torch.cuda.synchronize()
        for i, start, stop in events:
            times[i].append(start.elapsed_time(stop) * 1e3)
        if turn >= 8 and time.perf_counter() > end:
            break
    return [median(found) for found in times]


class Recorder:
    """Stands in front of a tuner's ``run``.

    Args:
        side: what to do with a kernel that is asked for.
        wanted: the kernels asked for; empty means all.
        winners: for each kernel and side, the options of the winning configuration.
        untuned: Triton's cache for kernels that are not asked for.
        write: called with what was found for a kernel.
    """

    def __init__(
        self, side: str, wanted: set[str], winners: dict[str, Any], untuned: str,
        write: Callable[..., None],
    ) -> None:  # fmt: skip
        self.side, self.wanted, self.winners, self.untuned = side, wanted, winners, untuned
        self.write = write
        self.case, self.number = "", 1
        self.chosen: dict[str, Any] = {}

    def begin(self, case: str, number: int = 1) -> None:
        """Begin a case, or a further key of it, for which the kernels asked for are tuned again."""
        self.case, self.number = case, number
        if number > 1:
            self.chosen = {name: self.chosen[name] for name in self.chosen.keys() - self.wanted}

    def label(self, name: str) -> str:
        """A kernel's name, with the number of its key."""
        return name if self.number == 1 else f"{name}#{self.number}"

    def wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``run`` method that decides what to do with each call."""

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            name = name_of(tuner)
            if name.startswith("fla.") and not within(name.split(":")[0], ALLOWED):
                raise RuntimeError(f"{name} may not be run here: take the case out")
            if self.wanted and (name not in self.wanted or name in self.chosen):
                return self.run_untuned(tuner, args, kwargs)
            if self.side == "compare" and self.label(name) in self.winners:
                return self.run_compared(tuner, args, kwargs)
            if self.side == "compare":
                return self.run_untuned(tuner, args, kwargs)
            if self.side == "single" and name in self.winners:
                tuner.configs = [find_config(tuner, self.winners[name]["ours"])]
            if name in self.chosen:
                return inner(tuner, *args, **kwargs)
            return self.run_tuned(inner, tuner, args, kwargs)

        return run

    def run_untuned(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch what was chosen before, else the first that works, with a cache of its own."""
        name = name_of(tuner)
        cache = os.environ["TRITON_CACHE_DIR"]
        os.environ["TRITON_CACHE_DIR"] = self.untuned
        error: Exception | None = None
        try:
            for config in [self.chosen[name]] if name in self.chosen else tuner.configs:
                try:
                    result = launch(tuner, config, args, kwargs)
                except Exception as failed:
                    error = failed
                    continue
                self.chosen[name] = tuner.best_config = config
                return result
        finally:
            os.environ["TRITON_CACHE_DIR"] = cache
        raise error or RuntimeError(f"{name} has no configurations")

    def run_tuned(
        self, inner: Callable[..., Any], tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the tuner's own ``run`` and write its seconds, counters and winner."""
        name, key = name_of(tuner), key_of(tuner, args, kwargs)
        listed = len(tuner.configs)
        torch.cuda.synchronize()
        before, start = counters(self.side, tuner), time.perf_counter()
        result = inner(tuner, *args, **kwargs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        after = counters(self.side, tuner)
        self.chosen[name] = tuner.best_config
        self.write(
            kernel=self.label(name), case=self.case, key=key, seconds=seconds,
            listed=listed, compiled=after[0] - before[0], timed=after[1] - before[1],
            winner=options_of(tuner.best_config),
        )  # fmt: skip
        return result

    def run_compared(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Time the winners of both sides, and stock's a second time to show the noise."""
        name, label = name_of(tuner), self.label(name_of(tuner))
        stock, ours = (find_config(tuner, self.winners[label][s]) for s in ("stock", "ours"))
        for config in (ours, stock):
            launch(tuner, config, args, kwargs)
        torch.cuda.synchronize()
        turns = [stock, ours, stock]
        us = compare([lambda c=c: launch(tuner, c, args, kwargs) for c in turns])
        self.chosen[name] = tuner.best_config = stock
        self.write(kernel=label, stock_us=us[0], ours_us=us[1], stock_again_us=us[2])
        return launch(tuner, stock, args, kwargs)


def counters(side: str, tuner: Any) -> tuple[int, int]:
    """Count the binaries and timings so far: of the process for ours, of the tuner for stock."""
    if side in OURS:
        stats = importlib.import_module("costmodel").stats()
        return stats.compiled, stats.timed
    timed = getattr(tuner, "configs_timings", None) or {}
    return len(timed), sum(_is_finite(times) for times in timed.values())


def _is_finite(times: Any) -> bool:
    return (times if isinstance(times, float) else times[0]) < float("inf")


def switch_on(side: str, recorder: Recorder) -> None:
    """Put the side's tuner and the recorder in place of every tuner's ``run``."""
    if side in OURS:
        importlib.import_module("costmodel.autotune.replace").replace_triton_autotune()
    classes = [Autotuner]
    if "flag_gems" in sys.modules:  # it has a run of its own
        classes.append(sys.modules["flag_gems.utils.libentry"].LibTuner)
    for cls in classes:
        cls.run = recorder.wrap(cls.run)


def bring_pool_up() -> None:
    """Start the children that compile, and wait until they are there."""
    pool = importlib.import_module("costmodel.gemm.specialize").device_compilers()
    know_key = importlib.import_module("costmodel.compile.triton_private").know_triton_key
    know_key()  # the children then find the key on disk
    pool.start(pool.size)
    for each in [pool.submit(f"{i}", None, partial(time.sleep, 0.5)) for i in range(pool.size)]:
        each.result()


def run_case(name: str, recorder: Recorder, write: Callable[..., None], keys: bool = False) -> None:
    """Call one case, perhaps with its further keys."""
    makers = [CASES[name], *(KEYS.get(name, ()) if keys else ())]
    for number, make in enumerate(makers, 1):
        recorder.begin(name, number)
        run_call(make, partial(write, **{"called" if number < len(makers) else "finished": name}))


def run_call(make: Callable[[Tensors], None], write: Callable[..., None]) -> None:
    """Make one call, and write its seconds and its error, if it failed."""
    error = None
    torch.cuda.synchronize()
    start = time.perf_counter()
    try:
        make(Tensors("cuda"))
        torch.cuda.synchronize()
    except Exception as failed:
        error = f"{type(failed).__name__}: {failed}"[:300]
        traceback.print_exc()
    write(seconds=time.perf_counter() - start, error=error)
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(BROKEN)  # this process can use the GPU no more


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("side", choices=["stock", *OURS, "single", "compare"])
    arguments.add_argument("cases", nargs="+")
    arguments.add_argument("--kernels", nargs="*", default=[])
    arguments.add_argument("--keys", action="store_true")
    arguments.add_argument("--winners", type=Path)
    arguments.add_argument("--untuned", required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--until", type=float, default=float("inf"), help="of time.time()")
    args = arguments.parse_args()
    for package in dict.fromkeys(PACKAGES[case.split("_")[0]] for case in args.cases):
        importlib.import_module(package)
    winners = json.loads(args.winners.read_text()) if args.winners else {}
    with args.out.open("a", buffering=1) as out:

        def write(**found: Any) -> None:
            out.write(json.dumps(found) + "\n")

        recorder = Recorder(args.side, set(args.kernels), winners, args.untuned, write)
        switch_on(args.side, recorder)
        torch.zeros(1, device="cuda")
        if args.side in ("ours", "everything"):
            bring_pool_up()
        for case in args.cases:
            if time.time() > args.until:
                break
            run_case(case, recorder, write, args.keys)


if __name__ == "__main__":
    main()
