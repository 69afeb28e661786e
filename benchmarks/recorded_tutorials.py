"""Kernels as in Triton's tutorials, written anew, and others like them, with usual lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from recorded_calls import F32, ROWS, Call, Maker, Shapes, combined, family
from recorded_products import product_calls

_calls: list[list[Call]] = []


def add(name: str, launch: Callable[..., Any], shapes: Shapes, make: Maker, **options: Any) -> None:
    path = f"{__name__}:{launch.__name__}"
    _calls.append(family(f"tutorials_{name}", path, shapes, make, **options))


# --- Elements -------------------------------------------------------------------------------------

_FLAT = combined({"BLOCK": (256, 512, 1024, 2048, 4096, 8192)}, (2, 4, 8), (1,))


@triton.autotune(_FLAT, ["n"])
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at, at < n), tl.load(y + at, at < n)
    tl.store(out + at, a + b, at < n)


@triton.autotune(_FLAT, ["n"])
@triton.jit
def gelu_kernel(x, bias, out, n, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, at < n).to(tl.float32) + tl.load(bias + at % width, at < n).to(tl.float32)
    tl.store(out + at, 0.5 * a * (1 + tl.erf(a * 0.70710678)), at < n)


@triton.autotune(_FLAT, ["n"])
@triton.jit
def dropout_kernel(x, out, n, p, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, at < n)
    kept = tl.rand(7, at) > p
    tl.store(out + at, tl.where(kept, a / (1 - p), 0.0), at < n)


@triton.autotune(_FLAT, ["n"], restore_value=["weight", "first", "second"])
@triton.jit
def adam_kernel(weight, grad, first, second, n, rate, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad + at, at < n).to(tl.float32)
    m = 0.9 * tl.load(first + at, at < n) + 0.1 * g
    v = 0.999 * tl.load(second + at, at < n, other=1.0) + 0.001 * g * g
    w = tl.load(weight + at, at < n).to(tl.float32) - rate * m / (tl.sqrt(v) + 1e-8)
    tl.store(first + at, m, at < n)
    tl.store(second + at, v, at < n)
    tl.store(weight + at, w, at < n)


@triton.autotune(
    combined({"BM": (16, 32, 64, 128), "BN": (16, 32, 64, 128)}, (2, 4, 8), (1,)), ["m", "n"]
)
@triton.jit
def transpose_kernel(x, out, m, n, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    cols = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    inside = (rows < m) & (cols < n)
    tl.store(out + cols * m + rows, tl.load(x + rows * n + cols, inside), inside)


@triton.autotune(combined({"BLOCK": (128, 256, 512, 1024)}, (1, 2, 4, 8), (1,)), ["d"])
@triton.jit
def gather_kernel(table, index, out, d, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row)
    tl.store(out + row * d + at, tl.load(table + source * d + at, at < d), at < d)


@triton.autotune(combined({"ROWS": (1, 2, 4, 8, 16)}, (1, 2, 4, 8), (1,)), ["n", "h"])
@triton.jit
def rope_kernel(x, cos, sin, out, n, h, D: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    half = tl.arange(0, D // 2)[None, :]
    inside = rows < n * h
    c = tl.load(cos + rows // h * (D // 2) + half, inside).to(tl.float32)
    s = tl.load(sin + rows // h * (D // 2) + half, inside).to(tl.float32)
    a = tl.load(x + rows * D + half, inside).to(tl.float32)
    b = tl.load(x + rows * D + D // 2 + half, inside).to(tl.float32)
    tl.store(out + rows * D + half, a * c - b * s, inside)
    tl.store(out + rows * D + D // 2 + half, a * s + b * c, inside)


@triton.autotune(combined({"BLOCK": (128, 256, 512, 1024, 2048)}, (1, 2, 4, 8), (1,)), ["n"])
@triton.jit
def stencil_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for shift in tl.static_range(-3, 4):
        inside = (at + shift >= 0) & (at + shift < n)
        total += tl.load(x + at + shift, inside, other=0.0).to(tl.float32)
    tl.store(out + at, total / 7, at < n)


# --- Rows -----------------------------------------------------------------------------------------

_ROW = combined({}, (1, 2, 4, 8, 16), (1, 2, 4))
_LOOP = combined({"BLOCK": (512, 1024, 2048, 4096)}, (2, 4, 8, 16), (1, 3))


@triton.autotune(_ROW, ["n"])
@triton.jit
def softmax_kernel(x, out, rows, n, WIDTH: tl.constexpr, num_stages: tl.constexpr):
    at = tl.arange(0, WIDTH)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=num_stages):
        a = tl.load(x + row * n + at, at < n, other=-float("inf")).to(tl.float32)
        e = tl.exp(a - tl.max(a, 0))
        tl.store(out + row * n + at, e / tl.sum(e, 0), at < n)


@triton.autotune(_LOOP, ["n"])
@triton.jit
def layer_norm_kernel(x, w, b, out, n, BLOCK: tl.constexpr):
    x += tl.program_id(0).to(tl.int64) * n
    out += tl.program_id(0).to(tl.int64) * n
    total, squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x + at, at < n, other=0.0).to(tl.float32)
        total += a
        squares += a * a
    mean = tl.sum(total, 0) / n
    scale = tl.rsqrt(tl.sum(squares, 0) / n - mean * mean + 1e-5)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x + at, at < n, other=0.0).to(tl.float32)
        weight, bias = tl.load(w + at, at < n), tl.load(b + at, at < n)
        tl.store(out + at, (a - mean) * scale * weight + bias, at < n)


@triton.autotune(_LOOP, ["n"])
@triton.jit
def cross_entropy_kernel(x, target, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x += row.to(tl.int64) * n
    most, total = -float("inf"), 0.0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x + at, at < n, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(a, 0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(a - higher), 0)
        most = higher
    label = tl.load(x + tl.load(target + row)).to(tl.float32)
    tl.store(out + row, most + tl.log(total) - label)


@triton.autotune(_LOOP, ["n"])
@triton.jit
def running_sum_kernel(x, out, n, BLOCK: tl.constexpr):
    x += tl.program_id(0).to(tl.int64) * n
    out += tl.program_id(0).to(tl.int64) * n
    before = 0.0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x + at, at < n, other=0.0).to(tl.float32)
        tl.store(out + at, before + tl.cumsum(a, 0), at < n)
        before += tl.sum(a, 0)


@triton.autotune(
    combined({"BM": (16, 32, 64, 128), "BN": (32, 64, 128)}, (2, 4, 8), (1, 3)), ["m", "n"]
)
@triton.jit
def column_sum_kernel(x, out, m, n, BM: tl.constexpr, BN: tl.constexpr):
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, m, BM):
        rows = start + tl.arange(0, BM)[:, None]
        inside = (rows < m) & (cols[None, :] < n)
        total += tl.load(x + rows * n + cols[None, :], inside, other=0.0).to(tl.float32)
    tl.store(out + cols, tl.sum(total, 0), cols < n)


# --- Launches -------------------------------------------------------------------------------------


def _flat(n: int) -> Callable[[Any], tuple[int]]:
    return lambda meta: (triton.cdiv(n, meta["BLOCK"]),)


def add_vectors(x: Any, y: Any) -> None:
    add_kernel[_flat(x.numel())](x, y, torch.empty_like(x), x.numel())


def gelu(x: Any, bias: Any) -> None:
    gelu_kernel[_flat(x.numel())](x, bias, torch.empty_like(x), x.numel(), bias.numel())


def dropout(x: Any) -> None:
    dropout_kernel[_flat(x.numel())](x, torch.empty_like(x), x.numel(), 0.3)


def adam(weight: Any, grad: Any) -> None:
    first, second = (torch.zeros_like(weight, dtype=F32) for _ in range(2))
    adam_kernel[_flat(weight.numel())](weight, grad, first, second, weight.numel(), 1e-3)


def stencil(x: Any) -> None:
    stencil_kernel[_flat(x.numel())](x, torch.empty_like(x), x.numel())


def transpose(x: Any) -> None:
    (m, n), out = x.shape, torch.empty_like(x)
    transpose_kernel[lambda t: (triton.cdiv(m, t["BM"]), triton.cdiv(n, t["BN"]))](x, out, m, n)


def gather(table: Any, index: Any) -> None:
    d, count = table.shape[1], index.numel()
    out = table.new_empty(count, d)
    gather_kernel[lambda t: (count, triton.cdiv(d, t["BLOCK"]))](table, index, out, d)


def rope(x: Any, cos: Any, sin: Any) -> None:
    n, h, d = x.shape
    grid = lambda meta: (triton.cdiv(n * h, meta["ROWS"]),)  # noqa: E731
    rope_kernel[grid](x, cos, sin, torch.empty_like(x), n, h, D=d)


def softmax(x: Any) -> None:
    rows, n = x.shape
    width = triton.next_power_of_2(n)
    softmax_kernel[(min(rows, 1056),)](x, torch.empty_like(x), rows, n, WIDTH=width)


def layer_norm(x: Any, w: Any, b: Any) -> None:
    layer_norm_kernel[(x.shape[0],)](x, w, b, torch.empty_like(x), x.shape[1])


def cross_entropy(x: Any, target: Any) -> None:
    out = torch.empty(x.shape[0], device=x.device)
    cross_entropy_kernel[(x.shape[0],)](x, target, out, x.shape[1])


def running_sum(x: Any) -> None:
    running_sum_kernel[(x.shape[0],)](x, torch.empty_like(x), x.shape[1])


def column_sum(x: Any) -> None:
    m, n = x.shape
    column_sum_kernel[lambda t: (triton.cdiv(n, t["BN"]),)](x, x.new_empty(n, dtype=F32), m, n)


_VECTORS: Shapes = [(2**22,), (98432,), (2**26,), (999999,)]
add("add", add_vectors, _VECTORS, lambda t, n: (t(n), t(n)))
add("dropout", dropout, _VECTORS, lambda t, n: (t(n),))
add("stencil", stencil, _VECTORS, lambda t, n: (t(n),))
add("adam", adam, _VECTORS, lambda t, n: (t(n), t(n)))
add("gelu", gelu, ROWS, lambda t, m, n: (t(m, n), t(n)))
add("transpose", transpose, ROWS, lambda t, *s: (t(*s),))
add("gather", gather, [(50000, 1024), (1000, 128), (32000, 4096)],
    lambda t, m, n: (t(m, n), t.whole(m, 8192)))  # fmt: skip
add("rope", rope, [(4096, 16, 128), (1000, 5, 64), (32768, 8, 128)],
    lambda t, n, h, d: (t(n, h, d), t(n, d // 2), t(n, d // 2)))  # fmt: skip
add("softmax", softmax, ROWS, lambda t, *s: (t(*s),))
add("layer_norm", layer_norm, ROWS, lambda t, m, n: (t(m, n), t(n), t(n)))
add("cross_entropy", cross_entropy, [(4096, 32000), (512, 5000), (1000, 50257)],
    lambda t, m, n: (t(m, n), t.whole(n, m)))  # fmt: skip
add("running_sum", running_sum, ROWS, lambda t, *s: (t(*s),))
add("column_sum", column_sum, ROWS, lambda t, *s: (t(*s),))


def tutorials_calls() -> list[list[Call]]:
    return [*_calls, *product_calls()]
