"""How sure a ranking is: the speed that its first k are expected to keep, and how many to time.

One signal is worth having: how far the two heads disagree on the first :data:`NEAR` of a ranking,
over how far apart the model sees these. Where a model errs by more than they differ, the best is
anywhere among them. The loss is a power law of this ratio and of k::

    1 - kept = exp(intercept) * ratio ** exponent * k ** slope

Its three constants are fitted to workloads that the model was not trained on, see
:mod:`costmodel.models.calibrate`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import exp, isfinite, log, nan
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InvalidInput
from costmodel.evaluation.coverage import Coverage
from costmodel.support.untrusted import require_count, take

__all__ = [
    "AUTO", "DEFAULT_K", "LIMIT", "NEAR", "PRICE", "Confidence", "LossLaw", "Signals", "TopK",
    "Uncertainty", "in_words", "require_top",
]  # fmt: skip

TopK = int | Literal["auto"]
AUTO = "auto"
NEAR = 30
"""Of so many of the first, signals are taken."""
LIMIT = 32
"""``auto`` times no more."""
DEFAULT_K = 8
"""Where a model cannot tell how sure it is."""
PRICE = 3e-4
"""So much of the speed a further timing must promise. In cross-validation a price kept more than a
target for all workloads did, at as many timings in all."""

_LEAST_UNSURE = 16
# Two heads may agree by chance, and costs may be equal: neither is a certainty.
_DISAGREEMENT_FLOOR, _SPREAD_FLOOR = 0.003, 0.01


@dataclass(frozen=True, slots=True)
class Signals:
    """What a ranking itself tells of its errors, in units of the log of a cost.

    Attributes:
        disagreement: standard deviation, over the first :data:`NEAR`, of the log of the ratio of
            the two heads; NaN where only one has answered.
        spread: log of the ratio of the last to the first of these.
    """

    disagreement: float
    spread: float

    @classmethod
    def of(cls, cost: NDArray[np.float64], other: NDArray[np.float64] | None) -> Signals:
        """From costs in ascending order, and what the other head says of the first of them.

        Args:
            cost: float64 [n], n >= 1, over 0; more than ``NEAR + 1`` are not looked at.
            other: float64 [min(n, NEAR)]; None where there is no other.
        """
        last = min(NEAR, len(cost) - 1)
        apart = nan if other is None else float(np.std(np.log(other / cost[: len(other)])))
        return cls(apart, float(np.log(cost[last] / cost[0])))

    @property
    def log_ratio(self) -> float:
        """Log of disagreement over spread; NaN where only one head has answered."""
        return log(self.disagreement + _DISAGREEMENT_FLOOR) - log(self.spread + _SPREAD_FLOOR)


@dataclass(frozen=True, slots=True)
class LossLaw:
    """The expected loss of one head, as in the module's docstring.

    ``exponent`` is 0 where the other head is not asked.
    """

    intercept: float
    exponent: float
    slope: float

    def loss(self, signals: Signals) -> float:
        """Of the first choice alone, from 0 to 1."""
        power = self.exponent * signals.log_ratio if self.exponent else 0.0
        return exp(min(self.intercept + power, 0.0))


@dataclass(frozen=True, slots=True)
class Confidence:
    """How sure one ranking is.

    Attributes:
        loss: of the first choice alone, expected: 1 - speed kept.
        slope: how it falls with the number that is timed, ``loss * k ** slope``.
        doubt: why the ranking should not be trusted, in words; empty if it may be.
    """

    loss: float
    slope: float
    doubt: str = ""

    @property
    def sure(self) -> bool:
        return not self.doubt

    def kept_at(self, k: int) -> float:
        """The speed that the best of the first k is expected to keep, from 0 to 1."""
        return 1.0 - float(self.loss * k**self.slope)

    @property
    def k(self) -> int:
        """How many to time: until one more promises less than it costs; more where unsure."""
        k = self.worth(PRICE)
        return k if self.sure else min(LIMIT, max(_LEAST_UNSURE, 2 * k))

    def worth(self, price: float) -> int:
        """How many are worth timing, up to :data:`LIMIT`, each for such a share of the speed."""
        ks = np.arange(1, LIMIT + 1)
        return int(ks[np.argmin(self.loss * ks**self.slope + price * ks)])


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """What a model knows of its own errors.

    Attributes:
        ptx, config: the law of the PTX-aware head, and of the configuration-only one; None where
            it never answered.
        most_disagreement: of the workloads that the law was fitted to.
        coverage: what the model has learned from.
    """

    ptx: LossLaw | None
    config: LossLaw | None
    most_disagreement: float
    coverage: Coverage

    def confidence(self, signals: Signals, doubt: str) -> Confidence | None:
        """Of a ranking with these signals; None where nothing is known of this head.

        Args:
            doubt: what :attr:`coverage` says of the workload.
        """
        law = self.config if np.isnan(signals.disagreement) else self.ptx
        if law is None:
            return None
        if not doubt and signals.disagreement > self.most_disagreement:
            doubt = (
                f"its two heads disagree by {100 * signals.disagreement:.1f} % on the first {NEAR},"
                f" by no more than {100 * self.most_disagreement:.1f} % on what it was tested with"
            )
        return Confidence(law.loss(signals), law.slope, doubt)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "ptx": asdict(self.ptx) if self.ptx else None,
            "config": asdict(self.config) if self.config else None,
            "most_disagreement": self.most_disagreement,
            "coverage": self.coverage.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Uncertainty:
        """The inverse of :meth:`to_dict`.

        Raises:
            InvalidInput: with what is wrong.
        """
        most = take(data, "most_disagreement", float)
        coverage = Coverage.from_dict(take(data, "coverage", dict))
        return cls(_law(data, "ptx"), _law(data, "config"), most, coverage)


def _law(data: Any, name: str) -> LossLaw | None:
    if data.get(name, 0) is None:
        return None
    found = take(data, name, dict)
    law = LossLaw(**{part: take(found, part, float) for part in LossLaw.__slots__})
    if not all(map(isfinite, asdict(law).values())) or law.slope > 0:
        raise InvalidInput(f"{name}={found!r:.80}: expected finite numbers, and no slope over 0")
    return law


def require_top(name: str, value: Any) -> TopK:
    """How many candidates to time: an integer of at least 1, or ``"auto"``.

    Raises:
        InvalidInput: it is neither.
    """
    if isinstance(value, str):
        if value == AUTO:
            return "auto"
        raise InvalidInput(f"{name}={value!r:.80}: expected an int of at least 1, or 'auto'")
    return require_count(name, value)


def in_words(expected_kept: float | None, doubt: str, k: int) -> str:
    """A line for people; empty where nothing is known."""
    if doubt:
        return f"unsure: {doubt}"
    if expected_kept is None:
        return ""
    return f"the best of the first {k} is expected to keep {100 * expected_kept:.1f} % of the speed"
