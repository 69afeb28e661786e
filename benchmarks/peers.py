"""Other people's models, for comparison. Optional: imported where they are used."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from costmodel.data.candidates import CONFIG_COLUMNS, Candidates, CostModel, Floats
from costmodel.errors import NoModel
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target

_GPUS = {
    "a100-sxm": "A100_SXM_80GB",
    "h100-sxm": "H100_SXM",
    "h100-pcie": "H100_PCIE",
    "h200-sxm": "H200_SXM",
    "b200-sxm": "B200",
}
_PRECISIONS = {"float16": "HSH", "bfloat16": "TST"}  # operands, accumulator, result
_PROPOSALS = 32
# The weight of a factor of two in each field; the order of the tiles counts least.
_COMPARED = {
    "block_m": 2.0, "block_n": 2.0, "block_k": 1.0, "num_warps": 1.0, "num_stages": 1.0,
    "split_k": 2.0, "group_m": 0.25,
}  # fmt: skip


class NvMatmulHeuristics(CostModel):
    """NVIDIA's nvMatmulHeuristics, asked for its TRITON target with its performance model.

    It proposes about a dozen configurations of its own, best first. Each proposal goes to the
    nearest candidate that is not taken yet; candidates without one come after, the nearest first.

    Source: PyPI ``nvidia-matmul-heuristics``; written against 0.1.0.27.
    """

    kind = "peer"
    name = "nvMatmulHeuristics"

    def predict(self, workload: Workload, candidates: Candidates, target: Target) -> Floats:
        """Return the place of each candidate, float64 [n].

        Raises:
            NoModel: the package is not installed, or does not know the device.
        """
        c = dict(zip(CONFIG_COLUMNS, candidates.config_columns.T, strict=True))
        proposals = self.propose(workload, target)
        # Its proposals do not say how operands are copied; the TMA kernel is the better one.
        base = 0.01 * c["is_pointer"] + 0.005 * c["is_persistent"] + 0.001 * c["maxnreg"]
        base += 0.005 * c["is_warp_specialized"]
        base += 1e-4 * c["halves"] + 2e-4 * c["flatten"]
        distance = np.tile(base, (len(proposals), 1))
        for row, proposal in enumerate(proposals):
            for name, weight in _COMPARED.items():
                distance[row] += weight * np.abs(np.log2(c[name] / proposal[name]))
        cost = _PROPOSALS + distance.min(axis=0, initial=1e3)
        for place, row in enumerate(distance):
            free = np.where(cost < _PROPOSALS, np.inf, row)
            if np.isfinite(free).any():
                cost[int(free.argmin())] = place
        return cost

    def propose(self, workload: Workload, target: Target) -> list[dict[str, int]]:
        """Return its proposals for a workload, best first, by the field names of a configuration.

        Raises:
            NoModel: the package is not installed, or does not know the device or the types.
        """
        code = workload.code
        if code.dtype not in _PRECISIONS:
            raise NoModel(
                f"nvMatmulHeuristics is not asked about {code.dtype} here: expected one of "
                f"{', '.join(_PRECISIONS)}"
            )
        if min(workload.m, workload.n, workload.k) == 0:
            return []
        nv, interface = _interface(target.device.name)
        # "N" is its word for an operand in the order of the result, here row-major.
        layouts = (code.a_layout, code.b_layout)
        letters = "".join("T" if layout == "col" else "N" for layout in layouts)
        layout = nv.NvMatmulHeuristicsMatmulLayout[f"{letters}_ROW_MAJOR"]
        problem = interface.makeNvMatmulHeuristicsProblem(
            workload.m, workload.n, workload.k, layout
        )
        found = interface.get(problem, _PROPOSALS, precision=_PRECISIONS[code.dtype])
        kernels = [row["kernel"] for row in sorted(found, key=lambda row: float(row["runtime"]))]
        return [_as_config(kernel) for kernel in kernels]


def _as_config(kernel: Any) -> dict[str, int]:
    warps = (kernel.cta_tile_m // kernel.warp_tile_m) * (kernel.cta_tile_n // kernel.warp_tile_n)
    return {
        "block_m": kernel.cta_tile_m,
        "block_n": kernel.cta_tile_n,
        "block_k": kernel.cta_tile_k,
        "num_warps": warps,
        "num_stages": kernel.stages,
        "split_k": kernel.split_k,
        "group_m": max(kernel.swizzle_factor, 1),
    }


@functools.cache
def _interface(device: str) -> tuple[Any, Any]:
    try:
        import nvMatmulHeuristics as nv
    except ImportError:
        raise NoModel(
            "nvMatmulHeuristics is not installed: run `pip install 'triton-costmodel[peers]'`"
        ) from None
    if device not in _GPUS:
        raise NoModel(f"nvMatmulHeuristics does not know {device}: expected {', '.join(_GPUS)}")
    interface = nv.NvMatmulHeuristicsInterfaceEx(
        backend=nv.NvMatmulHeuristicsTarget.TRITON,
        flags=nv.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        gpu=nv.NvMatmulHeuristicsNvidiaGpu[_GPUS[device]],
    )
    return nv, interface
