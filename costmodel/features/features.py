"""Feature vectors: the columns by which a learned model sees a candidate, derived from raw numbers.

The order of :data:`FEATURES` is part of a trained model. Change the names, their order or their
meaning, and :data:`FEATURE_SCHEMA` must change with them: older models are then refused instead
of being fed the wrong columns. Nothing that comes from a timing is a feature.
"""

from __future__ import annotations

from math import log2

import numpy as np
from numpy.typing import NDArray

from costmodel.data.candidates import ARTIFACT_COLUMNS, CONFIG_COLUMNS, Candidates
from costmodel.features.analytic import ANALYTIC_FEATURES, analytic_columns
from costmodel.gemm.workload import ACTIVATIONS, Workload
from costmodel.hardware.target import Target

FEATURE_SCHEMA = 5
"""Version of the meaning of the columns."""

_WORKLOAD_FEATURES = (
    "log_m", "log_n", "log_k", "log_flops", "log_bytes", "balance", "small_m",
    "a_align", "b_align", "c_align", "a_layout", "b_layout", "c_layout",
    "is_bfloat16", "item_bytes", "out_bytes", "tf32", "wide", "bias", "activation",
    "arch", "sm_count", "machine_balance", "l2_mib",
)  # fmt: skip
_PTX_DERIVED = (
    "steps_per_iteration", "mma_per_iteration", "loop_per_flop", "loop_memory_per_mma",
    "loop_sync_per_mma", "loop_integer_per_mma", "outside_loop", "issue_bound",
    "issue_over_compute",
)  # fmt: skip

CONFIG_FEATURES: tuple[str, ...] = (*_WORKLOAD_FEATURES, *CONFIG_COLUMNS, *ANALYTIC_FEATURES)
"""Columns that need no artifact."""

FEATURES: tuple[str, ...] = (*CONFIG_FEATURES, *ARTIFACT_COLUMNS, *_PTX_DERIVED)
"""All columns, in the order that a model is trained on."""

_LAYOUTS = ("row", "col", "strided")


def design_matrix(
    workload: Workload, candidates: Candidates, target: Target, *, ptx: bool
) -> NDArray[np.float32]:
    """Return the features of a batch, one row per candidate, in its order.

    Args:
        ptx: columns of :data:`FEATURES`, NaN where a candidate has no artifact; otherwise those
            of :data:`CONFIG_FEATURES`, which do not look at artifacts at all.

    Returns:
        float32 [n, f], C-contiguous.
    """
    names = FEATURES if ptx else CONFIG_FEATURES
    rows = len(candidates)
    matrix = np.empty((len(names), rows), dtype=np.float32)
    first, second = len(_WORKLOAD_FEATURES), len(_WORKLOAD_FEATURES) + len(CONFIG_COLUMNS)
    workload_values = _workload_values(workload, target)
    matrix[:first] = np.array([workload_values[n] for n in _WORKLOAD_FEATURES])[:, None]
    matrix[first:second] = candidates.config_columns.T
    analytic = analytic_columns(workload, candidates, target, binary=ptx)
    for row, name in enumerate(ANALYTIC_FEATURES, second):
        matrix[row] = analytic[name]
    if ptx:
        start = len(CONFIG_FEATURES)
        matrix[start : start + len(ARTIFACT_COLUMNS)] = candidates.artifact_columns.T
        derived = _ptx_derived(candidates, analytic, target)
        for row, name in enumerate(_PTX_DERIVED, start + len(ARTIFACT_COLUMNS)):
            matrix[row] = derived[name]
    return np.ascontiguousarray(matrix.T)


def _workload_values(workload: Workload, target: Target) -> dict[str, float]:
    code, device = workload.code, target.device
    flops, bytes_ = max(workload.flops(), 1), max(workload.bytes(), 1)
    machine_balance = device.tflops_of(code.kind) * 1e3 / device.bandwidth_gbs
    return {
        "log_m": log2(max(workload.m, 1)),
        "log_n": log2(max(workload.n, 1)),
        "log_k": log2(max(workload.k, 1)),
        "log_flops": log2(flops),
        "log_bytes": log2(bytes_),
        "balance": flops / bytes_ / machine_balance,
        "small_m": workload.m <= 64,
        "a_align": code.a_align,
        "b_align": code.b_align,
        "c_align": code.c_align,
        "a_layout": _LAYOUTS.index(code.a_layout),
        "b_layout": _LAYOUTS.index(code.b_layout),
        "c_layout": _LAYOUTS.index(code.c_layout),
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


def _ptx_derived(
    candidates: Candidates, analytic: dict[str, NDArray[np.float64]], target: Target
) -> dict[str, NDArray[np.float64]]:
    """Instruction mix of the main loop, and the work of issuing it all; NaN without one."""
    p = dict(zip(ARTIFACT_COLUMNS, candidates.artifact_columns.T, strict=True))
    c = dict(zip(CONFIG_COLUMNS, candidates.config_columns.T, strict=True))
    # One mma.sync is the work of a warp, one wgmma of four, one tcgen05.mma of the whole block.
    sharers = np.select(
        [p["loop_mma_sync"] > 0, p["loop_wgmma"] > 0], [c["num_warps"], c["num_warps"] / 4], 1.0
    )
    flops = _or_nan(p["loop_mma_flops"])
    mma = _or_nan(p["loop_mma_sync"] + p["loop_wgmma"] + p["loop_tcgen05_mma"])
    step_flops = 2 * c["block_m"] * c["block_n"] * c["block_k"]
    steps_per_iteration = flops * sharers / step_flops
    iterations = analytic["steps_per_program"] / steps_per_iteration
    outside = p["all_instructions"] - p["loop_instructions"]
    per_warp = p["loop_instructions"] * iterations + outside
    # Four schedulers a multiprocessor, one warp instruction a clock each.
    programs = np.ceil(analytic["programs"] / target.device.sm_count)
    issue_us = per_warp * c["num_warps"] * programs / 4 / target.device.clock_mhz
    issue_bound = issue_us / analytic["roofline_us"]
    memory = p["loop_ldmatrix"] + p["loop_ld_shared"] + p["loop_st_shared"]
    memory += p["loop_ld_global"] + p["loop_cp_async"] + p["loop_bulk_load"]
    sync = p["loop_barrier"] + p["loop_mbarrier"] + p["loop_fence"]
    return {
        "steps_per_iteration": steps_per_iteration,
        "mma_per_iteration": mma,
        "loop_per_flop": p["loop_instructions"] / flops,
        "loop_memory_per_mma": memory / mma,
        "loop_sync_per_mma": sync / mma,
        "loop_integer_per_mma": (p["loop_int_arith"] + p["loop_mov"]) / mma,
        "outside_loop": outside,
        "issue_bound": issue_bound,
        "issue_over_compute": issue_bound / analytic["compute_bound"],
    }


def _or_nan(count: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the count, NaN where it is zero: a ratio to it is then missing, not infinite."""
    return np.where(count > 0, count, np.nan)
