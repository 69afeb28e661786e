"""The result of a tuning: what was ranked, measured and chosen, why, and at what cost."""

from dataclasses import asdict, dataclass, field, replace
from math import isfinite, nan
from typing import Any, Self

from costmodel.data.measurement import Measurement
from costmodel.errors import InvalidInput, UnsupportedDtype
from costmodel.files import Named, decode
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target

OrTorch = GemmConfig | None
"""A configuration, or torch, which is None."""

PREDICTED = "predicted"
"""The ``source`` of a result that rests on no timing."""

PINNED = "pinned"
"""The ``source`` of a result that the caller has chosen."""


@dataclass(frozen=True)
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
class Segment:
    """Neighbouring m of a bucket, and what computes them.

    Attributes:
        last: the last m; the segment begins after the one before.
        config: None is torch.
        latency_us: at the last m that was timed; None where the choice is predicted.
    """

    last: int
    config: OrTorch
    latency_us: float | None = None

    def __post_init__(self) -> None:
        if self.last < 1 or (self.latency_us or 0.0) < 0:
            raise InvalidInput(f"{self}: expected an m over 0 and a time of at least 0")


@dataclass(frozen=True)
class BucketPlan:
    """The plan of a bucket: segments in ascending order, which together are the bucket.

    Attributes:
        segments: no two neighbours are alike.
        attempted: timing its m was tried, whether or not it worked. On disk only success counts:
            another process may try again.
    """

    segments: tuple[Segment, ...]
    attempted: bool = field(default=False, compare=False)

    def at(self, m: int) -> Segment | None:
        """The segment of an m; None past the bucket."""
        return next((segment for segment in self.segments if m <= segment.last), None)


NO_PLAN = BucketPlan((), attempted=True)
"""The plan of a bucket whose winner serves all its m."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A product and the model that answered for it; a ranking and a result say both.

    Attributes:
        workload, target: what was asked for, and where it would run.
        model, model_hash: which model answered.
        caveat: why it is not the first choice, or less exact than it could be; else empty.
        answered_by: which head of a learned model answered, in a line; empty for other models.
        out_of_coverage: which property of the workload is new to the model; else empty.
    """

    workload: Workload
    target: Target
    model: str
    model_hash: str
    caveat: str
    answered_by: str = ""
    out_of_coverage: str = ""

    def to_dict(self) -> Named:
        """JSON-ready."""
        return {
            "workload": self.workload.to_dict(),
            "target": self.target.to_dict(),
            "model": {"name": self.model, "hash": self.model_hash},
            "reservation": self.caveat,
            "head": self.answered_by,
            "doubt": self.out_of_coverage,
        }


@dataclass(frozen=True, kw_only=True)
class TuningResult(Answered):
    """The choice of how to compute a workload, and what led to it.

    Attributes:
        mode, k: as asked for.
        ranked: configurations with their predicted latency in us (None where the model knows
            only an order), the most promising first.
        measured: outcomes of what was compiled and timed, in the order of the trial; for finalists,
            that of their last comparison.
        torch: the measurement of ``torch.matmul``; None where it was no candidate.
        config: what was chosen; None is torch.
        why: one sentence.
        source: where timings come from: ``device (NAME)``, ``replay of NAME``; else
            :data:`PREDICTED` or :data:`PINNED`.
        reliable: it would be chosen again. False after a budget ran out, where timings scatter too
            much, or where candidates or torch could not be timed; such a result is not kept on
            disk.
        costs: what each stage took.
        expected_kept: the share of the best speed, from 0 to 1, that the best of those looked at
            was expected to keep; None where the model cannot tell.
        plan: what computes the other m of its bucket; None until a call has one of them.
        unsteady: its timings scatter too much to be sure; it is worth tuning again later.
    """

    mode: str
    k: int
    ranked: tuple[tuple[GemmConfig, float | None], ...]
    measured: tuple[tuple[GemmConfig, Measurement], ...]
    torch: Measurement | None
    config: OrTorch
    why: str
    source: str
    reliable: bool
    costs: Costs
    expected_kept: float | None = None
    plan: BucketPlan | None = None
    unsteady: bool = False

    @property
    def sure(self) -> bool | None:
        """True if the ranking may be trusted; None if the model cannot tell."""
        return None if self.expected_kept is None else not self.out_of_coverage

    @property
    def chosen(self) -> GemmConfig | str:
        """The configuration, or ``"torch"``."""
        return self.config or "torch"

    @property
    def timed(self) -> bool:
        """True if the choice rests on timings, and not on a prediction or a pin."""
        return self.source not in (PREDICTED, PINNED)

    def config_at(self, m: int) -> OrTorch:
        """Return the configuration for an m of the bucket, always legal; None is torch."""
        segment = self._segment(m)
        return segment.config if segment else self.config

    def at(self, m: int) -> Self:
        """The result for another m of the bucket, where another configuration may be chosen."""
        segment = self._segment(m)
        if segment is None or segment.config == self.config:
            return self
        how = "expected to be faster" if segment.latency_us is None else "timed as better around it"
        why = f"for m={m} {how} than {self.chosen}, which is for {self.workload}"
        return replace(self, config=segment.config, why=why, plan=None)

    def _segment(self, m: int) -> Segment | None:
        """The segment of another m than the one that was tuned; None without a plan of it."""
        return self.plan.at(m) if self.plan and m != self.workload.m else None

    @property
    def latency_us(self) -> float:
        """Latency of what was chosen; NaN if it was not timed."""
        if self.config is None:
            return self.torch.latency_us if self.torch else nan
        found = dict(self.measured).get(self.config)
        return found.latency_us if found else nan

    def to_dict(self) -> Named:
        """JSON-ready; a number that JSON lacks (NaN, infinity) is null."""
        return super().to_dict() | {
            "mode": self.mode,
            "k": self.k,
            "expected_kept": self.expected_kept,
            "sure": self.sure,
            "ranked": [
                {"config": c.to_dict(), "predicted_us": _finite(us)} for c, us in self.ranked
            ],
            "measured": [{"config": c.to_dict(), **_measurement(m)} for c, m in self.measured],
            "torch": _measurement(self.torch) if self.torch else None,
            "chosen": _config_or_torch(self.config),
            "why": self.why,
            "source": self.source,
            "reliable": self.reliable,
            "parts": [
                asdict(segment) | {"config": _config_or_torch(segment.config)}
                for segment in (self.plan.segments if self.plan else ())
            ],
            "costs": asdict(self.costs) | {"total_s": self.costs.total_s},
        }

    @classmethod
    def unranked(
        cls, workload: Workload, target: Target, mode: str, config: OrTorch, why: str,
        source: str = PREDICTED,
    ) -> Self:  # fmt: skip
        """A choice that no model was asked for; it is not kept on disk."""
        return cls(
            workload=workload, target=target, model="", model_hash="", caveat="", mode=mode, k=1,
            ranked=(), measured=(), torch=None, config=config, why=why, source=source,
            reliable=False, costs=Costs(),
        )  # fmt: skip

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The inverse of :meth:`to_dict`.

        Raises:
            InvalidInput: the message says what is wrong; only numbers, texts and names are allowed.
        """
        try:
            return decode(_by_field(data), cls)
        except (InvalidInput, UnsupportedDtype) as error:
            raise InvalidInput(f"not a tuning result: {error}") from None


def _by_field(data: Any) -> Named:
    """Return JSON with the names and types of the fields, where the two differ."""
    try:
        parts = [
            each | {"config": _config(each["config"])} for each in decode(data["parts"], list[Any])
        ]
        plan = {"segments": parts, "attempted": any(each.get("latency_us") for each in parts)}
        return data | {
            "workload": Workload.from_dict(data["workload"]),
            "target": Target.from_dict(data["target"]),
            "model": data["model"]["name"],
            "model_hash": data["model"]["hash"],
            "caveat": data["reservation"],
            "answered_by": data["head"],
            "out_of_coverage": data["doubt"],
            "ranked": [
                (GemmConfig.from_dict(row["config"]), row["predicted_us"]) for row in data["ranked"]
            ],
            "measured": [
                (GemmConfig.from_dict(row["config"]), _known(row)) for row in data["measured"]
            ],
            "torch": data["torch"] and _known(data["torch"]),
            "config": _config(data["chosen"]),
            "plan": plan if parts else None,
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidInput(f"a part that is missing or of another kind: {error!r:.80}") from None


def _config(value: Any) -> OrTorch:
    return None if value == "torch" else GemmConfig.from_dict(value)


def _config_or_torch(config: OrTorch) -> Named | str:
    return config.to_dict() if config else "torch"


def _measurement(measurement: Measurement) -> Named:
    return {name: _finite(value) for name, value in asdict(measurement).items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def _known(row: Named) -> Named:
    """The figures of a measurement that are known; the others are NaN in :class:`Measurement`."""
    return {name: value for name, value in row.items() if value is not None}
