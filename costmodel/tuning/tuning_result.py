"""The result of a tuning: what was ranked, measured and chosen, why, and at what cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from math import isfinite, nan
from typing import Any, cast, get_args, get_type_hints

from costmodel.data.measurement import Measurement, Status
from costmodel.errors import InvalidInput, UnsupportedDtype
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.validation import require_count, take

PREDICTED = "predicted"
"""The ``source`` of a result that rests on no timing."""

PINNED = "pinned"
"""The ``source`` of a result that the caller has chosen."""


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


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring m of a bucket, and what computes them.

    Attributes:
        last: the last m; the segment begins after the one before.
        config: None is torch.
        latency_us: at the last m that was timed; None where the choice is predicted.
    """

    last: int
    config: GemmConfig | None
    latency_us: float | None = None


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The plan of a bucket: segments in ascending order, which together are the bucket.

    Attributes:
        segments: no two neighbours are alike.
        attempted: its m were to be timed, whether or not that worked. It is not on disk: another
            process may try again.
    """

    segments: tuple[Segment, ...]
    attempted: bool = field(default=False, compare=False)

    def at(self, m: int) -> Segment | None:
        """The segment of an m; None past the bucket."""
        return next((segment for segment in self.segments if m <= segment.last), None)


NO_PLAN = BucketPlan((), attempted=True)
"""The plan of a bucket whose winner serves all its m."""


@dataclass(frozen=True)
class TuningResult:
    """The choice of how to compute a workload, and what led to it.

    Attributes:
        workload, target: what was tuned, and where for.
        model, model_hash: which model ranked.
        caveat: why that is not the first choice, or less exact than it could be; else empty.
        mode, k: as asked for.
        ranked: configurations with their predicted latency in us (None where the model knows
            only an order), the most promising first.
        measured: outcomes of what was compiled and timed, in the order of the trial; of the
            finalists the one of their last comparison.
        torch: what ``torch.matmul`` took; None where it was no candidate.
        config: what was chosen; None is torch.
        why: one sentence.
        source: where timings come from: ``device (NAME)``, ``replay of NAME``; else
            :data:`PREDICTED` or :data:`PINNED`.
        reliable: chosen as it would be again: false after a budget ran out or where candidates or
            torch could not be timed, and such a result is not kept on disk.
        costs: what each stage took.
        answered_by: which head of a learned model ranked, in a line; empty of other models.
        expected_kept: the share of the best speed, from 0 to 1, that the ranking promised to keep
            by what was looked at; None where the model cannot tell.
        out_of_coverage: which property of the workload is new to the model; else empty.
        plan: what computes the other m of its bucket; None until one of them is asked for, which
            the choice serves as well.
    """

    workload: Workload
    target: Target
    model: str
    model_hash: str
    caveat: str
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
    answered_by: str = ""
    expected_kept: float | None = None
    out_of_coverage: str = ""
    plan: BucketPlan | None = None

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

    def config_at(self, m: int) -> GemmConfig | None:
        """Return the configuration for an m of the bucket, always legal; None is torch."""
        segment = self.plan.at(m) if self.plan and m != self.workload.m else None
        return segment.config if segment else self.config

    def at(self, m: int) -> TuningResult:
        """The result for another m of the bucket, which something else may compute."""
        segment = self.plan.at(m) if self.plan and m != self.workload.m else None
        if segment is None or segment.config == self.config:
            return self
        how = "expected to be faster" if segment.latency_us is None else "timed as better around it"
        why = f"for m={m} {how} than {self.chosen}, which is for {self.workload}"
        return replace(self, config=segment.config, why=why, plan=None)

    @property
    def best_triton(self) -> tuple[GemmConfig, Measurement] | None:
        """The fastest configuration that works, torch or not."""
        ok = [pair for pair in self.measured if pair[1].ok]
        return min(ok, key=lambda pair: pair[1].latency_us, default=None)

    @property
    def latency_us(self) -> float:
        """Latency of what was chosen; NaN if it was not timed."""
        if self.config is None:
            return self.torch.latency_us if self.torch else nan
        return dict(self.measured).get(self.config, Measurement("ok")).latency_us

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a number that JSON lacks (NaN, infinity) is null."""
        return {
            "workload": self.workload.to_dict(),
            "target": self.target.to_dict(),
            "model": {"name": self.model, "hash": self.model_hash},
            "reservation": self.caveat,
            "head": self.answered_by,
            "mode": self.mode,
            "k": self.k,
            "expected_kept": self.expected_kept,
            "sure": self.sure,
            "doubt": self.out_of_coverage,
            "ranked": [
                {"config": c.to_dict(), "predicted_us": _plain(us)} for c, us in self.ranked
            ],
            "measured": [{"config": c.to_dict(), **_measurement(m)} for c, m in self.measured],
            "torch": _measurement(self.torch) if self.torch else None,
            "chosen": self.config.to_dict() if self.config else "torch",
            "why": self.why,
            "source": self.source,
            "reliable": self.reliable,
            "parts": [
                {
                    "last": segment.last,
                    "config": segment.config.to_dict() if segment.config else "torch",
                    "latency_us": _plain(segment.latency_us),
                }
                for segment in (self.plan.segments if self.plan else ())
            ],
            "costs": asdict(self.costs) | {"total_s": self.costs.total_s},
        }

    @classmethod
    def unranked(
        cls, workload: Workload, target: Target, mode: str, config: GemmConfig | None, why: str,
        source: str = PREDICTED,
    ) -> TuningResult:  # fmt: skip
        """A choice that no model was asked for; it is not to be kept on disk."""
        return cls(
            workload, target, model="", model_hash="", caveat="", mode=mode, k=1, ranked=(),
            measured=(), torch=None, config=config, why=why, source=source, reliable=False,
            costs=Costs(),
        )  # fmt: skip

    @classmethod
    def from_dict(cls, data: Any) -> TuningResult:
        """The inverse of :meth:`to_dict`.

        Raises:
            InvalidInput: with what is wrong; nothing but numbers, texts and names is accepted.
        """
        try:
            return _read(data)
        except (InvalidInput, UnsupportedDtype) as error:
            raise InvalidInput(f"not a tuning result: {error}") from None


def _read(data: Any) -> TuningResult:
    model, costs = take(data, "model", dict), take(data, "costs", dict)
    texts = {name: take(data, name, str) for name in ("mode", "why", "source")}
    chosen, torch = data.get("chosen"), data.get("torch")
    return TuningResult(
        workload=Workload.from_dict(take(data, "workload", dict)),
        target=Target.from_dict(take(data, "target", dict)),
        model=take(model, "name", str),
        model_hash=take(model, "hash", str),
        k=require_count("k", take(data, "k", int)),
        ranked=tuple((_config(row), _number(row, "predicted_us")) for row in _rows(data, "ranked")),
        measured=tuple((_config(row), _from_measurement(row)) for row in _rows(data, "measured")),
        torch=None if torch is None else _from_measurement(torch),
        config=None if chosen == "torch" else GemmConfig.from_dict(chosen),
        reliable=take(data, "reliable", bool),
        costs=Costs(**{name: take(costs, name, kind) for name, kind in _COSTS.items()}),
        # Not in results of earlier releases.
        answered_by=take(data, "head", str) if "head" in data else "",
        expected_kept=_number(data, "expected_kept") if "expected_kept" in data else None,
        out_of_coverage=take(data, "doubt", str) if "doubt" in data else "",
        plan=_plan(_rows(data, "parts")) if "parts" in data else None,
        caveat=take(data, "reservation", str),
        **texts,
    )


_COSTS = get_type_hints(Costs)


def _rows(data: dict[str, Any], name: str) -> list[Any]:
    return take(data, name, list)


def _config(row: Any) -> GemmConfig:
    return GemmConfig.from_dict(take(row, "config", dict))


def _plan(rows: list[Any]) -> BucketPlan | None:
    segments = tuple(map(_segment, rows))
    timed = any(segment.latency_us is not None for segment in segments)
    return BucketPlan(segments, attempted=timed) if segments else None


def _segment(row: Any) -> Segment:
    last = require_count("last", take(row, "last", int))
    config = None if row.get("config") == "torch" else _config(row)
    return Segment(last, config, _number(row, "latency_us") if "latency_us" in row else None)


def _measurement(m: Measurement) -> dict[str, Any]:
    return {name: _plain(value) for name, value in asdict(m).items()}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def _from_measurement(row: Any) -> Measurement:
    status = take(row, "status", str)
    if status not in get_args(Status):
        raise InvalidInput(f"status={status!r:.80}: expected one of {get_args(Status)}")
    times = {name: _number(row, name) for name in ("latency_us", "p10_us", "p90_us")}
    if status == "ok" and not times["latency_us"]:
        raise InvalidInput("a measurement that is ok: expected a latency_us over 0")
    return Measurement(
        cast(Status, status),
        **{name: nan if us is None else us for name, us in times.items()},
        repeats=take(row, "repeats", int),
        clock_mhz=take(row, "clock_mhz", int),
        error=take(row, "error", str),
    )


def _number(row: Any, name: str) -> float | None:
    """A number of at least 0, such as a time; None where the row says that there is none."""
    if isinstance(row, dict) and row.get(name, 0) is None:
        return None
    value = take(row, name, float)
    if value < 0:
        raise InvalidInput(f"{name}={value!r}: expected a number of at least 0, or null")
    return value
