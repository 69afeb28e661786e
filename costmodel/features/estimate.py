"""The analytic estimate of a launch: waves of blocks, each of steps.

The form is arithmetic. The constants are those of an H100 (Triton 3.6.0). All but ``_L2_SHARE`` and
``_WGMMA_SHARE`` are fitted to the near-best rows of its training recording. For another device they
scale with its data sheet. The trees learn the rest, so a constant need not be exact.
"""

from dataclasses import dataclass

import numpy as np

from costmodel.arrays import Floats, FloatsByName
from costmodel.gemm.family import repack_elements
from costmodel.gemm.space import Columns
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Device

# Extra traffic of rows that cross lines of the cache, as a share; what a step of the main loop
# spends its time on; parts of the estimate, as shares of the whole; the time of the traffic and the
# estimate, as multiples of the roofline; the logarithm of the estimate in us.
_FEATURES = """
    a_straddle b_straddle c_straddle
    step_compute step_bytes step_load step_wait
    loop_share tail_share dram_share split_share repack_share
    dram_estimate estimate log_estimate
"""
ESTIMATE_FEATURES = tuple(_FEATURES.split())

_LAUNCH_US = 0.89
_FIRST_BYTES_US = 0.73  # from the start of a block to its first bytes
_LOAD_LATENCY_US = 0.44
_EPILOGUE_US = 0.755
_STORE_FACTOR = 3.17  # cost of a stored byte over that of a loaded one
SM_BANDWIDTH_GBS = 141.0  # the most that one multiprocessor reads, some 64 bytes a clock
L2_SPEEDUP = 4.0  # L2 bandwidth over that of device memory, as products reach it
_DRAM_SHARE = 1.05  # share of the data sheet's bandwidth, beside what the latencies account for
_L2_SHARE = 0.5  # share of the L2 cache that keeps what will be read again
_WGMMA_SHARE = 0.90  # share of the data sheet's tensor rate
_MMA_SHARE = 0.42  # the same for mma.sync, which Hopper does not run at full rate
_FMA_SHARE = 0.6
_SHARED_BYTES_PER_US = 152e3  # of operands that the warps of a multiprocessor read (mma.sync)
_LOAD_COST = 2.08  # slots of the load unit for each of its instructions, if asynchronous
_UNPIPED_LOAD_COST = 3.26  # the same if not
# As recorded: plain loads of B take over three times as long where no step along K needs a mask.
_UNMASKED_LOAD_COST = 12.0
_UNPIPED_SERIAL = 0.29  # share of a step that does not run under the wait for its operands
_POINTER_STEP_US = (0.023, 0.057)  # overhead of a step: asynchronous copies, or plain loads
_TMA_STEP_US = 0.088
_LINE_COST, _SECTOR_COST, _STORE_LINE_COST = 0.285, 0.4, 0.51
_WAVE_GAP = 0.365  # share of the first bytes' latency, between waves that blocks enter one by one
_WS_EXPOSED = 0.49  # share of a tile's start and store that a warp-specialised kernel does not hide
_FLAT_EXPOSED = 0.465  # the same for a kernel with one loop over tiles and steps
_SPLIT_US = 1.19
_COPY_US, _COPY_SHARE = 1.12, 0.9


@dataclass(frozen=True)
class _Step:
    """Times of one block's step by itself, us [n], and bytes, with those of crossed lines."""

    warps: Floats
    compute: Floats
    loads: Floats
    bytes_: Floats
    alone: Floats  # latency that the stages under way do not hide, and overhead
    serial: Floats  # share that waits for its own loads
    dram_part: Floats  # share of its bytes that L2 does not have


def estimate_columns(workload: Workload, c: Columns, g: Columns, device: Device) -> FloatsByName:
    """Return the columns of :data:`ESTIMATE_FEATURES`, float64 [n] each.

    Args:
        c: columns of the configurations, see ``candidates.CONFIG_COLUMNS``, and ``running`` and
            ``stays`` of :func:`costmodel.features.analytic.analytic_columns`.
        g: ``occupancy``, ``programs``, ``steps_per_program``, ``tiles_m``, ``tiles_n``,
            ``wgmma_shape``, ``even_k`` and ``roofline_us`` of each.
    """
    lines = _straddle(workload, c)
    dram = _dram_bytes(workload, c, g, device)
    step = _step(workload, c, g, device, lines, dram)
    sm, occupancy = device.sm_count, g.occupancy
    slots = sm * occupancy
    full = np.floor(g.programs / slots)
    rest = g.programs - full * slots
    last = np.maximum(np.ceil(rest / sm), 1)
    busy = np.clip(rest, 1, sm)
    steps = g.steps_per_program
    whole, parts = _step_us(step, occupancy, sm, device)
    ending, last_parts = _step_us(step, last, busy, device)
    stored = c.block_m * c.block_n * workload.code.out_itemsize
    stored = stored * _STORE_FACTOR * (1 + _STORE_LINE_COST * lines["c_straddle"])
    store_whole = _EPILOGUE_US + stored * occupancy / _share(sm, device)
    store_last = _EPILOGUE_US + stored * last / _share(busy, device)
    # A persistent block of some kernels hides part of a tile's start and store under the loads of
    # the next tile.
    exposed = np.where(c.is_warp_specialized > 0, _WS_EXPOSED, 1.0)
    exposed = np.where((c.is_persistent > 0) & (c.flatten > 0), _FLAT_EXPOSED, exposed)
    gap = (
        _FIRST_BYTES_US * np.where(c.stays, exposed, 1.0) * np.where(occupancy > 1, _WAVE_GAP, 1.0)
    )
    first = _FIRST_BYTES_US + steps * whole + store_whole
    more = np.maximum(full - 1, 0) * (gap + steps * whole + store_whole * exposed)
    before_tail = np.where(full > 0, _WAVE_GAP * exposed, 1.0) * _FIRST_BYTES_US
    tail = np.where(rest > 0, before_tail + steps * ending + store_last, 0.0)
    loop = np.where(full > 0, first + more, 0.0) + tail
    dram_us = dram / (_DRAM_SHARE * device.bandwidth_gbs * 1e3) + _FIRST_BYTES_US
    split, copy = _split_us(c, g, device), _copy_us(workload, c, device)
    total = _LAUNCH_US + _slowest(loop, dram_us) + split + copy
    return lines | {
        **{name: np.where(full > 0, parts[name], last_parts[name]) for name in parts},
        "loop_share": loop / total,
        "tail_share": tail / total,
        "dram_share": dram_us / total,
        "split_share": split / total,
        "repack_share": copy / total,
        "dram_estimate": dram / (device.bandwidth_gbs * 1e3) / g.roofline_us,
        "estimate": total / g.roofline_us,
        "log_estimate": np.log(total),
    }


def _slowest(*times: Floats) -> Floats:
    """Return a smooth maximum: times that are nearly equal hinder each other."""
    return np.sqrt(np.sqrt(sum(np.square(np.square(t)) for t in times)))


def _share(busy: float | Floats, device: Device) -> Floats:
    """Return bytes per us that each of ``busy`` multiprocessors reads from L2."""
    l2 = device.bandwidth_gbs * 1e3 * L2_SPEEDUP
    return np.minimum(l2 / busy, SM_BANDWIDTH_GBS * 1e3)


def _step_us(
    step: _Step, resident: Floats, busy: float | Floats, device: Device
) -> tuple[Floats, FloatsByName]:
    """Return the time of a step, us [n], with ``resident`` blocks per multiprocessor; its shares.

    All blocks together get no more from device memory than its bandwidth.
    """
    memory = _DRAM_SHARE * device.bandwidth_gbs * 1e3
    bytes_us = np.maximum(
        step.bytes_ * resident / _share(busy, device),
        step.bytes_ * step.dram_part * resident * busy / memory,
    )
    # Each of the four quarters of a multiprocessor serves only its own warps.
    idle = np.maximum(1, 4 / (step.warps * resident))
    compute, loads = step.compute * resident * idle, step.loads * resident
    alone = step.alone + step.serial * (step.compute + step.loads + bytes_us / resident)
    time = _slowest(compute, bytes_us, loads, alone)
    parts = {
        "step_compute": compute / time,
        "step_bytes": bytes_us / time,
        "step_load": loads / time,
        "step_wait": step.alone / time,
    }
    return time, parts


def _step(
    workload: Workload, c: Columns, g: Columns, device: Device, lines: FloatsByName, dram: Floats
) -> _Step:
    """Return the work of one block's step on each unit."""
    code, item = workload.code, workload.code.itemsize
    a, b = (getattr(c, side) * c.block_k * item for side in ("block_m", "block_n"))
    bytes_ = a * (1 + lines["a_straddle"]) + b * (1 + lines["b_straddle"])
    pointer = c.is_pointer > 0
    # Copies of fewer than 4 bytes are not asynchronous: a step waits for such an operand.
    asynchronous = min(code.a_align, code.b_align) >= 4
    stages = np.where(pointer, np.maximum(c.num_stages - 1, 1), c.num_stages)
    depth = np.minimum(stages, g.steps_per_program)
    if not asynchronous:
        depth = np.where(pointer, 1.0, depth)
    # Every few clocks the load unit takes an instruction of a warp, or 128 bytes of a wider one.
    requests = a / (32 * min(code.a_align, 4)) + b / (32 * min(code.b_align, 4))
    cost: float | Floats = _LOAD_COST if asynchronous else _UNPIPED_LOAD_COST
    if not asynchronous and code.b_align < 4:
        cost = np.where(g.even_k > 0, _UNMASKED_LOAD_COST, cost)
    overhead = _POINTER_STEP_US[0 if asynchronous else 1]
    tile = c.block_m * c.block_n
    out_bytes = workload.m * workload.n * code.out_itemsize
    asked = np.maximum(g.programs * g.steps_per_program * (a + b), 1)
    return _Step(
        warps=c.num_warps,
        compute=_compute_us(workload, c, g, tile, device),
        loads=np.where(pointer, requests * cost / device.clock_mhz, 0.0),
        bytes_=bytes_,
        alone=_LOAD_LATENCY_US / depth + np.where(pointer, overhead, _TMA_STEP_US),
        serial=np.where(pointer & (not asynchronous), _UNPIPED_SERIAL, 0.0),
        dram_part=np.clip((dram - out_bytes) / asked, 0, 1),
    )


def _compute_us(workload: Workload, c: Columns, g: Columns, tile: Floats, device: Device) -> Floats:
    """Return the time to multiply one step of a block that has a multiprocessor to itself."""
    kind, warps = workload.code.kind, c.num_warps
    flops_per_us = device.tflops_of(kind) * 1e6 / device.sm_count
    ideal = 2 * tile * c.block_k / flops_per_us
    row = device.architecture
    if kind not in row.tensor_rates:
        return ideal / _FMA_SHARE
    # wgmma reads A and B from shared memory: with few columns it takes as long for less work.
    groups = np.maximum(warps / 4, 1)
    down = np.where(
        c.is_warp_specialized > 0, groups, np.minimum(groups, np.maximum(c.block_m / 64, 1))
    )
    width = np.minimum(c.block_n * down / groups, 256)
    wide = ideal / _WGMMA_SHARE * np.maximum(1, 0.5 + 50 / width)
    # A warp multiplies a share of the tile, and reads both of its sides.
    rows = np.maximum(c.block_m / warps, 16)
    read = warps * (rows + tile / (warps * rows)) * c.block_k * workload.code.itemsize
    share = _MMA_SHARE if row.is_wide else _WGMMA_SHARE  # mma.sync, if widest, is at full rate
    narrow = np.maximum(ideal / share, read / _SHARED_BYTES_PER_US)
    return np.where(g.wgmma_shape > 0, wide, narrow)


def _straddle(workload: Workload, c: Columns) -> FloatsByName:
    """Return the extra traffic, as a share, of rows that do not start on lines of 128 bytes.

    Operands are taken as dense: a code class has no strides. Copies are padded to whole lines.
    """
    w, code, item = workload, workload.code, workload.code.itemsize
    found = {}
    for x in code.matrices[:2]:
        along = x.in_memory[1]
        row, box = getattr(w, along), getattr(c, f"block_{along}")
        unit = np.gcd(max(row, 1) * item, 128)
        extra = _LINE_COST * (1 - unit / 128) + _SECTOR_COST * (unit < 32)
        # TMA takes rows in pieces of 128 bytes; a pointer row is one run of lines.
        lines = 128 / (box * item)
        runs = np.where(c.is_pointer > 0, np.minimum(lines, 2), np.maximum(lines, 1))
        copied = (c.repack > 0) & (x.align < 16)
        found[f"{x.name}_straddle"] = np.where(copied, 0.0, extra * runs)
    c_row = (w.m if code.c_layout == "col" else w.n) * code.out_itemsize
    outside = 1 - np.gcd(max(c_row, 1), 128) / 128
    return found | {"c_straddle": np.full_like(c.block_m, outside)}


def _dram_bytes(workload: Workload, c: Columns, g: Columns, device: Device) -> Floats:
    """Return the bytes of traffic to device memory. Data that L2 lost is read from there again.

    Tiles are computed in stripes of GROUP_M tile rows. Within a stripe, A stays in L2. From one
    stripe to the next, B stays only if the whole stripe with its part of C fits.
    """
    code, item = workload.code, workload.code.itemsize
    a, b = workload.m * workload.k * item, workload.n * workload.k * item
    group = np.minimum(c.group_m, g.tiles_m)
    running = c.running / c.split_k
    at_once = np.maximum(running / (group * g.tiles_n), 1)
    stripes = np.maximum(g.tiles_m / group / at_once, 1)
    rounds = np.maximum(g.tiles_n * group / np.maximum(running, 1), 1)
    rows = group * c.block_m
    kept = _L2_SHARE * device.l2_bytes
    lost_a = np.clip(rows * workload.k * item / kept - 1, 0, 1)
    touched = b + rows * (workload.k * item + workload.n * code.out_itemsize)
    lost_b = np.clip(touched / kept - 1, 0, 1)
    traffic = a * (1 + lost_a * (rounds - 1)) + b * (1 + lost_b * (stripes - 1))
    traffic += workload.m * workload.n * code.out_itemsize
    return traffic


def _split_us(c: Columns, g: Columns, device: Device) -> Floats:
    """Return the time of split-K: the last block of a tile reads all partial sums by itself."""
    tile = 4 * c.block_m * c.block_n
    alone = _SPLIT_US + (1 + c.split_k) * tile / (SM_BANDWIDTH_GBS * 1e3)
    together = tile * g.programs / (device.bandwidth_gbs * 1e3 * L2_SPEEDUP)
    return np.where(c.split_k > 1, alone + together, 0.0)


def _copy_us(workload: Workload, c: Columns, device: Device) -> Floats:
    """Return the time of the launch that copies operands that TMA cannot address."""
    copied = 2 * sum(repack_elements(workload)) * workload.code.itemsize
    copy_us = copied / (_COPY_SHARE * device.bandwidth_gbs * 1e3) + _COPY_US
    return np.where(c.repack > 0, copy_us, 0.0)
