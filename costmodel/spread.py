"""From the m that was tuned to the others of its bucket: which choice holds there too.

How a product falls into tiles, and tiles into waves, changes from one m to the next, and with it
what is fastest: a winner of another m was seen to take half as long again. A model that knows the
sizes tells most of it. So a bucket is cut into a few parts, and for each part a configuration that
was timed is expected to take what it took, times what the model makes of the other m; one that was
not, what the model says, times how far the model was off where it could be compared. No part is
timed. What has no binary yet is taken only where it is expected to gain more than a prediction
errs, so that a bucket has few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median

from costmodel.config import GemmConfig
from costmodel.errors import InvalidInput
from costmodel.models.xgb import XgbCostModel
from costmodel.ranking import rank
from costmodel.space import legality
from costmodel.tuning_result import Part, TuningResult
from costmodel.workload import Workload

__all__ = ["spread"]

_PARTS = 8
_LOOKED_AT = 16
_NEW_GAINS = 1.02  # so many times faster must be what is not compiled yet
# cuBLAS chooses by m as it likes: what it takes for another m is known less well.
_TORCH_GAINS = 1.05
_INT32_MAX = 2**31 - 1


def spread(result: TuningResult, rows: tuple[int, int], model: XgbCostModel) -> tuple[Part, ...]:
    """What is to compute the other m of the bucket of a result.

    Args:
        rows: the first and the last m of the bucket.
        model: that ranked, or one that knows as much.

    Returns:
        Ascending parts, at least one; together they are the bucket.
    """
    if result.config is None and not result.timed:
        return (Part(rows[1], None),)  # torch is predicted to be faster by far
    known_us = _known(result, model)
    parts: list[Part] = []
    for m in _ends(result.workload, rows):
        config = _best(result, replace(result.workload, m=m), known_us, model)
        if parts and parts[-1].config == config:
            parts.pop()
        parts.append(Part(m, config))
    return tuple(parts)


def _ends(workload: Workload, rows: tuple[int, int]) -> Iterator[int]:
    """The last m of each part. A tile more or less matters there: it is a multiple of many."""
    first, last = rows
    if not workload.code.wide:  # a larger product is of another class of code
        last = max(min(last, _INT32_MAX // max(workload.n, workload.k)), workload.m)
    size = last - first + 1
    count = min(_PARTS, size)
    yield from (first - 1 + -(-size * (i + 1) // count) for i in range(count))


def _known(result: TuningResult, model: XgbCostModel) -> dict[GemmConfig, tuple[float, float]]:
    """Of each configuration with a binary what it took where it was tuned, and was predicted to.

    Where nothing was timed: of the one that was chosen, twice the prediction.
    """
    timed = {c: m.latency_us for c, m in result.measured if m.ok} if result.timed else {}
    asked = list(timed) or [c for c in (result.config,) if c is not None]
    predicted = _predicted(result, result.workload, asked, model)
    return {c: (timed.get(c, predicted[c]), predicted[c]) for c in asked if c in predicted}


def _predicted(
    result: TuningResult, workload: Workload, configs: list[GemmConfig], model: XgbCostModel
) -> dict[GemmConfig, float]:
    """What these are predicted to take, in us; without those that cannot run, or repeat one."""
    legal = [c for c in configs if not legality(c, workload, result.target.device)]
    if not legal:
        return {}
    try:
        ranking = rank(workload, result.target, model, configs=legal)
    except InvalidInput:  # a table has it that none of them fits
        return {}
    return dict(zip(ranking.configs, ranking.cost.tolist(), strict=True))


def _best(
    result: TuningResult,
    workload: Workload,
    known_us: Mapping[GemmConfig, tuple[float, float]],
    model: XgbCostModel,
) -> GemmConfig | None:
    """What is expected to be fastest for one m."""
    there = _predicted(result, workload, list(known_us), model)
    expected = {c: us * known_us[c][0] / known_us[c][1] for c, us in there.items()}
    ratios = [took / predicted for took, predicted in known_us.values()]
    best = min(expected, key=expected.__getitem__, default=None)
    if (found := _new(result, workload, model)) is not None:
        new, new_us = found[0], found[1] * (median(ratios) if ratios else 1.0)
        if best is None or expected[best] > _NEW_GAINS * new_us:
            best, expected = new, expected | {new: new_us}
    torch_us = _torch_us(result, workload, model)
    gains = 1.0 if result.config is None else _TORCH_GAINS
    if best is None or (torch_us is not None and gains * torch_us < expected[best]):
        return None if torch_us is not None else result.config
    return best


def _new(
    result: TuningResult, workload: Workload, model: XgbCostModel
) -> tuple[GemmConfig, float] | None:
    """The first choice for one m of what was not tried, and its prediction in us.

    Only what is known to compile: the program itself will compile it, without a child that may die.
    """
    tried = {config for config, _ in result.measured}
    ranking = rank(workload, result.target, model, _LOOKED_AT)
    columns = zip(ranking.configs, ranking.candidates.artifacts, ranking.cost, strict=True)
    for config, artifact, us in columns:
        if config not in tried and artifact is not None and artifact.ok:
            return config, float(us)
    return None


def _torch_us(result: TuningResult, workload: Workload, model: XgbCostModel) -> float | None:
    """What torch is expected to take; None where it was not timed."""
    if result.torch is None or not result.torch.ok:
        return None
    here, there = (model.predict_torch(w, result.target) for w in (result.workload, workload))
    ratio = there / here
    if not ratio > 0:  # of a model that has not learned it
        device = result.target.device
        there, here = (
            device.roofline_us(w.flops(), w.bytes(), w.code.kind)
            for w in (workload, result.workload)
        )
        ratio = there / here
    return result.torch.latency_us * ratio
