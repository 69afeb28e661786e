"""Reason why a configuration is faster than another on a product: the fact that differs most."""

from __future__ import annotations

from math import ceil
from typing import Any

from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig
from costmodel.tuning.explanation import Explained, explain
from costmodel.tuning.ranking import Ranking

_LEAST = 1.05  # a smaller ratio counts as alike
_MIB = 2**20


def facts(row: Explained) -> dict[str, tuple[float, float]]:
    """Return facts that decide speed, each with a score (higher is better) and its figure."""
    grid, waves = row.grid, row.grid["waves"]
    busy = min(waves / ceil(waves) if waves > 0 else 1.0, grid["blocks_per_multiprocessor"])
    flight = min(row.residency["in_flight_percent"], 100.0)
    device, l2 = (row.traffic[name] for name in ("device_memory_bytes", "l2_bytes"))
    return {
        "multiprocessors busy, %": (busy, 100 * min(busy, 1.0)),
        "useful work in the tiles, %": (grid["useful_percent"], grid["useful_percent"]),
        "of latency x bandwidth in flight, %": (flight, flight),
        "MiB of device memory": (1 / device, device / _MIB),
        "MiB asked of L2": (1 / l2, l2 / _MIB),
    }


def reason(better: Explained, worse: Explained) -> str:
    """Name the fact in which the slower one is furthest behind."""
    good, bad = facts(better), facts(worse)
    behind = {name: good[name][0] / max(bad[name][0], 1e-9) for name in good}
    name = max(behind, key=lambda fact: round(behind[fact], 1))  # of equal ones the first
    if behind[name] < _LEAST:
        return "alike on paper: the binaries differ"
    return f"{name}: {good[name][1]:.3g} against {bad[name][1]:.3g}"


def why(ranking: Ranking, better: GemmConfig, worse: GemmConfig) -> str | None:
    """Say why a configuration is faster than another; None if one is not in the ranking."""
    places = [ranking.configs.index(c) + 1 for c in (better, worse) if c in ranking.configs]
    if len(places) < 2 or better == worse:
        return None
    model: Any = ranking.cost_model
    try:
        rows = explain(ranking.workload, ranking.target, model, places=places).rows
    except InvalidInput:  # the ranking has only some configurations
        return None
    return reason(*rows)
