"""What a tuning gave: the ranked list, what was measured, what was chosen, why, at what cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import isnan, nan
from typing import Any, get_args

from costmodel.config import GemmConfig
from costmodel.errors import InvalidInput
from costmodel.measurement import Measurement, Status
from costmodel.target import Target
from costmodel.workload import Workload

__all__ = ["PREDICTED", "Costs", "TuningResult"]

PREDICTED = "predicted"
"""The ``source`` of a result that rests on no timing."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Wall seconds of each stage, and how many configurations were compiled and timed."""

    rank_s: float = 0.0
    compile_s: float = 0.0
    measure_s: float = 0.0
    compiled: int = 0
    timed: int = 0

    @property
    def total_s(self) -> float:
        return self.rank_s + self.compile_s + self.measure_s


@dataclass(frozen=True)
class TuningResult:
    """How a workload is computed from now on.

    Attributes:
        workload, target: what was tuned, and where for.
        model, model_hash: which model ranked.
        reservation: why that is not the first choice, or less exact than it could be; else empty.
        mode, k: as asked for.
        ranked: configurations with their predicted latency in us (None where the model knows
            only an order), the most promising first.
        measured: outcomes of what was compiled and timed, in the order of the trial; of the
            finalists the one of their last comparison.
        torch: what ``torch.matmul`` took; None where it was no candidate.
        config: what was chosen; None is torch.
        why: one sentence.
        source: where timings come from: ``device (NAME)``, ``replay of NAME``, or
            :data:`PREDICTED`.
        reliable: chosen as it would be again: false after a budget ran out or where candidates or
            torch could not be timed, and such a result is not kept on disk.
        costs: what each stage took.
    """

    workload: Workload
    target: Target
    model: str
    model_hash: str
    reservation: str
    mode: str
    k: int
    ranked: tuple[tuple[GemmConfig, float | None], ...]
    measured: tuple[tuple[GemmConfig, Measurement], ...]
    torch: Measurement | None
    config: GemmConfig | None
    why: str
    source: str
    reliable: bool
    costs: Costs

    @property
    def chosen(self) -> GemmConfig | str:
        """The configuration, or ``"torch"``."""
        return self.config or "torch"

    @property
    def timed(self) -> bool:
        """Whether the choice rests on timings, and not on a prediction."""
        return self.source != PREDICTED

    @property
    def best_triton(self) -> tuple[GemmConfig, Measurement] | None:
        """The fastest configuration that works, torch or not."""
        ok = [pair for pair in self.measured if pair[1].ok]
        return min(ok, key=lambda pair: pair[1].latency_us, default=None)

    @property
    def latency_us(self) -> float:
        """Of what was chosen, as timed; NaN where it was not."""
        if self.config is None:
            return self.torch.latency_us if self.torch else nan
        return dict(self.measured).get(self.config, Measurement("ok")).latency_us

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "workload": self.workload.to_dict(),
            "target": self.target.to_dict(),
            "model": {"name": self.model, "hash": self.model_hash},
            "reservation": self.reservation,
            "mode": self.mode,
            "k": self.k,
            "ranked": [{"config": c.to_dict(), "predicted_us": us} for c, us in self.ranked],
            "measured": [{"config": c.to_dict(), **_measurement(m)} for c, m in self.measured],
            "torch": _measurement(self.torch) if self.torch else None,
            "chosen": self.config.to_dict() if self.config else "torch",
            "why": self.why,
            "source": self.source,
            "reliable": self.reliable,
            "costs": asdict(self.costs) | {"total_s": self.costs.total_s},
        }

    @classmethod
    def from_dict(cls, data: Any) -> TuningResult:
        """The inverse of :meth:`to_dict`.

        Raises:
            InvalidInput: with what is wrong; nothing but numbers, texts and names is accepted.
        """
        try:
            chosen = data["chosen"]
            return cls(
                workload=Workload.from_dict(data["workload"]),
                target=Target.from_dict(data["target"]),
                model=str(data["model"]["name"]),
                model_hash=str(data["model"]["hash"]),
                reservation=str(data["reservation"]),
                mode=str(data["mode"]),
                k=int(data["k"]),
                ranked=tuple(
                    (GemmConfig.from_dict(row["config"]), _optional(row["predicted_us"]))
                    for row in data["ranked"]
                ),
                measured=tuple(
                    (GemmConfig.from_dict(row["config"]), _from_measurement(row))
                    for row in data["measured"]
                ),
                torch=None if data["torch"] is None else _from_measurement(data["torch"]),
                config=None if chosen == "torch" else GemmConfig.from_dict(chosen),
                why=str(data["why"]),
                source=str(data["source"]),
                reliable=bool(data["reliable"]),
                costs=Costs(**{f.name: data["costs"][f.name] for f in fields(Costs)}),
            )
        except InvalidInput:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise InvalidInput(f"not a tuning result: {type(error).__name__}: {error}") from None


def _measurement(m: Measurement) -> dict[str, Any]:
    """A NaN is no JSON: what was not timed is null."""
    row = asdict(m)
    return {k: None if isinstance(v, float) and isnan(v) else v for k, v in row.items()}


def _from_measurement(row: dict[str, Any]) -> Measurement:
    if row["status"] not in get_args(Status):
        raise InvalidInput(f"status={row['status']!r}: expected one of {get_args(Status)}")
    names = ("latency_us", "p10_us", "p90_us")
    times = {n: nan if row[n] is None else float(row[n]) for n in names}
    return Measurement(
        row["status"],
        **times,
        repeats=int(row["repeats"]),
        clock_mhz=int(row["clock_mhz"]),
        error=str(row["error"]),
    )


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)
