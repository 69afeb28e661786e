"""Confidence of a ranking: what its first k keep on average, and which products are new.

Trees do not extrapolate: beyond the sizes of the training every product falls into the leaves of
the largest one. The analytic estimate still tells them apart, but nobody has measured how well.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from costmodel.arrays import Indices
from costmodel.data.candidates import CostModel
from costmodel.errors import InvalidInput
from costmodel.evaluation.evaluate import Problem
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models.table import TrainingTable

KEPT_AT = (1, 2, 4, 8, 16, 32)
"""The numbers of candidates that the table of a :class:`Confidence` has an entry for."""

_ALIGNED_BYTES = 16
_LEAST_WORKLOADS = 40
_MANY_WORKLOADS = 400
_LEAST_ROWS = 40  # a tuning times only the first few of a ranking: among these no choice loses much


@dataclass(frozen=True)
class Coverage:
    """The sizes and kinds of products that a model has learned from.

    Attributes:
        least, most: of m, n and k, each by itself.
        kinds: the number of workloads of each kind, see :func:`kind_of`.
    """

    least: tuple[int, int, int]
    most: tuple[int, int, int]
    kinds: dict[str, int]

    @classmethod
    def of(cls, workloads: Iterable[Workload]) -> Self:
        """Take the range of at least one workload."""
        every = list(workloads)
        m, n, k = zip(*(w.sizes for w in every))
        kinds = dict(sorted(Counter(map(kind_of, every)).items()))
        return cls((min(m), min(n), min(k)), (max(m), max(n), max(k)), kinds)

    def why_outside(self, workload: Workload) -> str:
        """Say which property of a workload is new; empty if none is."""
        for name, size, least, most in zip("mnk", workload.sizes, self.least, self.most):
            if not least <= size <= most:
                return f"{name} = {size} is beyond what the model has seen ({least} to {most})"
        if (kind := kind_of(workload)) not in self.kinds:
            return f"the model has seen no product of this kind ({kind})"
        return ""


@dataclass(frozen=True)
class Confidence:
    """Figures on workloads that a model was not trained on.

    Attributes:
        ptx, config: the mean share of the best speed, from 0 to 1, that the best of the first k
            keeps, by k as text; of the head that sees the compiled artifact, and of the one that
            sees the configuration only. Empty for a head that was not tested.
        coverage: the products that the model has learned from.
    """

    ptx: dict[str, float]
    config: dict[str, float]
    coverage: Coverage


def kept_at(table: Mapping[str, float], k: int) -> float | None:
    """Return the entry for the largest number up to k; None for an empty table."""
    return next((table[str(at)] for at in reversed(KEPT_AT) if at <= k and str(at) in table), None)


def kind_of(workload: Workload) -> str:
    """Describe which kernels may run a workload, and how they load its operands.

    The element type, which a model names itself, and the epilogue are left out.
    """
    code = workload.code
    words = [
        f"{x.name.upper()} {x.layout}-major "
        f"{'aligned' if x.align >= _ALIGNED_BYTES else 'unaligned'}"
        for x in code.matrices
    ]
    if code.out_itemsize > code.itemsize:
        words.append("result wider than the operands")
    return ", ".join(words)


# --- Measuring it on workloads that were not trained on -------------------------------------------


def calibrate(
    table: TrainingTable, fit: Callable[[TrainingTable], CostModel], *, seed: int
) -> Confidence | None:
    """Measure the speed that a model trained on this table may be expected to keep.

    A model trained on half of the workloads ranks the other half, and the other way round: that
    takes as long as the training itself. A model of all workloads errs a little less. Under 400
    workloads are cut into quarters, each ranked by a model of the other three: training is quick
    then, and these models err not much more than one of all.

    Args:
        fit: trains a model on a part of the table.
        seed: of the draw of the parts.

    Returns:
        None if fewer than 40 workloads have a row that worked, or if all of these are in one part.
    """
    folds = 4 if len(table.workloads) < _MANY_WORKLOADS else 2
    learned = np.unique(table.workload_index[table.ok])
    if len(learned) < _LEAST_WORKLOADS or len({w.nk for w in table.workloads}) < folds:
        return None
    parts = list(folds_by_nk(table, folds, seed=seed))
    if any(np.isin(learned, part).all() for part in parts):
        return None
    kept: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for part in parts:
        model = fit(table.of_workloads(np.setdiff1d(np.arange(len(table.workloads)), part)))
        for problem, target in problems(table.of_workloads(part)):
            every = problem.candidates
            if len(every) < _LEAST_ROWS:
                continue
            shown = {False: every.without_artifacts()}
            if every.has_artifact.all():
                shown[True] = every
            for ptx, candidates in shown.items():
                cost = model.predict(problem.workload, candidates, target)
                kept[ptx].append(problem.kept_at(cost, KEPT_AT))
    full, bare = (
        dict(zip(map(str, KEPT_AT), np.mean(kept[head], axis=0).tolist()))
        if len(kept[head]) >= _LEAST_WORKLOADS
        else {}
        for head in (True, False)
    )
    return Confidence(full, bare, Coverage.of(table.workloads[w] for w in learned))


def folds_by_nk(table: TrainingTable, folds: int, *, seed: int = 0) -> Iterator[Indices]:
    """Yield the workloads of each fold; no pair (n, k) lies in two.

    Raises:
        InvalidInput: fewer pairs than folds.
    """
    number = {pair: i for i, pair in enumerate(dict.fromkeys(w.nk for w in table.workloads))}
    if not 2 <= folds <= len(number):
        raise InvalidInput(
            f"{folds} folds of {len(number)} pairs (n, k): expected at least 2 folds and as many "
            f"pairs as folds"
        )
    pair_of = [number[w.nk] for w in table.workloads]
    for part in np.array_split(np.random.default_rng(seed).permutation(len(number)), folds):
        yield np.flatnonzero(np.isin(pair_of, part))


def problems(table: TrainingTable) -> Iterator[tuple[Problem, Target]]:
    """Yield the workloads of a table on which anything worked, and the target of each."""
    for workload, target, rows in table.parts():
        if problem := Problem.of(workload, table, rows, target.device):
            yield problem, target
