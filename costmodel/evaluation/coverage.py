"""The sizes and kinds of products that a model has learned from, so that it can say what is new.

Trees do not extrapolate: beyond the sizes of the training every product falls into the leaves of
the largest one. The estimate on paper still tells them apart, but nobody has seen how well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from costmodel.errors import InvalidInput
from costmodel.gemm.workload import Workload
from costmodel.support.untrusted import take

__all__ = ["Coverage", "kind_of"]

_SIZES = ("m", "n", "k")
_ALIGNED_BYTES = 16


@dataclass(frozen=True)
class Coverage:
    """The range of the training workloads.

    Attributes:
        least, most: of m, n and k, each by itself.
        kinds: how many workloads there were of each kind, see :func:`kind_of`.
    """

    least: tuple[int, int, int]
    most: tuple[int, int, int]
    kinds: dict[str, int]

    @classmethod
    def of(cls, workloads: Iterable[Workload]) -> Coverage:
        """The range of at least one workload."""
        every = list(workloads)
        columns = list(zip(*((w.m, w.n, w.k) for w in every), strict=True))
        return cls(
            (min(columns[0]), min(columns[1]), min(columns[2])),
            (max(columns[0]), max(columns[1]), max(columns[2])),
            dict(sorted(Counter(map(kind_of, every)).items())),
        )

    def doubt(self, workload: Workload) -> str:
        """In words, what of a workload lies outside; empty if nothing does."""
        sizes = (workload.m, workload.n, workload.k)
        for name, size, least, most in zip(_SIZES, sizes, self.least, self.most, strict=True):
            if not least <= size <= most:
                return f"{name} = {size} is beyond what the model has seen ({least} to {most})"
        if (kind := kind_of(workload)) not in self.kinds:
            return f"the model has seen no product of this kind ({kind})"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"least": list(self.least), "most": list(self.most), "kinds": dict(self.kinds)}

    @classmethod
    def from_dict(cls, data: Any) -> Coverage:
        """The inverse of :meth:`to_dict`.

        Raises:
            InvalidInput: not three sizes each, or no counts.
        """
        kinds = take(data, "kinds", dict)
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in kinds.values()):
            raise InvalidInput(f"kinds={kinds!r:.80}: expected a count for each kind")
        return cls(_three(data, "least"), _three(data, "most"), kinds)


def kind_of(workload: Workload) -> str:
    """What of a code class decides which kernels may run, and how they load, in words.

    Left out is the element type, which a model names itself, and the epilogue.
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


def _three(data: Any, name: str) -> tuple[int, int, int]:
    match take(data, name, list):
        case [int() as m, int() as n, int() as k]:
            return m, n, k
    raise InvalidInput(f"{name}={data[name]!r:.80}: expected the sizes m, n and k")
