"""A kernel family: all that the host knows of one kernel.

A family is one file in ``gemm/kernels/`` and one line in its ``__init__``. The defaults here are
those of a kernel that takes plain pointers and computes one tile of C in each program.

Methods with an argument ``c`` do arithmetic that works on one configuration and on the columns of
:func:`costmodel.gemm.space.grid_columns`: each rule is written once, for one configuration and for
the whole grid.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from costmodel.files import Named
from costmodel.gemm.config import ConfigBinary, GemmConfig, Specialization
from costmodel.gemm.kernels import known
from costmodel.gemm.workload import CodeClass, Matrix, Workload
from costmodel.hardware.architectures import Architecture
from costmodel.hardware.target import Device

MAX_GRID = 2**31 - 1  # programs and tiles are counted in 32 bits
WORKSPACE_LIMIT_BYTES = 2**30
# ptxas keeps some registers beside the accumulators of one wgmma for addresses and descriptors.
WGMMA_SPARE_REGISTERS = 26


class Check(NamedTuple):
    """One rule: where it is broken, and the reason to give there.

    Attributes:
        broken: a bool, or bool [n] of columns; a bool holds for all of them.
        text: the reason, with ``{}`` for each of the values.
        values: numbers, or columns of them.
    """

    broken: Any
    text: str
    values: tuple[Any, ...] = ()

    def reason(self) -> str:
        return self.text.format(*self.values)


Checks = Iterator[Check]


def is_wide(block_m: Any, num_warps: Any, code: CodeClass, architecture: Architecture) -> Any:
    """Return True where Triton multiplies with the instruction of four warps or of a block.

    That needs 64 rows. Otherwise it uses ``mma.sync``, or FMA for what no tensor core multiplies.
    """
    takes = architecture.is_wide and code.kind in architecture.tensor_rates
    return (block_m >= 64) & (num_warps >= 4) & takes


def stores_by_descriptor(code: CodeClass) -> bool:
    """Return True if TMA may write C: row-major and 16-byte aligned."""
    return code.c_layout == "row" and code.c_align == 16


def tiles(rows: tuple[int, ...], columns: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Pairs of sides of a tile that is neither too small nor too large."""
    return ((m, n) for m in rows for n in columns if 512 <= m * n <= 32768)


def warps(area: int) -> tuple[int, ...]:
    """Warp counts that give a thread a sensible share of the tile."""
    if area <= 1024:
        return (2, 4)
    if area <= 4096:
        return (4,)
    return (4, 8) if area <= 16384 else (8,)


def splits(area: int) -> tuple[int, ...]:
    """Split-K factors; a small tile has few partial sums to add up, so it may have many splits."""
    return (2, 4, 8, 16, 32) if area <= 1024 else (2, 4, 8, 16)


class KernelFamily:
    """All that is known of one kernel.

    Attributes:
        name: of the kernel in a configuration.
        kernel: the module and the function of its code, ``module:function``.
        beside: kernels that a launch may run before it, in the same form. They are part of what is
            measured, and so of the hash.
        traits: columns of features that are 1 for this kernel (``is_pointer``, ``is_tma``,
            ``is_persistent``, ``is_warp_specialized``): how the estimate and the models see it.
            Other names are ignored.
        is_persistent: each program computes tile after tile, and there are as many programs as
            multiprocessors.
        reads_by_descriptor: TMA reads A and B, so they must be aligned, or copied (``repack``).
        is_masked: the tail of K is masked, so whether K is a multiple of BLOCK_K is in the binary.
        splits_k: programs may share the K of one tile.
        powers_of_two: fields of a configuration that must be a power of two.
        group_depths: numbers of stages for which the grid has points of other tile orders.
        limits_registers: the grid has points with register limits.
    """

    name: str
    kernel: str
    beside: tuple[str, ...] = ()
    traits: tuple[str, ...] = ("is_pointer",)
    is_persistent: bool = False
    reads_by_descriptor: bool = False
    is_masked: bool = False
    splits_k: bool = False
    powers_of_two: tuple[str, ...] = ("block_m", "block_n", "block_k", "num_warps")
    group_depths: tuple[int, ...] = (3, 4)
    limits_registers: bool = True

    # --- the grid ---------------------------------------------------------------------------------

    def points(self) -> Iterator[GemmConfig]:
        """Configurations worth having on some workload or device."""
        raise NotImplementedError

    # --- legality ---------------------------------------------------------------------------------

    def checks(self, c: Any, code: CodeClass, device: Device) -> Checks:
        """Rules that do not depend on the sizes. The first that is broken is the reason given."""
        yield from self.own_checks(c, code, device)
        yield from self.register_checks(c, code, device)
        row = device.architecture
        threads = 32 * c.num_warps
        yield Check(threads > row.block_threads, "threads: {} pass the {} of a block",
                    (threads, row.block_threads))  # fmt: skip
        yield from self.operand_checks(c, code, device)
        need = self.shared_bytes_at_least(c, code, row)
        yield Check(need > device.shared_bytes,
                    "shared memory: the buffers take {} bytes, a block has {}",
                    (need, device.shared_bytes))  # fmt: skip
        if row.tensor_memory and code.kind in row.tensor_rates:
            columns = c.block_n * np.maximum(c.block_m // 128, 1)
            yield Check(columns > row.tensor_memory, "tensor memory: {} columns of {}",
                        (columns, row.tensor_memory))  # fmt: skip

    def own_checks(self, c: Any, code: CodeClass, device: Device) -> Checks:
        """Rules of this kernel alone."""
        return iter(())

    def register_checks(self, c: Any, code: CodeClass, device: Device) -> Checks:
        """Rules for ``maxnreg`` and the registers of one wide instruction; spills are legal."""
        limited = c.maxnreg > 0
        for broken, text in (
            (c.maxnreg < 32, "is under the 32 that addressing takes"),
            (c.maxnreg > 255, "is over the 255 that a thread can have"),
            (c.maxnreg % 8 > 0, "is no multiple of 8"),
        ):
            yield Check(limited & broken, "registers: maxnreg={} " + text, (c.maxnreg,))
        row = device.architecture
        if row.instruction == "wgmma":
            groups_n = np.maximum(c.num_warps // 4 // np.maximum(c.block_m // 64, 1), 1)
            limit = np.minimum(
                np.where(limited, c.maxnreg, 255), row.registers // (32 * c.num_warps)
            )
            width = np.minimum(c.block_n // groups_n, 256)
            yield one_instruction(is_wide(c.block_m, c.num_warps, code, row), width, limit)

    def operand_checks(self, c: Any, code: CodeClass, device: Device) -> Checks:
        """Rules for how A, B and C are addressed."""
        if not self.reads_by_descriptor:
            yield Check(c.repack, f"repack: the {self.name} kernel addresses any operand")
            return
        if not device.architecture.tma:
            text = "TMA: sm_{} has no tensor memory accelerator (sm_90 on)"
            yield Check(True, text, (device.arch,))
        as_it_is = c.repack == 0
        for x in code.matrices[:2]:
            name, strided = x.name.upper(), x.layout == "strided"
            yield Check(as_it_is & strided, f"TMA: {name} has no contiguous dimension")
            text = f"TMA: {name} is aligned to {x.align} bytes, its rows must be to 16"
            yield Check(as_it_is & (x.align < 16), text)

    def shared_bytes_at_least(self, c: Any, code: CodeClass, architecture: Architecture) -> Any:
        """Bytes of shared memory that the pipeline's buffers take at least.

        A warpgroup instruction reads its operands while the next stage is being written, so there
        are as many buffers as stages; mma.sync and FMA first load them to registers and need one
        fewer. A single buffer may be reused by the epilogue, or be in registers.
        """
        stages = c.num_stages
        wgmma = is_wide(c.block_m, c.num_warps, code, architecture)
        wgmma &= architecture.instruction == "wgmma"
        buffers = np.where(stages == 1, 0, np.where(wgmma, stages, stages - 1))
        a, b = self.pipelined(code)
        return buffers * c.block_k * (a * c.block_m + b * c.block_n) * code.itemsize

    def pipelined(self, code: CodeClass) -> list[bool]:
        """Return True for A, and for B, if it is copied ahead of its use.

        TMA copies any operand; an asynchronous copy through pointers moves at least 4 bytes.
        """
        return [
            self.reads_by_descriptor or (x.align >= 4 and x.layout != "strided")
            for x in code.matrices[:2]
        ]

    def size_checks(self, c: Any, workload: Workload, device: Device) -> Checks:
        """Rules that depend on the sizes."""
        need = partial_bytes(c, workload.m, workload.n)
        copies = sum(repack_elements(workload)) * workload.code.itemsize
        need = need + c.repack * float(copies)
        text = f"workspace: partial sums and copies take {{:.0f}} bytes of {WORKSPACE_LIMIT_BYTES}"
        yield Check(need > WORKSPACE_LIMIT_BYTES, text, (need,))
        tiles_n = -(-workload.n // c.block_n)
        tiles = -(-workload.m // c.block_m) * tiles_n
        if self.is_persistent:
            # To see the end, a program steps past the last tile by the number of programs.
            yield Check(tiles + device.sm_count > MAX_GRID,
                        "grid: {} tiles and a step past them pass 2**31 - 1", (tiles,))  # fmt: skip
        else:
            blocks = tiles * c.split_k
            yield Check(blocks > MAX_GRID, "grid: {} programs pass 2**31 - 1", (blocks,))
        group = c.group_m * tiles_n
        yield Check(group > MAX_GRID, "grid: {} tiles in a group of {} rows pass 2**31 - 1",
                    (group, c.group_m))  # fmt: skip

    # --- a launch ---------------------------------------------------------------------------------

    def stored_columns(self, c: Any) -> Any:
        """Columns of the block in shared memory through which a tile of C is stored, in parts."""
        return c.block_n // (1 + c.halves)

    # --- the binary -------------------------------------------------------------------------------

    def options(self, binary: ConfigBinary) -> Named:
        """Return the options to compile with."""
        options = {"num_warps": binary.num_warps, "num_stages": binary.num_stages}
        return options | ({"maxnreg": binary.maxnreg} if binary.maxnreg else {})

    def source_class(self) -> type[Any]:
        """Return Triton's class of the source."""
        from triton.compiler import ASTSource

        return ASTSource

    def constants(self, spec: Specialization) -> Named:
        """Return the arguments of the kernel whose value is part of the binary.

        The caller adds ``ACTIVATION``, and ``bias_ptr`` where there is no bias, for every kernel.
        """
        binary, code = spec.config_binary, spec.code
        baked = {
            "BLOCK_M": binary.block_m, "BLOCK_N": binary.block_n, "BLOCK_K": binary.block_k,
            "WIDE": code.wide, "PRECISION": code.data_type.precision,
        }  # fmt: skip
        # Triton pipelines what it knows to be contiguous. Descriptors hold the strides of A and B.
        for x in code.matrices[2 * self.reads_by_descriptor :]:
            if x.layout != "strided":
                baked[f"stride_{x.name}{x.in_memory[1]}"] = 1
        if self.is_masked:
            baked["EVEN_K"] = spec.even_k
        if self.splits_k:
            baked["SPLIT"] = binary.split
            if not binary.split:
                baked |= {"partial_ptr": None, "arrivals_ptr": None, "SPLIT_K": 1}
        return baked

    def descriptor_blocks(self, spec: Specialization) -> dict[str, tuple[int, int]]:
        """Return the shapes of the blocks that descriptors copy, by argument name.

        A shape is in the order of memory, the names in that of the kernel's arguments; empty
        without descriptors.
        """
        return {}

    def descriptor_type(self, dtype: str, element: str, block: tuple[int, int]) -> str:
        """Return Triton's type of the descriptor of blocks of this shape.

        Args:
            dtype: type of the elements.
            element: Triton's name of that type.
        """
        return f"tensordesc<{element}[{block[0]}, {block[1]}]>"


def one_instruction(where: Any, width: Any, limit: Any) -> Check:
    """Check that a thread can hold the accumulators of one wgmma: ptxas cannot spill them.

    The accumulators are 64 x width, spread over 128 threads.
    """
    need = width // 2 + WGMMA_SPARE_REGISTERS
    text = "registers: one wgmma of width {} needs {}, the limit is {}"
    return Check(where & (limit < need), text, (width, need, limit))


def partial_bytes(c: Any, m: int, n: int) -> Any:
    """Return the bytes of the partial sums of split-K (float32), 0 without a split.

    It is a float, since 64-bit integers may not hold it; it is exact up to the limit.
    """
    tiles = -(-m // c.block_m) * -(-n // c.block_n)
    return (c.split_k > 1) * (4.0 * tiles * c.split_k * c.block_m * c.block_n)


def repack_elements(workload: Workload) -> tuple[int, int]:
    """Return how many elements the aligned copies of A and of B have; 0 for one that is not copied.

    Rows are padded to 128 bytes, a line of the cache, so that TMA's rows of 128 bytes cross no
    more lines than they must. Rows under 128 bytes are padded only to the 16 bytes that TMA needs.
    """

    def size(x: Matrix, is_copied: bool) -> int:
        rows, cols = (getattr(workload, name) for name in x.in_memory)
        unit = (128 if cols * x.itemsize >= 128 else 16) // x.itemsize
        return rows * -(-cols // unit) * unit if is_copied else 0

    a, b = map(size, workload.code.matrices[:2], workload.code.needs_repack())
    return a, b


# --- the families there are -----------------------------------------------------------------------


def families() -> dict[str, KernelFamily]:
    """Return all families by name, in the order of the grid."""
    return known()


def family(name: str) -> KernelFamily:
    """Return a family by the name of its kernel."""
    return known()[name]
