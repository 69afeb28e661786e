"""Copies of operands that TMA cannot address: queued before the kernel that reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from costmodel.launch import Plan, Workspace, load_source
from costmodel.specialize import REPACK_BLOCK, repack_source
from costmodel.target import Target

if TYPE_CHECKING:
    import torch

__all__ = ["Repack", "interpret_repack", "load_repack"]


@functools.lru_cache(maxsize=64)
def load_repack(
    dtype: str, unit_stride: bool, target: Target, device_index: int
) -> Callable[[torch.Tensor, torch.Tensor, int], None]:
    """What copies a matrix into another: ``copy(src, dst, stream)``.

    Args:
        dtype: of both.
        unit_stride: the last dimension of the source is contiguous.

    ``dst`` has a contiguous last dimension; sizes and strides may be any.
    """
    src, options = repack_source(dtype, unit_stride)
    kernel = load_source(src, options, "repack", target, device_index)

    def copy(x: torch.Tensor, dst: torch.Tensor, stream: int) -> None:
        kernel(repack_blocks(dst), stream, repack_arguments(x, dst))

    return copy


def repack_blocks(dst: torch.Tensor) -> int:
    """Programs of a copy into this matrix."""
    return -(-dst.shape[0] // REPACK_BLOCK[0]) * -(-dst.stride(0) // REPACK_BLOCK[1])


def repack_arguments(x: torch.Tensor, dst: torch.Tensor) -> dict[str, Any]:
    """Run-time arguments of a copy, by name."""
    return {
        "src_ptr": x, "dst_ptr": dst, "rows": x.shape[0], "cols": x.shape[1],
        "src_row_stride": x.stride(0), "src_col_stride": x.stride(1),
        "dst_row_stride": dst.stride(0),
    }  # fmt: skip


class Repack:
    """The copies that a plan makes before its kernel."""

    def __init__(self, plan: Plan, target: Target, device_index: int) -> None:
        self._plan = plan
        code = plan.workload.code
        self._turned = (code.a_layout == "col", code.b_layout == "col")
        self._copy = tuple(
            load_repack(code.dtype, layout != "strided", target, device_index)
            for layout in (code.a_layout, code.b_layout)
        )

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, workspace: Workspace, stream: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the copies; returns what the kernel is to read."""
        aligned = self._plan.aligned(a, b, workspace)
        for x, dst, turned, copy in zip((a, b), aligned, self._turned, self._copy, strict=True):
            if dst is not x:
                copy(x.T, dst.T, stream) if turned else copy(x, dst, stream)
        return aligned


def interpret_repack(x: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy by Triton's interpreter on the CPU; as :func:`load_repack` does on a GPU."""
    from costmodel.kernels.repack import repack_rows

    block_rows, block_cols = REPACK_BLOCK
    repack_rows[(repack_blocks(dst),)](
        **repack_arguments(x, dst), BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols
    )
