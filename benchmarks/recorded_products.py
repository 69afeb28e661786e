"""Products as in Triton's tutorials, written anew, with the tutorials' lists of configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from recorded_calls import BF16, F16, HALVES, HEADS, Call, Maker, Shapes, combined, family

_calls: list[list[Call]] = []


def add(name: str, launch: Callable[..., Any], shapes: Shapes, make: Maker, **options: Any) -> None:
    path = f"{__name__}:{launch.__name__}"
    _calls.append(family(f"tutorials_{name}", path, shapes, make, **options))


def blocks(*rows: tuple[int, ...], names: str = "BM BN BK GROUP") -> list[Any]:
    """Configurations from rows of sizes, then stages and warps."""
    return [
        triton.Config(dict(zip(names.split(), row, strict=False)), num_stages=row[-2],
                      num_warps=row[-1])
        for row in rows
    ]  # fmt: skip


_MATMULS = blocks(
    (128, 256, 64, 8, 3, 8), (64, 256, 32, 8, 4, 4), (128, 128, 32, 8, 4, 4),
    (128, 64, 32, 8, 4, 4), (64, 128, 32, 8, 4, 4), (128, 32, 32, 8, 4, 4), (64, 32, 32, 8, 5, 2),
    (32, 64, 32, 8, 5, 2), (128, 256, 128, 8, 3, 8), (256, 128, 128, 8, 3, 8),
    (256, 64, 128, 8, 4, 4), (64, 256, 128, 8, 4, 4), (128, 128, 128, 8, 4, 4),
    (128, 64, 64, 8, 4, 4), (64, 128, 64, 8, 4, 4), (128, 32, 64, 8, 4, 4),
)  # fmt: skip


@triton.jit
def tile_of(m, n, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Place of a program's tile, in groups of rows of tiles, so that L2 is hit more often."""
    high, wide = tl.cdiv(m, BM), tl.cdiv(n, BN)
    pid = tl.program_id(0)
    first = pid // (GROUP * wide) * GROUP
    size = min(high - first, GROUP)
    return first + pid % size, pid % (GROUP * wide) // size


@triton.autotune(_MATMULS, ["m", "n", "k"])
@triton.jit
def matmul_kernel(a, b, c, m, n, k, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  GROUP: tl.constexpr):  # fmt: skip
    row, col = tile_of(m, n, BM, BN, GROUP)
    rows, cols, ks = row * BM + tl.arange(0, BM), col * BN + tl.arange(0, BN), tl.arange(0, BK)
    left = a + (rows % m)[:, None] * k + ks[None, :]
    right = b + ks[:, None] * sbk + (cols % n)[None, :] * sbn
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        x = tl.load(left, ks[None, :] < k - start, other=0.0)
        y = tl.load(right, ks[:, None] < k - start, other=0.0)
        acc = tl.dot(x, y, acc)
        left += BK
        right += BK * sbk
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    tl.store(c + rows[:, None] * n + cols[None, :], acc.to(c.dtype.element_ty), inside)


@triton.autotune(_MATMULS[:8], ["m", "n", "k"])
@triton.jit
def int8_kernel(a, b, scale, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                GROUP: tl.constexpr):  # fmt: skip
    row, col = tile_of(m, n, BM, BN, GROUP)
    rows, cols, ks = row * BM + tl.arange(0, BM), col * BN + tl.arange(0, BN), tl.arange(0, BK)
    left = a + (rows % m)[:, None] * k + ks[None, :]
    right = b + (cols % n)[None, :] * k + ks[:, None]
    acc = tl.zeros([BM, BN], tl.int32)
    for start in range(0, k, BK):
        x = tl.load(left + start, ks[None, :] < k - start, other=0)
        y = tl.load(right + start, ks[:, None] < k - start, other=0)
        acc = tl.dot(x, y, acc, out_dtype=tl.int32)
    by = tl.load(scale + rows, rows < m).to(tl.float32)
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    tl.store(c + rows[:, None] * n + cols[None, :], acc * by[:, None], inside)


_SPLITS = [
    triton.Config({"BM": bm, "BN": bn, "BK": bk, "SPLIT": split}, num_warps=w, num_stages=4)
    for bm, bn, bk, w in ((16, 64, 64, 4), (16, 128, 128, 4), (32, 64, 128, 4), (64, 128, 64, 8))
    for split in (1, 2, 4, 8, 16)
]


@triton.autotune(_SPLITS, ["m", "n", "k"], reset_to_zero=["c"])
@triton.jit
def split_k_kernel(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                   SPLIT: tl.constexpr):  # fmt: skip
    row, col = tl.program_id(0) // tl.cdiv(n, BN), tl.program_id(0) % tl.cdiv(n, BN)
    rows, cols = row * BM + tl.arange(0, BM), col * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(tl.program_id(1) * BK, k, BK * SPLIT):
        ks = start + tl.arange(0, BK)
        x = tl.load(a + (rows % m)[:, None] * k + ks[None, :], ks[None, :] < k, other=0.0)
        y = tl.load(b + ks[:, None] * n + (cols % n)[None, :], ks[:, None] < k, other=0.0)
        acc = tl.dot(x, y, acc)
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    tl.atomic_add(c + rows[:, None] * n + cols[None, :], acc, inside)


@triton.autotune(_MATMULS[:8], ["m", "n", "k"])
@triton.jit
def swiglu_kernel(a, gate, up, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  GROUP: tl.constexpr):  # fmt: skip
    row, col = tile_of(m, n, BM, BN, GROUP)
    rows, cols = row * BM + tl.arange(0, BM), col * BN + tl.arange(0, BN)
    g, u = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        ks = start + tl.arange(0, BK)
        x = tl.load(a + (rows % m)[:, None] * k + ks[None, :], ks[None, :] < k, other=0.0)
        at = ks[:, None] * n + (cols % n)[None, :]
        g = tl.dot(x, tl.load(gate + at, ks[:, None] < k, other=0.0), g)
        u = tl.dot(x, tl.load(up + at, ks[:, None] < k, other=0.0), u)
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    tl.store(c + rows[:, None] * n + cols[None, :], g * tl.sigmoid(g) * u, inside)


@triton.autotune(
    combined({"BM": (64, 128), "BN": (32, 64, 128)}, (4, 8), (2, 3, 4)), ["n", "D", "CAUSAL"]
)
@triton.jit
def attention_kernel(q, k, v, out, n, scale, D: tl.constexpr, CAUSAL: tl.constexpr,
                     BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * n * D
    rows, ds = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    query = tl.load(q + head + rows[:, None] * D + ds[None, :], rows[:, None] < n, other=0.0)
    most = tl.full([BM], -1e30, tl.float32)
    total, acc = tl.zeros([BM], tl.float32), tl.zeros([BM, D], tl.float32)
    end = min(n, (tl.program_id(0) + 1) * BM) if CAUSAL else n
    for start in range(0, end, BN):
        cols = start + tl.arange(0, BN)
        keys = tl.load(k + head + cols[None, :] * D + ds[:, None], cols[None, :] < n, other=0.0)
        s = tl.dot(query, keys) * (scale * 1.44269504)
        seen = cols[None, :] < n
        if CAUSAL:
            seen = seen & (cols[None, :] <= rows[:, None])
        s = tl.where(seen, s, -1e30)
        higher = tl.maximum(most, tl.max(s, 1))
        p, shrink = tl.exp2(s - higher[:, None]), tl.exp2(most - higher)
        values = tl.load(v + head + cols[:, None] * D + ds[None, :], cols[:, None] < n, other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None])
        most = higher
    tl.store(out + head + rows[:, None] * D + ds[None, :], acc / total[:, None], rows[:, None] < n)


def _tiles(m: int, n: int) -> Callable[[Any], tuple[int]]:
    return lambda meta: (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)


def matmul(a: Any, b: Any) -> None:
    (m, k), n = a.shape, b.shape[1]
    matmul_kernel[_tiles(m, n)](a, b, a.new_empty(m, n, dtype=BF16), m, n, k, *b.stride())


def int8_matmul(a: Any, b: Any, scale: Any) -> None:
    (m, k), n = a.shape, b.shape[0]
    int8_kernel[_tiles(m, n)](a, b, scale, scale.new_empty(m, n), m, n, k)


def split_k(a: Any, b: Any) -> None:
    (m, k), n = a.shape, b.shape[1]
    c = torch.zeros(m, n, device=a.device)
    split_k_kernel[lambda t: (*_tiles(m, n)(t), t["SPLIT"])](a, b, c, m, n, k)


def swiglu(a: Any, gate: Any, up: Any) -> None:
    (m, k), n = a.shape, gate.shape[1]
    swiglu_kernel[_tiles(m, n)](a, gate, up, a.new_empty(m, n), m, n, k)


def attention(q: Any, k: Any, v: Any, causal: bool) -> None:
    b, h, n, d = q.shape
    grid = lambda meta: (triton.cdiv(n, meta["BM"]), b * h)  # noqa: E731
    attention_kernel[grid](q, k, v, torch.empty_like(q), n, d**-0.5, D=d, CAUSAL=causal)


_PRODUCTS: Shapes = [(2048, 2048, 2048), (512, 512, 512), (1000, 777, 1112), (8192, 1024, 4096),
                     (64, 4096, 4096)]  # fmt: skip
add("matmul", matmul, _PRODUCTS, lambda t, m, n, k: (t(m, k), t(k, n)))
add("matmul_fp8", matmul, _PRODUCTS, lambda t, m, n, k: (t.fp8(m, k), t.fp8(n, k).t()),
    dtypes=(BF16,))  # fmt: skip
add(
    "matmul_transposed", matmul, _PRODUCTS, lambda t, m, n, k: (t(m, k), t(n, k).t()), dtypes=HALVES
)
add("int8_matmul", int8_matmul, _PRODUCTS,
    lambda t, m, n, k: (t.int8(m, k), t.int8(n, k), t.share(m)), dtypes=HALVES)  # fmt: skip
add("split_k", split_k, [(16, 4096, 4096), (64, 1024, 8192), (7, 1000, 5000)],
    lambda t, m, n, k: (t(m, k), t(k, n)), dtypes=HALVES)  # fmt: skip
add("swiglu", swiglu, _PRODUCTS, lambda t, m, n, k: (t(m, k), t(k, n), t(k, n)), dtypes=HALVES)
for _causal in (False, True):
    add(f"attention_{'causal' if _causal else 'full'}", attention, HEADS,
        lambda t, b, n, h, d, causal=_causal: (*(t(b, h, n, d) for _ in range(3)), causal),
        dtypes=(BF16, F16))  # fmt: skip


def product_calls() -> list[list[Call]]:
    return _calls
