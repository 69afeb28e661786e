"""GEMM through tensor descriptors (TMA): operands whose bases and strides are 16-byte aligned.

The copy engine clips at the edges and fills with zeros, so no load needs a mask.
"""

import triton
import triton.language as tl

from .epilogue import finish, grouped_tile, store_tile, sum_partials


@triton.jit
def load_product(
    acc, a_desc, b_desc, m_start, n_start, first_step, steps,
    BLOCK_K: tl.constexpr, A_COL: tl.constexpr, B_COL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + A[m tile, :] @ B[:, n tile] over the given steps of BLOCK_K."""
    for step in range(first_step, steps):
        k_start = step * BLOCK_K
        if A_COL:
            a = a_desc.load([k_start, m_start]).T
        else:
            a = a_desc.load([m_start, k_start])
        if B_COL:
            b = b_desc.load([n_start, k_start]).T
        else:
            b = b_desc.load([k_start, n_start])
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_product(
    acc, c_ptr, c_desc, bias_ptr, m_start, n_start, M, N, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr, WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Epilogue and store: by descriptor where C allows one, else by pointers.

    HALVES stores the tile in two halves, which needs half the shared memory, so that another
    stage of the pipeline may fit.
    """
    if HALVES:
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        store_part(
            left, c_ptr, c_desc, bias_ptr, m_start, n_start, M, N, stride_cm, stride_cn,
            BLOCK_M, BLOCK_N // 2, WIDE, ACTIVATION,
        )  # fmt: skip
        store_part(
            right, c_ptr, c_desc, bias_ptr, m_start, n_start + BLOCK_N // 2, M, N,
            stride_cm, stride_cn, BLOCK_M, BLOCK_N // 2, WIDE, ACTIVATION,
        )  # fmt: skip
    else:
        store_part(
            acc, c_ptr, c_desc, bias_ptr, m_start, n_start, M, N, stride_cm, stride_cn,
            BLOCK_M, BLOCK_N, WIDE, ACTIVATION,
        )  # fmt: skip


@triton.jit
def store_part(
    part, c_ptr, c_desc, bias_ptr, m_start, n_start, M, N, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    part = finish(part, bias_ptr, n_start + tl.arange(0, WIDTH), N, ACTIVATION)
    if c_desc is None:
        store_tile(c_ptr, part, m_start, n_start, M, N, stride_cm, stride_cn, BLOCK_M, WIDTH, WIDE)
    else:
        c_desc.store([m_start, n_start], part.to(c_desc.dtype))


@triton.jit
def gemm_tma(
    a_desc, b_desc, c_desc, c_ptr, bias_ptr, partial_ptr, arrivals_ptr,
    M, N, K, stride_cm, stride_cn, GROUP_M, SPLIT_K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_COL: tl.constexpr, B_COL: tl.constexpr, HALVES: tl.constexpr,
    SPLIT: tl.constexpr, WIDE: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C[M, N] = act(A @ B + bias), one tile of C (or a split of one) per program.

    Grid: tiles_m * tiles_n * SPLIT_K programs; the splits of a tile are neighbours.

    Args:
        a_desc: A[M, K] in blocks [BLOCK_M, BLOCK_K], or with A_COL its transpose [K, M] in
            blocks [BLOCK_K, BLOCK_M]; b_desc likewise: B[K, N], or with B_COL [N, K].
        c_desc: C[M, N] in blocks [BLOCK_M, BLOCK_N] (half as wide with HALVES), or None: then
            c_ptr and its strides are used.
        bias_ptr, partial_ptr, arrivals_ptr, PRECISION: as in ``gemm_pointer``.
    """
    tl.static_assert(BLOCK_M >= 16 and BLOCK_N >= 16 and BLOCK_K >= 16)
    tl.device_assert(GROUP_M > 0, "GROUP_M must be positive")
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    if SPLIT:
        tile = program // SPLIT_K
        split = program % SPLIT_K
        per_split = tl.cdiv(steps, SPLIT_K)
        first_step = split * per_split
        steps = tl.minimum(steps, first_step + per_split)
    else:
        tile = program
        split = 0
        first_step = 0
    tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
    m_start = tile_m * BLOCK_M
    n_start = tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = load_product(
        acc, a_desc, b_desc, m_start, n_start, first_step, steps, BLOCK_K, A_COL, B_COL, PRECISION
    )
    if SPLIT:
        acc, is_last = sum_partials(
            acc, partial_ptr, arrivals_ptr, tile, split, SPLIT_K, BLOCK_M, BLOCK_N
        )
        if is_last:
            store_product(
                acc, c_ptr, c_desc, bias_ptr, m_start, n_start, M, N, stride_cm, stride_cn,
                BLOCK_M, BLOCK_N, HALVES, WIDE, ACTIVATION,
            )  # fmt: skip
    else:
        store_product(
            acc, c_ptr, c_desc, bias_ptr, m_start, n_start, M, N, stride_cm, stride_cn,
            BLOCK_M, BLOCK_N, HALVES, WIDE, ACTIVATION,
        )  # fmt: skip


@triton.jit
def gemm_tma_persistent(
    a_desc, b_desc, c_desc, c_ptr, bias_ptr,
    M, N, K, stride_cm, stride_cn, GROUP_M,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_COL: tl.constexpr, B_COL: tl.constexpr, HALVES: tl.constexpr, FLATTEN: tl.constexpr,
    WIDE: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``gemm_tma``, but each program walks over tiles: the grid is as many as fit the GPU.

    FLATTEN makes one loop of tiles and steps, so that the loads of the next tile run under the
    epilogue of this one.
    """
    tl.static_assert(BLOCK_M >= 16 and BLOCK_N >= 16 and BLOCK_K >= 16)
    tl.device_assert(GROUP_M > 0, "GROUP_M must be positive")
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        m_start = tile_m * BLOCK_M
        n_start = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc = load_product(
            acc, a_desc, b_desc, m_start, n_start, 0, steps, BLOCK_K, A_COL, B_COL, PRECISION
        )
        store_product(
            acc, c_ptr, c_desc, bias_ptr, m_start, n_start, M, N, stride_cm, stride_cn,
            BLOCK_M, BLOCK_N, HALVES, WIDE, ACTIVATION,
        )  # fmt: skip
