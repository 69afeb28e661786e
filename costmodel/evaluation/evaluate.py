"""The evaluation protocol: how much speed each model's ranking keeps on the eval workloads.

The space of a workload is every legal configuration that was measured on it, failures too; equal
programs are ranked once. ``torch.matmul`` is never part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Self

import numpy as np

from costmodel.arrays import Floats, Indices, Integers
from costmodel.data.candidates import Candidates, CostModel
from costmodel.data.dataset import Dataset
from costmodel.data.measurement_table import Frame
from costmodel.errors import MissingData
from costmodel.evaluation import metrics
from costmodel.evaluation.duplicates import identities
from costmodel.evaluation.heldout import is_ragged
from costmodel.files import Named
from costmodel.gemm.space import why_illegal
from costmodel.gemm.specialize import kernel_hashes
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Device, Target
from costmodel.validation import log

TOP_K = (1, 4, 8, 16)


@dataclass(frozen=True)
class Problem:
    """A workload, the candidates to choose from, and the latency of each.

    Attributes:
        candidates: all that is legal and was measured, failures too.
        latency_us: float64 [n]; NaN where failed. Equal programs have the least of their latencies.
        identity: int64 [n], equal for candidates that do the same.
    """

    workload: Workload
    candidates: Candidates
    latency_us: Floats
    identity: Integers

    @classmethod
    def of(cls, workload: Workload, frame: Frame, rows: Indices, device: Device) -> Self | None:
        """Take the candidates of some rows that can be chosen; None if none of them worked.

        As in a ranking, a candidate that is known not to compile or launch cannot be chosen.
        """
        measured = frame.candidates.take(rows)
        legal = np.array([not why_illegal(c, workload, device) for c in measured.configs], bool)
        chosen = np.flatnonzero(measured.fits(device) & legal)
        candidates, rows = measured.take(chosen), rows[chosen]
        latency_us = np.where(frame.status[rows] == "ok", frame.latency_us[rows], np.nan)
        if not np.isfinite(latency_us).any():
            return None
        # One program has one latency, whichever of its names a model ranks first.
        identity = identities(workload, candidates)
        best = np.full(len(identity), np.nan)
        np.fmin.at(best, identity, latency_us)
        return cls(workload, candidates, best[identity], identity)

    def kept_at(self, cost: Floats, ks: Sequence[int]) -> tuple[float, ...]:
        """Return the speed kept by the first k of a ranking, for each k."""
        rows = metrics.distinct_rows(cost, self.identity)
        return tuple(metrics.speed_kept(self.latency_us[rows], cost[rows], k) for k in ks)


@dataclass(frozen=True)
class _Score:
    """The result of one ranking on one workload."""

    ragged: bool
    kept: tuple[float, ...]  # at each of TOP_K
    tau: float
    mape_pct: float | None


def evaluate(dataset: Dataset, models: Sequence[CostModel], target: Target) -> list[Named]:
    """Judge models on the eval rows of a dataset: the content of ``costmodel evaluate --json``.

    Added to the given models: ``random`` (the expected value of a random order), ``oracle`` (knows
    the recorded latencies) and ``noise ceiling`` (the recorded latencies as a prediction of an
    independent second measurement, the anchor rows; left out where none exist). Rows of a kernel
    that has changed since are left out, as in training: a warning tells how many.

    Args:
        dataset: has rows of role ``eval``.
        models: the ``kind`` of each (learned, baseline or peer) goes into its entry.
        target: what the models predict for.

    Returns:
        One entry per model: ``name``, ``kind``, ``workloads`` (how many; in the noise ceiling each
        once per run), ``speed_kept`` (percent: ``{"1": {"geomean_pct", "worst_pct"}, "4": …}``),
        ``regret`` (the older name of the same), ``aligned`` and ``ragged`` (the same for these
        workloads alone; None where there are none), ``kendall_tau`` and ``mape_pct`` (means over
        workloads; ``mape_pct`` is None where no latency is predicted).

    Raises:
        MissingData: the dataset holds no eval row of the present kernels, or none that worked.
    """
    frame = dataset.frame("eval", kernel_hashes=kernel_hashes())
    dropped = ", ".join(f"{reason} ({rows} rows)" for reason, rows in frame.dropped.items())
    problems = problems_of(frame, target.device)
    if not problems:
        raise _nothing_to_judge_by(dataset, dropped)
    if dropped:
        log.warning("%s, left out: %s", dataset.path, dropped)

    entries = []
    for model in models:
        costs = [model.predict(p.workload, p.candidates, target) for p in problems]
        scores = map(_score, problems, costs, repeat(model.predicts_latency))
        entries.append(_entry(model.name, model.kind, [*scores]))
    random = [_score(p, np.zeros(len(p.latency_us)), False) for p in problems]
    oracle = [_score(p, p.latency_us, False) for p in problems]
    entries += [_entry("random", "baseline", random), _entry("oracle", "oracle", oracle)]
    if second := _second_measurement(dataset, problems):
        entries.append(_entry("noise ceiling", "oracle", second))
    return entries


def problems_of(frame: Frame, device: Device) -> list[Problem]:
    """Return the workloads of a frame on which any candidate worked."""
    each = frame.rows_of.items()
    return [found for w, rows in each if (found := Problem.of(w, frame, rows, device))]


def _nothing_to_judge_by(dataset: Dataset, dropped: str) -> MissingData:
    what = f"{dataset.path} holds no working rows of the held-out list"
    if dropped:
        return MissingData(
            f"{what} that the kernels as they are now gave: {dropped}; record it again with "
            f"`costmodel collect --worklist FILE`, or name a dataset of these kernels with "
            f"`--data DIR`"
        )
    return MissingData(
        f"{what}: record some of it with `costmodel collect --shapes FILE --role eval`, or all "
        f"that `benchmarks/draw_reference.py eval` draws with `costmodel collect --worklist FILE`; "
        f"or name a dataset that has them with `--data DIR`"
    )


def _score(problem: Problem, cost: Floats, is_latency: bool) -> _Score:
    rows = metrics.distinct_rows(cost, problem.identity)
    latency, ranked = problem.latency_us[rows], cost[rows]
    return _Score(
        is_ragged(problem.workload),
        problem.kept_at(cost, TOP_K),
        metrics.kendall_tau(latency, ranked),
        metrics.mape_pct(latency, ranked) if is_latency else None,
    )


def _second_measurement(dataset: Dataset, problems: Sequence[Problem]) -> list[_Score]:
    """Score the ranking by the first measurement on the anchors of each run."""
    anchors, _ = dataset.unchanged(dataset.measurements("anchor"), kernel_hashes())
    scores = []
    for problem in problems:
        first = dict(zip(problem.candidates.configs, problem.latency_us.tolist()))
        rows = anchors.rows_for(problem.workload)
        rows = rows[(anchors.config_index[rows] >= 0) & anchors.ok[rows]]
        for run in sorted(set(anchors.run_index[rows].tolist())):
            again = rows[anchors.run_index[rows] == run]
            configs = [anchors.configs[i] for i in anchors.config_index[again]]
            cost = np.array([first.get(config, np.nan) for config in configs])
            # If the pick itself was not timed again, nothing is known of it.
            if len(again) > 1 and np.nanmin(list(first.values())) in cost:
                part = Problem(
                    problem.workload, Candidates.of(configs), anchors.latency_us[again],
                    np.arange(len(again)),
                )  # fmt: skip
                scores.append(_score(part, cost, True))
    return scores


def _entry(name: str, kind: str, scores: Sequence[_Score]) -> Named:
    errors = [s.mape_pct for s in scores if s.mape_pct is not None]
    return {
        "name": name,
        "kind": kind,
        "workloads": len(scores),
        "regret": _kept(scores),  # the older name: it is the speed that is kept
        "speed_kept": _kept(scores),
        "aligned": _kept([s for s in scores if not s.ragged]),
        "ragged": _kept([s for s in scores if s.ragged]),
        "kendall_tau": round(float(np.mean([s.tau for s in scores])), 4),
        "mape_pct": round(float(np.mean(errors)), 2) if errors else None,
    }


def _kept(scores: Sequence[_Score]) -> dict[str, dict[str, float]] | None:
    if not scores:
        return None
    columns = zip(TOP_K, zip(*(s.kept for s in scores)))
    return {
        str(k): {
            "geomean_pct": round(100 * metrics.geomean(kept), 2),
            "worst_pct": round(100 * min(kept), 2),
        }
        for k, kept in columns
    }
