"""The learned model: boosted trees on log(latency / estimate).

The estimate is the analytic model of :mod:`costmodel.features.estimate`; the trees learn what it
misses. So sizes that were not trained on start from arithmetic, not from the nearest leaf.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.arrays import Floats, Floats32, Indices
from costmodel.data.artifact_table import ArtifactTable
from costmodel.data.candidates import Candidates, CostModel
from costmodel.data.dataset import Dataset
from costmodel.errors import FileError, InvalidInput, ModelError, NoModel
from costmodel.features.features import CONFIG_FEATURES, FEATURES, design_matrix
from costmodel.files import time_now
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models import storage
from costmodel.models.confidence import calibrate
from costmodel.models.storage import COLUMNS, HEADS, TORCH, Card
from costmodel.models.table import TrainingTable
from costmodel.models.torch_time import predict_torch_us, train_torch_time
from costmodel.models.trees import DEFAULTS, LabelledRows, Trees, XgbParams, train_booster

# The trees of a head, the rows of a batch that it answers for, and the features of these rows.
_Head = tuple[Any, Indices, Floats32]

_ESTIMATE = CONFIG_FEATURES.index("estimate")  # the same column for both heads


class XgbCostModel(CostModel):
    """Predicts latency with two heads: one sees the compiled artifact, one the configuration only.

    Candidates with an artifact go to the full head and the others to the configuration head; both
    predict the same quantity, so that a batch may hold both.

    Attributes:
        card: what it was trained on; not there before ``fit``.
    """

    kind = "learned"
    predicts_latency = True
    card: Card

    def __init__(self, params: XgbParams = DEFAULTS, *, name: str = "xgb", nthread: int = 1):
        self.params, self.name, self.nthread = params, name, nthread
        self._trees: dict[str, Trees] = {}  # by part, see costmodel.models.storage
        self._trouble = f"{name} is not fitted"

    def fit(self, table: TrainingTable) -> XgbCostModel:
        """Train both heads on the ok rows of a table.

        Raises:
            InvalidInput: no row to learn from.
        """
        ok, dropped = table.ok, table.not_learned_from()
        if not ok.any():
            raise InvalidInput(
                f"nothing to train on: {len(table)} rows that are not of role eval"
                f"{''.join(f', {n} {why}' for why, n in dropped.items())}; expected rows of status "
                f"ok, of workloads that are not held out (docs/protocol.md): collect more"
            )
        log_multiple = np.log(table.latency_us[ok] / table.roofline_us()[ok])
        weight, workload = self.row_weights(table)[ok], table.workload_index[ok]
        trees = {}
        for ptx, part in HEADS.items():
            matrix = table.design_matrix(ptx=ptx)[ok]
            start = np.log(matrix[:, _ESTIMATE].astype(np.float64))
            rows = LabelledRows(matrix, log_multiple - start, start, weight, workload)
            names = COLUMNS[part]
            booster = train_booster(rows, self.params, nthread=self.nthread, names=names)
            trees[part] = Trees.of(booster, names)
        timings = zip(table.workloads, table.target_of_each(), table.torch_us, strict=False)
        if (torch := train_torch_time(timings)) is not None:
            trees[TORCH] = torch
        used, learned_on = np.unique(workload), table.learned_on()
        self.card = Card(
            name=self.name,
            hash=storage.content_hash(*(trees[part].raw for part in HEADS.values())),
            target=learned_on[0],
            dtypes=tuple(sorted({table.workloads[w].code.kind for w in used})),
            devices=tuple(target.device.name for target in learned_on),
            params=self.params,
            training={
                "rows": int(ok.sum()),
                "workloads": len(used),
                "dropped": dropped,
                "data_hash": table.content_hash(),
            },
        )
        self._trees, self._trouble = trees, ""
        self.artifacts, self.directory = table.artifacts, None
        return self

    def row_weights(self, table: TrainingTable) -> Floats:
        """The weight of each row, float64 [n]: slow configurations need no exact prediction."""
        with np.errstate(invalid="ignore"):
            slowdown = table.latency_us / table.best_us()[table.workload_index] - 1
        fall = np.exp(-self.params.nearness * np.maximum(slowdown, 0))
        return self.params.floor + (1 - self.params.floor) * fall

    def predict(self, workload: Workload, candidates: Candidates, target: Target) -> Floats:
        """Latency in us of each candidate, float64 [n].

        Raises:
            NoModel: not fitted.
        """
        return self.nearest(workload, candidates, target, len(candidates))[1]

    def nearest(
        self, workload: Workload, candidates: Candidates, target: Target, count: int
    ) -> tuple[Indices, Floats]:
        """Predict the latency in us of the candidates nearest to the fastest.

        The first eighth of the trees, which predicts nearly as well as all, chooses these.

        Args:
            count: how many; all if there are fewer.

        Returns:
            (rows, latency_us): ascending rows of the candidates, intp [count], and float64 [count].

        Raises:
            NoModel: not fitted.
        """
        heads = self._heads(workload, candidates, target)
        near = np.arange(len(candidates))
        if count < len(near):
            rough = _log_multiple(heads, len(near), rough=True)
            near = np.sort(np.argsort(rough, kind="stable")[:count])
            heads = [
                (head, rows[chosen], matrix[chosen])
                for head, rows, matrix in heads
                if len(chosen := np.flatnonzero(np.isin(rows, near)))
            ]
        log_multiple = _log_multiple(heads, len(candidates))
        return near, np.exp(log_multiple[near]) * workload.roofline_us(target.device)

    def expected_kept(self, *, ptx: bool) -> dict[str, float]:
        """Mean share of the best speed that the best of a head's first k keeps, by k: 0 to 1."""
        known = self.card.confidence
        if known is None:
            return {}
        return known.ptx if ptx else known.config

    def out_of_coverage(self, workload: Workload) -> str:
        """Say which property of a workload is new to the model; empty if none is."""
        known = self.card.confidence
        return known.coverage.why_outside(workload) if known else ""

    def contributions(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> tuple[Floats, Floats]:
        """Split predictions into the effects of each feature: the SHAP values of the trees.

        Returns:
            (start_us, log_factors): float64 [n] and [n, len(FEATURES)], a column for each name of
            :data:`FEATURES`, 0 where a head does not see it. :meth:`predict` is
            ``start_us * exp(log_factors.sum(axis=1))``; the start is the analytic estimate times
            what the trees add to it on average.
        """
        import xgboost

        start_us = np.full(len(candidates), workload.roofline_us(target.device))
        log_factors = np.zeros((len(candidates), len(FEATURES)))
        for head, rows, matrix in self._heads(workload, candidates, target):
            names = head.feature_names
            data = xgboost.DMatrix(matrix, feature_names=names, nthread=self.nthread)
            shap = head.predict(data, pred_contribs=True)
            columns = np.array([FEATURES.index(name) for name in names])
            log_factors[rows[:, np.newaxis], columns] = shap[:, :-1]
            start_us[rows] *= matrix[:, _ESTIMATE] * np.exp(shap[:, -1])  # the mean comes last
        return start_us, log_factors

    def predict_torch(self, workload: Workload, target: Target) -> float:
        """Latency of ``torch.matmul`` in us; NaN where the training rows had none of it.

        If its trees cannot be used, there is a warning, and NaN from then on.
        """
        if TORCH not in self._trees:
            return nan
        try:
            return predict_torch_us(self._trees[TORCH], workload, target)
        except (FileError, ModelError) as error:
            del self._trees[TORCH]
            warnings.warn(f"nothing is predicted of torch: {error}", RuntimeWarning, 2)
            return nan

    @cached_property
    def artifacts(self) -> ArtifactTable | None:
        """The artifacts it was trained with, by key: these need not be compiled again.

        Those of a loaded model are read when first asked for. None before ``fit``, or where the
        training table had none.

        Raises:
            CorruptFile, WrongVersion: the file beside the model cannot be used.
        """
        return storage.read_artifacts(self.directory, self.card) if self.directory else None

    def artifacts_for(self, target: Target) -> ArtifactTable | None:
        """The artifacts it was trained with; None with another toolchain. See :attr:`artifacts`."""
        same = self.card.target.toolchain == target.toolchain
        return self.artifacts if same else None

    def why_not_usable(self, workload: Workload | None, target: Target) -> str:
        """Say why this model should not be asked; empty if it may be."""
        if self._trouble:
            return self._trouble
        device, name = self.card.target.device, target.device.name
        if name not in self.card.devices and not device.is_sibling(target.device):
            return f"{self.name} was trained on {device.name}, not on {name}"
        if workload is not None and (kind := workload.code.kind) not in self.card.dtypes:
            return f"{self.name} was trained on {', '.join(self.card.dtypes)}, not on {kind}"
        return ""

    def caveat(self, target: Target) -> str:
        """Say which difference from the training makes predictions less exact; empty if none."""
        found = []
        for what, trained, ours in (
            ("on", self.card.devices, target.device.name),
            ("with Triton", (self.card.target.toolchain.triton,), target.toolchain.triton),
        ):
            if ours not in trained:
                there = " and ".join(trained)
                found.append(f"{self.name} was trained {what} {there}, this is {ours}")
        return "; ".join(found)

    def answered_by(self, target: Target, unknown: int, considered: int) -> str:
        """Say in a line which head ranked the configurations."""
        tools = target.toolchain
        artifacts = f"artifacts of Triton {tools.triton}, ptxas {tools.ptxas}"
        if not unknown:
            return f"PTX head: {artifacts} for all {considered} configurations"
        if unknown == considered:
            return f"configuration-only head for all {considered} configurations: no {artifacts}"
        return (
            f"PTX head for {considered - unknown} of {considered} configurations, "
            f"configuration-only head for {unknown}: no {artifacts}"
        )

    @property
    def hash(self) -> str:
        """16 hex digits of the trees and of the columns they expect; empty before ``fit``."""
        return self.card.hash if self._trees else ""

    def save(self, path: str | Path) -> Path:
        """Write the model to a directory (created if need be) and return it.

        See :mod:`costmodel.models.storage`. If anything fails, nothing is written.

        Raises:
            NoModel: not fitted. InvalidInput, FileError: as :func:`costmodel.models.storage.save`.
        """
        if not self._trees:
            raise NoModel(f"model {self.name!r} is not fitted: nothing to save, call fit() first")
        date = time_now()[:10]
        training = {"date": date, **self.card.training}
        card = replace(self.card, name=self.name, training=training)
        return storage.save(Path(path), card, self._trees, self.artifacts)

    @classmethod
    def load(cls, path: str | Path, *, parse: bool = True) -> XgbCostModel:
        """Read a model that :meth:`save` wrote.

        Args:
            parse: read the trees now; else at their first use.

        Raises:
            NoModel: nothing at this path.
            CorruptFile: truncated, foreign, or parts that are not those of the card.
            WrongVersion: written by a newer release.
            SchemaMismatch: trained on other columns than this release computes.
            MisreadModel: the installed XGBoost does not predict what it should.
        """
        path = Path(path)
        card = storage.read_card(path)
        model = cls(card.params, name=card.name)
        model.card, model.directory, model._trouble = card, path, ""
        model._trees = storage.read_trees(path, card)
        if parse:
            for trees in model._trees.values():
                trees.canary()  # which reads them
        return model

    def _heads(self, workload: Workload, candidates: Candidates, target: Target) -> list[_Head]:
        """Divide the candidates between the heads; if one cannot be read, the model is unusable."""
        if not self._trees:
            raise NoModel(f"model {self.name!r} is not fitted: call fit() or load one")
        known, found = candidates.has_artifact, []
        for ptx, part in HEADS.items():
            rows = np.flatnonzero(known == ptx)
            if len(rows):
                shown = candidates.take(rows) if len(rows) < len(candidates) else candidates
                matrix = design_matrix(workload, shown, target, ptx=ptx)
                try:
                    found.append((self._trees[part].booster, rows, matrix))
                except (FileError, ModelError) as error:
                    self._trouble = f"{self.name} cannot be used: {error}"
                    raise
        return found


def _log_multiple(heads: Sequence[_Head], size: int, *, rough: bool = False) -> Floats:
    """log(latency / roofline) as the heads predict it for their rows, float64 [size].

    Args:
        rough: use only the first eighth of the trees.
    """
    result = np.empty(size, dtype=np.float64)
    for head, rows, matrix in heads:
        trees = max(head.num_boosted_rounds() // 8, 1) if rough else 0  # 0 are all
        learned = head.inplace_predict(matrix, iteration_range=(0, trees))
        result[rows] = learned + np.log(matrix[:, _ESTIMATE])
    return result


def train(
    data: Dataset | TrainingTable,
    *,
    params: XgbParams = DEFAULTS,
    name: str = "xgb",
    nthread: int = 2,
    calibrated: bool = True,
) -> XgbCostModel:
    """Train a model on the training workloads of a dataset.

    ``train(dataset).save(path)``, then ``costmodel.use(path)`` is all that it takes to use it.

    Args:
        data: a dataset, whose rows of role ``train`` are used, or a table.
        name: what results call the model.
        nthread: threads of the training; prediction uses one.
        calibrated: measure also what its rankings keep. This takes as long again as training;
            below 400 workloads, about three times as long.

    Raises:
        InvalidInput: no row of status ok.
    """
    table = data if isinstance(data, TrainingTable) else TrainingTable.from_dataset(data)

    def fit(part: TrainingTable) -> XgbCostModel:
        return XgbCostModel(params, name=name, nthread=nthread).fit(part)

    model = fit(table)
    if calibrated:
        model.card = replace(model.card, confidence=calibrate(table, fit, seed=params.seed))
    return model
