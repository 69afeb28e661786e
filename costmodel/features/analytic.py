"""The analytic model of a launch: occupancy, waves, traffic, bounds of its time.

Nothing is timed; a few constants of the estimate are fitted (``estimate.py``). The numbers are
features of a learned model. Their ratios matter, their absolute accuracy does not.
"""

import numpy as np

from costmodel.arrays import Floats, FloatsByName
from costmodel.data.candidates import ARTIFACT_COLUMNS, CONFIG_COLUMNS, Candidates
from costmodel.features.estimate import ESTIMATE_FEATURES, L2_SPEEDUP, estimate_columns
from costmodel.gemm.family import is_wide
from costmodel.gemm.space import Columns
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Device, Target

# The binary, known or estimated; the grid; padding, as useful over padded work; traffic; lower
# bounds of the time, as multiples of the workload's roofline, and the roofline itself.
_FEATURES = """
    registers_used shared_used occupancy warps_per_sm accumulators_per_thread wgmma_shape
    rows_per_warp
    tiles_m tiles_n tiles programs steps steps_per_program tiles_per_sm waves wave_efficiency
    last_wave sm_balance group_fill
    useful_m useful_n useful_k useful even_k
    tile_intensity program_bytes operand_traffic dram_traffic wave_footprint_l2 split_traffic
    bytes_in_flight stages_per_step resident
    compute_bound dram_bound l2_bound bound roofline_us
"""
ANALYTIC_FEATURES = (*_FEATURES.split(), *ESTIMATE_FEATURES)

_OTHER_REGISTERS = 48  # addresses, loop counters and operand fragments beside the accumulators
_LATENCY_US = 0.8  # one trip to device memory under load: it sets how much must be in flight


def occupancy(registers: Floats, shared_bytes: Floats, num_warps: Floats, device: Device) -> Floats:
    """Return how many blocks of a kernel fit one multiprocessor: float64 [n], at least 1.

    Args:
        registers: per thread, [n].
        shared_bytes: per block, [n].
        num_warps: per block, [n].

    Source: NVIDIA's occupancy tables; registers are given to warps in units of 256.
    """
    per_warp = np.ceil(np.maximum(registers, 16) * 32 / 256) * 256
    row = device.architecture
    by_registers = np.floor(np.floor(row.registers / per_warp) / num_warps)
    by_shared = np.floor(device.sm_shared_bytes / (shared_bytes + row.reserved_shared_bytes))
    by_warps = np.floor(row.max_warps / num_warps)
    blocks = np.minimum(np.minimum(by_registers, by_shared), np.minimum(by_warps, row.max_blocks))
    return np.maximum(blocks, 1.0)


def analytic_columns(
    workload: Workload, candidates: Candidates, target: Target, *, binary: bool
) -> FloatsByName:
    """Return the columns of :data:`ANALYTIC_FEATURES`, float64 [n] each.

    Args:
        binary: take registers and shared memory from the artifacts where they are known;
            otherwise all are estimated from the configuration.
    """
    device = target.device
    c = Columns(**dict(zip(CONFIG_COLUMNS, candidates.config_columns.T)))
    # A block that stays is alone on its multiprocessor, and stores one tile while the stages
    # already hold the next.
    c.stays = (c.is_persistent > 0) | (c.is_warp_specialized > 0)
    c.stage_bytes = (c.block_m + c.block_n) * c.block_k * workload.code.itemsize
    m, n, k = (float(max(side, 1)) for side in workload.sizes)
    g = Columns(**_resources(workload, candidates, device, c, binary))
    vars(g).update(_grid(m, n, k, c, g.occupancy, device))
    c.running = np.minimum(g.programs, device.sm_count * g.occupancy)
    vars(g).update(_traffic(workload, m, n, k, c, g, device))

    # Blocks that share a multiprocessor share its arithmetic units: the fullest multiprocessor
    # decides.
    kind = workload.code.kind
    sm_flops_us = device.tflops_of(kind) * 1e6 / device.sm_count
    program_flops = 2 * c.block_m * c.block_n * c.block_k * g.steps_per_program
    compute_us = np.ceil(g.programs / device.sm_count) * program_flops / sm_flops_us
    bytes_us = device.bandwidth_gbs * 1e3
    dram_us = (g.dram_traffic + g.split_traffic) / bytes_us
    l2_us = (g.operand_traffic + g.split_traffic) / (bytes_us * L2_SPEEDUP)
    roofline = workload.roofline_us(device)
    g.compute_bound = compute_us / roofline
    g.dram_bound = dram_us / roofline
    g.l2_bound = l2_us / roofline
    g.bound = np.maximum(np.maximum(compute_us, dram_us), l2_us) / roofline
    g.resident = np.minimum(g.occupancy, np.ceil(g.programs / device.sm_count))
    g.roofline_us = np.full_like(compute_us, roofline)
    return vars(g) | estimate_columns(workload, c, g, device)


def _resources(
    workload: Workload, candidates: Candidates, device: Device, c: Columns, binary: bool
) -> FloatsByName:
    """Return registers, shared memory, and how many blocks then fit a multiprocessor."""
    accumulators = c.block_m * c.block_n / (32 * c.num_warps)
    registers = np.minimum(accumulators + _OTHER_REGISTERS, 255)
    registers = np.where(c.maxnreg > 0, np.minimum(registers, c.maxnreg), registers)
    epilogue = c.block_m * c.stored_n * workload.code.out_itemsize
    pipeline = c.num_stages * c.stage_bytes
    shared = np.where(c.stays, pipeline + epilogue, np.maximum(pipeline, epilogue))
    if binary:
        known = dict(zip(ARTIFACT_COLUMNS[:3], candidates.artifact_columns.T, strict=False))
        there = ~np.isnan(known["registers"])
        registers = np.where(there, known["registers"], registers)
        shared = np.where(there, known["shared_bytes"], shared)
    blocks = occupancy(registers, shared, c.num_warps, device)
    blocks = np.where(c.stays, 1.0, blocks)
    return {
        "registers_used": registers,
        "shared_used": shared,
        "occupancy": blocks,
        "warps_per_sm": blocks * c.num_warps,
        "accumulators_per_thread": accumulators,
        "wgmma_shape": is_wide(c.block_m, c.num_warps, workload.code, device.architecture).astype(
            np.float64
        ),
        "rows_per_warp": c.block_m / c.num_warps,
    }


def _grid(m: float, n: float, k: float, c: Columns, blocks: Floats, device: Device) -> FloatsByName:
    """Return tiles, programs, waves, and the share of them that is useful work."""
    tiles_m, tiles_n = np.ceil(m / c.block_m), np.ceil(n / c.block_n)
    tiles = tiles_m * tiles_n
    programs = tiles * c.split_k
    steps = np.ceil(k / c.block_k)
    steps_per_program = np.ceil(steps / c.split_k)
    slots = device.sm_count * blocks
    waves = programs / slots
    whole = np.ceil(waves)
    per_sm = programs / device.sm_count
    useful_m = m / (tiles_m * c.block_m)
    useful_n = n / (tiles_n * c.block_n)
    useful_k = k / (steps_per_program * c.split_k * c.block_k)
    return {
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
        "tiles": tiles,
        "programs": programs,
        "steps": steps,
        "steps_per_program": steps_per_program,
        "tiles_per_sm": per_sm,
        "waves": waves,
        "wave_efficiency": waves / whole,
        "last_wave": waves - whole + 1,
        "sm_balance": per_sm / np.ceil(per_sm),
        "group_fill": np.minimum(c.group_m, tiles_m) / c.group_m,
        "useful_m": useful_m,
        "useful_n": useful_n,
        "useful_k": useful_k,
        "useful": useful_m * useful_n * useful_k,
        "even_k": (np.remainder(k, c.block_k) == 0).astype(np.float64),
    }


def _traffic(
    workload: Workload, m: float, n: float, k: float, c: Columns, g: Columns, device: Device
) -> FloatsByName:
    """Return bytes that programs ask for, that reach device memory, and that are in flight."""
    item, out_item = workload.code.itemsize, workload.code.out_itemsize
    program_bytes = c.stage_bytes * g.steps_per_program
    # The tiles that run at once form a block of GROUP_M rows, which reads each operand once.
    running_tiles = np.maximum(np.floor(c.running / c.split_k), 1)
    rows = np.minimum(np.minimum(c.group_m, g.tiles_m), running_tiles)
    columns = np.minimum(np.ceil(running_tiles / rows), g.tiles_n)
    wave_bytes = (rows * c.block_m + columns * c.block_n) * k * item
    least = (m * k + k * n) * item
    dram = np.maximum(g.tiles / running_tiles * wave_bytes, least)
    if least < device.l2_bytes:  # everything stays in L2 once it has been read
        dram = np.full_like(dram, least)
    partials = 2.0 * 4 * c.block_m * c.block_n * g.programs
    in_flight = c.running * c.stage_bytes * np.minimum(c.num_stages, g.steps_per_program)
    return {
        "tile_intensity": c.block_m * c.block_n / (c.block_m + c.block_n),
        "program_bytes": program_bytes,
        "operand_traffic": program_bytes * g.programs + m * n * out_item,
        "dram_traffic": dram + m * n * out_item,
        "wave_footprint_l2": wave_bytes / device.l2_bytes,
        "split_traffic": np.where(c.split_k > 1, partials, 0.0),
        "bytes_in_flight": in_flight / (device.bandwidth_gbs * 1e3 * _LATENCY_US),
        "stages_per_step": c.num_stages / g.steps_per_program,
    }
