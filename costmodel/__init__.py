"""A learned cost-model autotuner for Triton: matrix products, and any other kernel.

::

    import costmodel

    c = costmodel.matmul(a, b)                      # tunes once, launches from then on
    costmodel.train(dataset).save(path)             # a model of your own
    costmodel.use(path)

Importing this touches no GPU and no disk; each name is loaded when first used. The import reads one
environment variable, ``COSTMODEL_AUTOTUNE``: 1 calls :func:`replace_triton_autotune`.
"""

from __future__ import annotations

from importlib import import_module
from os import environ
from typing import TYPE_CHECKING, Any

from costmodel import errors
from costmodel.errors import *  # noqa: F403

if TYPE_CHECKING:
    from pathlib import Path

    from costmodel import nn as nn
    from costmodel import torch_ops as torch_ops
    from costmodel.autotune.replace import prune_configs_by, replace_triton_autotune
    from costmodel.autotune.tuner import autotune
    from costmodel.data.dataset import Dataset
    from costmodel.dispatch.ahead import pin, tune, unpin
    from costmodel.dispatch.dispatch import result_for, set_buckets, set_mode, use
    from costmodel.dispatch.warmup import warmup
    from costmodel.gemm.config import GemmConfig
    from costmodel.gemm.workload import Workload
    from costmodel.hardware.target import Target
    from costmodel.measure.replay import ReplayRunner
    from costmodel.models import XgbCostModel, load
    from costmodel.scaled.product import int_mm, scaled_mm
    from costmodel.torch_ops import matmul
    from costmodel.tuning.counters import Stats, stats
    from costmodel.tuning.explanation import Explanation, explain
    from costmodel.tuning.ranking import Ranking, rank
    from costmodel.tuning.tuning_result import TuningResult

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "Explanation",
    "GemmConfig",
    "Ranking",
    "ReplayRunner",
    "Stats",
    "Target",
    "TuningResult",
    "Workload",
    "__version__",
    "autotune",
    "explain",
    "int_mm",
    "load",
    "matmul",
    "pin",
    "prune_configs_by",
    "rank",
    "replace_triton_autotune",
    "result_for",
    "scaled_mm",
    "set_buckets",
    "set_mode",
    "stats",
    "train",
    "tune",
    "unpin",
    "use",
    "warmup",
]
__all__ += errors.__all__
__all__.sort()

_WHERE = {
    "Dataset": "data.dataset",
    "Explanation": "tuning.explanation",
    "GemmConfig": "gemm.config",
    "Ranking": "tuning.ranking",
    "ReplayRunner": "measure.replay",
    "Stats": "tuning.counters",
    "Target": "hardware.target",
    "TuningResult": "tuning.tuning_result",
    "Workload": "gemm.workload",
    "explain": "tuning.explanation",
    "int_mm": "scaled.product",
    "load": "models",
    "matmul": "torch_ops",
    "pin": "dispatch.ahead",
    "prune_configs_by": "autotune.replace",
    "rank": "tuning.ranking",
    "replace_triton_autotune": "autotune.replace",
    "result_for": "dispatch.dispatch",
    "scaled_mm": "scaled.product",
    "set_buckets": "dispatch.dispatch",
    "set_mode": "dispatch.dispatch",
    "stats": "tuning.counters",
    "tune": "dispatch.ahead",
    "unpin": "dispatch.ahead",
    "use": "dispatch.dispatch",
    "warmup": "dispatch.warmup",
}
_MODULES = ("autotune", "nn", "torch_ops")


def train(
    dataset: Dataset | str | Path,
    *siblings: Dataset | str | Path,
    add_cache: bool | str | Path = False,
    **options: Any,
) -> XgbCostModel:
    """Train a model on the training workloads of a dataset, or of a dataset directory.

    Other options are those of :func:`costmodel.models.train`: ``params``, ``name``, ``nthread``,
    ``calibrated``.

    Args:
        siblings: datasets of other devices that run the same binaries, such as an H200 beside an
            H100: one model for all of them.
        add_cache: learn also from the timings in a cache of winners that are of the first dataset's
            kind of device. True: the cache that tuning uses; a path: another one. The model's card
            says under ``from_use`` how many rows were added, and why others were not.

    Raises:
        MissingData, CorruptFile, WrongVersion: no usable dataset at this path.
        MissingData: ``add_cache`` is no directory. InvalidInput: no row to learn from, or datasets
            whose devices or toolchains have different binaries.
    """
    from costmodel import models
    from costmodel.data.dataset import Dataset

    first, *others = (
        d if isinstance(d, Dataset) else Dataset.open(d) for d in (dataset, *siblings)
    )
    card = None
    if add_cache is False:
        table = models.TrainingTable.from_dataset(first)
    else:
        from costmodel.tuning.from_use import open_cache, with_use

        table, card = with_use(first, open_cache(None if add_cache is True else add_cache))
    if others:
        more = map(models.TrainingTable.from_dataset, others)
        table = models.TrainingTable.joined([table, *more])
    model = models.train(table, **options)
    if card is not None:
        model.card.training["from_use"] = card
    return model


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


if environ.get("COSTMODEL_AUTOTUNE", "") not in ("", "0"):
    from costmodel.autotune.replace import replace_triton_autotune as _replace

    _replace()
