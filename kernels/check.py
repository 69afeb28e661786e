"""The correctness gate: counts elements of a result that are off its reference."""

import triton
import triton.language as tl


@triton.jit
def count_mismatches(out_ptr, ref_ptr, count_ptr, size, atol, rtol, BLOCK: tl.constexpr):
    """count += how many of out[size] are not within atol + rtol * |ref|; NaN never is.

    Args:
        out_ptr: the result, any float type; ref_ptr: its reference, float32; both contiguous.
        count_ptr: int32 [1].
    """
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    out = tl.load(out_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    ref = tl.load(ref_ptr + offs, mask=mask, other=0.0)
    # An infinite reference has no tolerance: any number would be within it.
    near = (tl.abs(out - ref) <= atol + rtol * tl.abs(ref)) & (tl.abs(ref) < float("inf"))
    # A reference past the range of the output rounds to infinity there, and must do so here.
    near = near | (out == ref.to(out_ptr.dtype.element_ty).to(tl.float32))
    bad = tl.sum(tl.where(mask & (near == 0), 1, 0))
    tl.atomic_add(count_ptr, bad, mask=bad > 0)
