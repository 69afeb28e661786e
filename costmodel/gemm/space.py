"""Which configurations may run: the only place where that is said.

:func:`legality` says why one cannot run; :class:`SearchSpace` is the grid less what cannot run and
what would only repeat another point.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, get_args

from costmodel.gemm.config import GemmConfig, KernelName, n_parts, stored_columns
from costmodel.gemm.grid import grid
from costmodel.gemm.kernel_code import kernel_trouble
from costmodel.gemm.specialize import entry_registers, multiply_registers, stores_by_descriptor
from costmodel.gemm.workload import CodeClass, Workload
from costmodel.hardware.architectures import Architecture
from costmodel.hardware.target import Device, Target

__all__ = ["SearchSpace", "launch_blocks", "legality", "workspace_bytes"]

WORKSPACE_LIMIT_BYTES = 2**30
MAX_GRID = 2**31 - 1  # programs and tiles are counted in 32 bits
# ptxas keeps some registers beside the accumulators of one wgmma for addresses and descriptors.
_WGMMA_SPARE_REGISTERS = 26


@dataclass(frozen=True)
class SearchSpace:
    """The configurations that may run one workload on one target.

    Attributes:
        workload, target: what the space is of.
        configs: legal and distinct, in the order of the grid.
        rejected: why the other points of the grid cannot run.
        redundant: points that would do the same as another, and which.
    """

    workload: Workload
    target: Target
    configs: tuple[GemmConfig, ...]
    rejected: dict[GemmConfig, str]
    redundant: dict[GemmConfig, str]

    @classmethod
    def of(cls, workload: Workload, target: Target) -> SearchSpace:
        """Sort the whole grid. Nothing is compiled, no GPU is asked."""
        possible, impossible, repeated = _by_code(workload.code, target)
        configs: dict[GemmConfig, GemmConfig] = {}
        rejected, redundant = dict(impossible), dict(repeated)
        for config in possible:
            if reason := _size_trouble(config, workload, target.device):
                rejected[config] = reason
                continue
            same = _effective(config, workload)
            if same in configs:
                redundant[config] = f"runs as {configs[same]} does"
            elif reason := _idle_splits(config, workload):
                redundant[config] = reason
            else:
                configs[same] = config
        return cls(workload, target, tuple(configs.values()), rejected, redundant)

    def __len__(self) -> int:
        return len(self.configs)


def legality(config: GemmConfig, workload: Workload, device: Device) -> str:
    """Why this configuration cannot compile or launch; empty if it can.

    Spills are no reason: some spilling configurations win. The first reason found is given.
    """
    return _code_trouble(config, workload.code, device) or _size_trouble(config, workload, device)


@functools.lru_cache(maxsize=64)
def _by_code(
    code: CodeClass, target: Target
) -> tuple[tuple[GemmConfig, ...], dict[GemmConfig, str], dict[GemmConfig, str]]:
    """The grid, sorted by what does not depend on sizes: what is left, impossible, repeated.

    Asked once for each class of code: sorting takes longer than a model takes to rank.
    """
    possible: list[GemmConfig] = []
    rejected: dict[GemmConfig, str] = {}
    redundant: dict[GemmConfig, str] = {}
    aligned = not any(code.needs_repack())
    toolchain = {name: kernel_trouble(name, target.toolchain) for name in get_args(KernelName)}
    for config in grid():
        if config.repack and aligned:
            redundant[config] = "repack: every operand is aligned as it is"
        elif reason := toolchain[config.kernel] or _code_trouble(config, code, target.device):
            rejected[config] = reason
        else:
            possible.append(config)
    return tuple(possible), rejected, redundant


def possible_configs(code: CodeClass, target: Target) -> tuple[GemmConfig, ...]:
    """The points of the grid that may run products of some sizes, in its order."""
    return _by_code(code, target)[0]


def _code_trouble(config: GemmConfig, code: CodeClass, device: Device) -> str:
    checks = (
        _warp_groups(config, code, device),
        _registers(config, code, device),
        _threads(config, device),
        _tma(config, code, device),
        _shared(config, code.repacked() if config.repack else code, device),
        _tensor_memory(config, code, device),
    )
    return next((reason for reason in checks if reason), "")


def _size_trouble(config: GemmConfig, workload: Workload, device: Device) -> str:
    return _workspace(config, workload) or _grid(config, workload, device)


def launch_blocks(config: GemmConfig, m: int, n: int, sm_count: int) -> int:
    """How many programs a launch has."""
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    if is_persistent(config):
        return min(tiles, sm_count)
    return tiles * config.split_k


def is_persistent(config: GemmConfig) -> bool:
    """Whether each program computes tile after tile, and there are as many as multiprocessors."""
    return config.kernel in ("tma_persistent", "warp_specialized")


def repack_elements(workload: Workload) -> tuple[int, int]:
    """Elements of the aligned copies of A and of B, 0 for one that is addressed as it is.

    Rows are padded to 128 bytes, a line of the cache, so that TMA's rows of 128 bytes cross no
    more lines than they must; rows under 128 bytes only to the 16 that TMA asks for.
    """
    code = workload.code

    def size(rows: int, cols: int, layout: str) -> int:
        if layout == "col":
            rows, cols = cols, rows
        unit = (128 if cols * code.itemsize >= 128 else 16) // code.itemsize
        return rows * -(-cols // unit) * unit

    a, b = code.needs_repack()
    return (
        size(workload.m, workload.k, code.a_layout) if a else 0,
        size(workload.k, workload.n, code.b_layout) if b else 0,
    )


def workspace_bytes(config: GemmConfig, m: int, n: int) -> int:
    """Device memory for the partial sums of split-K (float32), 0 without a split."""
    if config.split_k == 1:
        return 0
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    return tiles * config.split_k * config.block_m * config.block_n * 4


def is_wide(block_m: Any, num_warps: Any, code: CodeClass, architecture: Architecture) -> Any:
    """True where Triton multiplies with the instruction of four warps or of a block.

    It takes 64 rows. Otherwise it is ``mma.sync``, or FMA for what no tensor core multiplies.

    Args:
        block_m, num_warps: of one configuration, or columns of them.
    """
    takes = architecture.is_wide and code.kind in architecture.tensor_rates
    return (block_m >= 64) & (num_warps >= 4) & takes


def uses_wgmma(config: GemmConfig, code: CodeClass, architecture: Architecture) -> bool:
    """Return True if Triton multiplies with Hopper's warpgroup instruction."""
    return architecture.instruction == "wgmma" and bool(
        is_wide(config.block_m, config.num_warps, code, architecture)
    )


def shared_bytes_at_least(config: GemmConfig, code: CodeClass, architecture: Architecture) -> int:
    """Shared memory that the pipeline's buffers take for certain.

    A warpgroup instruction reads its operands while the next stage is being written, so there are
    as many buffers as stages; mma.sync and FMA first load them to registers and need one fewer.
    An asynchronous copy moves at least 4 bytes: an operand aligned to 2 has no pipeline.
    """
    item = code.itemsize
    if config.kernel == "warp_specialized":
        return _ring_bytes(config, code)
    wgmma = uses_wgmma(config, code, architecture)
    buffers = config.num_stages if wgmma else max(config.num_stages - 1, 0)
    if config.num_stages == 1:
        buffers = 0  # then the only buffer may be reused by the epilogue, or be in registers
    a = config.block_m * config.block_k * item
    b = config.block_n * config.block_k * item
    if config.kernel != "pointer":
        epilogue = 0
        if config.kernel == "tma_persistent" and stores_by_descriptor(code):
            # The store of one tile overlaps the loads of the next: the tile has its own place.
            width = stored_columns(config.kernel, config.block_n, config.halves)
            epilogue = config.block_m * width * code.out_itemsize
        return buffers * (a + b) + epilogue
    a_buffers = buffers if code.a_align >= 4 and code.a_layout != "strided" else 0
    b_buffers = buffers if code.b_align >= 4 and code.b_layout != "strided" else 0
    return a_buffers * a + b_buffers * b


def _ring_bytes(config: GemmConfig, code: CodeClass) -> int:
    """Stages, the blocks that C is stored from, and two barriers a stage."""
    width = stored_columns(config.kernel, config.block_n, config.halves)
    stage = (config.block_m + config.block_n) * config.block_k * code.itemsize
    c_block = config.block_m * width * code.out_itemsize
    return config.num_stages * (stage + 16) + c_block


def _warp_groups(config: GemmConfig, code: CodeClass, device: Device) -> str:
    """What the warp-specialised kernel asks for; nothing of the others."""
    if config.kernel != "warp_specialized":
        return ""
    if device.architecture.instruction != "wgmma":
        return f"warp groups: sm_{device.arch} has no wgmma (sm_90 only)"
    if code.itemsize != 2:
        return f"warp groups: {code.dtype} operands have no kernel there, 16-bit ones do"
    if config.num_warps not in (8, 12):
        return f"warp groups: {config.num_warps} warps multiply; it takes 8 or 12"
    if config.split_k > 1 or config.maxnreg or config.flatten:
        return "warp groups: no split-K, maxnreg or flatten; the kernel has its own ways"
    groups = config.num_warps // 4
    rows, odd = divmod(config.block_m, groups)
    if odd or rows not in (64, 128, 256):
        return f"warp groups: {config.block_m} rows cannot be dealt to {groups} groups in 64s"
    first, rest = n_parts(config.block_n)
    if first > 256 or first < 32 or rest & (rest - 1) or 0 < rest < 16:
        return f"warp groups: {config.block_n} columns are no one or two powers of two, 16 to 256"
    if rest and config.halves:
        return "warp groups: two accumulators are stored in parts as wide as the second"
    return ""


def _registers(config: GemmConfig, code: CodeClass, device: Device) -> str:
    threads = 32 * config.num_warps
    if config.kernel == "warp_specialized":
        need = config.block_m * config.block_n // threads + _WGMMA_SPARE_REGISTERS
        dealt = multiply_registers(config.num_warps)
        if need > dealt:
            return f"registers: {need} a thread, {dealt} are there"
        return _one_instruction(n_parts(config.block_n)[0], entry_registers(config.num_warps))
    limit = min(config.maxnreg or 255, device.architecture.registers // threads)
    if config.maxnreg and config.maxnreg < 32:
        return f"registers: maxnreg={config.maxnreg} is under the 32 that addressing takes"
    if config.maxnreg > 255:
        return f"registers: maxnreg={config.maxnreg} is over the 255 that a thread can have"
    if config.maxnreg % 8:
        return f"registers: maxnreg={config.maxnreg} is no multiple of 8"
    if uses_wgmma(config, code, device.architecture):
        groups = config.num_warps // 4
        groups_n = max(groups // (config.block_m // 64), 1)
        return _one_instruction(min(config.block_n // groups_n, 256), limit)
    return ""


def _one_instruction(width: int, limit: int) -> str:
    """One wgmma holds 64 x width / 128 accumulators a thread, and ptxas cannot spill them."""
    need = width // 2 + _WGMMA_SPARE_REGISTERS
    if limit < need:
        return f"registers: one wgmma of width {width} needs {need}, the limit is {limit}"
    return ""


def _threads(config: GemmConfig, device: Device) -> str:
    threads, most = 32 * config.num_warps, device.architecture.block_threads
    return f"threads: {threads} pass the {most} of a block" if threads > most else ""


def _tma(config: GemmConfig, code: CodeClass, device: Device) -> str:
    if config.kernel == "pointer":
        return "repack: the pointer kernel addresses any operand" if config.repack else ""
    if config.kernel == "warp_specialized" and not stores_by_descriptor(code):
        return "TMA: C must be row-major and aligned to 16 bytes, it is stored by TMA only"
    if not device.architecture.tma:
        return f"TMA: sm_{device.arch} has no tensor memory accelerator (sm_90 on)"
    if config.repack:
        return ""
    for operand, layout, align in (
        ("A", code.a_layout, code.a_align), ("B", code.b_layout, code.b_align),
    ):  # fmt: skip
        if layout == "strided":
            return f"TMA: {operand} has no contiguous dimension"
        if align < 16:
            return f"TMA: {operand} is aligned to {align} bytes, its rows must be to 16"
    return ""


def _shared(config: GemmConfig, code: CodeClass, device: Device) -> str:
    need = shared_bytes_at_least(config, code, device.architecture)
    if need > device.shared_bytes:
        return f"shared memory: the buffers take {need} bytes, a block has {device.shared_bytes}"
    return ""


def _tensor_memory(config: GemmConfig, code: CodeClass, device: Device) -> str:
    row = device.architecture
    if not row.tensor_memory or code.kind not in row.tensor_rates:
        return ""
    columns, most = config.block_n * max(config.block_m // 128, 1), row.tensor_memory
    return f"tensor memory: {columns} columns of {most}" if columns > most else ""


def _workspace(config: GemmConfig, workload: Workload) -> str:
    if config.split_k == 1 and not config.repack:
        return ""
    need = workspace_bytes(config, workload.m, workload.n)
    if config.repack:
        need += sum(repack_elements(workload)) * workload.code.itemsize
    if need > WORKSPACE_LIMIT_BYTES:
        return f"workspace: partial sums and copies take {need} bytes of {WORKSPACE_LIMIT_BYTES}"
    return ""


def _grid(config: GemmConfig, workload: Workload, device: Device) -> str:
    tiles_n = -(-workload.n // config.block_n)
    tiles = -(-workload.m // config.block_m) * tiles_n
    if is_persistent(config):
        # A program steps past the last tile, by as many as there are programs, to see the end.
        if tiles + device.sm_count > MAX_GRID:
            return f"grid: {tiles} tiles and a step past them pass 2**31 - 1"
    elif (blocks := tiles * config.split_k) > MAX_GRID:
        return f"grid: {blocks} programs pass 2**31 - 1"
    # Of a configuration of the grid it never does: those with more than 8 have wide tiles.
    if (group := config.group_m * tiles_n) > MAX_GRID:
        return f"grid: {group} tiles in a group of {config.group_m} rows pass 2**31 - 1"
    return ""


def _idle_splits(config: GemmConfig, workload: Workload) -> str:
    """Splits past the steps of K would add nothing but idle programs."""
    if config.split_k == 1:
        return ""
    steps = max(-(-workload.k // config.block_k), 1)
    per_split = -(-steps // config.split_k)
    busy = -(-steps // per_split)
    if config.split_k > busy:
        return f"split-K: K has {steps} steps of {config.block_k}, {busy} splits do the same"
    return ""


def _effective(config: GemmConfig, workload: Workload) -> GemmConfig:
    """The configuration with launch arguments cut to what makes a difference."""
    tiles_m = max(-(-workload.m // config.block_m), 1)
    return config if config.group_m <= tiles_m else replace(config, group_m=tiles_m)
