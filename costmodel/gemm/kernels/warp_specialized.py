"""``warp_specialized``: one warp copies, two or three groups of four multiply (Hopper, Gluon).

M may be 192, and N the sum of two powers of two: such a tile has two accumulators.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from costmodel.files import Named
from costmodel.gemm.config import ConfigBinary, GemmConfig, Specialization
from costmodel.gemm.family import (
    WGMMA_SPARE_REGISTERS,
    Check,
    Checks,
    one_instruction,
    stores_by_descriptor,
)
from costmodel.gemm.kernels.tma import TmaFamily
from costmodel.gemm.workload import CodeClass
from costmodel.hardware.architectures import SM_REGISTERS, Architecture
from costmodel.hardware.target import Device

COPY_REGISTERS = 24
"""Registers of a thread that only copies: the least there is."""

_RING_BYTES = 96 * 1024


class WarpSpecializedFamily(TmaFamily):
    name = "warp_specialized"
    kernel = "costmodel.kernels.warp_specialized:gemm_warp_specialized"
    traits = ("is_warp_specialized",)
    is_persistent = True
    splits_k = False
    powers_of_two = ("block_k",)
    group_depths = (3, 4, 5, 6)
    limits_registers = False

    def points(self) -> Iterator[GemmConfig]:
        for m, num_warps in ((128, 8), (192, 12), (256, 8)):
            for n in (64, 96, 128, 160, 192, 256):
                for stages in range(3, 8):
                    # One program has a multiprocessor to itself: a shallow ring leaves room idle.
                    if (m + n) * 64 * 2 * stages < _RING_BYTES:
                        continue
                    one_accumulator = not n & (n - 1)
                    for halves in (False, True) if one_accumulator and n >= 128 else (False,):
                        yield GemmConfig(self.name, m, n, 64, num_warps, stages, halves=halves)

    def own_checks(self, c: Any, code: CodeClass, device: Device) -> Checks:
        if device.architecture.instruction != "wgmma":
            yield Check(True, f"warp groups: sm_{device.arch} has no wgmma (sm_90 only)")
        if code.itemsize != 2:
            text = f"warp groups: {code.dtype} operands have no kernel there, 16-bit ones do"
            yield Check(True, text)
        yield Check((c.num_warps != 8) & (c.num_warps != 12),
                    "warp groups: {} warps multiply; it takes 8 or 12", (c.num_warps,))  # fmt: skip
        text = "warp groups: no split-K, maxnreg or flatten; the kernel has its own ways"
        yield Check((c.split_k > 1) | (c.maxnreg > 0) | c.flatten, text)
        groups = np.maximum(c.num_warps // 4, 1)
        rows = c.block_m // groups
        dealt = (c.block_m % groups == 0) & ((rows == 64) | (rows == 128) | (rows == 256))
        yield Check(dealt == 0, "warp groups: {} rows cannot be dealt to {} groups in 64s",
                    (c.block_m, groups))  # fmt: skip
        first, rest = n_parts(c.block_n)
        odd = (first > 256) | (first < 32) | (rest & (rest - 1) > 0) | ((rest > 0) & (rest < 16))
        text = "warp groups: {} columns are no one or two powers of two, 16 to 256"
        yield Check(odd, text, (c.block_n,))
        text = "warp groups: two accumulators are stored in parts as wide as the second"
        yield Check((rest > 0) & c.halves, text)

    def register_checks(self, c: Any, code: CodeClass, device: Device) -> Checks:
        need = c.block_m * c.block_n // (32 * c.num_warps) + WGMMA_SPARE_REGISTERS
        dealt = multiply_registers(c.num_warps)
        yield Check(need > dealt, "registers: {} a thread, {} are there", (need, dealt))
        yield one_instruction(True, n_parts(c.block_n)[0], entry_registers(c.num_warps))

    def operand_checks(self, c: Any, code: CodeClass, device: Device) -> Checks:
        if not stores_by_descriptor(code):
            text = "TMA: C must be row-major and aligned to 16 bytes, it is stored by TMA only"
            yield Check(True, text)
        yield from super().operand_checks(c, code, device)

    def shared_bytes_at_least(self, c: Any, code: CodeClass, architecture: Architecture) -> Any:
        """Exact: stages, the blocks that C is stored from, and two barriers a stage."""
        stage = (c.block_m + c.block_n) * c.block_k * code.itemsize
        return c.num_stages * (stage + 16) + c.block_m * self.stored_columns(c) * code.out_itemsize

    def stored_columns(self, c: Any) -> Any:
        """Two accumulators are stored in parts as wide as the second."""
        rest = n_parts(c.block_n)[1]
        return np.where(rest > 0, rest, super().stored_columns(c))

    def options(self, binary: ConfigBinary) -> Named:
        """One group of four is launched, and its warp-specialised region adds the others."""
        return {"num_warps": 4, "maxnreg": entry_registers(binary.num_warps)}

    def source_class(self) -> type[Any]:
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource

    def constants(self, spec: Specialization) -> Named:
        c = spec.config_binary
        first, rest = map(int, n_parts(c.block_n))
        baked = {
            "ROWS": c.block_m // (c.num_warps // 4), "BLOCK_N1": first, "BLOCK_N2": rest,
            "BLOCK_K": c.block_k, "STAGES": c.num_stages, "GROUPS": c.num_warps // 4,
            "A_COL": spec.code.a_layout == "col", "B_COL": spec.code.b_layout == "col",
            "COPY_REGISTERS": COPY_REGISTERS,
            "MULTIPLY_REGISTERS": int(multiply_registers(c.num_warps)),
        }  # fmt: skip
        return baked if rest else baked | {"b2_desc": None}

    def operand_blocks(self, spec: Specialization) -> tuple[int, tuple[int, ...]]:
        c = spec.config_binary
        first, rest = map(int, n_parts(c.block_n))
        return c.block_m // (c.num_warps // 4), (first, rest) if rest else (first,)

    def descriptor_type(self, dtype: str, element: str, block: tuple[int, int]) -> str:
        """Gluon wants the layout in shared memory said: the widest swizzle of the elements."""
        from triton.experimental.gluon import language as gl

        layout = gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, dtype))
        return f"tensordesc<{element}[{block[0]}, {block[1]}],{layout!r}>"


def n_parts(block_n: Any) -> tuple[Any, Any]:
    """The greatest power of two in ``block_n``, and the rest: 0 where it is a power of two itself.

    Each part has an accumulator of its own.
    """
    first = 1 << (np.frexp(block_n)[1] - 1)
    return first, block_n - first


def entry_registers(num_warps: Any) -> Any:
    """Registers of every thread at entry, before they are dealt out again.

    The copying warp takes the place of four. ptxas compiles each instruction for so many.
    """
    return SM_REGISTERS // (32 * (num_warps + 4)) // 8 * 8


def multiply_registers(num_warps: Any) -> Any:
    """Registers of a thread that multiplies, in units of 8."""
    per_group = SM_REGISTERS // 128 - COPY_REGISTERS
    return per_group // np.maximum(num_warps // 4, 1) // 8 * 8


FAMILY = WarpSpecializedFamily()
