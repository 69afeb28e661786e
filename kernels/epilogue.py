"""What every kernel shares: tile order, the sum of split-K partials, and the epilogue."""

import triton
import triton.language as tl


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M):
    """(row, column) of a tile, walking columns of GROUP_M tiles so that operands stay in L2."""
    per_group = GROUP_M * tiles_n
    group = tile // per_group
    first_m = group * GROUP_M
    group_rows = tl.minimum(tiles_m - first_m, GROUP_M)
    inside = tile % per_group
    return first_m + inside % group_rows, inside // group_rows


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation, in float32. GELU is the exact one (erf), as torch's default."""
    tl.static_assert(
        ACTIVATION == "none" or ACTIVATION == "relu" or ACTIVATION == "gelu" or ACTIVATION == "silu"
    )
    if ACTIVATION == "relu":
        # A comparison keeps NaN; maximum(x, 0) would hide it.
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def finish(acc, bias_ptr, offs_n, N, ACTIVATION: tl.constexpr):
    """act(acc + bias[n]) in float32; ``bias_ptr`` is None where there is none."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        acc += bias[None, :]
    return activate(acc, ACTIVATION)


@triton.jit
def store_tile(
    c_ptr, value, m_start, n_start, M, N, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write one tile of C through plain pointers, clipped at its edges."""
    offs_m = m_start + tl.arange(0, BLOCK_M)
    offs_n = n_start + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    if WIDE:
        offs_m = offs_m.to(tl.int64)
        offs_n = offs_n.to(tl.int64)
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    tl.store(c_ptrs, value.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_partials(ptrs, start, end, SIZE: tl.constexpr, BATCH: tl.constexpr):
    """The partial tiles start, ..., start + BATCH - 1, SIZE elements apart; zeros from end on."""
    parts = ()
    for i in tl.static_range(BATCH):
        s = start + i
        parts += (tl.load(ptrs + s * SIZE, mask=s < end, other=0.0, cache_modifier=".cg"),)
    return parts


@triton.jit
def add_partials(parts, ptrs, SPLIT_K, SIZE: tl.constexpr, BATCH: tl.constexpr):
    """The sum of SPLIT_K partial tiles in order; ``parts`` are the first BATCH of them.

    A batch is asked for at the end of a turn of the loop: were its loads and its additions in one
    block of code, ptxas would mix them, to wait for each load alone.
    """
    acc = tl.zeros(ptrs.shape, tl.float32)
    for start in tl.range(0, SPLIT_K, BATCH):
        for i in tl.static_range(BATCH):
            acc += parts[i]
        parts = load_partials(ptrs, start + BATCH, SPLIT_K, SIZE, BATCH)
    return acc


@triton.jit
def sum_partials(
    acc, partial_ptr, arrivals_ptr, tile, split, SPLIT_K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Put this split's partial sum down; the last CTA of a tile to arrive adds all of them up.

    The sum runs over the splits in order, whoever is last, so that the result is bitwise the same
    from run to run. ``arrivals_ptr`` holds one zero per tile and is left so.

    Returns:
        (sum, True) in the last CTA of the tile; (anything, False) in the others.
    """
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    # Loads of 64 registers a thread (with four warps) are under way at a time: enough to keep the
    # memory busy, and few enough that as many CTAs share a multiprocessor as before. A tile of
    # more than that is added up in two halves, as its sum takes many registers itself.
    BATCH: tl.constexpr = min(8, max(1, 8192 // SIZE))
    PIECES: tl.constexpr = 2 if SIZE > 8192 else 1
    offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    first = partial_ptr + tile.to(tl.int64) * SPLIT_K * SIZE
    tl.store(first + split * SIZE + offs, acc)
    # Every thread's part must be written before the one thread that counts releases it.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == SPLIT_K - 1
    rows = tl.arange(0, BLOCK_M // PIECES)[:, None]
    ptrs = first + rows * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    parts = load_partials(ptrs, 0, tl.where(is_last, SPLIT_K, 0), SIZE, BATCH)
    if is_last:
        top = add_partials(parts, ptrs, SPLIT_K, SIZE, BATCH)
        if PIECES == 1:
            acc = top
        else:
            ptrs += SIZE // 2
            parts = load_partials(ptrs, 0, SPLIT_K, SIZE, BATCH)
            bottom = add_partials(parts, ptrs, SPLIT_K, SIZE, BATCH)
            both = tl.permute(tl.join(top, bottom), (2, 0, 1))
            acc = tl.reshape(both, (BLOCK_M, BLOCK_N))
        tl.store(arrivals_ptr + tile, 0)
    return acc, is_last
