"""Boosted trees: trained on a table of features, and read from files that are checked.

Squared error on log(latency / estimate) makes a good prediction of each row. But a choice rests on
the few rows that are nearly the fastest, and these differ by less than the remaining error. So
their order is learned as well, as in RankNet (Burges et al., 2005): for rows ``i`` and ``j`` of one
workload, ``i`` being the faster one, the loss is
``log(1 + exp(scale * (predicted_i - predicted_j)))``. One ensemble learns both, so that its
prediction stays a latency.

Nothing here knows what is predicted: rows are numbers, and columns are names.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from costmodel.arrays import Floats32, Indices
from costmodel.errors import CorruptFile, MisreadModel, SchemaMismatch
from costmodel.models.forest import Forest

_CANARY_OFF = 1e-3  # of a logarithm; by their rounding, releases differ by a hundredth of it
# Fastest rows of a workload: each of the first number makes a pair with each of the second.
_FASTEST, _RIVALS = 16, 96
_REACH = 1.6  # a rival takes at most so many times as long as the best
_FALL = 10.0  # weight of a pair: exp(-_FALL * log latency of the faster row over the best),
_FULL = 0.2  # times the log latency of one row over the other, which counts fully from here on

Names = tuple[str, ...]
_Numbers = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class XgbParams:
    """Hyper-parameters, the same for both heads.

    To compare others, train with each and look at ``expected_kept`` of the models.

    Attributes:
        rounds: number of trees; fixed, so that the data that a model is judged by does not decide
            when to stop.
        nearness: how fast a row's weight falls with its distance from the best of its workload:
            ``weight = floor + (1 - floor) * exp(-nearness * (latency / best - 1))``.
        floor: the least weight.
        pairs: weight of the order of rows near the best, beside that of the squared error
            (:class:`NearBest`); 0 turns it off.
        pair_scale: factor of log latency in the loss of that order: larger is sharper.
        seed: of row and column sampling.
    """

    rounds: int = 400
    max_depth: int = 8
    learning_rate: float = 0.05
    min_child_weight: float = 2.0
    subsample: float = 0.8
    colsample_bytree: float = 0.4
    reg_lambda: float = 1.0
    max_bin: int = 64
    nearness: float = 5.0
    floor: float = 0.03
    pairs: float = 0.05
    pair_scale: float = 20.0
    seed: int = 0

    def booster(self, nthread: int) -> dict[str, Any]:
        """Return the options of ``xgboost.train``."""
        ours = ("rounds", "nearness", "floor", "pairs", "pair_scale")
        theirs = {k: v for k, v in asdict(self).items() if k not in ours}
        return {
            **theirs, "objective": "reg:squarederror", "tree_method": "hist", "nthread": nthread,
        }  # fmt: skip


DEFAULTS = XgbParams()


@dataclass(frozen=True)
class LabelledRows:
    """Rows to learn from.

    Attributes:
        matrix: features, float32 [n, f].
        label: log(latency / start), float [n].
        start: log of the value that a prediction starts from: the label is added to it, float [n].
        weight: of the squared error, float [n].
        workload: the number of each row's workload, int [n].
    """

    matrix: Floats32
    label: _Numbers
    start: _Numbers
    weight: _Numbers
    workload: NDArray[np.integer[Any]]


class NearBest:
    """The pairs of rows near the best of each workload, and the loss of a wrong order of them.

    Attributes:
        rows: for each workload the rows of its pairs, fastest first, int [w, r]; the rest is filled
            with row 0, whose weight is 0.
        weight: float32 [w, f, r], for each pair of one of the ``f`` fastest and a slower row. The
            weights of all pairs of one of the fastest add up to 1 on average.
    """

    def __init__(self, log_latency: _Numbers, workload: NDArray[Any]):
        order = np.lexsort((log_latency, workload))
        starts = np.flatnonzero(np.diff(workload[order], prepend=-1))
        near = [_near(log_latency, rows) for rows in np.split(order, starts[1:]) if len(rows) > 1]
        self.rows = np.zeros((len(near), _RIVALS), dtype=np.intp)
        slower = np.full((len(near), _RIVALS), np.nan)  # than the best, in the logarithm
        for w, rows in enumerate(near):
            self.rows[w, : len(rows)] = rows
            slower[w, : len(rows)] = log_latency[rows] - log_latency[rows[0]]
        first, other = slower[:, :_FASTEST, None], slower[:, None, :]
        weight = np.exp(-_FALL * first) * np.clip((other - first) / _FULL, 0, 1)
        self.weight = np.nan_to_num(weight).astype(np.float32)
        of_row = self.weight.sum(axis=2)
        if of_row.any():
            self.weight /= of_row[of_row > 0].mean()

    def gradients(self, predicted: Floats32, scale: float) -> tuple[Floats32, Floats32]:
        """Return the first and second derivative of the loss by each row's prediction, float32 [n].

        Args:
            predicted: log latency, up to a constant of each workload, float32 [n].
        """
        gradient, curvature = np.zeros_like(predicted), np.zeros_like(predicted)
        cost = scale * predicted[self.rows]
        with np.errstate(over="ignore"):  # to infinity: then the order is right beyond doubt
            wrong = 1 / (1 + np.exp(cost[:, None, :] - cost[:, :_FASTEST, None]))
        push = self.weight * wrong
        bend = push * (1 - wrong)
        for values, result, sign in ((scale * push, gradient, -1), (scale**2 * bend, curvature, 1)):
            of_row = sign * values.sum(axis=1)
            of_row[:, :_FASTEST] += values.sum(axis=2)
            np.add.at(result, self.rows.ravel(), of_row.ravel())
        return gradient, curvature


def _near(log_latency: _Numbers, rows: Indices) -> Indices:
    """Return the rows near the best; ``rows`` are a workload's, with the fastest first."""
    rivals = rows[:_RIVALS]
    count = np.searchsorted(log_latency[rivals], log_latency[rows[0]] + np.log(_REACH))
    return rivals[:count]


def train_booster(
    rows: LabelledRows, params: XgbParams, *, nthread: int, names: Sequence[str] | None = None
) -> Any:
    """Train trees that predict the label of rows; deterministic, whatever the number of threads."""
    import xgboost

    data = xgboost.QuantileDMatrix(
        rows.matrix,
        label=rows.label,
        weight=rows.weight,
        feature_names=names and list(names),
        nthread=nthread,
        max_bin=params.max_bin,
    )
    options, objective = params.booster(nthread), None
    if params.pairs:
        options |= {"base_score": 0.0}
        objective = _objective(rows, params)
    return xgboost.train(options, data, num_boost_round=params.rounds, obj=objective)


def _objective(
    rows: LabelledRows, params: XgbParams
) -> Callable[[Floats32, Any], tuple[Floats32, Floats32]]:
    """Return the function of the gradients of squared error and of :class:`NearBest`, weighted."""
    label, start, weight = (
        column.astype(np.float32) for column in (rows.label, rows.start, rows.weight)
    )
    near = NearBest(rows.label + rows.start, rows.workload)

    def gradients(predicted: Floats32, _: Any) -> tuple[Floats32, Floats32]:
        first, second = near.gradients(predicted + start, params.pair_scale)
        return (weight * (predicted - label) + params.pairs * first, weight + params.pairs * second)

    return gradients


@dataclass(eq=False)
class Trees:
    """Trees in XGBoost's format UBJ, parsed at their first use.

    Importing XGBoost and parsing takes a second. A process that only looks up a winner saves it.

    Attributes:
        columns: the names of the columns that they expect.
        read: returns the trees, or raises CorruptFile or FileError.
        file: where they come from, for messages.
        expected: the :meth:`canary` of the trees when they were saved.
    """

    columns: Names
    read: Callable[[], bytes]
    file: Path | None = None
    expected: float | None = None

    @classmethod
    def of(cls, booster: Any, columns: Names) -> Self:
        """Take trees that were just trained."""
        raw = bytes(booster.save_raw(raw_format="ubj"))
        return cls(columns, lambda: raw)

    @cached_property
    def raw(self) -> bytes:
        """The trees as UBJ.

        Raises:
            CorruptFile, FileError: the file is damaged, not that of the card, or cannot be read.
        """
        return self.read()

    @cached_property
    def booster(self) -> Any:
        """The trees, which predict with one thread: more are slower on a few rows.

        Raises:
            CorruptFile, SchemaMismatch: other content, or other columns.
            MisreadModel: the installed XGBoost predicts something else than it should.
        """
        import xgboost

        booster = xgboost.Booster()
        try:
            booster.load_model(bytearray(self.raw))
        except xgboost.core.XGBoostError as error:
            reason = str(error).splitlines()[0][:200]
            raise CorruptFile(f"{self.file}: not an XGBoost model in UBJ ({reason})") from None
        booster.set_param({"nthread": 1})
        require_columns(self.file, booster.feature_names or (), self.columns)
        found = _canary(booster)
        if self.expected is not None and not abs(found - self.expected) <= _CANARY_OFF:
            raise MisreadModel(
                f"{self.file}: XGBoost {xgboost.__version__} predicts {found:.4f} where "
                f"{self.expected:.4f} is known to be right: upgrade it (pip install -U "
                f"xgboost-cpu), or train the model again"
            )
        return booster

    @cached_property
    def forest(self) -> Forest:
        """The trees as they predict without XGBoost; what wrote them, and when, is not checked."""
        return Forest.of(self.raw)

    def canary(self) -> float:
        """Predict one fixed row: a release of XGBoost that reads the trees wrongly differs.

        Some releases have read the same file wrongly without a warning, for example without the
        mean that all trees start from.
        """
        return _canary(self.booster)


def _canary(booster: Any) -> float:
    row = np.arange(booster.num_features(), dtype=np.float32) % 8
    row[::5] = np.nan
    return float(booster.inplace_predict(row[np.newaxis])[0])


def require_columns(file: Path | None, found: Sequence[str], expected: Sequence[str]) -> None:
    """Refuse other columns, or another order; the message shows the first difference.

    Raises:
        SchemaMismatch: they differ.
    """
    for place, (theirs, ours) in enumerate(zip_longest(found, expected, fillvalue="nothing")):
        if theirs != ours:
            raise SchemaMismatch(
                f"{file}: {len(found)} feature columns, this release computes {len(expected)}; the "
                f"first difference is column {place} ({theirs}, expected {ours}); train the model "
                f"again"
            )
