"""``costmodel.autotune``: the decorator, and the steps of a call of a tuned kernel.

:func:`run` works on any ``triton.runtime.Autotuner``. If a call of the same kind came before, a
call costs one look into a dictionary. The first call of a kind is tuned: configurations whose
timings are in the store are not timed again; the others are compiled in child processes, and timed
as soon as they are compiled.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from math import inf
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime.autotuner import Autotuner as StockAutotuner

from costmodel.autotune.call import KernelCall
from costmodel.autotune.options import Options
from costmodel.autotune.tuning import Tuning
from costmodel.errors import HostError, NoGpu
from costmodel.files import Named
from costmodel.tuning.modes import default_mode
from costmodel.tuning.ranks import epoch
from costmodel.validation import closest, drop_oldest, warn_once

_STATE = "_costmodel"  # the name under which a tuner has its state
_AT_MOST = 4096  # kinds of calls of one tuner
_LACKS_GPU = "_cuda_getDevice", "NVIDIA driver", "CUDA GPUs", "active drivers"  # in errors

Arguments = tuple[Any, ...]
"""Arguments of a call, or the values made of them that tell kinds of calls apart."""

stock_run: Callable[..., Any] = StockAutotuner.run


class Autotuner(StockAutotuner):  # type: ignore[misc]
    """A ``triton.runtime.Autotuner`` that costmodel tunes; see :func:`autotune`."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the best configuration for these arguments; the first call of a kind tunes."""
        return run(self, *args, **kwargs)

    def frozen(self, *args: Any, **kwargs: Any) -> StockAutotuner:
        """Return the kernel with only its best configuration; see :func:`frozen`."""
        return frozen(self, *args, **kwargs)


def autotune(
    configs: Sequence[Any],
    key: Sequence[str],
    *,
    mode: str | None = None,
    budget_s: float = inf,
    check: str = "",
    isolate: str = "",
    model: str = "",
    **options: Any,
) -> Callable[[Any], Autotuner]:
    """Tune a ``triton.jit`` function, as ``triton.autotune`` does: its arguments mean the same.

    Differences: the key also has the device, the alignment of pointers and which integers are 1 or
    multiples of 16; hooks, zeroing and restoring are not timed; a configuration that does not
    compile, or is wrong, is left out whatever the error; timings are kept on disk.

    ``torch.compile`` times the whole list itself, in its own way, and refuses hooks. For a compiled
    function, call ``kernel.frozen(*args, grid=grid)`` before, and use the kernel that it returns
    for calls of the same kind.

    Args:
        configs, key: as for ``triton.autotune``.
        mode: as for :func:`costmodel.matmul`. ``auto`` times the configurations that may win,
            ``exhaustive`` times all, and ``predict`` none. ``background`` compiles while the first
            configuration of the list answers. ``never`` takes the best that is known. None: the
            default mode.
        budget_s: after so many seconds the best configuration so far wins.
        check: ``agree``: a configuration whose results differ from those of most others cannot win.
        isolate: ``timing``: time in a child process, on arguments made like these. A kernel that
            crashes there, or does not end within 20 s, costs its configuration only. If an
            argument, such as an address, cannot be made there, it warns and times in this process.
        model: ``ptx-score``: in mode ``predict`` the hand-weighted score of the PTX ranks, not the
            model of kernels.
        options: other options of ``triton.autotune``.

    Raises:
        InvalidInput: an unknown mode, check, isolate or model, or seconds that are not over 0.
    """
    own = Options(mode, budget_s, check, isolate, model)

    def decorate(function: Any) -> Autotuner:
        given = {"reset_to_zero": None, "restore_value": None} | options
        made = Autotuner(function, function.arg_names, list(configs), list(key), **given)
        state_of(made, own)
        _check_names(made)
        return made

    return decorate


def _check_names(tuner: Any) -> None:
    """Warn of names in the key or a configuration that are no arguments.

    In a configuration, only a name that looks misspelled counts. Triton ignores an unknown name in
    the key. It refuses one in a configuration, except if a pruning function replaces the
    configurations, or if the function is a wrapper that takes any name.
    """
    names, keys = tuner.arg_names, {*tuner.keys}
    given = keys.union(*(config.kwargs for config in tuner.configs))
    for name in given.difference(names, vars(CUDAOptions)):
        if name in keys or closest(name, names):
            warn_once(
                f"{tuner.base_fn.__name__} has no argument {name!r}, as "
                f"{'the key' if name in keys else 'a Config'} has{closest(name, names)}",
                stacklevel=5,
            )


class State:
    """The state that costmodel keeps of one tuner.

    Attributes:
        launches: the configuration and its options for a call, by :meth:`key_of`.
        launched: Triton's keys of the calls so far.
        compiling: compiles that mode ``background`` waits for, by :meth:`key_of`.
        cached: entries that costmodel put into the tuner's own ``cache``.
        repeats: launches that the owner of the tuner makes again by himself.
        lock: held by the thread that tunes.
    """

    def __init__(self, tuner: Any, options: Options):
        self.options = options
        self.launches: dict[Any, tuple[Any, Named]] = {}
        self.launched: set[Any] = set()
        self.compiling: dict[Any, list[Future[Any]]] = {}
        self.cached: dict[Any, Any] = {}
        self.repeats: dict[Any, Any] = {}
        self.lock = threading.RLock()
        in_key = dict.fromkeys(tuner.keys, lambda value: value)
        # FlagGems may round the values in the key, with functions in the order of the key.
        in_key |= zip(tuner.keys, getattr(tuner, "strategy", None) or (), strict=False)
        function = tuner.fn
        while not hasattr(function, "params") and hasattr(function, "fn"):
            function = function.fn
        params = getattr(function, "params", ())  # functions of Triton's interpreter have none
        plain = {p.name for p in params if p.do_not_specialize}
        aligned = {p.name for p in params if p.do_not_specialize_on_alignment}
        # For each argument: is its value in the key, may Triton specialize on it, on its alignment?
        self._by_name = {
            x: (in_key.get(x), x not in plain, x not in plain | aligned) for x in tuner.arg_names
        }
        self._rules = [*self._by_name.values()]

    def key_of(self, args: Arguments, kwargs: Named) -> Arguments:
        """Return the key of a call's kind: calls with other keys may need other configurations."""
        parts: list[Any] = [torch._C._cuda_getDevice(), epoch()]
        for value, rule in zip(args, self._rules, strict=False):
            _describe(value, rule, parts)
        for name, value in kwargs.items():
            if rule_of := self._by_name.get(name):
                parts.append(name)
                _describe(value, rule_of, parts)
        return tuple(parts)


def state_of(tuner: Any, options: Options | None = None) -> State:
    """Return costmodel's state of a tuner; make an empty one if there is none."""
    state = tuner.__dict__.get(_STATE)
    return state or tuner.__dict__.setdefault(_STATE, State(tuner, options or Options()))


def _describe(value: Any, rule: tuple[Any, bool, bool], parts: list[Any]) -> None:
    in_key, specialized, by_alignment = rule
    kind = type(value)
    if kind is int:
        if in_key:
            parts.append(in_key(value))
        elif specialized:
            parts.append(2 if value == 1 else by_alignment and not value & 15)
    elif hasattr(value, "data_ptr"):
        parts.append(value.dtype)
        if by_alignment:
            parts.append(not value.data_ptr() & 15)
    elif hasattr(value, "block_shape"):  # a descriptor
        parts.append(value.base.dtype)
    elif in_key or value is None:  # if an optional pointer is None, Triton compiles another kernel
        parts.append(value)


def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch a tuner's best configuration for these arguments; the first call of a kind tunes.

    Raises:
        CompileError: no configuration can be compiled and launched. NoGpu: there is no GPU.
    """
    if torch.compiler.is_dynamo_compiling():  # break the graph: nothing of this can be traced
        return torch.compiler.disable(run)(tuner, *args, **kwargs)  # type: ignore[no-untyped-call]
    try:
        if knobs.runtime.interpret:
            return stock_run(tuner, *args, **kwargs)
        found: Any
        if len(tuner.configs) < 2:
            found = tuner.configs[0], tuner.configs[0].all_kwargs()
        else:
            state = state_of(tuner)
            key = state.key_of(args, kwargs)
            found = state.launches.get(key)
        if found is None:
            found = _first_call(tuner, state, key, args, kwargs)
        config, options = found
        tuner.best_config = config
        if config.pre_hook is not None:
            named = dict(zip(tuner.arg_names, args, strict=False))
            config.pre_hook({**named, **kwargs, **options})
        return tuner.fn.run(*args, **kwargs, **options)
    except (AttributeError, RuntimeError) as error:
        _require_gpu(error)
        raise


def _require_gpu(error: Exception) -> None:
    """Raise NoGpu if torch or Triton failed because there is no GPU."""
    if any(text in str(error) for text in _LACKS_GPU):
        raise NoGpu(
            "no usable NVIDIA GPU: `costmodel compile --bundle FILE --kernel FILE.py:FUNCTION` "
            "compiles without one; under TRITON_INTERPRET=1, `kernel.fn[grid](...)` with the "
            "constants of one configuration runs on the CPU"
        ) from error


def frozen(tuner: Any, *args: Any, **kwargs: Any) -> StockAutotuner:
    """Return a tuner's kernel with the best configuration for these arguments as its only one.

    The kernel is launched in the same way as the tuner. If this kind of call was not tuned before,
    it is tuned now; apart from tuning, nothing is launched.

    Args:
        args, kwargs: those of a call, and ``grid``.
    """
    config = tuner.configs[0]
    if len(tuner.configs) > 1:
        state, kwargs = state_of(tuner), {"warmup": False, **kwargs}
        try:
            key = state.key_of(args, kwargs)
        except (AttributeError, RuntimeError) as error:
            _require_gpu(error)
            raise
        config, _ = _first_call(tuner, state, key, args, kwargs)
        if begun := state.compiling.get(key):  # the kernel that is returned stays as it is
            wait(begun)
            config, _ = _first_call(tuner, state, key, args, kwargs)
    return StockAutotuner(tuner.fn, tuner.arg_names, [config], [], None, None)


def _stock_key(tuner: Any, named: Named) -> Arguments:
    """Return the key of a tuner's ``cache``, as Triton makes it, but without tensors."""
    values = [named[x] for x in tuner.keys if x in named and not hasattr(named[x], "data_ptr")]
    return *values, *(str(value.dtype) for value in named.values() if hasattr(value, "dtype"))


def _chosen(tuning: Tuning, state: State, key: Any) -> tuple[Any, bool]:
    """Return the configuration of a call, and True if later calls take it too."""
    mode = state.options.mode or default_mode()
    if (config := tuning.known()) is not None:
        return tuning.shared(config), True
    if tuning.is_empty or torch.cuda.is_current_stream_capturing():
        return tuning.best_known() or tuning.configs[0], False
    try:
        if mode == "background" and not _is_compiled(tuning, state, key):
            return tuning.configs[0], False
        if mode in ("predict", "heuristic"):
            config = tuning.predict()
        elif mode != "never":
            config = tuning.choose()
    except (HostError, torch.OutOfMemoryError) as error:
        warnings.warn(f"{tuning} is not tuned: {error}", RuntimeWarning, 5)
    return tuning.shared(config or tuning.best_known() or tuning.configs[0]), True


def _is_compiled(tuning: Tuning, state: State, key: Arguments) -> bool:
    """Begin to compile all configurations of a call; return True once that is done."""
    if key not in state.compiling:
        state.compiling[key] = tuning.compiling.begin_all()
    if not all(future.done() for future in state.compiling[key]):
        return False
    del state.compiling[key]
    return True


def _first_call(
    tuner: Any, state: State, key: Arguments, args: Arguments, kwargs: Named
) -> tuple[Any, Named]:
    """Find the configuration of a call; keep it for the next ones if it is the final one."""
    with state.lock:
        if found := state.launches.get(key):  # another thread was faster
            return found
        named = KernelCall(tuner, args, kwargs).arguments
        of_tuner = _stock_key(tuner, named)
        # Triton may have put something there, or a library with its own files, such as fla.
        cache = tuner.cache if type(tuner.cache) is dict else {}
        given = cache.get(of_tuner)
        if given is not None and given is not state.cached.get(of_tuner):
            config, is_final = given, True
        else:
            of_all = state.key_of(tuple(named.get(name) for name in tuner.arg_names), {})
            tuning = Tuning(tuner, state.options, of_all, args, kwargs)
            # Triton zeroes once for each of its own keys; later calls may add to what is there.
            tuning.resets = of_tuner not in state.launched
            config, is_final = _chosen(tuning, state, key)
            state.launched.add(of_tuner)
            if is_final:
                cache[of_tuner] = state.cached[of_tuner] = config
        found = config, config.all_kwargs()
        if is_final:
            state.launches[key] = found
            drop_oldest(state.launches, _AT_MOST)
        return found
