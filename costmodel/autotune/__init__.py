"""Tunes any Triton kernel: a drop-in for ``triton.autotune``."""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """This package, which is also the decorator ``costmodel.autotune(configs, key)``."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from costmodel.autotune.tuner import autotune

        return autotune(*args, **options)


sys.modules[__name__].__class__ = _Callable
