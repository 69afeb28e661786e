"""Products of 8-bit operands with scales, for large m on Hopper: one warp copies, groups multiply.

The ring of stages and the dealing of rows to groups are those of ``warp_specialized``. Products are
promoted by the ordinary units of one group while the tensor cores multiply for another.
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
from .epilogue import grouped_tile
from .warp_specialized import finish_rows


@gluon.jit
def warm_scales(ptr, start, stride, LIMIT, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """Have the scales of BLOCK rows, ROWS (or 0, for 1) to a scale, brought into the L2 cache.

    Each line of the cache is asked for once.
    """
    PER: gl.constexpr = max(ROWS, 1)
    offs = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0])) * 32
    row = start // PER + offs
    mask = (offs < (BLOCK + PER - 1) // PER) & (row < gl.cdiv(LIMIT, PER))
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [ptr + row * stride, mask.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fill_stages(
    descs, ring, scales, M, N, K, GROUP_M: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr,
    ROWS_A: gl.constexpr, ROWS_B: gl.constexpr,
):  # fmt: skip
    """The copying warp: fills a stage as soon as all groups have multiplied what was in it.

    The stage's scales are then on their way to the cache when the groups come to it.
    """
    a_ptr, b_ptr, stride_am, stride_ak, stride_bn, stride_bk = scales
    a_desc, b_desc = descs
    a_ring, b_ring, full, empty = ring
    tiles_m = gl.cdiv(M, ROWS * GROUPS)
    tiles_n = gl.cdiv(N, BLOCK_N * PARTS)
    filled = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        for step in range(gl.cdiv(K, BLOCK_K)):
            stage = filled % STAGES
            barrier = full.index(stage)
            mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, (ROWS * GROUPS + BLOCK_N * PARTS) * BLOCK_K)
            for i in gl.static_range(GROUPS):
                start = [(tile_m * GROUPS + i) * ROWS, step * BLOCK_K]
                block = a_ring.index(stage * GROUPS + i)
                tma.async_copy_global_to_shared(a_desc, start, barrier, block)
            for i in gl.static_range(PARTS):
                start = [(tile_n * PARTS + i) * BLOCK_N, step * BLOCK_K]
                block = b_ring.index(stage * PARTS + i)
                tma.async_copy_global_to_shared(b_desc, start, barrier, block)
            if a_ptr is not None:
                if ROWS_A > 0 or step == 0:
                    row, column = tile_m * GROUPS * ROWS, tile_n * PARTS * BLOCK_N
                    a_step, b_step = a_ptr + step * stride_ak, b_ptr + step * stride_bk
                    warm_scales(a_step, row, stride_am, M, ROWS_A, GROUPS * ROWS)
                    warm_scales(b_step, column, stride_bn, N, ROWS_B, PARTS * BLOCK_N)
            filled += 1


@gluon.jit
def load_scales(ptr, offs, stride, LIMIT):
    """ptr[offs * stride], 0 past the end; the strides of a scale of the whole operand are 0."""
    return gl.load(ptr + offs * stride, mask=offs < LIMIT, other=0.0)


@gluon.jit
def block_scales(
    scales, offs_m, offs_n, n_start, step, M, N, K, ROWS_A: gl.constexpr, ROWS_B: gl.constexpr,
    BLOCK_N: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Scales of a block of 128 of K, or of the last: of A's rows, and of B's in each part.

    Those of a part are one if it lies in one block. Without scales along K: nothing that is used.
    """
    a_ptr, b_ptr, stride_am, stride_ak, stride_bn, stride_bk = scales
    if ROWS_A == 0:
        sa, sb, sb2 = 0, 0, 0
    else:
        step = gl.minimum(step, gl.cdiv(K, 128) - 1)
        a_ptr += step * stride_ak
        b_ptr += step * stride_bk
        sa = load_scales(a_ptr, offs_m // ROWS_A, stride_am, gl.cdiv(M, ROWS_A))
        row = n_start if ROWS_B % BLOCK_N == 0 else n_start + offs_n
        sb = load_scales(b_ptr, row // ROWS_B, stride_bn, gl.cdiv(N, ROWS_B))
        sb2 = sb
        if PARTS == 2:
            sb2 = load_scales(b_ptr, (row + BLOCK_N) // ROWS_B, stride_bn, gl.cdiv(N, ROWS_B))
    return sa, sb, sb2


@gluon.jit
def promoted(
    acc, part, sa, sb, ROWS_A: gl.constexpr, ROWS_B: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """acc + part * sa * sb in float32, with the scales of ``block_scales``."""
    if ROWS_A == 0:
        acc += part
    elif ROWS_B % BLOCK_N == 0:
        acc += part * gl.expand_dims(sa * sb, 1)
    else:
        acc += part * gl.expand_dims(sb, 0) * gl.expand_dims(sa, 1)
    return acc


@gluon.jit
def add_stage(
    acc, acc2, ring, scales, used, INDEX: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    PARTS: gl.constexpr, ROWS_A: gl.constexpr, ROWS_B: gl.constexpr,
):  # fmt: skip
    """Multiply the next stage; return the sums of the parts with its products, promoted."""
    a_ring, b_ring, full, empty = ring
    sa, sb, sb2 = scales
    BLOCK_N: gl.constexpr = acc.shape[1]
    stage = used % STAGES
    mbarrier.wait(full.index(stage), (used // STAGES) & 1)
    a = a_ring.index(stage * GROUPS + INDEX)
    LAYOUT: gl.constexpr = acc.type.layout
    part = gl.zeros(acc.shape, acc.dtype, LAYOUT)
    b = b_ring.index(stage * PARTS).permute([1, 0])
    part = warpgroup_mma(a, b, part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    if PARTS == 2:
        acc = promoted(acc, part, sa, sb, ROWS_A, ROWS_B, BLOCK_N)
        # The sums are made before the registers of the product are used again.
        acc, part = warpgroup_mma_wait(0, deps=[acc, part])
        b = b_ring.index(stage * PARTS + 1).permute([1, 0])
        part = warpgroup_mma(a, b, part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage))
        acc2 = promoted(acc2, part, sa, sb2, ROWS_A, ROWS_B, BLOCK_N)
    else:
        mbarrier.arrive(empty.index(stage))
        acc = promoted(acc, part, sa, sb, ROWS_A, ROWS_B, BLOCK_N)
    return acc, acc2


@gluon.jit
def multiply_rows(
    ring, out, scales, M, N, K, INDEX: gl.constexpr, GROUP_M: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    PARTS: gl.constexpr, ROWS_A: gl.constexpr, ROWS_B: gl.constexpr, PROMOTE: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """A multiplying group of four warps: rows [INDEX * ROWS, (INDEX + 1) * ROWS) of each tile."""
    a_ring, b_ring, full, empty = ring
    SUM: gl.constexpr = gl.int32 if a_ring.dtype == gl.int8 else gl.float32
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    tiles_m = gl.cdiv(M, ROWS * GROUPS)
    tiles_n = gl.cdiv(N, BLOCK_N * PARTS)
    steps = gl.cdiv(K, BLOCK_K)
    offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    used = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        m_start = (tile_m * GROUPS + INDEX) * ROWS
        n_start = tile_n * BLOCK_N * PARTS
        offs_m = m_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        acc = gl.zeros([ROWS, BLOCK_N], SUM, LAYOUT)
        acc2 = acc
        if PROMOTE:
            even = block_scales(
                scales, offs_m, offs_n, n_start, 0, M, N, K, ROWS_A, ROWS_B, BLOCK_N, PARTS
            )
            odd = block_scales(
                scales, offs_m, offs_n, n_start, 1, M, N, K, ROWS_A, ROWS_B, BLOCK_N, PARTS
            )
            # By twos: a load then has a whole step to arrive, and no copy of it waits before that.
            for step in range(0, steps, 2):
                acc, acc2 = add_stage(
                    acc, acc2, ring, even, used, INDEX, STAGES, GROUPS, PARTS, ROWS_A, ROWS_B
                )
                even = block_scales(
                    scales, offs_m, offs_n, n_start, step + 2, M, N, K, ROWS_A, ROWS_B, BLOCK_N,
                    PARTS,
                )  # fmt: skip
                if step + 1 < steps:
                    acc, acc2 = add_stage(
                        acc, acc2, ring, odd, used + 1, INDEX, STAGES, GROUPS, PARTS, ROWS_A,
                        ROWS_B,
                    )  # fmt: skip
                odd = block_scales(
                    scales, offs_m, offs_n, n_start, step + 3, M, N, K, ROWS_A, ROWS_B, BLOCK_N,
                    PARTS,
                )  # fmt: skip
                used += 2
            used -= steps % 2
        else:
            for step in range(steps):
                stage = used % STAGES
                mbarrier.wait(full.index(stage), (used // STAGES) & 1)
                a = a_ring.index(stage * GROUPS + INDEX)
                acc = warpgroup_mma(a, b_ring.index(stage).permute([1, 0]), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                # Only this step's product is under way: the stage before may be filled again.
                mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), pred=step > 0)
                used += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), pred=steps > 0)
        finish_scaled(acc, out, scales, offs_m, offs_n, m_start, n_start, M, N, INDEX, ROWS_A,
                      ACTIVATION)  # fmt: skip
        if PARTS == 2:
            finish_scaled(acc2, out, scales, offs_m, offs_n, m_start, n_start + BLOCK_N, M, N,
                          INDEX, ROWS_A, ACTIVATION)  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit
def finish_scaled(
    acc, out, scales, offs_m, offs_n, m_start, n_start, M, N, INDEX: gl.constexpr,
    ROWS_A: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Scales that do not change along K, the epilogue and the store of a group's rows."""
    c_desc, c_ring, bias_ptr = out
    a_ptr, b_ptr, stride_am, _ak, stride_bn, _bk = scales
    if a_ptr is None:
        value = acc
    else:
        value = acc.to(gl.float32)
        if ROWS_A == 0:
            value *= gl.expand_dims(load_scales(a_ptr, offs_m, stride_am, M), 1)
            value *= gl.expand_dims(load_scales(b_ptr, n_start + offs_n, stride_bn, N), 0)
    finish_rows(value, c_desc, c_ring.index(INDEX), bias_ptr, m_start, n_start, N, ACTIVATION)


@gluon.jit(do_not_specialize=["M", "stride_sak", "stride_sbk"])
def scaled_warp_specialized(
    a_desc, b_desc, c_desc, scale_a_ptr, scale_b_ptr, bias_ptr,
    M, N, K, stride_sam, stride_sak, stride_sbn, stride_sbk, GROUP_M: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, PARTS: gl.constexpr, ROWS_A: gl.constexpr, ROWS_B: gl.constexpr,
    PROMOTE: gl.constexpr, ACTIVATION: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As ``scaled_tiles``, each program walking over tiles of GROUPS * ROWS rows; no split-K.

    Grid: as many programs as fit the GPU, at most one a tile. Four warps are launched; the region
    adds the others.

    Args:
        a_desc: A[M, K] in blocks [ROWS, BLOCK_K]; b_desc: B[N, K] in blocks [BLOCK_N, BLOCK_K].
        c_desc: C[M, N] in blocks of ROWS rows; the width divides BLOCK_N.
        PARTS: a tile is so many times BLOCK_N wide (1, or 2 if products are promoted): the parts
            share the registers of the product, so that a wider tile asks less of the L2 cache.
        ROWS_A, ROWS_B, PROMOTE: as of ``scaled_tiles``; BLOCK_K is 128.
        COPY_REGISTERS, MULTIPLY_REGISTERS: of a thread of either kind.
    """
    gl.static_assert(GROUPS == 2 or GROUPS == 3)
    gl.static_assert(ROWS % 64 == 0 and BLOCK_K == 128)
    gl.static_assert(PARTS == 1 or (PARTS == 2 and PROMOTE))
    a_ring = gl.allocate_shared_memory(
        a_desc.dtype, [STAGES * GROUPS] + a_desc.block_shape, a_desc.layout
    )
    b_ring = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES * PARTS] + b_desc.block_shape, b_desc.layout
    )
    c_ring = gl.allocate_shared_memory(c_desc.dtype, [GROUPS] + c_desc.block_shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    descs = (a_desc, b_desc)
    ring = (a_ring, b_ring, full, empty)
    out = (c_desc, c_ring, bias_ptr)
    scales = (scale_a_ptr, scale_b_ptr, stride_sam, stride_sak, stride_sbn, stride_sbk)
    # Written out, since constants in a tuple that has a name are constants no longer.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply_rows, (ring, out, scales, M, N, K, 0, GROUP_M, ROWS, BLOCK_N, BLOCK_K,
                                 STAGES, GROUPS, PARTS, ROWS_A, ROWS_B, PROMOTE, ACTIVATION)),
                (multiply_rows, (ring, out, scales, M, N, K, 1, GROUP_M, ROWS, BLOCK_N, BLOCK_K,
                                 STAGES, GROUPS, PARTS, ROWS_A, ROWS_B, PROMOTE, ACTIVATION)),
                (fill_stages, (descs, ring, scales, M, N, K, GROUP_M, ROWS, BLOCK_N, BLOCK_K,
                               STAGES, GROUPS, PARTS, ROWS_A, ROWS_B)),
            ],
            [4, 1],
            [MULTIPLY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_rows, (ring, out, scales, M, N, K, 0, GROUP_M, ROWS, BLOCK_N, BLOCK_K,
                                 STAGES, GROUPS, PARTS, ROWS_A, ROWS_B, PROMOTE, ACTIVATION)),
                (multiply_rows, (ring, out, scales, M, N, K, 1, GROUP_M, ROWS, BLOCK_N, BLOCK_K,
                                 STAGES, GROUPS, PARTS, ROWS_A, ROWS_B, PROMOTE, ACTIVATION)),
                (multiply_rows, (ring, out, scales, M, N, K, 2, GROUP_M, ROWS, BLOCK_N, BLOCK_K,
                                 STAGES, GROUPS, PARTS, ROWS_A, ROWS_B, PROMOTE, ACTIVATION)),
                (fill_stages, (descs, ring, scales, M, N, K, GROUP_M, ROWS, BLOCK_N, BLOCK_K,
                               STAGES, GROUPS, PARTS, ROWS_A, ROWS_B)),
            ],
            [4, 4, 1],
            [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
