"""Plans run by Triton's own launch: a GPU's, or its interpreter (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

from typing import Any

import torch

from costmodel.gemm.specialize import constants, kernel_function
from costmodel.launch.plan import Plan

__all__ = ["repack_by_triton", "run_by_triton"]


def run_by_triton(plan: Plan, arguments: dict[str, Any]) -> None:
    """Run a plan's kernel on :meth:`Plan.arguments`."""
    fn = kernel_function(plan.spec.kernel)
    baked = constants(plan.spec)
    names = set(fn.arg_names)
    values = {k: v for k, v in arguments.items() if k in names and k not in baked}
    fn[(plan.blocks,)](**values, **{k: v for k, v in baked.items() if k in names})


def repack_by_triton(
    plan: Plan,
    operands: tuple[torch.Tensor, torch.Tensor],
    copies: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Make the copies of a plan, as ``Repack`` does."""
    from costmodel.kernels.repack import repack_operands

    blocks, arguments = plan.repack_arguments(operands, copies)
    if plan.repacking:
        repack_operands[(blocks,)](**(arguments | plan.repacking.constants()))
