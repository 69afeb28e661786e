"""``pointer``: plain pointers, so any size, stride and alignment."""

from collections.abc import Iterator
from typing import Any

from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.family import KernelFamily, splits, tiles, warps


class PointerFamily(KernelFamily):
    name = "pointer"
    kernel = "costmodel.kernels.pointer:gemm_pointer"
    is_masked = True
    splits_k = True

    def points(self) -> Iterator[GemmConfig]:
        sides = (16, 32, 64, 128, 256)
        for m, n in tiles(sides, sides):
            for k in (32, 64, 128):
                for num_warps in warps(m * n):
                    for stages in (2, 3, 4, 5) if k < 128 else (2, 3, 5):
                        yield GemmConfig(self.name, m, n, k, num_warps, stages)
        for m, n in tiles((16, 32, 64, 128), (32, 64, 128)):
            for k in (64, 128):
                for stages in (3, 5):
                    for split in splits(m * n):
                        yield GemmConfig(self.name, m, n, k, 4, stages, split_k=split)
        yield from self._small_points()

    def _small_points(self) -> Iterator[GemmConfig]:
        """The rule for small sizes chooses among these."""
        for m, n in tiles((16, 32, 64), (32, 64)):
            for k in (16, 32):
                for num_warps in (1, 2, 4):
                    for stages in (1, 2):
                        yield GemmConfig(self.name, m, n, k, num_warps, stages)

    def constants(self, spec: Specialization) -> dict[str, Any]:
        code, item = spec.code, spec.code.itemsize
        return super().constants(spec) | {
            "A_CONTIGUOUS": code.a_align // item if code.a_layout == "col" else 1,
            "B_CONTIGUOUS": code.b_align // item if code.b_layout == "row" else 1,
        }


FAMILY = PointerFamily()
