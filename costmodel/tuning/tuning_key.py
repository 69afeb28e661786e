"""Products that share a choice: the buckets of m, and the key of a choice in memory and on disk.

A bucket of m is the unit of a choice: a service that sees every m tunes a bounded number of times.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from costmodel.data.candidates import CostModel
from costmodel.errors import InvalidInput
from costmodel.files import Named
from costmodel.gemm.space import grid_hash, why_illegal
from costmodel.gemm.specialize import kernel_hashes
from costmodel.gemm.workload import MOST, MOST_OFFSET, Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.measure.protocol import TimingProtocol
from costmodel.tuning.search import LIBRARY_COUNTS
from costmodel.tuning.tuner import untimed_because
from costmodel.tuning.tuning_result import TuningResult

# Up to here the bounds are the powers of two, whatever the steps.
_BY_OCTAVES = 128
# Where every side is at most this, `auto` does not time: no bucket lies on both sides of this m.
_SMALL = 512
# Elements of an operand: far more than fit into the memory of any device.
_MOST_ELEMENTS = 2**40


@dataclass(frozen=True)
class Buckets:
    """Ranges of m that share a winner.

    Attributes:
        steps: how many equal ranges each octave above 128 has: 1, 2, 4, 8, .., 128. With more,
            choices are closer to those of tuning every m, and more is tuned.
        bounds: the user's own upper ends, ascending, such as the batch sizes that a server pads to;
            above the last, ``steps`` applies.
    """

    steps: int = 4
    bounds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise InvalidInput(f"steps={self.steps!r}: expected a power of two from 1 to 128")
        bounds = tuple(self.bounds) if isinstance(self.bounds, Iterable) else (None,)
        if any(type(x) is not int for x in bounds) or any(
            x >= y for x, y in pairwise((0, *bounds))
        ):
            raise InvalidInput(
                f"bounds={self.bounds!r:.80}: expected ascending whole numbers over 0, such as "
                f"(24, 64)"
            )
        object.__setattr__(self, "bounds", bounds)  # a list becomes a tuple

    def range_of(self, workload: Workload) -> tuple[int, int]:
        """The first and the last m that share the winner of a workload.

        The bucket of its m, cut where a larger product would be of another class of code (where
        its offsets would need 64 bits), and where no device could hold a larger one: beyond that,
        nothing may be legal.
        """
        first, last = self.of(workload.m)
        longest = max(*workload.nk, 1)
        for limit in (_MOST_ELEMENTS,) if workload.code.wide else (MOST_OFFSET + 1, _MOST_ELEMENTS):
            most = limit // longest
            if workload.m <= most:
                return first, min(last, most)
            first = max(first, most + 1)
        return first, last

    def of(self, m: int) -> tuple[int, int]:
        """The first and the last m of the bucket of an m."""
        place = bisect_left(self.bounds, m)
        before = self.bounds[place - 1] if place else 0
        if place < len(self.bounds):
            last = self.bounds[place]
        else:
            half = (1 << (m - 1).bit_length()) // 2  # of the least power of two that is not below m
            step = max(half if m <= _BY_OCTAVES else half // self.steps, 1)
            last = -(-m // step) * step
            before = max(before, last - step)
        if before < _SMALL < last:
            before, last = (before, _SMALL) if m <= _SMALL else (_SMALL, last)
        return before + 1, min(last, MOST)


@dataclass(frozen=True)
class TuningKey:
    """A bucket of products that share a choice, and how that choice is made.

    Attributes:
        largest: the product of the last m of the bucket. All that a configuration needs of a device
            grows with m: what is legal for this product is legal for the whole bucket.
        m_range: the first and the last m of the bucket.
        device_index: the CUDA device.
        mode: one of ``TUNING_MODES``.
        model: compared by identity; None is the one that answers without being named.
        k, include_torch: as in :func:`costmodel.tuning.tuner.tune`.
        epoch: of the process group whose ranks must make the same choice, see
            :func:`costmodel.tuning.ranks.epoch`; 0 without one.
        toolchain: the compiler, whose settings a program may change.
    """

    largest: Workload
    m_range: tuple[int, int]
    device_index: int
    mode: str = "auto"
    model: CostModel | None = None
    k: int = 8
    include_torch: bool = True
    epoch: int = 0
    toolchain: Toolchain | None = None

    def workload(self, m: int) -> Workload:
        """The product of one m of the bucket."""
        return replace(self.largest, m=m)

    def on_disk(self, target: Target, model: CostModel) -> Named:
        """All that the choice rests on, readable: other devices, compilers, models are other keys.

        Args:
            model: the one that answers.
        """
        import torch

        workload = self.largest
        first, last = self.m_range
        timed = not untimed_because(workload, self.mode)
        return {
            "name": f"{first}-{last}x{workload.n}x{workload.k}-{target.device.name}",
            **workload.to_dict(),
            "m": [first, last],
            **target.here(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "kernels": kernel_hashes(),
            "space": grid_hash(),
            "model": model.name,
            "model_hash": model.hash,
            "mode": self.mode,
            "top_k": self.k,
            "include_torch": self.include_torch,
            "protocol": TimingProtocol().to_dict() if timed else None,
            "torch_counts": LIBRARY_COUNTS if timed else None,
        }

    def accepts(self, result: TuningResult, target: Target, model: CostModel) -> bool:
        """Return True if a result from disk is of this key, and what it chose may run here."""
        of, (first, last) = result.workload, self.m_range
        if not first <= of.m <= last or self.workload(of.m) != of:
            return False
        # A launch depends on the figures of the target.
        ours = target, model.name, model.hash
        if (result.target, result.model, result.model_hash) != ours:
            return False
        segments = result.plan.segments if result.plan else ()
        chosen = {result.config, *(segment.config for segment in segments)}
        return not any(why_illegal(c, self.largest, target.device) for c in chosen if c is not None)
