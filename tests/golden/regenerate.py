"""Write the golden files anew: ``python tests/golden/regenerate.py``, with Triton 3.6.0.

Do it only when kernels, features or the supported Triton change, and read the difference. The
files in ``hand/`` are written by hand and stay as they are.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from costmodel.compile.ptx import PTX_SCHEMA, extract, normalize, ptx_hash
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.specialize import source, specialize
from costmodel.gemm.workload import Workload

HERE = Path(__file__).parent
POINTER = GemmConfig("pointer", 64, 64, 32, num_warps=4, num_stages=3)
SPLIT = replace(POINTER, split_k=2)
TMA = GemmConfig("tma", 64, 64, 64, num_warps=4, num_stages=3)
PERSISTENT = replace(TMA, kernel="tma_persistent")
GROUPS = GemmConfig("warp_specialized", 192, 96, 64, num_warps=12, num_stages=4)
CASES: dict[str, tuple[int, GemmConfig]] = {
    "sm_80-pointer": (80, POINTER),
    "sm_90-pointer": (90, POINTER),
    "sm_90-pointer-split": (90, SPLIT),
    "sm_90-tma": (90, TMA),
    "sm_90-tma_persistent": (90, PERSISTENT),
    "sm_90-warp_specialized": (90, GROUPS),
    "sm_100-pointer": (100, POINTER),
    "sm_100-tma": (100, TMA),
    "sm_100-tma_persistent": (100, PERSISTENT),
}


def compile_ptx(arch: int, config: GemmConfig) -> str:
    """The PTX of a square float16 product, compiled without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    src, options = source(specialize(Workload.dense(4096, 4096, 4096), config))
    compiled = triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options)
    return str(compiled.asm["ptx"])


def main() -> None:
    import triton

    files: dict[str, Any] = {}
    for name, (arch, config) in CASES.items():
        ptx = compile_ptx(arch, config)
        (HERE / f"{name}.ptx").write_text(normalize(ptx))
        files[name] = {
            "arch": arch,
            "config": config.to_dict(),
            "hash": ptx_hash(ptx),
            "features": extract(ptx),
        }
    expected = {"triton": triton.__version__, "ptx_schema": PTX_SCHEMA, "files": files}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
