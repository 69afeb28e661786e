"""One call of a tuned kernel: its arguments, its hooks, and copies to restore the arguments."""

import functools
from contextlib import suppress
from math import isfinite
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from costmodel.autotune.arguments import Snapshot, tensors_of
from costmodel.autotune.store import lasting_text
from costmodel.compile.compiler import reason
from costmodel.files import Named, digest


class KernelCall:
    """The arguments with which a kernel was called, to launch any of its configurations.

    Args:
        tuner: a ``triton.runtime.Autotuner``.
        args, kwargs: passed to its ``run``.

    Attributes:
        named: all arguments by name, and the options of the launch.
        arguments: those of them that the kernel has.
        may_write: names of the arguments that the kernel may write; None: all, or not kept yet.
    """

    def __init__(self, tuner: Any, args: tuple[Any, ...], kwargs: Named):
        self.tuner, self._args, self._kwargs = tuner, args, kwargs
        self.named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
        self.arguments = {k: v for k, v in self.named.items() if k in tuner.arg_names}
        self.may_write: set[str] | None = None
        self._before: Snapshot | None = None
        self._restored: Snapshot | None = None

    def __str__(self) -> str:
        return self.tuner.base_fn.__name__

    def launch(self, config: Any, function: Any = None, **options: Any) -> Any:
        """Launch a configuration, of ``function`` if it is given; Triton's errors propagate."""
        run = (function or self.tuner.fn).run
        return run(*self._args, **{**self._kwargs, **options}, **config.all_kwargs())

    def refused(self, config: Any) -> str:
        """Load a configuration; say why compiler or driver refuses it, empty if it loads."""
        self.hook(config)
        try:
            run = getattr(self.launch(config, warmup=True), "run", None)  # this asks the driver
            if isinstance(run, functools.partial):  # which has refused before: it raises the error
                run()
        except (AssertionError, ValueError, CompilationError, OutOfResources, PTXASError) as error:
            return reason(error)
        return ""

    def prepare(self, config: Any) -> None:
        """Do what the user asked for before a launch: hooks, zeroing, restoring."""
        if self._restored is None:
            self._restored = Snapshot(self._tensors(self.tuner.restore_value))
        self.hook(config)
        self.reset(config, reset_only=False)
        if not self.tuner.user_defined_pre_hook:
            self._restored.restore()

    def reset(self, config: Any, *, reset_only: bool = True) -> None:
        """Zero ``reset_to_zero``, or call the user's hook; ``reset_only``: no launch is timed."""
        if self.tuner.user_defined_pre_hook:
            self.tuner.pre_hook({**self.named, **config.all_kwargs()}, reset_only=reset_only)
            return
        for tensor in self._tensors(self.tuner.reset_to_zero).values():
            tensor.zero_()

    def finish(self, config: Any, exception: Exception | None = None) -> None:
        """Call the hook that the user asked for after a launch."""
        if self.tuner.user_defined_post_hook:
            self.tuner.post_hook({**self.named, **config.all_kwargs()}, exception=exception)

    def hook(self, config: Any) -> None:
        """Call the hook of a configuration, which may change arguments for it."""
        if config.pre_hook is not None:
            config.pre_hook({**self.named, **config.all_kwargs()})

    def source(self) -> str:
        """Return a hash of the kernel, and of the heuristics around it."""
        function, code = self.tuner.fn, ""
        while not hasattr(function, "cache_key"):
            code += "".join(map(_code, getattr(function, "values", {}).values()))
            function = function.fn
        own = function.cache_key
        return f"{own}-{digest(code, 64)}" if code else own

    def key(self) -> Named:
        """Return the values of the tuner's own key, and the types of arguments."""
        named = self.arguments
        values = {k: named[k] for k in self.tuner.keys if k in named}
        plain = {
            k: v if isinstance(v, int | str | None) else lasting_text(v)
            for k, v in values.items()
            if not hasattr(v, "data_ptr")
        }
        return plain | {k: str(v.dtype) for k, v in named.items() if hasattr(v, "dtype")}

    def grid(self, config: Any) -> list[int]:
        """Return the programs that a configuration launches, in each dimension; empty: unknown."""
        grid = self._kwargs.get("grid", ())
        with suppress(Exception):  # the user's function may need defaults, which Triton adds
            grid = grid({**self.named, **config.all_kwargs()}) if callable(grid) else grid
            return [int(size) for size in grid]
        return []

    def described(self) -> Named:
        """Return the arguments as JSON can hold them: type and shape of tensors, numbers, None."""
        named = {name: self.named.get(name) for name in self.tuner.arg_names}
        plain = {
            name: value
            for name, value in named.items()
            if value is None or (isinstance(value, int | float) and isfinite(value))
        }
        tensors = tensors_of(named).items()
        return plain | {name: [str(x.dtype), list(x.shape)] for name, x in tensors}

    def keep(self, names: set[str] | None) -> None:
        """Copy the arguments that the kernel may write, before the first launch; None: all."""
        if self._before is not None:
            if names == self.may_write:
                return
            self._before.restore()  # later configurations of a long list may write others
            self._before = None
        self.may_write = names
        self._before = Snapshot(tensors_of(self.named, names))

    def restore(self) -> None:
        """Put back what the copied arguments held before the first launch."""
        for snapshot in filter(None, (self._before, self._restored)):
            snapshot.restore()

    def written(self) -> Snapshot:
        """Copy the present content of the arguments that the kernel may write."""
        assert self._before is not None
        return Snapshot(self._before.tensors)

    def _tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        return {x: self.named[x] for x in names if self.named.get(x) is not None}


def _code(heuristic: Any) -> str:
    """Return the code of a function of ``triton.heuristics`` as a text; of calls only the names."""
    if (code := getattr(heuristic, "__code__", None)) is None:
        return lasting_text(heuristic)
    cells = [cell.cell_contents for cell in heuristic.__closure__ or ()]
    parts = [code.co_code.hex(), code.co_names, *code.co_consts, *cells]
    return repr([part for part in parts if isinstance(part, int | float | str | tuple)])
