"""Feature vectors: the columns by which a learned model sees a candidate, derived from raw numbers.

The order of :data:`FEATURES` is part of a trained model. If the names, their order or their meaning
change, :data:`FEATURE_SCHEMA` must change too: older models are then refused instead of getting the
wrong columns. Nothing that comes from a timing is a feature.
"""

from math import log2

import numpy as np

from costmodel.arrays import Floats, Floats32, FloatsByName
from costmodel.data.candidates import ARTIFACT_COLUMNS, CONFIG_COLUMNS, Candidates
from costmodel.features.analytic import ANALYTIC_FEATURES, analytic_columns
from costmodel.files import Named
from costmodel.gemm.space import Columns
from costmodel.gemm.workload import ACTIVATIONS, Workload
from costmodel.hardware.target import Target

FEATURE_SCHEMA = 5
"""Version of the meaning of the columns."""

_OF_WORKLOAD = """
    log_m log_n log_k log_flops log_bytes balance small_m a_align b_align c_align a_layout b_layout
    c_layout is_bfloat16 item_bytes out_bytes tf32 wide bias activation arch sm_count
    machine_balance l2_mib
"""
_WORKLOAD_FEATURES = tuple(_OF_WORKLOAD.split())
_OF_PTX = """
    steps_per_iteration mma_per_iteration loop_per_flop loop_memory_per_mma loop_sync_per_mma
    loop_integer_per_mma outside_loop issue_bound issue_over_compute
"""
_PTX_DERIVED = tuple(_OF_PTX.split())

CONFIG_FEATURES = (*_WORKLOAD_FEATURES, *CONFIG_COLUMNS, *ANALYTIC_FEATURES)
"""Columns that need no artifact."""

FEATURES = (*CONFIG_FEATURES, *ARTIFACT_COLUMNS, *_PTX_DERIVED)
"""All columns, in the order that a model is trained on."""

_LAYOUTS = ("row", "col", "strided")


def design_matrix(
    workload: Workload, candidates: Candidates, target: Target, *, ptx: bool
) -> Floats32:
    """Return the features of a batch, one row per candidate, in its order.

    Args:
        ptx: return the columns of :data:`FEATURES`, NaN where a candidate has no artifact;
            otherwise those of :data:`CONFIG_FEATURES`, which do not look at artifacts at all.

    Returns:
        float32 [n, f], C-contiguous.
    """
    columns = _workload_values(workload, target)
    columns |= zip(CONFIG_COLUMNS, candidates.config_columns.T)
    analytic = analytic_columns(workload, candidates, target, binary=ptx)
    columns |= analytic
    if ptx:
        columns |= zip(ARTIFACT_COLUMNS, candidates.artifact_columns.T)
        columns |= _ptx_derived(Columns(**columns), target)
    names = FEATURES if ptx else CONFIG_FEATURES
    matrix = np.empty((len(names), len(candidates)), dtype=np.float32)
    for row, name in enumerate(names):
        matrix[row] = columns[name]
    return np.ascontiguousarray(matrix.T)


def _workload_values(workload: Workload, target: Target) -> Named:
    code, device = workload.code, target.device
    flops, bytes_ = max(workload.flops(), 1), max(workload.bytes(), 1)
    machine_balance = device.tflops_of(code.kind) * 1e3 / device.bandwidth_gbs
    return {
        **{f"log_{name}": log2(max(getattr(workload, name), 1)) for name in "mnk"},
        "log_flops": log2(flops),
        "log_bytes": log2(bytes_),
        "balance": flops / bytes_ / machine_balance,
        "small_m": workload.m <= 64,
        **{f"{x.name}_align": x.align for x in code.matrices},
        **{f"{x.name}_layout": _LAYOUTS.index(x.layout) for x in code.matrices},
        "is_bfloat16": code.dtype == "bfloat16",
        "item_bytes": code.itemsize,
        "out_bytes": code.out_itemsize,
        "tf32": code.tf32,
        "wide": code.wide,
        "bias": code.bias,
        "activation": ACTIVATIONS.index(code.activation),
        "arch": device.arch,
        "sm_count": device.sm_count,
        "machine_balance": machine_balance,
        "l2_mib": device.l2_bytes / 2**20,
    }


def _ptx_derived(c: Columns, target: Target) -> FloatsByName:
    """Instruction mix of the main loop, and the time to issue it all; NaN without a main loop."""
    # One mma.sync is the work of a warp, one wgmma of four, one tcgen05.mma of the whole block.
    sharers = np.select(
        [c.loop_mma_sync > 0, c.loop_wgmma > 0], [c.num_warps, c.num_warps / 4], 1.0
    )
    flops = _or_nan(c.loop_mma_flops)
    mma = _or_nan(c.loop_mma_sync + c.loop_wgmma + c.loop_tcgen05_mma)
    step_flops = 2 * c.block_m * c.block_n * c.block_k
    steps_per_iteration = flops * sharers / step_flops
    iterations = c.steps_per_program / steps_per_iteration
    outside = c.all_instructions - c.loop_instructions
    per_warp = c.loop_instructions * iterations + outside
    # Four schedulers a multiprocessor, one warp instruction a clock each.
    programs = np.ceil(c.programs / target.device.sm_count)
    issue_us = per_warp * c.num_warps * programs / 4 / target.device.clock_mhz
    issue_bound = issue_us / c.roofline_us
    memory = c.loop_ldmatrix + c.loop_ld_shared + c.loop_st_shared
    memory += c.loop_ld_global + c.loop_cp_async + c.loop_bulk_load
    sync = c.loop_barrier + c.loop_mbarrier + c.loop_fence
    return {
        "steps_per_iteration": steps_per_iteration,
        "mma_per_iteration": mma,
        "loop_per_flop": c.loop_instructions / flops,
        "loop_memory_per_mma": memory / mma,
        "loop_sync_per_mma": sync / mma,
        "loop_integer_per_mma": (c.loop_int_arith + c.loop_mov) / mma,
        "outside_loop": outside,
        "issue_bound": issue_bound,
        "issue_over_compute": issue_bound / c.compute_bound,
    }


def _or_nan(count: Floats) -> Floats:
    """Return the count, NaN where it is zero: a ratio to it is then missing, not infinite."""
    return np.where(count > 0, count, np.nan)
