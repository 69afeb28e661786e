"""Scaled products as vLLM, aiter and DeepGEMM call them: their names, arguments and layouts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from costmodel.errors import InvalidInput
from costmodel.scaled.configs import BY_BLOCK, BY_ROW, ROW, STEP, TENSOR
from costmodel.scaled.product import scaled_mm


def w8a8_triton_block_scaled_mm(
    A: Tensor, B: Tensor, As: Tensor, Bs: Tensor, block_size: Sequence[int],
    output_dtype: torch.dtype = torch.float16,
) -> Tensor:  # fmt: skip
    """Multiply as vLLM's function of this name: A [..., k] by B [n, k], with scales of blocks.

    Args:
        As: [..., k / 128]; Bs: [n / 128, k / 128].

    Raises:
        InvalidInput: another ``block_size`` than [128, 128]. Others as :func:`scaled_mm`.
    """
    if list(block_size) != [STEP, STEP]:
        raise InvalidInput(f"block_size={list(block_size)}: expected [{STEP}, {STEP}]")
    a, scale = A.reshape(-1, A.shape[-1]), As.reshape(-1, As.shape[-1])
    return gemm_a8w8_blockscale(a, B, scale, Bs, output_dtype).view(*A.shape[:-1], len(B))


def triton_scaled_mm(
    input: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply as vLLM's function of this name: fp8 or int8 [m, k] by [k, n].

    Args:
        scale_a: one element, [m] or [m, 1]; scale_b: one element, [n] or [n, 1].
    """
    a = (scale_a, TENSOR) if scale_a.numel() == 1 else (scale_a.reshape(-1, 1), ROW)
    b = (scale_b, TENSOR) if scale_b.numel() == 1 else (scale_b.reshape(1, -1), ROW)
    return scaled_mm(input, weight, *a, *b, bias=bias, output_dtype=out_dtype)


def gemm_a8w8_blockscale(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor,
    dtype: torch.dtype | None = torch.bfloat16, y: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply as aiter's function of this name: x [m, k], w [n, k], scales as vLLM has them."""
    return scaled_mm(x, w.T, x_scale, BY_ROW, w_scale.T, BY_BLOCK, output_dtype=dtype, out=y)


def fp8_gemm_nt(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, c: Any = None
) -> None:
    """Multiply as DeepGEMM's function of this name: into d [m, n].

    Args:
        a: [m, k] and its scales [m, k / 128], of any strides; b: [n, k] and [n / 128, k / 128].
        c: only None: nothing is added.
    """
    if c is not None:
        raise InvalidInput("c is a tensor: expected None, add it afterwards")
    gemm_a8w8_blockscale(a[0], b[0], a[1], b[1], d.dtype, d)
