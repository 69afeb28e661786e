"""The calls whose kernels judge a model: no model learns from these."""

from __future__ import annotations

from typing import Any

import torch
from recorded_calls import BF16, HALVES, HEADS, Call, Maker, Shapes, Typed, family

_calls: list[list[Call]] = []
_SHORT: Shapes = [(b, min(n, 1024), h, d) for b, n, h, d in HEADS[:3]]


def add(name: str, path: str, shapes: Shapes, make: Maker, **options: Any) -> None:
    _calls.append(family(name, path, shapes, make, **options))


def _four(t: Typed, *s: int) -> tuple[Any, ...]:
    return t(*s), t(*s), t(*s), t(*s)


add("fla_gsa", "fla.ops.gsa.chunk:chunk_gsa", HEADS[1:4],
    lambda t, *s: (*_four(t, *s), t.decay(*s)), dtypes=HALVES, grad=True)  # fmt: skip
add("fla_gsa_recurrent", "fla.ops.gsa.fused_recurrent:fused_recurrent_gsa", _SHORT,
    lambda t, *s: (*_four(t, *s), t.decay(*s)), grad=True)  # fmt: skip
add(
    "fla_gsa_gate", "fla.ops.gsa.gate:fused_additive_gate", HEADS, lambda t, *s: (t(*s),), grad=True
)


def _ttt(t: Typed, b: int, n: int, h: int, d: int) -> tuple[Any, ...]:
    return t(b, n, h, d), t(b, n, h, d), t(b, n, h, d), t(h, d), t(h, d), t.share(b, n, h, 1)


for _kind, _path in (
    ("chunk", "chunk:chunk_ttt_linear"),
    ("fused", "fused_chunk:fused_chunk_ttt_linear"),
):
    add(f"fla_ttt_{_kind}", f"fla.ops.ttt.{_path}", [s for s in HEADS if s[1] % 64 == 0], _ttt,
        dtypes=HALVES, grad=True)  # fmt: skip


def _nsa(t: Typed, b: int, n: int, h: int, d: int) -> tuple[Any, ...]:
    q, k, v = t(b, n, h, d), t(b, n, h // 16, d), t(b, n, h // 16, d)
    return q, k, v, *(t.share(b, n, h) for _ in range(3)), {"block_size": 64}


add("fla_nsa", "fla.ops.nsa.parallel:parallel_nsa",
    [(1, 1024, 32, 128), (2, 4096, 16, 64), (1, 1000, 32, 64)], _nsa, dtypes=HALVES,
    grad=True)  # fmt: skip

_ROWS: Shapes = [(4096, 4096), (512, 1024), (1000, 3001), (16384, 2048)]
add("liger_dyt_forward", "liger_kernel.ops.dyt:liger_dyt_fwd", _ROWS,
    lambda t, m, n: (t(m, n), t(1), t(n), t(n)))  # fmt: skip
add("liger_dyt_backward", "liger_kernel.ops.dyt:liger_dyt_bwd", _ROWS,
    lambda t, m, n: (t(m, n), t(m, n), t(1), t(n), t(n)))  # fmt: skip
add("liger_gated_mlp", "liger_kernel.ops.mlp:LigerMLPFunction.apply",
    [(1024, 512, 1024), (8192, 2048, 4096), (1000, 768, 1536)],
    lambda t, n, d, f: (t(1, n, d), t(f, d) / 32, t(f, d) / 32, t(d, f) / 32), dtypes=HALVES,
    grad=True)  # fmt: skip


def _moe(t: Typed, n: int, e: int, d: int, f: int) -> tuple[Any, ...]:
    experts = torch.rand(n, e, device=t.device).topk(2).indices.int()
    return t(n, d), t(e, 2 * f, d), t(e, d, f), experts, t.share(n, 2).float()


add("liger_moe", "liger_kernel.ops.fused_moe:LigerFusedMoEFunction.apply",
    [(1024, 8, 512, 256), (8192, 16, 1024, 1024), (1000, 4, 768, 384)], _moe, dtypes=HALVES,
    grad=True)  # fmt: skip


add("liger_int2", "liger_kernel.ops.experimental.mm_int8int2:matmul",
    [(1024, 1024, 1024), (128, 4096, 2048), (1000, 768, 2048)],
    lambda t, m, n, k: (t.int8(m, k), t.whole(255, k // 4, n).to(torch.uint8)),
    dtypes=(BF16,))  # fmt: skip


def judges_calls() -> list[list[Call]]:
    return _calls
