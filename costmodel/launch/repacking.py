"""Copies of operands that TMA cannot address: queued before the kernel that reads them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from costmodel.gemm.specialize import REPACK_BLOCK, repack_key, repack_source
from costmodel.hardware.target import Target
from costmodel.launch.kernel import Kernel, load_source
from costmodel.launch.plan import Plan

if TYPE_CHECKING:
    import torch

    from costmodel.launch.workspace import Workspace


@functools.lru_cache(maxsize=1024)  # more than there are, so that all stay loaded
def load_repack(
    dtype: str, a_unit: bool | None, b_unit: bool | None, target: Target, device_index: int
) -> Kernel:
    """Return the kernel that copies A, B or both; :func:`repack_launch` gives its arguments.

    Args:
        dtype: of the operands.
        a_unit, b_unit: as of :func:`costmodel.gemm.specialize.repack_source`.
    """
    make = functools.partial(repack_source, dtype, a_unit, b_unit)
    return load_source(
        repack_key(dtype, a_unit, b_unit, target), make, "repack", target, device_index
    )


def repack_launch(
    plan: Plan,
    operands: tuple[torch.Tensor, torch.Tensor],
    copies: tuple[torch.Tensor, torch.Tensor],
) -> tuple[int, dict[str, Any]]:
    """Return how many programs make a plan's copies, and their run-time arguments by name.

    Args:
        operands: A and B.
        copies: as :meth:`Plan.aligned` gave them.
    """
    code = plan.workload.code
    blocks: list[int] = []
    arguments: dict[str, Any] = {}
    for name, x, dst, elements, layout in zip(
        "ab", operands, copies, plan.repacked, (code.a_layout, code.b_layout), strict=True
    ):
        if not elements:
            continue
        if layout == "col":
            x, dst = x.T, dst.T
        blocks.append(-(-dst.shape[0] // REPACK_BLOCK[0]) * -(-dst.stride(0) // REPACK_BLOCK[1]))
        arguments |= {
            f"{name}_ptr": x, f"{name}_copy_ptr": dst,
            f"{name}_rows": x.shape[0], f"{name}_cols": x.shape[1],
            f"{name}_row_stride": x.stride(0), f"{name}_col_stride": x.stride(1),
            f"{name}_copy_stride": dst.stride(0),
        }  # fmt: skip
    if len(blocks) == 2:
        arguments["a_blocks"] = blocks[0]
    return sum(blocks), arguments


class Repack:
    """The copies that a plan makes before its kernel, in at most one launch."""

    def __init__(self, plan: Plan, target: Target, device_index: int) -> None:
        self._plan = plan
        self._kernel: Kernel | None = None
        if any(plan.repacked):
            code = plan.workload.code
            self._kernel = load_repack(code.dtype, *unit_strides(plan), target, device_index)

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, workspace: Workspace, stream: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the copies and return the operands for the kernel."""
        aligned = self._plan.aligned(a, b, workspace)
        if self._kernel is not None:
            blocks, arguments = repack_launch(self._plan, (a, b), aligned)
            self._kernel(blocks, stream, arguments)
        return aligned


def unit_strides(plan: Plan) -> tuple[bool | None, bool | None]:
    """For A and for B: None without a copy, else True if the rows in memory are contiguous."""
    code = plan.workload.code
    a, b = plan.repacked
    return (
        code.a_layout != "strided" if a else None,
        code.b_layout != "strided" if b else None,
    )
