"""The workloads that a model is judged on, and the rule that keeps them out of training.

A training workload, whatever its m, dtype or layout, must not have the (n, k) of an eval workload,
nor one near it (both within 2 %). Two other forms of the same product count as well:

- the operand-swapped twin. C^T = B^T A^T is the product with m and n exchanged, so a workload
  whose (m, k) is an eval (n, k) is that eval layer seen from the other side;
- the same weights read the other way (n and k exchanged), as the backward pass does.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from costmodel.gemm.workload import Workload, kind_options

HELD_OUT = "held out for evaluation"
"""The reason for leaving out what :func:`is_held_out` refuses."""

_TOLERANCE = 0.02


@dataclass(frozen=True)
class EvalWorkload:
    """A line of the eval list: the origin of the shape, and its sizes."""

    name: str
    m: int
    n: int
    k: int


_RAGGED_OR_EXTREME = 10  # the last of the list


@cache
def eval_list() -> tuple[EvalWorkload, ...]:
    """Return the eval list in its order: the content of ``benchmarks/eval.csv``."""
    lines = Path(__file__).with_name("eval.csv").read_text(encoding="utf-8").splitlines()
    rows = (line.rsplit(",", 3) for line in lines[1:])
    return tuple(EvalWorkload(name, int(m), int(n), int(k)) for name, m, n, k in rows)


def eval_workloads(dtype: str = "float16") -> list[Workload]:
    """Return the eval list as dense row-major workloads of a kind (``costmodel.gemm.dtypes``)."""
    types = kind_options(dtype)
    return [Workload.dense(e.m, e.n, e.k, **types) for e in eval_list()]


@cache
def eval_pairs() -> frozenset[tuple[int, int]]:
    """Return the (n, k) that are held out."""
    return frozenset((e.n, e.k) for e in eval_list())


def is_held_out(workload: Workload) -> bool:
    """Return True if a workload must stay out of training data."""
    m, n, k = workload.sizes
    disguises = ((n, k), (m, k), (k, n))
    return any(
        _near(side, eval_n) and _near(depth, eval_k)
        for eval_n, eval_k in eval_pairs()
        for side, depth in disguises
    )


def is_ragged(workload: Workload) -> bool:
    """Return True if a workload counts as ragged or extreme, not as aligned.

    Those are the last ten of the eval list, all with a strided operand, and all where n, k or a
    stride is not a multiple of 16.
    """
    if workload.code.is_strided:
        return True
    strides = (getattr(workload, x.in_memory[1]) for x in workload.code.matrices)
    return any(x % 16 for x in (*workload.nk, *strides)) or workload.sizes in {
        (e.m, e.n, e.k) for e in eval_list()[-_RAGGED_OR_EXTREME:]
    }


def _near(value: int, eval_value: int) -> bool:
    return abs(value - eval_value) <= _TOLERANCE * eval_value
