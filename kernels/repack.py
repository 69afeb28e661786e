"""Copies operands into rows that the TMA kernels can address."""

import triton
import triton.language as tl


@triton.jit
def copy_rows(
    program, src_ptr, dst_ptr, rows, cols, src_row_stride, src_col_stride, dst_row_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dst[rows, cols] = src[rows, cols], whose rows may start anywhere: one block of it.

    The rest of a row of ``dst``, up to its stride, is filled with zeros.
    """
    tiles = tl.cdiv(dst_row_stride, BLOCK_COLS)
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


@triton.jit
def repack_operands(
    a_ptr, a_copy_ptr, a_rows, a_cols, a_row_stride, a_col_stride, a_copy_stride,
    b_ptr, b_copy_ptr, b_rows, b_cols, b_row_stride, b_col_stride, b_copy_stride,
    a_blocks, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Copy A, B or both, in one launch; all arguments of an operand that stays are None.

    Rows are those of memory: an operand that is stored by columns is given as its transpose.

    Grid: the blocks of A, then those of B; an operand has cdiv(rows, BLOCK_ROWS) *
    cdiv(copy_stride, BLOCK_COLS) of them.

    Args:
        a_blocks: how many programs copy A; None unless both are copied.
    """
    program = tl.program_id(0)
    if b_ptr is None:
        copy_rows(
            program, a_ptr, a_copy_ptr, a_rows, a_cols, a_row_stride, a_col_stride, a_copy_stride,
            BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
    elif a_ptr is None:
        copy_rows(
            program, b_ptr, b_copy_ptr, b_rows, b_cols, b_row_stride, b_col_stride, b_copy_stride,
            BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
    elif program < a_blocks:
        copy_rows(
            program, a_ptr, a_copy_ptr, a_rows, a_cols, a_row_stride, a_col_stride, a_copy_stride,
            BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
    else:
        copy_rows(
            program - a_blocks, b_ptr, b_copy_ptr, b_rows, b_cols, b_row_stride, b_col_stride,
            b_copy_stride, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
