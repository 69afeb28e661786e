"""``tma_persistent``: as ``tma``, but each program walks over tiles."""

from collections.abc import Iterator
from typing import Any

from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.family import stores_by_descriptor, tiles, warps
from costmodel.gemm.kernels.tma import TmaFamily
from costmodel.gemm.workload import CodeClass
from costmodel.hardware.architectures import Architecture


class PersistentTmaFamily(TmaFamily):
    name = "tma_persistent"
    kernel = "costmodel.kernels.tma:gemm_tma_persistent"
    traits = ("is_persistent",)
    is_persistent = True
    splits_k = False
    limits_registers = False

    def points(self) -> Iterator[GemmConfig]:
        for m, n in tiles((64, 128, 256), (64, 128, 256)):
            for k in (64, 128):
                for num_warps in warps(m * n):
                    for stages in (3, 4, 5, 6):
                        for halves in (False, True) if m * n >= 16384 else (False,):
                            for flatten in (False, True):
                                yield GemmConfig(
                                    self.name, m, n, k, num_warps, stages,
                                    halves=halves, flatten=flatten,
                                )  # fmt: skip

    def shared_bytes_at_least(self, c: Any, code: CodeClass, architecture: Architecture) -> Any:
        """The store of one tile overlaps the loads of the next, so the tile has its own memory."""
        buffers = super().shared_bytes_at_least(c, code, architecture)
        if not stores_by_descriptor(code):
            return buffers
        return buffers + c.block_m * self.stored_columns(c) * code.out_itemsize

    def constants(self, spec: Specialization) -> dict[str, Any]:
        return super().constants(spec) | {"FLATTEN": spec.config_binary.flatten}


FAMILY = PersistentTmaFamily()
