"""Generations of GPUs: one row each. A new architecture with a known instruction is a new row only.

Figures: NVIDIA's programming guides (compute capabilities) and white papers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SM_REGISTERS = 65_536
"""Registers of a multiprocessor, on every GPU since 2012; also the most that one block may have."""


@dataclass(frozen=True)
class Architecture:
    """The properties of every card of one compute capability.

    Attributes:
        capability: compute capability times ten (90).
        name: the generation.
        instruction: the widest tensor-core instruction: ``mma.sync`` of a warp, ``wgmma`` of four
            warps, or ``tcgen05`` of a block.
        tensor_flops: dense 16-bit operations of a multiprocessor in a clock, on tensor cores.
        tensor_rates: rate of each data type on the tensor cores, over that of 16 bits. Other types
            take the FMA units.
        fma_units: float32 units of a multiprocessor.
        max_warps, max_blocks: the most that a multiprocessor holds.
        tma: a tensor memory accelerator copies tiles by descriptor.
        tensor_memory: columns of tensor memory, 0 without one.
        registers: those of a multiprocessor; also the most that a block may have.
        block_threads: the most threads of a block.
        reserved_shared_bytes: shared memory that CUDA keeps for each block. CUDA's tables of limits
            do not include it.
        ptxas_counts_reserved: ptxas adds that memory to the shared memory that it reports.
    """

    capability: int
    name: str
    instruction: str
    tensor_flops: int
    tensor_rates: Mapping[str, float]
    fma_units: int = 128
    max_warps: int = 64
    max_blocks: int = 32
    tma: bool = False
    tensor_memory: int = 0
    registers: int = SM_REGISTERS
    block_threads: int = 1024
    reserved_shared_bytes: int = 1024
    ptxas_counts_reserved: bool = False

    @property
    def is_wide(self) -> bool:
        """True if its widest instruction reads operands from shared memory."""
        return self.instruction != "mma.sync"


_AMPERE = MappingProxyType({"float16": 1.0, "bfloat16": 1.0, "tf32": 0.5, "int8": 2.0})
_HOPPER = MappingProxyType({**_AMPERE, "float8_e4m3fn": 2.0, "float8_e5m2": 2.0})

_ROWS = (
    Architecture(80, "Ampere", "mma.sync", 2048, _AMPERE, fma_units=64),
    Architecture(86, "Ampere", "mma.sync", 1024, _AMPERE, max_warps=48, max_blocks=16),
    Architecture(89, "Ada", "mma.sync", 1024, _HOPPER, max_warps=48, max_blocks=24),
    Architecture(90, "Hopper", "wgmma", 4096, _HOPPER, tma=True,
                 ptxas_counts_reserved=True),
    Architecture(100, "Blackwell", "tcgen05", 8192, _HOPPER, tma=True,
                 tensor_memory=512, ptxas_counts_reserved=True),
    Architecture(120, "Blackwell", "mma.sync", 1024, _HOPPER, max_warps=48, max_blocks=24,
                 tma=True, ptxas_counts_reserved=True),
)  # fmt: skip
ARCHITECTURES = {row.capability: row for row in _ROWS}
"""All rows, by capability, in ascending order."""


def architecture(capability: int) -> Architecture:
    """Return the row of a capability; if there is none, the nearest one before it, else the first.

    A later version of a generation has what the earlier ones have.
    """
    before = (row for row in ARCHITECTURES if row <= capability)
    return ARCHITECTURES[max(before, default=min(ARCHITECTURES))]
