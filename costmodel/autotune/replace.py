"""Puts costmodel in the place of Triton's own tuner, for a whole process."""

import sys
import warnings
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner as StockAutotuner

from costmodel.autotune.options import Options
from costmodel.autotune.tuner import run
from costmodel.autotune.tuning import Tuning
from costmodel.errors import HostError
from costmodel.files import Named
from costmodel.validation import require_count

# Modules whose tuners have a ``run`` of their own that does what Triton's does.
_OWN_RUNS = ("flag_gems.",)


def replace_triton_autotune() -> None:
    """Make costmodel tune all kernels that ``triton.autotune`` tunes in this process.

    This includes tuners that were built before, and tuners of subclasses that do not define
    ``run``. Of the subclasses with their own ``run``, only that of FlagGems is replaced.
    """
    StockAutotuner.run = run
    for subclass in _subclasses(StockAutotuner):
        _adapt(subclass)
    StockAutotuner.__init_subclass__ = classmethod(lambda cls, **options: _adapt(cls))


def prune_configs_by(top_k: int = 8) -> Named:
    """Return a ``prune_configs_by`` for ``triton.autotune`` that keeps the best ``top_k``.

    It is for programs that keep Triton's own tuner. The configurations are compiled in child
    processes and ranked by the model of kernels. Under ``torch.compile`` all are kept.

    Raises:
        InvalidInput: ``top_k`` is not over 0.
    """
    require_count("top_k", top_k)

    def early_config_prune(configs: list[Any], named: Named, **options: Any) -> list[Any]:
        if torch.compiler.is_compiling():  # Inductor calls this, and has no arguments yet
            return configs
        # Triton does not say whose configurations these are.
        tuner = sys._getframe(1).f_locals["self"]
        try:
            tuning = Tuning(tuner, Options(), (), (), {**named, **options}, configs)
            return tuning.ranked()[:top_k]
        except HostError as error:
            warnings.warn(f"{tuner.base_fn.__name__} is not pruned: {error}", stacklevel=2)
            return configs

    return {"early_config_prune": early_config_prune}


def _subclasses(cls: Any) -> list[Any]:
    return [x for each in cls.__subclasses__() for x in (each, *_subclasses(each))]


def _adapt(subclass: Any) -> None:
    if "run" in vars(subclass) and subclass.__module__.startswith(_OWN_RUNS):
        subclass.run = run
