"""The kernel of a toy family: one tile of C a program, without a pipeline."""

import triton
import triton.language as tl

from costmodel.kernels.epilogue import finish, grouped_tile, store_tile


@triton.jit
def gemm_toy(
    a_ptr, b_ptr, c_ptr, bias_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, GROUP_M,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """C[M, N] = act(A[M, K] @ B[K, N] + bias[N])."""
    tile_m, tile_n = grouped_tile(
        tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M
    )
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak,
            mask=(offs_m < M)[:, None] & (offs_k < K)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn,
            mask=(offs_k < K)[:, None] & (offs_n < N)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    value = finish(acc, bias_ptr, offs_n, N, ACTIVATION)
    store_tile(
        c_ptr, value, tile_m * BLOCK_M, tile_n * BLOCK_N, M, N, stride_cm, stride_cn,
        BLOCK_M, BLOCK_N, WIDE,
    )  # fmt: skip
