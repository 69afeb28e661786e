"""A toy family: the one file that a new kernel needs on the host side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import Check, KernelFamily
from costmodel.gemm.workload import CodeClass
from costmodel.hardware.target import Device


class ToyFamily(KernelFamily):
    name = "toy"
    kernel = "toy_kernel:gemm_toy"
    limits_registers = False

    def points(self) -> Iterator[GemmConfig]:
        for m, n in ((32, 32), (64, 64), (64, 32)):
            for num_warps in (2, 4):
                yield GemmConfig(self.name, m, n, 32, num_warps, 1)

    def own_checks(self, c: Any, code: CodeClass, device: Device) -> Iterator[Check]:
        text = "toy: a tile of {}x{} is no square"
        yield Check(c.block_m != c.block_n, text, (c.block_m, c.block_n))
        yield Check((c.split_k > 1) | (c.block_m < 0), "toy: no split of K")


FAMILY = ToyFamily()
