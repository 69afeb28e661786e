"""What is expected of another m than the one that was tuned, from its timings and the model.

A configuration that was timed is expected to take what it took, times what the model makes of the
other m; one that was not, what the model says, times how far the model was off where it could be
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import why_illegal
from costmodel.gemm.workload import Workload
from costmodel.models.xgb import XgbCostModel
from costmodel.tuning.ranking import rank
from costmodel.tuning.tuning_result import TuningResult

__all__ = ["Expectation", "Expected", "Known"]

_LOOKED_AT = 16


class Known(NamedTuple):
    """A configuration that was tried, what it is expected to take, and what the model says."""

    config: GemmConfig
    expected_us: float
    predicted_us: float


@dataclass(frozen=True, slots=True)
class Expected:
    """What one m may take, in us.

    Attributes:
        known: of what was tried for the m that was tuned and works, the fastest first.
        new: the first choice of what was not tried, and is known to compile; None: there is none.
        torch_us: of ``torch.matmul``; None where it was not timed.
    """

    known: tuple[Known, ...]
    new: tuple[GemmConfig, float] | None
    torch_us: float | None

    def only(self, works: Callable[[GemmConfig], bool]) -> Expected:
        """Without the configurations that do not work."""
        known = tuple(each for each in self.known if works(each.config))
        new = self.new if self.new is not None and works(self.new[0]) else None
        return replace(self, known=known, new=new)


@dataclass(frozen=True)
class Expectation:
    """What a tuning lets expect of other m.

    Attributes:
        result: of the tuning.
        model: that ranked, or one that knows as much.
    """

    result: TuningResult
    model: XgbCostModel

    def at(self, m: int) -> Expected:
        """What is expected of the same product with another m."""
        workload = replace(self.result.workload, m=m)
        there = self._predicted(workload, [*self._factors])
        known = [Known(config, us * self._factors[config], us) for config, us in there.items()]
        return Expected(
            known=tuple(sorted(known, key=lambda each: each.expected_us)),
            new=self._new(workload),
            torch_us=self._torch_us(workload),
        )

    @cached_property
    def _factors(self) -> dict[GemmConfig, float]:
        """Of each configuration with a binary, how much longer it took than was predicted.

        Where nothing was timed: 1 of the one that was chosen.
        """
        result = self.result
        timed = {c: m.latency_us for c, m in result.measured if m.ok} if result.timed else {}
        asked = list(timed) or [c for c in (result.config,) if c is not None]
        predicted = self._predicted(result.workload, asked)
        return {c: timed.get(c, us) / us for c, us in predicted.items()}

    def _predicted(
        self, workload: Workload, configs: Sequence[GemmConfig]
    ) -> dict[GemmConfig, float]:
        """What these are predicted to take; without those that cannot run, or repeat one."""
        target = self.result.target
        legal = [c for c in configs if not why_illegal(c, workload, target.device)]
        if not legal:
            return {}
        try:
            ranking = rank(workload, target, self.model, configs=legal)
        except InvalidInput:  # a table has it that none of them fits
            return {}
        return dict(zip(ranking.configs, ranking.cost.tolist(), strict=True))

    def _new(self, workload: Workload) -> tuple[GemmConfig, float] | None:
        """Only what is known to compile: a program may compile it without a child that may die."""
        tried = {config for config, _ in self.result.measured}
        factor = median(self._factors.values()) if self._factors else 1.0
        ranking = rank(workload, self.result.target, self.model, _LOOKED_AT)
        columns = zip(ranking.configs, ranking.candidates.has_artifact, ranking.cost, strict=True)
        for config, compiles, us in columns:
            if compiles and config not in tried:
                return config, float(us) * factor
        return None

    def _torch_us(self, workload: Workload) -> float | None:
        result = self.result
        if result.torch is None or not result.torch.ok:
            return None
        products = (workload, result.workload)
        there, here = (self.model.predict_torch(w, result.target) for w in products)
        if not (here > 0 and there / here > 0):  # of a model that has not learned it
            device = result.target.device
            there, here = (device.roofline_us(w.flops(), w.bytes(), w.code.kind) for w in products)
        return result.torch.latency_us * there / here
