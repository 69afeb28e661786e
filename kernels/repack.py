"""Copies a matrix into rows that the TMA kernels can address."""

import triton
import triton.language as tl


@triton.jit
def repack_rows(
    src_ptr, dst_ptr, rows, cols, src_row_stride, src_col_stride, dst_row_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dst[rows, cols] = src[rows, cols], whose rows may start anywhere.

    The rest of a row of ``dst``, up to its stride, is filled with zeros.

    Grid: cdiv(rows, BLOCK_ROWS) * cdiv(dst_row_stride, BLOCK_COLS) programs.
    """
    tiles = tl.cdiv(dst_row_stride, BLOCK_COLS)
    program = tl.program_id(0)
    row = (program // tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (program % tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    # Whole rows of dst are written, so that the stores need not stop inside a vector.
    whole = (row < rows)[:, None] & (col < dst_row_stride)[None, :]
    # Rows of over 2**31 elements in all are met in practice (a vocabulary), so 64 bits always.
    row = row.to(tl.int64)[:, None]
    col = col.to(tl.int64)[None, :]
    value = tl.load(src_ptr + row * src_row_stride + col * src_col_stride, mask=inside, other=0.0)
    tl.store(dst_ptr + row * dst_row_stride + col, value, mask=whole)
