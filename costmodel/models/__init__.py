"""Cost models: baselines and the learned one; training, saving, and which one answers."""

from costmodel.models.baselines import AnalyticModel, PtxScore, RuleHeuristic, StaticRank
from costmodel.models.registry import (
    find_model,
    known_artifacts,
    load,
    model_directory,
    shipped_models,
    use,
)
from costmodel.models.table import TrainingTable
from costmodel.models.trees import XgbParams
from costmodel.models.xgb import XgbCostModel, train

__all__ = [
    "AnalyticModel",
    "PtxScore",
    "RuleHeuristic",
    "StaticRank",
    "TrainingTable",
    "XgbCostModel",
    "XgbParams",
    "find_model",
    "known_artifacts",
    "load",
    "model_directory",
    "shipped_models",
    "train",
    "use",
]
