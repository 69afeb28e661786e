"""Which configurations there are, and which of them may run: the only place where that is said.

:func:`grid` lists the points worth having; :func:`legality` says why one cannot run;
:class:`SearchSpace` is the grid less what cannot run and what would only repeat another point.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from costmodel.config import GemmConfig
from costmodel.specialize import stores_by_descriptor
from costmodel.target import Device, Target
from costmodel.workload import DTYPES, CodeClass, Workload

__all__ = ["SearchSpace", "grid", "launch_blocks", "legality", "workspace_bytes"]

_WORKSPACE_LIMIT_BYTES = 2**30
_MAX_GRID = 2**31 - 1
# ptxas keeps some registers beside the accumulators of one wgmma for addresses and descriptors.
_WGMMA_SPARE_REGISTERS = 26
_SM_REGISTERS = 65536


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
        configs: dict[GemmConfig, GemmConfig] = {}
        rejected: dict[GemmConfig, str] = {}
        redundant: dict[GemmConfig, str] = {}
        aligned = not any(workload.code.needs_repack())
        for config in grid():
            if config.repack and aligned:
                redundant[config] = "repack: every operand is aligned as it is"
                continue
            if reason := legality(config, workload, target.device):
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
    code = workload.code
    checks = (
        _registers(config, device),
        _threads(config),
        _tma(config, code, device),
        _shared(config, code.repacked() if config.repack else code, device),
        _tensor_memory(config, device),
        _workspace(config, workload),
        _grid(config, workload, device),
    )
    return next((reason for reason in checks if reason), "")


def launch_blocks(config: GemmConfig, m: int, n: int, sm_count: int) -> int:
    """How many programs a launch has."""
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    if config.kernel == "tma_persistent":
        return min(tiles, sm_count)
    return tiles * config.split_k


def repack_elements(workload: Workload) -> tuple[int, int]:
    """Elements of the aligned copies of A and of B, 0 for one that is addressed as it is.

    Rows are padded to 16 bytes.
    """
    code = workload.code
    per_16_bytes = 16 // code.itemsize

    def size(rows: int, cols: int, layout: str) -> int:
        if layout == "col":
            rows, cols = cols, rows
        return rows * -(-cols // per_16_bytes) * per_16_bytes

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


def uses_wgmma(config: GemmConfig, arch: int) -> bool:
    """Whether Triton multiplies with Hopper's warpgroup instruction rather than mma.sync."""
    return arch // 10 == 9 and config.block_m >= 64 and config.num_warps >= 4


def shared_bytes_at_least(config: GemmConfig, code: CodeClass, arch: int) -> int:
    """Shared memory that the pipeline's buffers take for certain.

    A warpgroup instruction reads its operands while the next stage is being written, so there are
    as many buffers as stages; mma.sync first loads them to registers and needs one fewer. An
    asynchronous copy moves at least 4 bytes: an operand aligned to 2 has no pipeline.
    """
    item = code.itemsize
    buffers = config.num_stages if uses_wgmma(config, arch) else max(config.num_stages - 1, 0)
    if config.num_stages == 1:
        buffers = 0  # then the only buffer may be reused by the epilogue, or be in registers
    a = config.block_m * config.block_k * item
    b = config.block_n * config.block_k * item
    if config.kernel != "pointer":
        epilogue = 0
        if config.kernel == "tma_persistent" and stores_by_descriptor(code):
            # The store of one tile overlaps the loads of the next: the tile has its own place.
            size = config.block_m * config.block_n * DTYPES[code.out_dtype]
            epilogue = size // 2 if config.halves else size
        return buffers * (a + b) + epilogue
    a_buffers = buffers if code.a_align >= 4 and code.a_layout != "strided" else 0
    b_buffers = buffers if code.b_align >= 4 and code.b_layout != "strided" else 0
    return a_buffers * a + b_buffers * b


def _registers(config: GemmConfig, device: Device) -> str:
    threads = 32 * config.num_warps
    limit = min(config.maxnreg or 255, _SM_REGISTERS // threads)
    if config.maxnreg and config.maxnreg < 32:
        return f"registers: maxnreg={config.maxnreg} is under the 32 that addressing takes"
    if config.maxnreg > 255:
        return f"registers: maxnreg={config.maxnreg} is over the 255 that a thread can have"
    if config.maxnreg % 8:
        return f"registers: maxnreg={config.maxnreg} is no multiple of 8"
    if uses_wgmma(config, device.arch):
        groups = config.num_warps // 4
        groups_n = max(groups // (config.block_m // 64), 1)
        # One instruction holds 64 x N/128 accumulators a thread, and ptxas cannot spill them.
        width = min(config.block_n // groups_n, 256)
        need = width // 2 + _WGMMA_SPARE_REGISTERS
        if limit < need:
            return f"registers: one wgmma of width {width} needs {need}, the limit is {limit}"
    return ""


def _threads(config: GemmConfig) -> str:
    threads = 32 * config.num_warps
    return f"threads: {threads} pass the 1024 of a block" if threads > 1024 else ""


def _tma(config: GemmConfig, code: CodeClass, device: Device) -> str:
    if config.kernel == "pointer":
        return "repack: the pointer kernel addresses any operand" if config.repack else ""
    if device.arch < 90:
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
    need = shared_bytes_at_least(config, code, device.arch)
    if need > device.shared_bytes:
        return f"shared memory: the buffers take {need} bytes, a block has {device.shared_bytes}"
    return ""


def _tensor_memory(config: GemmConfig, device: Device) -> str:
    if device.arch // 10 != 10:
        return ""
    columns = config.block_n * max(config.block_m // 128, 1)
    return f"tensor memory: {columns} columns of 512" if columns > 512 else ""


def _workspace(config: GemmConfig, workload: Workload) -> str:
    need = workspace_bytes(config, workload.m, workload.n)
    if config.repack:
        need += sum(repack_elements(workload)) * workload.code.itemsize
    if need > _WORKSPACE_LIMIT_BYTES:
        return f"workspace: partial sums and copies take {need} bytes of {_WORKSPACE_LIMIT_BYTES}"
    return ""


def _grid(config: GemmConfig, workload: Workload, device: Device) -> str:
    blocks = launch_blocks(config, workload.m, workload.n, device.sm_count)
    return f"grid: {blocks} programs pass 2**31 - 1" if blocks > _MAX_GRID else ""


def _idle_splits(config: GemmConfig, workload: Workload) -> str:
    """Splits past the steps of K would add nothing but idle programs."""
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


@functools.cache
def grid() -> tuple[GemmConfig, ...]:
    """Every point worth having on some workload or device; none twice."""
    points = (*_pointer(), *_pointer_split(), *_small(), *_tma_plain(), *_tma_split(),
              *_tma_persistent())  # fmt: skip
    points = (*points, *_group_variants(points), *_register_variants(points))
    return tuple(dict.fromkeys((*points, *_repack_variants(points))))


def _tiles(rows: tuple[int, ...], columns: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return ((m, n) for m in rows for n in columns if 512 <= m * n <= 32768)


def _warps(area: int) -> tuple[int, ...]:
    """Warp counts that give a thread a sensible share of the tile."""
    return {512: (2, 4), 1024: (2, 4), 2048: (4,), 4096: (4,), 8192: (4, 8), 16384: (4, 8)}.get(
        area, (8,)
    )


def _pointer() -> Iterator[GemmConfig]:
    for m, n in _tiles((16, 32, 64, 128, 256), (16, 32, 64, 128, 256)):
        for k in (32, 64, 128):
            for warps in _warps(m * n):
                for stages in (2, 3, 4, 5) if k < 128 else (2, 3, 5):
                    yield GemmConfig("pointer", m, n, k, warps, stages)


def _pointer_split() -> Iterator[GemmConfig]:
    for m, n in _tiles((16, 32, 64, 128), (32, 64, 128)):
        for k in (64, 128):
            for stages in (3, 5):
                for split in (2, 4, 8, 16):
                    yield GemmConfig("pointer", m, n, k, 4, stages, split_k=split)


def _small() -> Iterator[GemmConfig]:
    """The rule for small sizes chooses among these."""
    for m, n in _tiles((16, 32, 64), (32, 64)):
        for k in (16, 32):
            for warps in (1, 2, 4):
                for stages in (1, 2):
                    yield GemmConfig("pointer", m, n, k, warps, stages)


def _tma_plain() -> Iterator[GemmConfig]:
    for m, n in _tiles((16, 32, 64, 128, 256), (32, 64, 128, 256)):
        for k in (64, 128, 256):
            for warps in _warps(m * n):
                for stages in (3, 4, 5, 6, 8):
                    if k == 256 and (m * n > 4096 or stages > 5):
                        continue
                    for halves in (False, True) if m * n >= 16384 else (False,):
                        yield GemmConfig("tma", m, n, k, warps, stages, halves=halves)


def _tma_split() -> Iterator[GemmConfig]:
    for m, n in _tiles((16, 32, 64, 128), (32, 64, 128, 256)):
        for k in (64, 128, 256) if m * n <= 2048 else (64, 128):
            for stages in (4, 6) if m * n <= 8192 else (3, 4):
                warps = 8 if m * n > 16384 else 4
                for split in (2, 4, 8, 16) if m * n <= 8192 else (2, 4, 8):
                    yield GemmConfig("tma", m, n, k, warps, stages, split_k=split)


def _tma_persistent() -> Iterator[GemmConfig]:
    for m, n in _tiles((64, 128, 256), (64, 128, 256)):
        for k in (64, 128):
            for warps in _warps(m * n):
                for stages in (3, 4, 5, 6):
                    for halves in (False, True) if m * n >= 16384 else (False,):
                        for flatten in (False, True):
                            yield GemmConfig(
                                "tma_persistent", m, n, k, warps, stages,
                                halves=halves, flatten=flatten,
                            )  # fmt: skip


def _group_variants(points: tuple[GemmConfig, ...]) -> Iterator[GemmConfig]:
    """Other tile orders, for the large tiles that large problems want."""
    for point in points:
        large = min(point.block_m, point.block_n) >= 128 and point.block_k == 64
        if large and point.split_k == 1 and point.num_stages in (3, 4):
            for group in (1, 4, 16):
                yield replace(point, group_m=group)


def _register_variants(points: tuple[GemmConfig, ...]) -> Iterator[GemmConfig]:
    """Register limits, where they may buy another block per multiprocessor."""
    for point in points:
        area = point.block_m * point.block_n
        if point.split_k > 1 or point.halves or point.block_k != 64 or point.num_stages != 4:
            continue
        if point.kernel == "tma_persistent" or area < 2048:
            continue
        for limit in (80, 96, 128, 160):
            yield replace(point, maxnreg=limit)


def _repack_variants(points: tuple[GemmConfig, ...]) -> Iterator[GemmConfig]:
    """The TMA kernels for operands that TMA cannot address as they are.

    They pay for large products, so the smallest tiles are left out.
    """
    for point in points:
        if point.kernel != "pointer" and point.block_m * point.block_n >= 2048:
            yield replace(point, repack=True)
