"""Launches each kernel on a few small products: what ``compute-sanitizer`` is to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python sanitized_kernels.py

Everything but the kernels runs on the CPU, so that nothing else is watched.
"""

from __future__ import annotations

import sys

import torch

from costmodel.gemm.config import GemmConfig
from costmodel.gemm.space import why_illegal
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.kernel import load
from costmodel.launch.plan import Plan, Repack, Workspace

CONFIGS = [
    GemmConfig("pointer", 32, 32, 32, 4, 3),
    GemmConfig("pointer", 32, 32, 32, 4, 2, split_k=3),
    GemmConfig("tma", 64, 64, 64, 4, 3),
    GemmConfig("tma", 64, 64, 64, 4, 3, split_k=2),
    GemmConfig("tma", 32, 16, 128, 4, 4, split_k=2),
    GemmConfig("tma", 128, 128, 64, 4, 3, split_k=3),
    GemmConfig("tma", 64, 64, 64, 4, 3, repack=True),
    GemmConfig("tma_persistent", 128, 128, 64, 8, 3, halves=True, flatten=True),
    GemmConfig("warp_specialized", 128, 96, 64, 8, 3),
    GemmConfig("warp_specialized", 192, 96, 64, 12, 3),
]
SHAPES = [(130, 136, 200), (65, 33, 100)]


def run(config: GemmConfig, m: int, n: int, k: int, transposed: bool) -> bool:
    """Launch once and compare with float64; False where the configuration is not legal."""
    torch.manual_seed(0)
    a, b = (
        torch.randn(m, k).half(),
        torch.randn(n, k).half().T if transposed else torch.randn(k, n).half(),
    )
    expected = a.double() @ b.double()
    a, b = a.cuda(), b.cuda()
    out = torch.full((m, n), float("nan"), dtype=torch.float16).cuda()
    workload = Workload.from_tensors(a, b, out)
    target = Target.current()
    if why_illegal(config, workload, target.device):
        return False
    # More tiles than programs, so that persistent kernels go round.
    plan = Plan(workload, config, sm_count=2)
    stream = torch.cuda.current_stream().cuda_stream
    workspace = Workspace(a.device)
    if config.repack:
        a, b = Repack(plan, target, 0)(a, b, workspace, stream)
    arguments = plan.arguments(a, b, out, None, plan.scratch(workspace))
    load(plan.spec, target, 0)(plan.blocks, stream, arguments)
    torch.cuda.synchronize()
    torch.testing.assert_close(out.cpu().double(), expected, atol=0.05, rtol=5e-3)
    return True


def main() -> None:
    ran = 0
    for config in CONFIGS:
        done = [run(config, *s, turned) for s in SHAPES for turned in (False, True)]
        assert any(done), f"{config} ran nowhere"
        ran += sum(done)
    print(f"{ran} products are right")


if __name__ == "__main__":
    sys.exit(main())
