"""Confidence of a ranking: what its first k keep on average, and which products are new.

Trees do not extrapolate: beyond the sizes of the training every product falls into the leaves of
the largest one. The analytic estimate still tells them apart, but nobody has seen how well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from costmodel.gemm.workload import Workload

KEPT_AT = (1, 2, 4, 8, 16, 32)
"""The numbers of candidates that the table of a :class:`Confidence` has an entry for."""

_ALIGNED_BYTES = 16


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
    def of(cls, workloads: Iterable[Workload]) -> Coverage:
        """Take the range of at least one workload."""
        every = list(workloads)
        m, n, k = zip(*((w.m, w.n, w.k) for w in every), strict=True)
        kinds = dict(sorted(Counter(map(kind_of, every)).items()))
        return cls((min(m), min(n), min(k)), (max(m), max(n), max(k)), kinds)

    def why_outside(self, workload: Workload) -> str:
        """Say which property of a workload is new; empty if none is."""
        sizes = (workload.m, workload.n, workload.k)
        for name, size, least, most in zip("mnk", sizes, self.least, self.most, strict=True):
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
    operands = (("A", code.a_layout, code.a_align), ("B", code.b_layout, code.b_align),
                ("C", code.c_layout, code.c_align))  # fmt: skip
    words = [
        f"{name} {layout}-major {'aligned' if align >= _ALIGNED_BYTES else 'unaligned'}"
        for name, layout, align in operands
    ]
    if code.out_itemsize > code.itemsize:
        words.append("result wider than the operands")
    return ", ".join(words)
