"""A learned cost-model autotuner for Triton GEMM.

::

    import costmodel

    c = costmodel.matmul(a, b)                      # tunes once, launches from then on
    costmodel.train(dataset).save(path)             # a model of one's own
    costmodel.use(path)

Importing this touches no GPU, no disk and no environment; each name is loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from costmodel.errors import (
    CompileError,
    CorruptFile,
    CostModelError,
    DeviceError,
    FileError,
    GradientError,
    IllegalConfig,
    InvalidInput,
    LaunchError,
    LayoutError,
    MissingData,
    MixedData,
    ModelError,
    NoGpu,
    NoModel,
    NotRecorded,
    SchemaMismatch,
    ShapeError,
    UnknownTarget,
    UnsupportedDtype,
    WrongVersion,
)

if TYPE_CHECKING:
    from pathlib import Path

    from costmodel.ahead import tune, warmup
    from costmodel.config import GemmConfig
    from costmodel.dataset import Dataset
    from costmodel.dispatch import matmul, result_for, use
    from costmodel.explanation import Explanation, explain
    from costmodel.models import XgbCostModel, load
    from costmodel.ranking import Ranking, rank
    from costmodel.runner.replay import ReplayRunner
    from costmodel.target import Target
    from costmodel.tuning_result import TuningResult
    from costmodel.workload import Workload

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "CorruptFile",
    "CostModelError",
    "Dataset",
    "DeviceError",
    "Explanation",
    "FileError",
    "GemmConfig",
    "GradientError",
    "IllegalConfig",
    "InvalidInput",
    "LaunchError",
    "LayoutError",
    "MissingData",
    "MixedData",
    "ModelError",
    "NoGpu",
    "NoModel",
    "NotRecorded",
    "Ranking",
    "ReplayRunner",
    "SchemaMismatch",
    "ShapeError",
    "Target",
    "TuningResult",
    "UnknownTarget",
    "UnsupportedDtype",
    "Workload",
    "WrongVersion",
    "__version__",
    "explain",
    "load",
    "matmul",
    "rank",
    "result_for",
    "train",
    "tune",
    "use",
    "warmup",
]

_WHERE = {
    "Dataset": "dataset",
    "Explanation": "explanation",
    "GemmConfig": "config",
    "Ranking": "ranking",
    "ReplayRunner": "runner.replay",
    "Target": "target",
    "TuningResult": "tuning_result",
    "Workload": "workload",
    "explain": "explanation",
    "load": "models",
    "matmul": "dispatch",
    "rank": "ranking",
    "result_for": "dispatch",
    "tune": "ahead",
    "use": "dispatch",
    "warmup": "ahead",
}


def train(dataset: Dataset | str | Path, **options: Any) -> XgbCostModel:
    """Train a model on the training workloads of a dataset, or of a dataset directory.

    Options are those of :func:`costmodel.models.train`: ``params``, ``name``, ``nthread``.

    Raises:
        MissingData, CorruptFile, WrongVersion: no usable dataset at this path.
        InvalidInput: no row to learn from.
    """
    from costmodel import models
    from costmodel.dataset import Dataset

    opened = dataset if isinstance(dataset, Dataset) else Dataset.open(dataset)
    return models.train(opened, **options)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
