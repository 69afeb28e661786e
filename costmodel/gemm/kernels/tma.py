"""``tma``: tensor descriptors; operands that TMA cannot address are copied first (``repack``)."""

from collections.abc import Iterator
from typing import Any

from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.family import KernelFamily, splits, stores_by_descriptor, tiles, warps

SIDES = (16, 32, 64, 128, 256)


class TmaFamily(KernelFamily):
    name = "tma"
    kernel = "costmodel.kernels.tma:gemm_tma"
    beside = ("costmodel.kernels.repack:repack_operands",)
    traits = ("is_tma",)
    reads_by_descriptor = True
    splits_k = True

    def points(self) -> Iterator[GemmConfig]:
        for m, n in tiles(SIDES, SIDES):
            for k in (64, 128, 256):
                if n == 16 and k == 64:
                    continue
                for num_warps in warps(m * n):
                    for stages in (3, 4, 5, 6, 8):
                        # A thin product wants all of its operands on the way at once.
                        if k == 256 and (m * n > 4096 or (stages > 5 and m * n > 1024)):
                            continue
                        for halves in (False, True) if m * n >= 16384 else (False,):
                            yield GemmConfig(self.name, m, n, k, num_warps, stages, halves=halves)
        yield from self._split_points()

    def _split_points(self) -> Iterator[GemmConfig]:
        for m, n in tiles(SIDES[:4], SIDES):
            for k in (64, 128, 256) if m * n <= 2048 else (64, 128):
                if n == 16 and k == 64:
                    continue
                for stages in (4, 6) if m * n <= 8192 else (3, 4):
                    num_warps = 8 if m * n > 16384 else 4
                    for split in splits(m * n) if m * n <= 8192 else (2, 4, 8):
                        yield GemmConfig(self.name, m, n, k, num_warps, stages, split_k=split)

    def constants(self, spec: Specialization) -> dict[str, Any]:
        baked = super().constants(spec) | {
            "A_COL": spec.code.a_layout == "col", "B_COL": spec.code.b_layout == "col",
            "HALVES": spec.config_binary.halves,
        }  # fmt: skip
        baked["c_ptr" if stores_by_descriptor(spec.code) else "c_desc"] = None
        return baked

    def descriptor_blocks(self, spec: Specialization) -> dict[str, tuple[int, int]]:
        c, code = spec.config_binary, spec.code
        rows, columns = self.operand_blocks(spec)
        blocks = {"a_desc": (c.block_k, rows) if code.a_layout == "col" else (rows, c.block_k)}
        for name, width in zip(("b_desc", "b2_desc"), columns, strict=False):
            blocks[name] = (width, c.block_k) if code.b_layout == "col" else (c.block_k, width)
        if stores_by_descriptor(code):
            blocks["c_desc"] = (rows, int(self.stored_columns(c)))
        return blocks

    def operand_blocks(self, spec: Specialization) -> tuple[int, tuple[int, ...]]:
        """Return the rows of a block of A, and the columns of each block of B."""
        return spec.config_binary.block_m, (spec.config_binary.block_n,)


FAMILY = TmaFamily()
