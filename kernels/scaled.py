"""Products of 8-bit operands with scales: tiles of any size, and splits of K for small m.

A[M, K] and B are read along K: B is given as its transpose [N, K], as checkpoints have it. A scale
belongs to the whole operand, to a row of it, or to a block of rows by 128 of K; strides say which.
"""

import triton
import triton.language as tl

from .epilogue import finish, grouped_tile, load_partials, store_tile


@triton.jit
def load_row(ptr, offs, stride, LIMIT, OTHER: tl.constexpr):
    """ptr[offs * stride] as float32 where offs < LIMIT, else OTHER."""
    return tl.load(ptr + offs * stride, mask=offs < LIMIT, other=OTHER).to(tl.float32)


@triton.jit
def step_scales(
    scale_a_ptr, scale_b_ptr, offs_m, offs_n, n_start, block, M, N, stride_sam, stride_sak,
    stride_sbn, stride_sbk, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales [BLOCK_M] of A, and [BLOCK_N] or one of B, of one block of 128 of K."""
    a_ptr = scale_a_ptr + block * stride_sak
    b_ptr = scale_b_ptr + block * stride_sbk
    sa = load_row(a_ptr, offs_m // ROWS_A, stride_sam, tl.cdiv(M, ROWS_A), 0.0)
    if ROWS_B % BLOCK_N == 0:  # the tile lies in one block of B's rows
        sb = tl.load(b_ptr + n_start // ROWS_B * stride_sbn)
    else:
        sb = load_row(b_ptr, offs_n // ROWS_B, stride_sbn, tl.cdiv(N, ROWS_B), 0.0)
    return sa, sb


@triton.jit
def scaled(
    part, sa, sb, SWAP: tl.constexpr, ROWS_B: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """part[BLOCK_M, BLOCK_N] (or its transpose) times scales of :func:`step_scales`."""
    if ROWS_B % BLOCK_N == 0:
        sa *= sb
    elif SWAP:
        part *= sb[:, None]
    else:
        part *= sb[None, :]
    return part * (sa[None, :] if SWAP else sa[:, None])


@triton.jit
def add_splits(
    acc, partial_ptr, arrivals_ptr, tile, split, SPLIT_K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """As ``epilogue.sum_partials``, for partial sums of any type: int32 ones stay exact.

    HELD: how many elements are on their way at a time.
    """
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    BATCH: tl.constexpr = max(1, min(8, HELD // SIZE))
    offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    ptrs = partial_ptr + tile.to(tl.int64) * SPLIT_K * SIZE + offs
    tl.store(ptrs + split * SIZE, acc)
    tl.debug_barrier()  # all threads have written before one of them says so
    arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == SPLIT_K - 1
    parts = load_partials(ptrs, 0, tl.where(is_last, SPLIT_K, 0), SIZE, BATCH)
    if is_last:
        acc = tl.zeros((BLOCK_M, BLOCK_N), acc.dtype)
        for start in tl.range(0, SPLIT_K, BATCH):
            for i in tl.static_range(BATCH):
                acc += parts[i]
            parts = load_partials(ptrs, start + BATCH, SPLIT_K, SIZE, BATCH)
        tl.store(arrivals_ptr + tile, 0)
    return acc, is_last


@triton.jit(do_not_specialize=["M", "SPLIT_K", "stride_sak", "stride_sbk"])
def scaled_tiles(
    a_desc, b_desc, a_ptr, b_ptr, c_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, partial_ptr,
    arrivals_ptr,
    M, N, K, stride_am, stride_bn, stride_cm, stride_sam, stride_sak, stride_sbn, stride_sbk,
    SPLIT_K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SWAP: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, PROMOTE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """C[M, N] = act(sum over blocks of K of (A @ B) * scale_a * scale_b, + bias[N]).

    Grid: tiles_m * tiles_n * SPLIT_K programs; the splits of a tile are neighbours.

    Args:
        a_ptr, b_ptr: A[M, K] and B[N, K], K contiguous: both fp8 or both int8.
        a_desc, b_desc: the same in blocks [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K], to be read by
            TMA; None: by plain loads.
        scale_a_ptr, scale_b_ptr: float32, or None for a plain product.
        partial_ptr: float32 (int32 for int8) [tiles, SPLIT_K, BLOCK_M, BLOCK_N]; arrivals_ptr:
            int32 [tiles], zero before and after. None unless SPLIT.
        ROWS_A, ROWS_B: rows of A and of B that share a scale in each 128 of K (1 or 128; BLOCK_K is
            128 then). 0: the scales do not change along K, and are applied once, at the end.
        SWAP: multiply B @ A.T, so that the tensor cores' tile is narrow along M.
        PROMOTE: add the product of each BLOCK_K in float32 on the ordinary units; the tensor cores
            of Hopper keep some 14 bits of a sum of fp8 products.
    """
    program = tl.program_id(0)
    tile = program // SPLIT_K if SPLIT else program
    split = program % SPLIT_K if SPLIT else 0
    tile_m, tile_n = grouped_tile(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    first = 0
    last = tl.cdiv(K, BLOCK_K)
    if SPLIT:
        per_split = tl.cdiv(last, SPLIT_K)
        first = split * per_split
        last = tl.minimum(last, first + per_split)
    offs_k = first * BLOCK_K + tl.arange(0, BLOCK_K)
    # Rows past the edge read row 0 instead; what they give is not stored.
    row = tl.where(offs_m < M, offs_m, 0).to(tl.int64)
    col = tl.where(offs_n < N, offs_n, 0).to(tl.int64)
    a_ptrs = a_ptr + row[:, None] * stride_am + offs_k[None, :]
    b_ptrs = b_ptr + col[:, None] * stride_bn + offs_k[None, :]
    SUM: tl.constexpr = tl.int32 if a_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), SUM)
    blocks = tl.cdiv(K, BLOCK_K)
    n_start = tile_n * BLOCK_N
    if ROWS_A > 0:
        sa, sb = step_scales(
            scale_a_ptr, scale_b_ptr, offs_m, offs_n, n_start, tl.minimum(first, blocks - 1), M, N,
            stride_sam, stride_sak, stride_sbn, stride_sbk, ROWS_A, ROWS_B, BLOCK_N,
        )  # fmt: skip
    for step in range(first, last):
        if a_desc is not None:
            a = a_desc.load([tile_m * BLOCK_M, step * BLOCK_K])
            b = b_desc.load([tile_n * BLOCK_N, step * BLOCK_K])
        elif EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            inside = (tl.arange(0, BLOCK_K) < K - step * BLOCK_K)[None, :]
            a = tl.load(a_ptrs, mask=inside, other=0.0)
            b = tl.load(b_ptrs, mask=inside, other=0.0)
        x, y = (b, a) if SWAP else (a, b)
        if PROMOTE and BLOCK_K > 128:  # by scales of rows
            acc = tl.dot(x, y.T, acc, out_dtype=SUM, max_num_imprecise_acc=128)
        elif PROMOTE:
            if ROWS_A > 0:  # those of the next step are asked for before this one multiplies
                next_sa, next_sb = step_scales(
                    scale_a_ptr, scale_b_ptr, offs_m, offs_n, n_start,
                    tl.minimum(step + 1, blocks - 1), M, N, stride_sam, stride_sak, stride_sbn,
                    stride_sbk, ROWS_A, ROWS_B, BLOCK_N,
                )  # fmt: skip
            part = tl.dot(x, y.T, out_dtype=SUM)
            if ROWS_A > 0:
                part = scaled(part, sa, sb, SWAP, ROWS_B, BLOCK_N)
                sa, sb = next_sa, next_sb
            acc += part
        else:
            acc = tl.dot(x, y.T, acc, out_dtype=SUM)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    if SWAP:
        acc = acc.T
    is_last = True
    if SPLIT:
        acc, is_last = add_splits(
            acc, partial_ptr, arrivals_ptr, tile, split, SPLIT_K, BLOCK_M, BLOCK_N,
            # Scales of blocks take registers too: as many programs share a multiprocessor.
            4096 if ROWS_A > 0 else 8192,
        )  # fmt: skip
    if is_last:
        if scale_a_ptr is None:
            value = acc
        else:
            value = acc.to(tl.float32)
            if ROWS_A == 0:
                value *= load_row(scale_a_ptr, offs_m, stride_sam, M, 0.0)[:, None]
                value *= load_row(scale_b_ptr, offs_n, stride_sbn, N, 0.0)[None, :]
            value = finish(value, bias_ptr, offs_n, N, ACTIVATION)
        store_tile(
            c_ptr, value, tile_m * BLOCK_M, tile_n * BLOCK_N, M, N, stride_cm, 1,
            BLOCK_M, BLOCK_N, True,
        )  # fmt: skip
