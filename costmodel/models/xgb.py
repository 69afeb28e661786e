"""The learned model: boosted trees on log(latency / estimate).

The estimate is the analytic model of :mod:`costmodel.features.estimate`; the trees learn what it
misses. So sizes that were not trained on start from arithmetic, not from the nearest leaf.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from costmodel.data.candidates import Candidates, CostModel
from costmodel.errors import FileError, InvalidInput, ModelError, NoModel
from costmodel.features.features import CONFIG_FEATURES, FEATURES, design_matrix
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models import storage
from costmodel.models.confidence import Confidence
from costmodel.models.objective import DEFAULTS, LabelledRows, XgbParams, train_booster
from costmodel.models.torch_time import TORCH_FEATURES, TorchTime
from costmodel.models.trees import Trees

if TYPE_CHECKING:
    from xgboost import Booster

    from costmodel.data.artifact_table import ArtifactTable
    from costmodel.models.table import TrainingTable

__all__ = ["DEFAULTS", "XgbCostModel", "XgbParams"]

_COLUMNS = {True: FEATURES, False: CONFIG_FEATURES}
_ESTIMATE = CONFIG_FEATURES.index("estimate")  # the same column for both heads


class XgbCostModel(CostModel):
    """Predicts latency with two heads: one sees the compiled artifact, one the configuration only.

    Candidates with an artifact go to the full head and the others to the configuration head; both
    predict the same quantity, so that a batch may hold both.

    Attributes:
        target_, dtypes_: what it was trained on; of types the kinds, see ``gemm.dtypes``.
        devices_: the names of all devices that it has seen a working row of, that of the target
            first.
        card_: rows, workloads, dropped failures, hash of the data and date of the training.
        torch_time_: predicts ``torch.matmul``, for choosing it where nothing is timed.
        confidence_: what its rankings keep, and of which products; None if it was not calibrated.
    """

    kind = "learned"
    predicts_latency = True

    def __init__(
        self, params: XgbParams = DEFAULTS, *, name: str = "xgb", nthread: int = 1
    ) -> None:
        self.params = params
        self.name = name
        self.nthread = nthread
        self.card_: dict[str, Any] = {}
        self.target_: Target | None = None
        self.dtypes_: tuple[str, ...] = ()
        self.devices_: tuple[str, ...] = ()
        self.torch_time_ = TorchTime()
        self.confidence_: Confidence | None = None
        self._heads: dict[bool, Trees] = {}
        self._hash = ""
        self._trouble = ""
        self._artifacts: ArtifactTable | None = None
        self._directory: Path | None = None

    def fit(self, table: TrainingTable) -> XgbCostModel:
        """Train both heads on the ok rows of a table.

        Raises:
            InvalidInput: no row to learn from.
        """
        ok = table.ok()
        if not ok.any():
            raise InvalidInput(
                f"nothing to train on: {len(table)} rows, dropped {table.dropped()}; expected "
                f"rows of status ok, of workloads that are not held out (docs/protocol.md)"
            )
        log_multiple = np.log(table.latency_us[ok] / table.roofline_us()[ok])
        weight = self.row_weights(table)[ok]
        heads: dict[bool, Trees] = {}
        for ptx, names in _COLUMNS.items():
            matrix = table.design_matrix(ptx=ptx)[ok]
            start = np.log(matrix[:, _ESTIMATE].astype(np.float64))
            rows = LabelledRows(
                matrix, log_multiple - start, start, weight, table.workload_index[ok]
            )
            booster = train_booster(rows, self.params, nthread=self.nthread, names=names)
            heads[ptx] = Trees(names, booster=booster)
        self._heads, self._trouble = heads, ""
        self._hash = storage.content_hash(heads[True].raw, heads[False].raw)
        self.torch_time_ = TorchTime()  # nothing of the data before
        if table.torch_us is not None:
            self.torch_time_.fit(table.workloads, table.torch_us.tolist(), table.target_of_each())
        used = np.unique(table.workload_index[ok])
        learned_on = table.learned_on()
        self.target_, self._artifacts, self._directory = learned_on[0], table.artifacts, None
        self.devices_ = tuple(target.device.name for target in learned_on)
        self.confidence_ = None  # that of other trees
        self.dtypes_ = tuple(sorted({table.workloads[w].code.kind for w in used}))
        self.card_ = {
            "rows": int(ok.sum()),
            "workloads": len(used),
            "dropped": table.dropped(),
            "data_hash": table.content_hash(),
        }
        return self

    def row_weights(self, table: TrainingTable) -> NDArray[np.float64]:
        """The weight of each row, float64 [n]: slow configurations need no exact prediction."""
        with np.errstate(invalid="ignore"):
            slowdown = table.latency_us / table.best_us()[table.workload_index] - 1
        fall = np.exp(-self.params.nearness * np.maximum(slowdown, 0))
        return self.params.floor + (1 - self.params.floor) * fall

    def predict(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> NDArray[np.float64]:
        """Latency in us of each candidate, float64 [n].

        Raises:
            NoModel: not fitted.
        """
        return self.nearest(workload, candidates, target, len(candidates))[1]

    def nearest(
        self, workload: Workload, candidates: Candidates, target: Target, count: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Predict the latency in us of the candidates nearest to the fastest.

        The first eighth of the trees, which comes near the whole, says which those are.

        Args:
            count: how many; all where there are no more.

        Returns:
            (rows, latency_us): ascending rows of the candidates, intp [count], and float64 [count].

        Raises:
            NoModel: not fitted.
        """
        if not self._heads:
            raise NoModel(f"model {self.name!r} is not fitted: call fit() or load one")
        known = candidates.has_artifact
        heads = []
        for ptx, rows in ((True, np.flatnonzero(known)), (False, np.flatnonzero(~known))):
            if len(rows):
                part = candidates.take(rows) if len(rows) < len(candidates) else candidates
                heads.append((ptx, rows, design_matrix(workload, part, target, ptx=ptx)))
        near = np.arange(len(candidates))
        if count < len(near):
            rough = self._log_multiple(heads, len(near), rough=True)
            near = np.sort(np.argsort(rough, kind="stable")[:count])
            heads = [
                (ptx, rows[chosen], matrix[chosen])
                for ptx, rows, matrix in heads
                if len(chosen := np.flatnonzero(np.isin(rows, near)))
            ]
        log_multiple = self._log_multiple(heads, len(candidates))
        roofline = target.device.roofline_us(workload.flops(), workload.bytes(), workload.code.kind)
        return near, np.exp(log_multiple[near]) * roofline

    def _log_multiple(
        self,
        heads: Sequence[tuple[bool, NDArray[np.intp], NDArray[np.float32]]],
        size: int,
        *,
        rough: bool = False,
    ) -> NDArray[np.float64]:
        """log(latency / roofline) by the heads, of their rows, float64 [size].

        Args:
            rough: by the first eighth of the trees.
        """
        result = np.empty(size, dtype=np.float64)
        for ptx, rows, matrix in heads:
            head = self._head(ptx)
            trees = max(head.num_boosted_rounds() // 8, 1) if rough else 0  # 0 are all
            learned = head.inplace_predict(matrix, iteration_range=(0, trees))
            result[rows] = learned + np.log(matrix[:, _ESTIMATE])
        return result

    def expected_kept(self, *, ptx: bool) -> dict[str, float]:
        """Mean share of the best speed that the best of the first k of one head keep, by k."""
        if self.confidence_ is None:
            return {}
        return self.confidence_.ptx if ptx else self.confidence_.config

    def out_of_coverage(self, workload: Workload) -> str:
        """Say which property of a workload is new to the model; empty if none is."""
        return self.confidence_.coverage.why_outside(workload) if self.confidence_ else ""

    def contributions(
        self, workload: Workload, candidates: Candidates, target: Target
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Split predictions into what each feature does: the SHAP values of the trees.

        Returns:
            (start_us, log_factors): float64 [n] and [n, len(FEATURES)], a column for each name of
            :data:`FEATURES`, 0 where a head does not see it. :meth:`predict` is
            ``start_us * exp(log_factors.sum(axis=1))``; the start is the analytic estimate times
            what the trees add to it on average.
        """
        import xgboost

        roofline = target.device.roofline_us(workload.flops(), workload.bytes(), workload.code.kind)
        start_us = np.full(len(candidates), roofline)
        log_factors = np.zeros((len(candidates), len(FEATURES)))
        known = candidates.has_artifact
        for ptx, names in _COLUMNS.items():
            rows = known if ptx else ~known
            if not rows.any():
                continue
            part = candidates.take(np.flatnonzero(rows))
            matrix = design_matrix(workload, part, target, ptx=ptx)
            data = xgboost.DMatrix(matrix, feature_names=list(names), nthread=self.nthread)
            shap = self._head(ptx).predict(data, pred_contribs=True)
            for column, name in enumerate(names):
                log_factors[rows, FEATURES.index(name)] = shap[:, column]
            start_us[rows] *= matrix[:, _ESTIMATE] * np.exp(shap[:, -1])  # the mean comes last
        return start_us, log_factors

    def predict_torch(self, workload: Workload, target: Target) -> float:
        """Latency of ``torch.matmul`` in us; NaN where the training rows had none of it.

        Trees of it that cannot be used are a warning, and NaN from then on.
        """
        try:
            return self.torch_time_.predict(workload, target)
        except (FileError, ModelError) as error:
            self.torch_time_ = TorchTime()
            warnings.warn(f"nothing is predicted of torch: {error}", RuntimeWarning, stacklevel=2)
            return nan

    @property
    def artifacts(self) -> ArtifactTable | None:
        """The artifacts it was trained with, by key: it knows them without compiling.

        Those of a loaded model are read when first asked for. None before ``fit``, or where the
        training table had none.

        Raises:
            CorruptFile, WrongVersion: the file beside the model cannot be used.
        """
        if self._artifacts is None and self._directory is not None:
            self._artifacts = storage.read_artifacts(self._directory)
        return self._artifacts

    @property
    def directory(self) -> Path | None:
        """Directory that the model was loaded from; None if it was trained here."""
        return self._directory

    def artifacts_for(self, target: Target) -> ArtifactTable | None:
        """The artifacts it was trained with; None with another toolchain. See :attr:`artifacts`."""
        same = self.target_ is not None and self.target_.toolchain == target.toolchain
        return self.artifacts if same else None

    def why_not_usable(self, workload: Workload | None, target: Target) -> str:
        """Say why this model should not be asked; empty if it may be."""
        if self._trouble:
            return f"{self.name} cannot be used: {self._trouble}"
        if self.target_ is None:
            return f"{self.name} is not fitted"
        device = self.target_.device
        if target.device.name not in self.devices_ and not device.is_sibling(target.device):
            return f"{self.name} was trained on {device.name}, not on {target.device.name}"
        if workload is not None and (kind := workload.code.kind) not in self.dtypes_:
            return f"{self.name} was trained on {', '.join(self.dtypes_)}, not on {kind}"
        return ""

    def caveat(self, target: Target) -> str:
        """Say which difference from the training makes predictions less exact; empty if none."""
        assert self.target_ is not None  # a model that is not fitted is not usable
        found = []
        for what, trained, ours in (
            ("on", self.devices_, target.device.name),
            ("with Triton", (self.target_.toolchain.triton,), target.toolchain.triton),
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
        return self._hash

    def save(self, path: str | Path) -> Path:
        """Write the model to a directory (created if need be) and return it.

        See :mod:`costmodel.models.storage`. All of it is written or, whatever fails, nothing.

        Raises:
            NoModel: not fitted. InvalidInput, FileError: as :func:`costmodel.models.storage.save`.
        """
        if self.target_ is None:
            raise NoModel(f"model {self.name!r} is not fitted: nothing to save, call fit() first")
        trees = {storage.HEADS[ptx]: head for ptx, head in self._heads.items()}
        if self.torch_time_.trees is not None:
            trees[storage.TORCH] = self.torch_time_.trees
        card = storage.Card.of(
            name=self.name,
            hash=self.hash,
            target=self.target_,
            dtypes=self.dtypes_,
            devices=self.devices_,
            params=self.params,
            training={"date": datetime.now(UTC).date().isoformat(), **self.card_},
            confidence=self.confidence_,
            canaries={part: of.canary() for part, of in trees.items()},
        )
        raw = {part: of.raw for part, of in trees.items()}  # read before anything is overwritten
        return storage.save(Path(path), card, raw, self.artifacts)

    @classmethod
    def load(cls, path: str | Path, *, parse: bool = True) -> XgbCostModel:
        """Read a model that :meth:`save` wrote.

        Args:
            parse: read the trees now; else when they are first asked.

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
        model.target_, model.dtypes_, model.devices_ = card.target, card.dtypes, card.devices
        model.card_, model.confidence_ = card.training, card.confidence
        model._hash, model._directory = card.hash, path
        heads = functools.cache(lambda: storage.read_heads(path, card))

        def trees_of(part: str, columns: tuple[str, ...], read: Callable[[], bytes]) -> Trees:
            canary = card.canaries.get(part)
            return Trees(columns, file=path / card.files[part], read=read, canary=canary)

        model._heads = {
            ptx: trees_of(part, _COLUMNS[ptx], lambda ptx=ptx: heads()[ptx])  # type: ignore[misc]
            for ptx, part in storage.HEADS.items()
        }
        if storage.TORCH in card.files:
            model.torch_time_ = TorchTime(
                trees_of(storage.TORCH, TORCH_FEATURES, lambda: storage.read_torch(path, card))
            )
        if parse:
            for trees in (*model._heads.values(), model.torch_time_.trees):
                if trees is not None:
                    trees.booster()
        return model

    def _head(self, ptx: bool) -> Booster:
        """Return a head; the model cannot be used any more if its trees cannot be read."""
        try:
            return self._heads[ptx].booster()
        except (FileError, ModelError) as error:
            self._trouble = str(error)
            raise
