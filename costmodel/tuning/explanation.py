"""Explains a ranking: what is known of each configuration, and what the model adds to it.

Nothing is compiled or timed. Figures of the launch are those of :mod:`costmodel.features.analytic`.
The model's part is exact: a start value times its factors, one for each concept, is the prediction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp

import numpy as np

from costmodel.arrays import Floats
from costmodel.data.candidates import ARTIFACT_COLUMNS, ModelLike
from costmodel.errors import InvalidInput
from costmodel.features.analytic import analytic_columns, occupancy
from costmodel.features.concepts import grouped
from costmodel.features.features import FEATURES
from costmodel.files import Named
from costmodel.gemm.config import GemmConfig, as_config
from costmodel.gemm.space import Columns, why_illegal
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.tuning.ranking import Ranking, rank
from costmodel.validation import require, require_count

WITH_PTX = "with PTX"
WITHOUT_PTX = "configuration only"

Facts = Mapping[str, float | str | None]

_SHARE = "_share"


@dataclass(frozen=True)
class Explained:
    """One configuration of a ranking. What is not known is None; units are in the names.

    Attributes:
        place: in the ranking, from 1.
        config: the configuration.
        predicted_us: None where the model only knows an order.
        answered_by: :data:`WITH_PTX` or :data:`WITHOUT_PTX`, the part of a learned model that
            answered; empty where none did.
        roofline: which bound the product has, and how near the prediction comes to it.
        grid: blocks, waves, and how full the last one is.
        residency: blocks on a multiprocessor, what limits them, and bytes in flight.
        traffic: bytes that move, and what splitting k costs.
        binary: registers, spills and shared memory; None where it was never compiled.
        paper_us: the estimate on paper, which the model starts from, and its parts: these may run
            at the same time, so that they need not add up.
        start_us: the estimate times the model's mean correction of it.
        factors: the effect that each concept has by the model, as a factor on the latency:
            ``predicted_us = start_us * product of factors``. None where no learned model answered.
    """

    place: int
    config: GemmConfig
    predicted_us: float | None
    answered_by: str
    roofline: Facts
    grid: Facts
    residency: Facts
    traffic: Facts
    binary: Facts | None
    paper_us: Mapping[str, float]
    start_us: float | None = None
    factors: Mapping[str, float] | None = field(default=None, repr=False)

    def to_dict(self) -> Named:
        """JSON-ready."""
        row = asdict(self)
        return row | {"head": row.pop("answered_by")}


@dataclass(frozen=True)
class Explanation:
    """Some configurations of a ranking, explained.

    Attributes:
        ranking: the ranking that they are in; it says which model answered, and why if that is not
            the first choice.
        roofline_us: the least time of the product by the data sheet.
        no_factors: why there are no factors; empty where there are.
        rows: in the order of their places.
    """

    ranking: Ranking = field(repr=False)
    roofline_us: float
    no_factors: str
    rows: tuple[Explained, ...]

    def to_dict(self) -> Named:
        """JSON-ready."""
        head = self.ranking.to_dict()
        del head["ranked"]
        return {
            **head,
            "roofline_us": self.roofline_us,
            "no_factors": self.no_factors,
            "explained": [row.to_dict() for row in self.rows],
        }


def explain(
    workload: Workload,
    target: Target | None = None,
    model: ModelLike = None,
    *,
    top: int = 3,
    places: Sequence[int] | None = None,
    against: GemmConfig | str | None = None,
) -> Explanation:
    """Explain why the first ``top`` configurations of a ranking are there; needs no GPU.

    Args:
        target, model: as for :func:`costmodel.rank`.
        top: how many, from the first on.
        places: explain these instead, counted from 1; at least one.
        against: explain the first and this one instead: a configuration, or its short name, such
            as ``"tma 128x256x64 w8 s4 g8"``.

    Raises:
        InvalidInput: top < 1, no place, a text that names no configuration, or a place or a
            configuration that the ranking does not have.
        As :func:`costmodel.rank`, for target and model.
    """
    require_count("top", top)
    if places is not None:
        require("places", places, Sequence, "a list of places from 1, such as [1, 50]")
        if not len(places):
            raise InvalidInput("places is empty: expected places from 1, such as [1, 50], or None")
        for place in places:
            require_count("a place", place)
    other = None if against is None else as_config("against", against)
    few = places is None and other is None
    ranking = rank(workload, target, model, top if few else None)
    if other is not None:
        places = tuple(dict.fromkeys((1, _place(ranking, other))))
    if places is None:
        places = range(1, len(ranking) + 1)
    if beyond := [place for place in places if place > len(ranking)]:
        raise InvalidInput(
            f"place {beyond[0]}: expected 1 to {len(ranking)}, the distinct configurations"
        )
    rows = [place - 1 for place in places]
    candidates = ranking.candidates.take(rows)
    paper = analytic_columns(workload, candidates, ranking.target, binary=True)
    found = ranking.cost_model.contributions(workload, candidates, ranking.target)
    explained = []
    for i, row in enumerate(rows):
        here = Columns(**{name: float(column[i]) for name, column in paper.items()})
        learned = found and (float(found[0][i]), found[1][i])
        explained.append(_explained(ranking, row, here, learned))
    none = f"only a trained model gives any, and {ranking.model} answered"
    return Explanation(
        ranking=ranking,
        roofline_us=float(paper["roofline_us"][0]),
        no_factors=none if found is None else "",
        rows=tuple(explained),
    )


def _place(ranking: Ranking, config: GemmConfig) -> int:
    """Return the place of a configuration, from 1."""
    if config in ranking.configs:
        return ranking.configs.index(config) + 1
    why = why_illegal(config, ranking.workload, ranking.target.device)
    raise InvalidInput(
        f"{config} is not in the ranking of {ranking.workload}: "
        f"{why or 'it is not in the space, is known not to compile, or does as another one does'}"
    )


def _explained(
    ranking: Ranking, row: int, paper: Columns, learned: tuple[float, Floats] | None
) -> Explained:
    """Explain one row, by its analytic columns and the contributions of a learned model."""
    config, target = ranking.configs[row], ranking.target
    predicted_us = ranking.predicted_us(row)
    columns = ranking.candidates.artifact_columns[row]
    known = not np.isnan(columns[0])
    binary = dict(zip(ARTIFACT_COLUMNS[:3], map(float, columns), strict=False)) if known else None
    answered_by, start_us, factors = "", None, None
    if learned is not None:
        answered_by = WITH_PTX if known else WITHOUT_PTX
        start_us, logs = learned
        factors = {name: exp(x) for name, x in grouped(FEATURES, logs.tolist()).items()}
    return Explained(
        place=row + 1,
        config=config,
        predicted_us=predicted_us,
        answered_by=answered_by,
        roofline=_roofline(ranking.workload, target, paper.roofline_us, predicted_us),
        **_of_the_launch(ranking.workload, config, target, paper),
        binary=binary,
        start_us=start_us,
        factors=factors,
    )


def _roofline(
    workload: Workload, target: Target, roofline_us: float, predicted_us: float | None
) -> Facts:
    """Return whether arithmetic or memory bounds the product, and the rates as predicted."""
    device, kind = target.device, workload.code.kind
    compute_us = device.roofline_us(workload.flops(), 0, kind)
    memory_us = device.roofline_us(0, workload.bytes(), kind)
    us = predicted_us or float("nan")
    rates = {
        "percent": 100 * roofline_us / us,
        "tflops": workload.flops() / us / 1e6,
        "gbs": workload.bytes() / us / 1e3,
    }
    return {
        "bound": "compute" if compute_us > memory_us else "memory",
        "roofline_us": roofline_us,
        **(rates if predicted_us else dict.fromkeys(rates)),
        "peak_tflops": device.tflops_of(kind),
        "peak_gbs": device.bandwidth_gbs,
    }


def _of_the_launch(workload: Workload, config: GemmConfig, target: Target, paper: Columns) -> Named:
    """Return the estimate and what it rests on.

    Tail and imbalance say how much longer the blocks take than if they were spread evenly: over the
    waves, and over the multiprocessors (the one with the most blocks decides).
    """
    device = target.device
    running = min(paper.programs, device.sm_count * paper.occupancy)
    stage_bytes = (config.block_m + config.block_n) * config.block_k * workload.code.itemsize
    in_flight = running * stage_bytes * min(config.num_stages, paper.steps_per_program)
    estimate_us = paper.estimate * paper.roofline_us
    shares = {n.removesuffix(_SHARE): x for n, x in vars(paper).items() if n.endswith(_SHARE)}
    paper_us = {name: x * estimate_us for name, x in shares.items()} | {"estimate": estimate_us}
    return {
        "grid": {
            "tiles": paper.tiles,
            "blocks": paper.programs,
            "blocks_per_multiprocessor": paper.programs / device.sm_count,
            "waves": paper.waves,
            "last_wave_full_percent": 100 * paper.last_wave,
            "tail_percent": 100 * (1 / paper.wave_efficiency - 1),
            "imbalance_percent": 100 * (1 / paper.sm_balance - 1),
            "useful_percent": 100 * paper.useful,
            "steps": paper.steps_per_program,
            "split_k": config.split_k,
        },
        "residency": {
            "blocks_per_multiprocessor": paper.occupancy,
            "limited_by": _limit(config, target, paper),
            "warps_per_multiprocessor": paper.warps_per_sm,
            "registers_per_thread": paper.registers_used,
            "shared_bytes": paper.shared_used,
            "bytes_in_flight": in_flight,
            "bytes_wanted": in_flight / paper.bytes_in_flight,
            "in_flight_percent": 100 * paper.bytes_in_flight,
        },
        "traffic": {
            "least_bytes": workload.bytes(),
            "device_memory_bytes": paper.dram_traffic,
            "l2_bytes": paper.operand_traffic,
            "split_k_bytes": paper.split_traffic,
            "split_k_us": paper_us.get("split", 0.0),
        },
        "paper_us": paper_us,
    }


def _limit(config: GemmConfig, target: Target, paper: Columns) -> str:
    """Name what limits the number of blocks on a multiprocessor."""

    def fit(registers: float, shared_bytes: float) -> float:
        per_thread, per_block, warps = np.array([[registers], [shared_bytes], [config.num_warps]])
        return float(occupancy(per_thread, per_block, warps, target.device)[0])

    registers, shared_bytes = paper.registers_used, paper.shared_used
    blocks = paper.occupancy
    if fit(registers, shared_bytes) > blocks:
        return "the kernel, which starts one block on each"
    limits = {"registers": fit(registers, 0), "shared memory": fit(0, shared_bytes)}
    if fit(0, 0) <= blocks:
        return "warps"
    return " and ".join(name for name, limit in limits.items() if limit <= blocks)
