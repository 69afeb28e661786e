"""GEMM whose warps share the work out: one copies, four or more times four multiply (Hopper).

In Gluon, since Triton cannot say which warp does what. The copying warp keeps a ring of stages in
shared memory full; each group of four warps multiplies its own rows of the tile. A tile may be as
wide as two powers of two (192 = 128 + 64): it then has two accumulators, which share A.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import hopper_tma as tma
from .epilogue import activate, grouped_tile


@gluon.jit
def copy_block(desc, row, col, barrier, block, TURNED: gl.constexpr):
    """Start the copy of a block; with TURNED the descriptor is of the transposed matrix."""
    if TURNED:
        tma.async_copy_global_to_shared(desc, [col, row], barrier, block)
    else:
        tma.async_copy_global_to_shared(desc, [row, col], barrier, block)


@gluon.jit
def fill_stages(
    descs, ring, M, N, K, GROUP_M, ROWS: gl.constexpr, BLOCK_N1: gl.constexpr,
    BLOCK_N2: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    A_COL: gl.constexpr, B_COL: gl.constexpr,
):  # fmt: skip
    """The copying warp: fills a stage as soon as all groups have multiplied what was in it."""
    a_desc, b_desc, b2_desc = descs
    a_ring, b_ring, b2_ring, full, empty = ring
    BLOCK_M: gl.constexpr = ROWS * GROUPS
    BLOCK_N: gl.constexpr = BLOCK_N1 + BLOCK_N2
    STAGE_BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    filled = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        m_start = tile_m * BLOCK_M
        n_start = tile_n * BLOCK_N
        for step in range(steps):
            stage = filled % STAGES
            barrier = full.index(stage)
            mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, STAGE_BYTES)
            k_start = step * BLOCK_K
            for i in gl.static_range(GROUPS):
                block = a_ring.index(stage * GROUPS + i)
                copy_block(a_desc, m_start + i * ROWS, k_start, barrier, block, A_COL)
            copy_block(b_desc, k_start, n_start, barrier, b_ring.index(stage), B_COL)
            if BLOCK_N2 > 0:
                block = b2_ring.index(stage)
                copy_block(b2_desc, k_start, n_start + BLOCK_N1, barrier, block, B_COL)
            filled += 1


@gluon.jit
def finish_part(acc, c_desc, c_block, bias_ptr, m_start, n_start, N, ACTIVATION: gl.constexpr):
    """Epilogue, as ``epilogue.finish``, and store of one part of a group's rows."""
    if bias_ptr is not None:
        offs_n = n_start + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        bias = gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32)
        acc += gl.expand_dims(bias, 0)
    acc = activate(acc, ACTIVATION)
    # The store before this one has to have read the block.
    tma.store_wait(pendings=0)
    c_block.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [m_start, n_start], c_block)


@gluon.jit
def finish_rows(acc, c_desc, c_block, bias_ptr, m_start, n_start, N, ACTIVATION: gl.constexpr):
    """``finish_part`` for an accumulator as wide as the block, or 2, 4, ... times as wide."""
    WIDTH: gl.constexpr = acc.shape[1]
    if WIDTH == c_desc.block_shape[1]:
        finish_part(acc, c_desc, c_block, bias_ptr, m_start, n_start, N, ACTIVATION)
    else:
        HALF: gl.constexpr = WIDTH // 2
        left, right = gl.split(gl.permute(gl.reshape(acc, [acc.shape[0], 2, HALF]), [0, 2, 1]))
        finish_rows(left, c_desc, c_block, bias_ptr, m_start, n_start, N, ACTIVATION)
        finish_rows(right, c_desc, c_block, bias_ptr, m_start, n_start + HALF, N, ACTIVATION)


@gluon.jit
def multiply_rows(
    ring, out, M, N, K, GROUP_M, INDEX: gl.constexpr, ROWS: gl.constexpr, BLOCK_N1: gl.constexpr,
    BLOCK_N2: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    A_COL: gl.constexpr, B_COL: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """A multiplying group of four warps: rows [INDEX * ROWS, (INDEX + 1) * ROWS) of each tile."""
    a_ring, b_ring, b2_ring, full, empty = ring
    c_desc, c_ring, bias_ptr = out
    c_block = c_ring.index(INDEX)
    LAYOUT1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N1, 16])
    tiles_m = gl.cdiv(M, ROWS * GROUPS)
    tiles_n = gl.cdiv(N, BLOCK_N1 + BLOCK_N2)
    steps = gl.cdiv(K, BLOCK_K)
    used = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        m_start = (tile_m * GROUPS + INDEX) * ROWS
        n_start = tile_n * (BLOCK_N1 + BLOCK_N2)
        acc = gl.zeros([ROWS, BLOCK_N1], gl.float32, LAYOUT1)
        if BLOCK_N2 > 0:
            LAYOUT2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N2, 16])
            acc2 = gl.zeros([ROWS, BLOCK_N2], gl.float32, LAYOUT2)
        for step in range(steps):
            stage = used % STAGES
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            a = a_ring.index(stage * GROUPS + INDEX)
            b = b_ring.index(stage)
            if A_COL:
                a = a.permute([1, 0])
            if B_COL:
                b = b.permute([1, 0])
            acc = warpgroup_mma(a, b, acc, is_async=True)
            if BLOCK_N2 > 0:
                b2 = b2_ring.index(stage)
                if B_COL:
                    b2 = b2.permute([1, 0])
                acc2 = warpgroup_mma(a, b2, acc2, is_async=True)
                acc, acc2 = warpgroup_mma_wait(2, deps=[acc, acc2])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            # Only this step's products are under way: the stage before may be filled again.
            mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), pred=step > 0)
            used += 1
        if BLOCK_N2 > 0:
            acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), pred=steps > 0)
        finish_rows(acc, c_desc, c_block, bias_ptr, m_start, n_start, N, ACTIVATION)
        if BLOCK_N2 > 0:
            n2_start = n_start + BLOCK_N1
            finish_rows(acc2, c_desc, c_block, bias_ptr, m_start, n2_start, N, ACTIVATION)
    tma.store_wait(pendings=0)


@gluon.jit
def gemm_warp_specialized(
    a_desc, b_desc, b2_desc, c_desc, bias_ptr, M, N, K, GROUP_M,
    ROWS: gl.constexpr, BLOCK_N1: gl.constexpr, BLOCK_N2: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, A_COL: gl.constexpr, B_COL: gl.constexpr,
    ACTIVATION: gl.constexpr, COPY_REGISTERS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """C[M, N] = act(A @ B + bias), each program walking over tiles of GROUPS * ROWS rows.

    Grid: as many programs as fit the GPU, at most one a tile. Four warps are launched; the
    region adds the others.

    Args:
        a_desc: A[M, K] in blocks [ROWS, BLOCK_K], or with A_COL its transpose in blocks
            [BLOCK_K, ROWS]; b_desc: B[K, N] in blocks [BLOCK_K, BLOCK_N1], or with B_COL its
            transpose; b2_desc: the same with BLOCK_N2, None where that is 0.
        c_desc: C[M, N] in blocks of ROWS rows, through which a group stores its accumulators,
            part by part: their widths are powers of two times that of the block. A narrow block
            leaves room for another stage.
        bias_ptr: bias[N] or None.
        COPY_REGISTERS, MULTIPLY_REGISTERS: of a thread of either kind.
    """
    gl.static_assert(GROUPS == 2 or GROUPS == 3)
    gl.static_assert(ROWS % 64 == 0 and BLOCK_K % 16 == 0)
    a_ring = gl.allocate_shared_memory(
        a_desc.dtype, [STAGES * GROUPS] + a_desc.block_shape, a_desc.layout
    )
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    c_ring = gl.allocate_shared_memory(c_desc.dtype, [GROUPS] + c_desc.block_shape, c_desc.layout)
    if BLOCK_N2 > 0:
        b2_ring = gl.allocate_shared_memory(
            b2_desc.dtype, [STAGES] + b2_desc.block_shape, b2_desc.layout
        )
    else:
        b2_ring = b_ring
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    descs = (a_desc, b_desc, b2_desc)
    ring = (a_ring, b_ring, b2_ring, full, empty)
    out = (c_desc, c_ring, bias_ptr)
    # Written out, since constants in a tuple that has a name are constants no longer.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply_rows, (ring, out, M, N, K, GROUP_M, 0, ROWS, BLOCK_N1, BLOCK_N2, BLOCK_K,
                                 STAGES, GROUPS, A_COL, B_COL, ACTIVATION)),
                (multiply_rows, (ring, out, M, N, K, GROUP_M, 1, ROWS, BLOCK_N1, BLOCK_N2, BLOCK_K,
                                 STAGES, GROUPS, A_COL, B_COL, ACTIVATION)),
                (fill_stages, (descs, ring, M, N, K, GROUP_M, ROWS, BLOCK_N1, BLOCK_N2, BLOCK_K,
                               STAGES, GROUPS, A_COL, B_COL)),
            ],
            [4, 1],
            [MULTIPLY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_rows, (ring, out, M, N, K, GROUP_M, 0, ROWS, BLOCK_N1, BLOCK_N2, BLOCK_K,
                                 STAGES, GROUPS, A_COL, B_COL, ACTIVATION)),
                (multiply_rows, (ring, out, M, N, K, GROUP_M, 1, ROWS, BLOCK_N1, BLOCK_N2, BLOCK_K,
                                 STAGES, GROUPS, A_COL, B_COL, ACTIVATION)),
                (multiply_rows, (ring, out, M, N, K, GROUP_M, 2, ROWS, BLOCK_N1, BLOCK_N2, BLOCK_K,
                                 STAGES, GROUPS, A_COL, B_COL, ACTIVATION)),
                (fill_stages, (descs, ring, M, N, K, GROUP_M, ROWS, BLOCK_N1, BLOCK_N2, BLOCK_K,
                               STAGES, GROUPS, A_COL, B_COL)),
            ],
            [4, 4, 1],
            [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
