"""The calls of FlagGems that are recorded: one for each tuned kernel, in several shapes."""

from __future__ import annotations

from typing import Any

import torch
from recorded_calls import BF16, F32, HALVES, HEADS, ROWS, Call, Maker, Shapes, Typed, family

PRODUCTS: Shapes = [(512, 512, 512), (4096, 1024, 2048), (1000, 777, 1111), (64, 4096, 4096),
                    (8192, 8192, 1024)]  # fmt: skip
IMAGES: Shapes = [(8, 32, 28, 28), (32, 128, 56, 56), (3, 17, 45, 45), (64, 256, 14, 14)]
CUBES: Shapes = [(16, 512, 512), (4, 64, 128), (7, 333, 501)]

_calls: list[list[Call]] = []


def add(name: str, path: str, shapes: Shapes, make: Maker, **options: Any) -> None:
    module = path if path.startswith(("hopper.", "flag_gems.")) else f"flag_gems.ops.{path}"
    _calls.append(family(f"flag_gems_{name}", module, shapes, make, **options))


def one(t: Typed, *s: int) -> tuple[Any, ...]:
    return (t(*s),)


def two(t: Typed, *s: int) -> tuple[Any, ...]:
    return t(*s), t(*s)


# --- Rows -----------------------------------------------------------------------------------------

for _name, _path, _more in (
    ("prod", "prod:prod_dim", {"dim": 1}), ("amax", "amax:amax", {"dim": [1]}),
    ("min", "min:min_dim", {"dim": 1}), ("max", "max:max_dim", {"dim": 1}),
    ("all", "all:all_dim", {"dim": 1}), ("any", "any:any_dim", {"dim": 1}),
    ("aminmax", "aminmax:aminmax", {"dim": 1}), ("std", "std:std", {"dim": [1]}),
    ("var", "var:var_correction", {"dim": [1]}), ("var_mean", "var_mean:var_mean", {"dim": [1]}),
    ("count_nonzero", "count_nonzero:count_nonzero", {"dim": 1}),
    ("amax_first", "amax:amax", {"dim": [0]}), ("prod_first", "prod:prod_dim", {"dim": 0}),
    ("var_first", "var:var_correction", {"dim": [0]}), ("std_first", "std:std", {"dim": [0]}),
):  # fmt: skip
    add(_name, _path, ROWS, lambda t, *s, more=_more: (t(*s), more))
for _name in ("sum", "mean"):
    add(_name, f"{_name}:{_name}_dim", CUBES, lambda t, *s: (t(*s), {"dim": [0, 2]}))
add("argmin", "argmin:argmin", CUBES, lambda t, *s: (t(*s), 1))
for _ord, _name in ((2, "l2"), (0, "l0"), (float("inf"), "max"), (-float("inf"), "min"), (3, "v")):
    add(f"{_name}_norm", "vector_norm:vector_norm", ROWS,
        lambda t, *s, order=_ord: (t(*s), order, [1]))  # fmt: skip
for _dim, _kind in ((-1, "inner"), (0, "outer")):
    add(f"softmax_bwd_{_kind}", "softmax:softmax_backward", ROWS,
        lambda t, *s, dim=_dim: (t(*s), t(*s), dim, t.dtype))  # fmt: skip
add("log_softmax_bwd", "log_softmax:log_softmax_backward", ROWS,
    lambda t, *s: (t(*s), t(*s), -1, t.dtype))  # fmt: skip
add("layer_norm", "layernorm:layer_norm", [*ROWS, (4096, 256), (100000, 64)],
    lambda t, m, n: (t(m, n), [n], t(n), t(n)))  # fmt: skip
add("layer_norm_bwd", "layernorm:layer_norm_backward", ROWS,
    lambda t, m, n: (t(m, n), t(m, n), [n], t(m), t.share(m), t(n), t(n), [True] * 3))  # fmt: skip
add("rms_norm", "rms_norm:rms_norm_forward", [(512, 131072), (64, 65536), (100, 50000)],
    lambda t, m, n: (t(m, n), [n], t(n)))  # fmt: skip
add("weight_norm_first", "weightnorm:weight_norm_interface", ROWS,
    lambda t, m, n: (t(m, n), t(m, 1)))  # fmt: skip
add("weight_norm_last", "weightnorm:weight_norm_interface", ROWS,
    lambda t, m, n: (t(m, n), t(1, n), 1))  # fmt: skip
add("weight_norm_bwd_first", "weightnorm:weight_norm_interface_backward", ROWS,
    lambda t, m, n: (t(m, n), t(m, n), t(m, 1), t.share(m, 1) + 1, 0))  # fmt: skip
add("weight_norm_bwd_last", "weightnorm:weight_norm_interface_backward", ROWS,
    lambda t, m, n: (t(m, n), t(m, n), t(1, n), t.share(1, n) + 1, 1))  # fmt: skip
add("weight_norm_middle", "flag_gems.fused.weight_norm:weight_norm_except_dim", CUBES,
    lambda t, a, b, c: (t(a, b, c), t(1, b, 1), 1))  # fmt: skip
add("weight_norm_bwd_middle", "flag_gems.fused.weight_norm:weight_norm_except_dim_backward", CUBES,
    lambda t, a, b, c: (t(a, b, c), t(a, b, c), t(1, b, 1), t.share(1, b, 1).float() + 1, 1),
)  # fmt: skip
add("triu", "triu:triu", [(1024, 1024), (4096, 4096), (777, 1001)], one)
add("triu_batch", "triu:triu", CUBES, one)
add("vstack", "vstack:vstack", ROWS, lambda t, *s: ([t(*s) for _ in range(3)],))
add("reglu", "flag_gems.fused.reglu:reglu", [s for s in ROWS if s[1] % 2 == 0], one)
add("dreglu", "flag_gems.fused.reglu:dreglu", [s for s in ROWS if s[1] % 2 == 0],
    lambda t, m, n: (t(m, n // 2), t(m, n)))  # fmt: skip
add("scaled_softmax", "scaled_softmax:scaled_softmax_forward",
    [(4, 8, 512, 512), (1, 16, 2048, 2048), (2, 4, 1024, 1024)],
    lambda t, *s: (t(*s), 0.125), dtypes=HALVES)  # fmt: skip
add("scaled_softmax_bwd", "scaled_softmax:scaled_softmax_backward",
    [(4, 8, 512, 512), (1, 16, 2048, 2048), (2, 4, 1024, 1024)],
    lambda t, *s: (t(*s), t(*s), 0.125), dtypes=HALVES)  # fmt: skip
_LOSS = "flag_gems.fused.cross_entropy_loss:cross_entropy_loss"
_VOCABULARIES: Shapes = [(2048, 32000), (512, 5000), (1000, 50257), (4096, 1024)]
for _name, _options in (("", {}), ("_smooth", {"label_smoothing": 0.1})):
    add(f"cross_entropy{_name}", _LOSS, _VOCABULARIES,
        lambda t, m, n, more=_options: (t(m, n), t.whole(n, m), {**more, "reduction": "none"}),
        grad=True)  # fmt: skip
add("cross_entropy_probability", _LOSS, _VOCABULARIES,
    lambda t, m, n: (t(m, n), t.share(m, n) / n, {"reduction": "none"}), grad=True)  # fmt: skip
add("conj", "conj_physical:conj_physical", [(1024, 1024), (777, 1001), (4096, 4096)],
    lambda t, *s: (torch.complex(t(*s, dtype=F32), t(*s, dtype=F32)),), dtypes=(F32,))  # fmt: skip
add("exponential", "exponential_:exponential_", [(1000,), (2**20,), (2**26,), (99999,)], one)
add("randn", "randn:randn", [(1000, 1001), (4096, 4096), (64, 64)],
    lambda t, *s: (s, {"device": t.device, "dtype": t.dtype}))  # fmt: skip
add("randperm", "randperm:randperm", [(2**16,), (2**20,), (99999,), (2**24,)],
    lambda t, n: (n, {"device": t.device}), dtypes=(F32,))  # fmt: skip
add("topk", "flag_gems.fused.DSA.bin_topk:bucket_sort_topk_triton",
    [(64, 8192), (256, 32768), (7, 5000)],
    lambda t, m, n: (t(m, n, dtype=F32), torch.zeros(m, dtype=torch.int32, device=t.device),
                     torch.full((m,), n, dtype=torch.int32, device=t.device), 512),
    dtypes=(F32,))  # fmt: skip
add("sqrt", "hopper.ops.sqrt:sqrt", ROWS, one)

# --- Products -------------------------------------------------------------------------------------

add("mm", "mm:mm", PRODUCTS, lambda t, m, n, k: (t(m, k), t(k, n)))
add("mm_hopper", "hopper.ops.mm:mm", PRODUCTS, lambda t, m, n, k: (t(m, k), t(k, n)),
    dtypes=HALVES)  # fmt: skip


def _own_transpose(t: Typed, m: int, k: int) -> tuple[Any, ...]:
    a = t(m, k)
    return a, a.t()


add("syrk", "mm:mm", [(2048, 1024), (512, 512), (1000, 777)], _own_transpose, dtypes=HALVES)
add("addmm", "addmm:addmm", PRODUCTS, lambda t, m, n, k: (t(m, n), t(m, k), t(k, n)))
add("bmm", "bmm:bmm", [(16, 512, 512, 256), (4, 1000, 777, 333), (64, 128, 128, 1024)],
    lambda t, b, m, n, k: (t(b, m, k), t(b, k, n)))  # fmt: skip
add("baddbmm", "baddbmm:baddbmm", [(16, 512, 512, 256), (4, 1000, 777, 333), (64, 128, 128, 1024)],
    lambda t, b, m, n, k: (t(b, m, n), t(b, m, k), t(b, k, n)))  # fmt: skip
add("mv", "mv:mv", [(1024, 1024), (8192, 4096), (1000, 3001)], lambda t, m, n: (t(m, n), t(n)))
add("addmv", "addmv:addmv", [(1024, 1024), (8192, 4096), (1000, 3001)],
    lambda t, m, n: (t(m), t(m, n), t(n)))  # fmt: skip
add("kron", "kron:kron", [(32, 32, 32, 32), (128, 64, 32, 16), (17, 33, 30, 21)],
    lambda t, a, b, c, d: (t(a, b), t(c, d)))  # fmt: skip
add("kron_batch", "kron:kron", [(4, 16, 32, 32), (2, 64, 32, 16), (3, 17, 30, 21)],
    lambda t, n, a, b, c: (t(n, a, b), t(n, c, a)))  # fmt: skip
add("group_mm", "group_gemm:group_mm",
    [(8, 512, 1024, 512), (4, 300, 512, 768), (16, 128, 2048, 512)],
    lambda t, g, m, n, k: (t(g * m, k), t(g, k, n),
                           torch.arange(1, g + 1, dtype=torch.int32, device=t.device) * m),
    dtypes=HALVES)  # fmt: skip


def _grouped(t: Typed, g: int, m: int, n: int, k: int) -> tuple[Any, ...]:
    def cut(i: int, size: int) -> slice:
        return slice(i * size, (i + 1) * size)

    table = [[m, n, k, cut(i, m), cut(i, k), cut(i, m)] for i in range(g)]
    return t(g * m, k), t(g * k, n), t(g * m, n), table


add("group_gemm", "group_gemm:group_gemm", [(8, 512, 1024, 512), (4, 256, 512, 768)], _grouped,
    dtypes=HALVES)  # fmt: skip


def _attention(t: Typed, b: int, n: int, h: int, d: int) -> tuple[Any, ...]:
    return t(b, h, n, d), t(b, h, n, d), t(b, h, n, d)


_SDPA = "attention:scaled_dot_product_attention"
add("attention", _SDPA, HEADS, _attention, dtypes=HALVES, grad=True)
add("attention_causal", _SDPA, HEADS, lambda t, *s: (*_attention(t, *s), {"is_causal": True}),
    dtypes=HALVES, grad=True)  # fmt: skip
add("flash", "flash_api:mha_fwd", HEADS[:3],
    lambda t, *s: (t(*s), t(*s), t(*s), None, None, 0.0, 0.125, False, -1, -1, 0.0, False),
    dtypes=HALVES)  # fmt: skip

# --- Images and the like --------------------------------------------------------------------------

add("conv2d", "conv2d:conv2d", IMAGES,
    lambda t, b, c, *s: (t(b, c, *s), t(64, c, 3, 3), None, 1, 1),
    dtypes=(*HALVES, F32), grad=True)  # fmt: skip
add("conv1d", "conv1d:conv1d", [(8, 64, 1024), (32, 128, 2000), (3, 17, 555)],
    lambda t, b, c, n: (t(b, c, n), t(64, c, 3), None, 1, 1))  # fmt: skip
add("depthwise", "conv_depthwise2d:_conv_depthwise2d", IMAGES,
    lambda t, b, c, *s: (t(b, c, *s), t(c, 1, 3, 3), (3, 3), None, (1, 1), (1, 1), (1, 1)),
)  # fmt: skip
add("conv3d", "conv3d:conv3d", [(2, 16, 8, 16, 16), (1, 32, 16, 32, 32), (2, 9, 7, 15, 15)],
    lambda t, b, c, *s: (t(b, c, *s), t(32, c, 3, 3, 3), None, 1, 1))  # fmt: skip
add("max_pool2d", "max_pool2d_with_indices:max_pool2d_with_indices", IMAGES,
    lambda t, *s: (t(*s), 3, 2, 1))  # fmt: skip
add("max_pool2d_bwd", "max_pool2d_with_indices:max_pool2d_backward",
    [s for s in IMAGES if s[2] % 2 == 0],
    lambda t, b, c, h, w: (t(b, c, h // 2, w // 2), t(b, c, h, w),
                           t.whole(h * w, b, c, h // 2, w // 2), 3, 2, 1, 1, False))  # fmt: skip
add("avg_pool2d", "avg_pool2d:avg_pool2d", IMAGES, lambda t, *s: (t(*s), 3, 2, 1))
add("avg_pool2d_bwd", "avg_pool2d:avg_pool2d_backward", [s for s in IMAGES if s[2] % 2 == 0],
    lambda t, b, c, h, w: (t(b, c, h // 2, w // 2), t(b, c, h, w), [3, 3], [2, 2], [1, 1],
                           False, True, None))  # fmt: skip
add("batch_norm", "batch_norm:batch_norm", IMAGES,
    lambda t, b, c, *s: (t(b, c, *s), t(c), t(c), t(c), t(c), True))  # fmt: skip
add("batch_norm_bwd", "batch_norm:batch_norm_backward", IMAGES,
    lambda t, b, c, *s: (t(b, c, *s), t(b, c, *s), t(c), t(c), t(c), t(c, dtype=F32),
                         t(c, dtype=F32), True, 1e-5, [True, True, True]))  # fmt: skip
add("instance_norm", "flag_gems.fused.instance_norm:instance_norm",
    [*IMAGES, (4, 8, 256, 256), (16, 64, 8, 8)],
    lambda t, b, c, *s: (t(b, c, *s), t(c), t(c)), grad=True)  # fmt: skip
add("instance_norm_running", "flag_gems.fused.instance_norm:instance_norm", IMAGES,
    lambda t, b, c, *s: (t(b, c, *s), t(c), t(c), t(c, dtype=F32), t.share(c).float(),
                         False))  # fmt: skip
add("nearest1d", "upsample_nearest1d:upsample_nearest1d", [(32, 64, 1024), (4, 17, 555)],
    lambda t, a, b, n: (t(a, b, n), [2 * n]))  # fmt: skip
for _name in ("upsample_nearest2d", "upsample_bicubic2d"):
    add(_name, f"{_name}:{_name}", IMAGES, lambda t, a, b, h, w: (t(a, b, h, w), [2 * h, 2 * w]))
add("bicubic_aa", "upsample_bicubic2d_aa:_upsample_bicubic2d_aa", IMAGES,
    lambda t, a, b, h, w: (t(a, b, h, w), [2 * h, 2 * w]))  # fmt: skip
add("bicubic_aa_down", "upsample_bicubic2d_aa:_upsample_bicubic2d_aa", IMAGES,
    lambda t, a, b, h, w: (t(a, b, h, w), [h // 2, w // 2]))  # fmt: skip
add("nearest3d", "upsample_nearest3d:upsample_nearest3d",
    [(4, 16, 8, 28, 28), (2, 32, 16, 56, 56), (1, 7, 5, 33, 33)],
    lambda t, a, b, *s: (t(a, b, *s), [2 * x for x in s]))  # fmt: skip
add("pad3d", "replication_pad3d:replication_pad3d",
    [(4, 16, 8, 28, 28), (2, 32, 16, 56, 56), (1, 7, 5, 33, 33)],
    lambda t, *s: (t(*s), (1, 1, 2, 2, 1, 1)))  # fmt: skip
_STREAMS: Shapes = [(4096, 2048), (512, 1024), (1000, 1536), (16384, 1024)]
for _streams in (4, 2):
    add(f"mhc_post_{_streams}", "flag_gems.fused.mhc.mhc_post:mhc_post", _STREAMS,
        lambda t, n, d, s=_streams: (t(n, d), t(n, s, d), t(n, s, 1, dtype=F32),
                                     t(n, s, s, dtype=F32)), dtypes=(BF16,))  # fmt: skip
    add(f"mhc_pre_{_streams}", "flag_gems.fused.mhc.mhc_pre:mhc_pre", _STREAMS,
        lambda t, n, d, s=_streams: (t(n, s, d), t((2 + s) * s, s * d, dtype=F32),
                                     t(3, dtype=F32), t((2 + s) * s, dtype=F32), 1e-6, 1e-6, 1e-6,
                                     2.0, 20), dtypes=(BF16,))  # fmt: skip


def gems_calls() -> list[list[Call]]:
    return _calls
