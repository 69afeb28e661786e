"""Kernels as users write them, for tests of tuning: none takes longer than a few microseconds."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, bias_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C = A @ B + bias, all contiguous; the bias may be None."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = (m < M)[:, None] & (k < K)[None, :]
        b_mask = (k < K)[:, None] & (n < N)[None, :]
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    c_mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(tl.float16), mask=c_mask)


@triton.jit
def tma_matmul(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C = A @ B through descriptors that the host makes; all sizes are multiples of the blocks."""
    m, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a_desc.load([m, k]), b_desc.load([k, n]), acc)
    c_desc.store([m, n], acc.to(tl.float16))


def set_blocks(args: dict[str, Any]) -> None:
    """Give the descriptors of a :func:`tma_matmul` the blocks of a configuration."""
    m, n, k = (args[f"BLOCK_{x}"] for x in "MNK")
    args["a_desc"].block_shape = [m, k]
    args["b_desc"].block_shape = [k, n]
    args["c_desc"].block_shape = [m, n]


@triton.jit
def row_sum(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Sum each row."""
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * n + at, mask=at < n, other=0.0)
    tl.store(out_ptr + row, tl.sum(total))


@triton.jit
def bump(x_ptr, total_ptr, n, BLOCK: tl.constexpr):
    """x += 1 in place, and add the new sum to a total, which may be None."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=-1.0) + 1.0
    tl.store(x_ptr + at, x, mask=at < n)
    if total_ptr is not None:
        tl.atomic_add(total_ptr, tl.sum(x))


@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def masked(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """x = 1 up to n."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(x_ptr + at, 1.0)
    else:
        tl.store(x_ptr + at, 1.0, mask=at < n)


@gluon.jit
def doubled(x_ptr, n, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """x *= 2 in place, in Gluon."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(x_ptr + at, 2 * gl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def piece(x_ptr, out_ptr, n, BLOCK: tl.constexpr, PART: tl.constexpr):
    """out = x, of which a part only is written."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK // PART)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def eighth(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = x / 8."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * 0.125, mask=at < n)


@triton.jit
def walk(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Read n zeros in blocks, each of which says where the next one lies."""
    at = 0
    while at < n:
        at += BLOCK + tl.sum(tl.load(x_ptr + at + tl.arange(0, BLOCK)))
    tl.store(out_ptr, at)


@triton.jit
def wild(x_ptr, n, BLOCK: tl.constexpr):
    """x += 1 in place; blocks of 128 read from an address that is no one's."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    if BLOCK == 128:
        x += tl.load(x_ptr + (1 << 45))
    tl.store(x_ptr + at, x + 1, mask=at < n)
