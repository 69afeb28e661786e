"""Predicts ``torch.matmul`` (cuBLAS), so that it can be chosen where nothing is timed."""

from collections.abc import Iterable
from math import ceil, log, log2

import numpy as np

from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.models.trees import Trees

_LAUNCH_US = 2.0  # the least that any launch takes
_TILES = ((64, 64), (128, 128), (128, 256), (256, 128))  # such as cuBLAS has
_FEATURES = """
    log2_m log2_n log2_k log2_a_align log2_b_align log2_c_align is_float16 item_bytes out_bytes tf32
    a_is_col b_is_col log_compute log_memory
"""
TORCH_FEATURES = (
    *_FEATURES.split(),
    *(f"{name}_{m}x{n}" for m, n in _TILES for name in ("log2_tiles", "tail", "log_wave_time")),
)
_PARAMS = {
    "max_depth": 4, "eta": 0.05, "subsample": 0.8, "colsample_bytree": 0.6, "min_child_weight": 2,
    "seed": 0, "tree_method": "hist", "nthread": 1,
}  # fmt: skip
_ROUNDS = 300
_LEAST_WORKLOADS = 20


def train_torch_time(timings: Iterable[tuple[Workload, Target, float]]) -> Trees | None:
    """Learn log(latency / roofline) of a workload; None if too few were timed.

    Args:
        timings: what ``torch.matmul`` took on a target, in us; NaN are left out.
    """
    import xgboost

    known = [(w, target, us) for w, target, us in timings if us > 0]
    if len(known) < _LEAST_WORKLOADS:
        return None
    rows = np.array([_features(w, target) for w, target, _ in known], dtype=np.float32)
    label = [log(us / _floor_us(w, target)) for w, target, us in known]
    data = xgboost.DMatrix(rows, label=label, feature_names=list(TORCH_FEATURES), nthread=1)
    booster = xgboost.train(_PARAMS, data, num_boost_round=_ROUNDS, verbose_eval=False)
    return Trees.of(booster, TORCH_FEATURES)


def predict_torch_us(trees: Trees, workload: Workload, target: Target) -> float:
    """Predict the latency of ``torch.matmul`` in us."""
    row = np.array([_features(workload, target)], dtype=np.float32)
    return float(np.exp(trees.booster.inplace_predict(row)[0])) * _floor_us(workload, target)


def _floor_us(w: Workload, target: Target) -> float:
    return w.roofline_us(target.device) + _LAUNCH_US


def _features(w: Workload, target: Target) -> list[float]:
    code, device = w.code, target.device
    row = [
        *map(log2, w.sizes), *(log2(x.align) for x in code.matrices),
        float(code.dtype == "float16"),
        code.itemsize, code.out_itemsize, float(code.tf32), float(code.a_layout == "col"),
        float(code.b_layout == "col"),
        log(device.roofline_us(w.flops(), 0, code.kind)), log(device.roofline_us(0, w.bytes())),
    ]  # fmt: skip
    for m, n in _TILES:
        tiles = ceil(w.m / m) * ceil(w.n / n)
        waves = tiles / device.sm_count
        wave_us = m * n * w.k * 2 * device.sm_count / device.tflops_of(code.kind) / 1e6
        row += [log2(tiles), ceil(waves) / waves, log(ceil(waves) * wave_us + 1)]
    return row
