"""GEMM through plain pointers: any sizes, any strides, any alignment."""

import triton
import triton.language as tl

from .epilogue import finish, grouped_tile, store_tile, sum_partials


@triton.jit
def gemm_pointer(
    a_ptr, b_ptr, c_ptr, bias_ptr, partial_ptr, arrivals_ptr,
    M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    GROUP_M, SPLIT_K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
    B_CONTIGUOUS: tl.constexpr, A_CONTIGUOUS: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """C[M, N] = act(A[M, K] @ B[K, N] + bias[N]), one tile of C (or a split of one) per program.

    Grid: tiles_m * tiles_n * SPLIT_K programs; the splits of a tile are neighbours.

    Args:
        bias_ptr: bias[N], or None.
        partial_ptr: float32 [tiles, SPLIT_K, BLOCK_M, BLOCK_N]; None unless SPLIT.
        arrivals_ptr: int32 [tiles], zero before and after; None unless SPLIT.
        EVEN_K: K is a multiple of BLOCK_K, so that no load along K needs a mask.
        WIDE: offsets may pass 2**31 elements; the strides are 64-bit then.
        A_CONTIGUOUS, B_CONTIGUOUS: how many elements of A along M, and of B along N, lie side
            by side with a whole vector inside or outside the matrix (1 where K is contiguous).
        PRECISION: of float32 operands: ``ieee``, or ``tf32`` to multiply on the tensor cores.
    """
    tl.static_assert(BLOCK_M >= 16 and BLOCK_N >= 16 and BLOCK_K >= 16)
    tl.device_assert(GROUP_M > 0, "GROUP_M must be positive")
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    if SPLIT:
        tile = program // SPLIT_K
        split = program % SPLIT_K
    else:
        tile = program
        split = 0
    tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)

    # Rows and columns past the edge read row or column 0 instead; what they give is not stored.
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.max_contiguous(
        tl.multiple_of(tl.where(offs_m < M, offs_m, 0), A_CONTIGUOUS), A_CONTIGUOUS
    )
    col = tl.max_contiguous(
        tl.multiple_of(tl.where(offs_n < N, offs_n, 0), B_CONTIGUOUS), B_CONTIGUOUS
    )
    steps = tl.cdiv(K, BLOCK_K)
    first_step = 0
    if SPLIT:
        per_split = tl.cdiv(steps, SPLIT_K)
        first_step = split * per_split
        steps = tl.minimum(steps, first_step + per_split)
    offs_k = first_step * BLOCK_K + tl.arange(0, BLOCK_K)
    k_index = offs_k
    if WIDE:
        row = row.to(tl.int64)
        col = col.to(tl.int64)
        k_index = offs_k.to(tl.int64)
    a_ptrs = a_ptr + row[:, None] * stride_am + k_index[None, :] * stride_ak
    b_ptrs = b_ptr + k_index[:, None] * stride_bk + col[None, :] * stride_bn

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(first_step, steps):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            inside = tl.arange(0, BLOCK_K) < K - step * BLOCK_K
            a = tl.load(a_ptrs, mask=inside[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk

    if SPLIT:
        acc, is_last = sum_partials(
            acc, partial_ptr, arrivals_ptr, tile, split, SPLIT_K, BLOCK_M, BLOCK_N
        )
        if is_last:
            value = finish(acc, bias_ptr, offs_n, N, ACTIVATION)
            store_tile(
                c_ptr, value, tile_m * BLOCK_M, tile_n * BLOCK_N, M, N, stride_cm, stride_cn,
                BLOCK_M, BLOCK_N, WIDE,
            )  # fmt: skip
    else:
        value = finish(acc, bias_ptr, offs_n, N, ACTIVATION)
        store_tile(
            c_ptr, value, tile_m * BLOCK_M, tile_n * BLOCK_N, M, N, stride_cm, stride_cn,
            BLOCK_M, BLOCK_N, WIDE,
        )  # fmt: skip
