"""Cost models: baselines, the learned one, peers; training, saving, and which one answers."""

from __future__ import annotations

from costmodel.models.baselines import AnalyticModel, RuleHeuristic, StaticRank
from costmodel.models.known import known_artifacts
from costmodel.models.peers import NvMatmulHeuristics
from costmodel.models.ptx_score import PtxScore
from costmodel.models.registry import (
    find_model,
    load,
    model_directory,
    shipped_models,
    use,
)
from costmodel.models.table import TrainingTable
from costmodel.models.train import train
from costmodel.models.validate import cross_validate
from costmodel.models.xgb import XgbCostModel, XgbParams

__all__ = [
    "AnalyticModel",
    "NvMatmulHeuristics",
    "PtxScore",
    "RuleHeuristic",
    "StaticRank",
    "TrainingTable",
    "XgbCostModel",
    "XgbParams",
    "cross_validate",
    "find_model",
    "known_artifacts",
    "load",
    "model_directory",
    "shipped_models",
    "train",
    "use",
]
