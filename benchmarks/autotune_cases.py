"""Calls of other packages that reach tuned kernels: Flash Linear Attention, FlagGems, Liger.

A case makes its arguments and calls. Its name begins with the name of its package. Most cases call
one function around one kernel, so that little besides the kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from costmodel.autotune.dataset import HELD_OUT, LEARNED_FROM

ALLOWED = (
    *(x[:-1] for x in (*LEARNED_FROM, *HELD_OUT) if x.startswith(("fla.", "liger_kernel."))),
    "flag_gems",
)
"""Modules whose kernels may be run here; others of fla may not."""

CASES: dict[str, Callable[[Tensors], None]] = {}


def within(module: str, folders: tuple[str, ...]) -> bool:
    """Return True if a module lies in one of these folders."""
    return any(module == folder or module.startswith(f"{folder}.") for folder in folders)


class Tensors:
    """Makes random arguments on one device, the same ones in every process."""

    def __init__(self, device: str) -> None:
        self.device = device
        torch.manual_seed(0)

    def __call__(
        self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False
    ) -> torch.Tensor:
        made = torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype)
        return made.requires_grad_(grad)

    def decay(self, *shape: int, grad: bool = False) -> torch.Tensor:
        """Logarithms of decay factors, float32: small and negative."""
        made = -torch.rand(*shape, device=self.device, dtype=torch.float32) / 10
        return made.requires_grad_(grad)

    def unit(self, *shape: int, grad: bool = False) -> torch.Tensor:
        """Vectors of length 1, bfloat16."""
        made = torch.nn.functional.normalize(self(*shape, dtype=torch.float32), dim=-1)
        return made.bfloat16().requires_grad_(grad)

    def share(self, *shape: int, grad: bool = False) -> torch.Tensor:
        """Numbers between 0 and 1, bfloat16."""
        made = torch.rand(*shape, device=self.device).bfloat16()
        return made.requires_grad_(grad)

    def whole(self, below: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(below, shape, device=self.device, dtype=dtype)


def case(make: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    """Add a function to CASES under its name."""
    CASES[make.__name__] = make
    return make


def function(path: str) -> Any:
    """The function at ``module:name``; nothing is imported before a case needs it."""
    module, name = path.split(":")
    return getattr(import_module(module), name)


def backward(result: torch.Tensor | tuple[Any, ...]) -> None:
    out = result if isinstance(result, torch.Tensor) else result[0]
    out.backward(torch.randn_like(out))


def single(name: str, path: str, *makers: Callable[[Tensors], Any], **options: Any) -> None:
    """Add a case that is one call, with an argument from each maker."""
    CASES[name] = lambda t: function(path)(*(make(t) for make in makers), **options)


B, T, H, D = 2, 4096, 16, 128
_HEADS = (B, T, H, D)
_SMALL = (2, 2048, 8, 64)
_CHUNKS = 2048 // 64


def heads(t: Tensors) -> torch.Tensor:
    return t(*_SMALL)


def gates(t: Tensors) -> torch.Tensor:
    return t.decay(*_SMALL[:3])


def states(t: Tensors) -> torch.Tensor:
    return t(2, _CHUNKS, 8, 64, 64)


def squares(t: Tensors) -> torch.Tensor:
    return t(*_SMALL[:3], 64)


def rows(t: Tensors) -> torch.Tensor:
    return t(8192, 2048)


def const(value: Any) -> Callable[[Tensors], Any]:
    return lambda _: value


@case
def fla_chunk_gla(t: Tensors) -> None:
    q, k, v = (t(*_HEADS, grad=True) for _ in range(3))
    backward(function("fla.ops.gla:chunk_gla")(q, k, v, t.decay(*_HEADS, grad=True)))


@case
def fla_chunk_gated_delta_rule(t: Tensors) -> None:
    q, k, v = t.unit(*_HEADS, grad=True), t.unit(*_HEADS, grad=True), t(*_HEADS, grad=True)
    g, beta = t.decay(*_HEADS[:3], grad=True), t.share(*_HEADS[:3], grad=True)
    backward(function("fla.ops.gated_delta_rule:chunk_gated_delta_rule")(q, k, v, g, beta))


_COMMON, _UTILS = "fla.ops.common", "fla.ops.utils"
single("fla_chunk_fwd_h", f"{_COMMON}.chunk_h:chunk_fwd_h", heads, heads, gates)
single("fla_chunk_bwd_dh", f"{_COMMON}.chunk_h:chunk_bwd_dh", heads, heads, heads, heads,
       const(None), const(None), const(0.125), gates)  # fmt: skip
single("fla_chunk_fwd_o", f"{_COMMON}.chunk_o:chunk_fwd_o", heads, heads, heads, states, gates)
single("fla_chunk_bwd_dv", f"{_COMMON}.chunk_o:chunk_bwd_dv", heads, heads, heads, states, gates)
single("fla_chunk_bwd_dv_local", f"{_COMMON}.chunk_o:chunk_bwd_dv_local", heads, heads, heads,
       gates)  # fmt: skip
single("fla_chunk_kkt", f"{_COMMON}.chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd", heads, gates,
       lambda t: t.share(*_SMALL[:3]))  # fmt: skip
single("fla_global_cumsum_scalar", f"{_UTILS}.cumsum:chunk_global_cumsum_scalar",
       lambda t: t.decay(4, 8192, 16))  # fmt: skip
single("fla_global_cumsum_vector", f"{_UTILS}.cumsum:chunk_global_cumsum_vector",
       lambda t: t.decay(*_HEADS))  # fmt: skip
single("fla_local_cumsum_scalar", f"{_UTILS}.cumsum:chunk_local_cumsum_scalar",
       lambda t: t.decay(*_HEADS[:3]), const(64))  # fmt: skip
single("fla_local_cumsum_vector", f"{_UTILS}.cumsum:chunk_local_cumsum_vector",
       lambda t: t.decay(*_HEADS), const(64))  # fmt: skip
single("fla_logsumexp", f"{_UTILS}.logsumexp:logsumexp_fwd", rows)
single("fla_softmax_fwd", f"{_UTILS}.softmax:softmax_fwd", rows)
single("fla_softmax_bwd", f"{_UTILS}.softmax:softmax_bwd", rows, rows)
single("fla_matmul", f"{_UTILS}.matmul:matmul", lambda t: t(2048, 1024), lambda t: t(1024, 2048))
single("fla_mean_pooling_fwd", f"{_UTILS}.pooling:mean_pooling_fwd", lambda t: t(*_HEADS),
       const(64))  # fmt: skip
single("fla_mean_pooling_bwd", f"{_UTILS}.pooling:mean_pooling_bwd", lambda t: t(2, 64, 16, 128),
       const(2), const(4096), const(64))  # fmt: skip
for _size in (16, 32, 64):
    single(f"fla_solve_tril_{_size}", f"{_UTILS}.solve_tril:solve_tril",
           lambda t, size=_size: t(2, 4096, 8, size, dtype=torch.float32) / 64)  # fmt: skip

_GDR, _DELTA = "fla.ops.gated_delta_rule", "fla.ops.delta_rule.wy_fast"
single("fla_gdn_gate", f"{_GDR}.gate:gdn_gate_fwd", lambda t: t(*_HEADS[:3]),
       lambda t: t(16, dtype=torch.float32))  # fmt: skip
single("fla_gdn_gate_cumsum", f"{_GDR}.gate:gdn_gate_chunk_cumsum", lambda t: t(*_HEADS[:3]),
       lambda t: t(16, dtype=torch.float32), const(64))  # fmt: skip
single("fla_delta_recompute_w_u", f"{_DELTA}:recompute_w_u_fwd", heads, heads,
       lambda t: t.share(*_SMALL[:3]), squares, const(None))  # fmt: skip
single("fla_delta_wy_bwd", f"{_DELTA}:prepare_wy_repr_bwd", heads, heads,
       lambda t: t.share(*_SMALL[:3]), squares, heads, heads, const(None))  # fmt: skip


@case
def fla_parallel_simple_gla(t: Tensors) -> None:
    q, k, v = (t(*_SMALL, grad=True) for _ in range(3))
    backward(function("fla.ops.simple_gla.parallel:parallel_simple_gla")(q, k, v, gates(t)))


@case
def fla_chunk_rwkv6(t: Tensors) -> None:
    q, k, v = (t(*_SMALL, grad=True) for _ in range(3))
    w, u = t.decay(*_SMALL, grad=True), t(8, 64, grad=True)
    backward(function("fla.ops.rwkv6.chunk:chunk_rwkv6")(q, k, v, w, u))


single("fla_rwkv6_cumsum", "fla.ops.rwkv6.chunk:chunk_rwkv6_fwd_cumsum",
       lambda t: t.decay(*_SMALL), const(64))  # fmt: skip


@case
def fla_chunk_hgrn(t: Tensors) -> None:
    x, g = t(4, 2048, 2048, grad=True), t.decay(4, 2048, 2048, grad=True)
    backward(function("fla.ops.hgrn.chunk:chunk_hgrn")(x, g))


@case
def fla_fused_recurrent_hgrn(t: Tensors) -> None:
    x, g = t(4, 512, 2048, grad=True), t.decay(4, 512, 2048, grad=True)
    backward(function("fla.ops.hgrn.fused_recurrent:fused_recurrent_hgrn")(x, g))


@case
def fla_chunk_gsa(t: Tensors) -> None:
    q, k, v, s = (t(*_SMALL, grad=True) for _ in range(4))
    backward(function("fla.ops.gsa.chunk:chunk_gsa")(q, k, v, s, t.decay(*_SMALL, grad=True)))


@case
def fla_chunk_iplr(t: Tensors) -> None:
    q, k, v, a, b = (t.unit(*_SMALL) for _ in range(5))
    path = "fla.ops.generalized_delta_rule.iplr.chunk:chunk_iplr_delta_rule"
    function(path)(q, k, v, a, b)


@case
def fla_parallel_nsa(t: Tensors) -> None:
    q, k, v = t(1, 2048, 32, 64, grad=True), t(1, 2048, 2, 64, grad=True), t(1, 2048, 2, 64)
    g = [t.share(1, 2048, 32) for _ in range(3)]
    result = function("fla.ops.nsa.parallel:parallel_nsa")(q, k, v, *g, block_size=64)
    backward(result)


_ACTIVATIONS = "fla.modules.activations.ops"
for _name in ("sigmoid", "logsigmoid", "swish", "elu_p1"):
    single(f"fla_{_name}_fwd", f"{_ACTIVATIONS}:{_name}_fwd", rows)
    single(f"fla_{_name}_bwd", f"{_ACTIVATIONS}:{_name}_bwd", rows, rows,
           **({"temperature": 1.0} if _name == "logsigmoid" else {}))  # fmt: skip
for _name in ("swiglu", "sigmoidglu", "powglu"):
    single(f"fla_{_name}_fwd", f"{_ACTIVATIONS}:{_name}_fwd", rows, rows)
    single(f"fla_{_name}_fwdbwd", f"{_ACTIVATIONS}:{_name}_fwdbwd", rows, rows, rows)


def norm(t: Tensors, width: int) -> None:
    x, w, b = t(8192, width, grad=True), t(width, grad=True), t(width, grad=True)
    backward(function("fla.modules.norm.layernorm:layer_norm")(x, w, b))


def gated_norm(t: Tensors, width: int) -> None:
    x, g = t(8192, width, grad=True), t(8192, width, grad=True)
    w, b = t(width, grad=True), t(width, grad=True)
    path = "fla.modules.norm.fused_norm_gate:layer_norm_gated"
    backward(function(path)(x, g, w, b, activation="swish"))


def l2norm(t: Tensors, width: int) -> None:
    backward(function("fla.modules.norm.l2norm:l2norm")(t(65536, width, grad=True)))


def token_shift(t: Tensors, length: int) -> None:
    path = "fla.modules.token_shift:token_shift"
    backward(function(path)(t(2, length, 2048, grad=True)))


# Narrow and wide rows, short and long texts have kernels of their own.
for _width in (512, 2048):
    CASES[f"fla_layer_norm_{_width}"] = partial(norm, width=_width)
    CASES[f"fla_layer_norm_gated_{_width}"] = partial(gated_norm, width=_width)
for _width in (128, 1024):
    CASES[f"fla_l2norm_{_width}"] = partial(l2norm, width=_width)
for _length in (2048, 8192):
    CASES[f"fla_token_shift_{_length}"] = partial(token_shift, length=_length)


@case
def fla_rotary(t: Tensors) -> None:
    cos, sin = t(4096, 64), t(4096, 64)
    function("fla.modules.rotary.ops:rotary_embedding_fwdbwd")(t(*_HEADS), cos, sin)


@case
def fla_causal_conv1d(t: Tensors) -> None:
    x, w = t(2, 4096, 2048, grad=True), t(2048, 4, grad=True)
    path = "fla.modules.causal_conv1d.ops:causal_conv1d"
    backward(function(path)(x, weight=w, activation="silu"))


def images(t: Tensors) -> torch.Tensor:
    return t(32, 64, 56, 56)


_GEMS = "flag_gems.ops"
single("flag_gems_log_softmax_bwd", f"{_GEMS}.log_softmax:log_softmax_backward", rows, rows,
       const(-1), const(torch.bfloat16))  # fmt: skip
for _dim, _kind in ((-1, "inner"), (0, "outer")):
    single(f"flag_gems_softmax_bwd_{_kind}", f"{_GEMS}.softmax:softmax_backward", rows, rows,
           const(_dim), const(torch.bfloat16))  # fmt: skip
single("flag_gems_scaled_softmax", f"{_GEMS}.scaled_softmax:scaled_softmax_forward",
       lambda t: t(4, 8, 1024, 1024), const(0.125))  # fmt: skip
single("flag_gems_scaled_softmax_bwd", f"{_GEMS}.scaled_softmax:scaled_softmax_backward",
       *[lambda t: t(4, 8, 1024, 1024)] * 2, const(0.125))  # fmt: skip
single("flag_gems_layer_norm_loop", f"{_GEMS}.layernorm:layer_norm", lambda t: t(2048, 8192),
       const([8192]), lambda t: t(8192), lambda t: t(8192))  # fmt: skip
single("flag_gems_layer_norm_persistent", f"{_GEMS}.layernorm:layer_norm", rows, const([2048]),
       lambda t: t(2048), lambda t: t(2048))  # fmt: skip
single("flag_gems_layer_norm_bwd", f"{_GEMS}.layernorm:layer_norm_backward", rows, rows,
       const([2048]), lambda t: t(8192), lambda t: t.share(8192), lambda t: t(2048),
       lambda t: t(2048), const([True, True, True]))  # fmt: skip
single("flag_gems_conv2d", f"{_GEMS}.conv2d:conv2d", images, lambda t: t(64, 64, 3, 3),
       const(None), const(1), const(1))  # fmt: skip
single("flag_gems_conv3d", f"{_GEMS}.conv3d:conv3d", lambda t: t(2, 32, 16, 32, 32),
       lambda t: t(32, 32, 3, 3, 3), const(None), const(1), const(1))  # fmt: skip
single("flag_gems_max_pool2d", f"{_GEMS}.max_pool2d_with_indices:max_pool2d_with_indices", images,
       const(3), const(2), const(1))  # fmt: skip
single("flag_gems_max_pool2d_bwd", f"{_GEMS}.max_pool2d_with_indices:max_pool2d_backward",
       lambda t: t(32, 64, 28, 28), images, lambda t: t.whole(3136, 32, 64, 28, 28),
       const(3), const(2), const(1), const(1), const(False))  # fmt: skip
single("flag_gems_avg_pool2d", f"{_GEMS}.avg_pool2d:avg_pool2d", images, const(3), const(2),
       const(1))  # fmt: skip
single("flag_gems_avg_pool2d_bwd", f"{_GEMS}.avg_pool2d:avg_pool2d_backward",
       lambda t: t(32, 64, 28, 28), images, const([3, 3]), const([2, 2]), const([1, 1]),
       const(False), const(True), const(None))  # fmt: skip
single("flag_gems_batch_norm", f"{_GEMS}.batch_norm:batch_norm", images,
       *[lambda t: t(64)] * 4, training=True)  # fmt: skip
single("flag_gems_weight_norm_first", f"{_GEMS}.weightnorm:weight_norm_interface", rows,
       lambda t: t(8192, 1))  # fmt: skip
single("flag_gems_weight_norm_last", f"{_GEMS}.weightnorm:weight_norm_interface", rows,
       lambda t: t(1, 2048), const(1))  # fmt: skip
single("flag_gems_var_mean", f"{_GEMS}.var_mean:var_mean", rows, const([1]))
single("flag_gems_std", f"{_GEMS}.std:std", rows, const([1]))
single("flag_gems_kron", f"{_GEMS}.kron:kron", lambda t: t(64, 64), lambda t: t(32, 32))
single("flag_gems_argmin", f"{_GEMS}.argmin:argmin", lambda t: t(64, 512, 512), const(1))
single("flag_gems_addmv", f"{_GEMS}.addmv:addmv", lambda t: t(4096), lambda t: t(4096, 4096),
       lambda t: t(4096))  # fmt: skip
single("flag_gems_triu", f"{_GEMS}.triu:triu", lambda t: t(4096, 4096))
single("flag_gems_triu_batch", f"{_GEMS}.triu:triu", lambda t: t(16, 1024, 1024))
for _ord, _norm in ((2, "l2"), (0, "l0"), (float("inf"), "max"), (3, "v")):
    single(f"flag_gems_{_norm}_norm", f"{_GEMS}.vector_norm:vector_norm", rows, const(_ord),
           const([1]))  # fmt: skip
single("flag_gems_upsample_nearest1d", f"{_GEMS}.upsample_nearest1d:upsample_nearest1d",
       lambda t: t(32, 64, 2048), const([4096]))  # fmt: skip
single("flag_gems_upsample_nearest2d", f"{_GEMS}.upsample_nearest2d:upsample_nearest2d", images,
       const([112, 112]))  # fmt: skip
single("flag_gems_upsample_bicubic2d", f"{_GEMS}.upsample_bicubic2d:upsample_bicubic2d", images,
       const([112, 112]))  # fmt: skip
single("flag_gems_upsample_bicubic2d_aa", f"{_GEMS}.upsample_bicubic2d_aa:_upsample_bicubic2d_aa",
       lambda t: t(4, 16, 128, 128), const([96, 96]))  # fmt: skip
single("flag_gems_rms_norm_loop", f"{_GEMS}.rms_norm:rms_norm_forward", lambda t: t(512, 131072),
       const([131072]), lambda t: t(131072))  # fmt: skip
single("flag_gems_vstack", f"{_GEMS}.vstack:vstack", lambda t: [t(1024, 2048) for _ in range(4)])
single("flag_gems_moe_sum", "flag_gems.fused.moe_sum:moe_sum", lambda t: t(4096, 8, 2048),
       lambda t: t(4096, 2048))  # fmt: skip
single("flag_gems_mhc_post", "flag_gems.fused.mhc.mhc_post:mhc_post", lambda t: t(4096, 2048),
       lambda t: t(4096, 4, 2048), lambda t: t(4096, 4, 1, dtype=torch.float32),
       lambda t: t(4096, 4, 4, dtype=torch.float32))  # fmt: skip


for _path, _options in (
    ("prod:prod_dim", {"dim": 1}), ("amax:amax", {"dim": [1]}), ("min:min_dim", {"dim": 1}),
    ("max:max_dim", {"dim": 1}), ("all:all_dim", {"dim": 1}), ("aminmax:aminmax", {"dim": 1}),
):  # fmt: skip
    single(f"flag_gems_{_path.split(':')[0]}", f"{_GEMS}.{_path}", rows, **_options)
single("flag_gems_mm", f"{_GEMS}.mm:mm", *[lambda t: t(2048, 2048)] * 2)
single("flag_gems_addmm", f"{_GEMS}.addmm:addmm", *[lambda t: t(2048, 2048)] * 3)
single("flag_gems_bmm", f"{_GEMS}.bmm:bmm", lambda t: t(16, 1024, 512),
       lambda t: t(16, 512, 1024))  # fmt: skip
single("flag_gems_mv", f"{_GEMS}.mv:mv", lambda t: t(4096, 4096), lambda t: t(4096))
single("flag_gems_attention", f"{_GEMS}.attention:scaled_dot_product_attention_forward",
       *[lambda t: t(2, 16, 2048, 128)] * 3)  # fmt: skip
single("flag_gems_reglu", "flag_gems.fused.reglu:reglu", rows)


@case
def flag_gems_cross_entropy(t: Tensors) -> None:
    x, target = t(4096, 32000, grad=True), t.whole(32000, 4096)
    path = "flag_gems.fused.cross_entropy_loss:cross_entropy_loss"
    function(path)(x, target).backward()


@case
def flag_gems_instance_norm(t: Tensors) -> None:
    x, w, b = t(16, 64, 56, 56, grad=True), t(64, grad=True), t(64, grad=True)
    backward(function("flag_gems.fused.instance_norm:instance_norm")(x, w, b))


single("liger_dyt_fwd", "liger_kernel.ops.dyt:liger_dyt_fwd", lambda t: t(4096, 4096),
       lambda t: t(1), lambda t: t(4096), lambda t: t(4096))  # fmt: skip
single("liger_dyt_bwd", "liger_kernel.ops.dyt:liger_dyt_bwd", *[lambda t: t(4096, 4096)] * 2,
       lambda t: t(1), lambda t: t(4096), lambda t: t(4096))  # fmt: skip


@case
def liger_fused_moe(t: Tensors) -> None:
    x, up, down = t(2048, 1024, grad=True), t(8, 1024, 1024, grad=True), t(8, 1024, 512, grad=True)
    experts = torch.rand(2048, 8, device=t.device).topk(2).indices.int()
    weights = torch.rand(2048, 2, device=t.device).requires_grad_()
    apply = function("liger_kernel.ops.fused_moe:LigerFusedMoEFunction").apply
    backward(apply(x, up, down, experts, weights))


@case
def liger_mlp(t: Tensors) -> None:
    x, gate = t(2, 1024, 1024, grad=True), t(2048, 1024, grad=True)
    up, down = t(2048, 1024, grad=True), t(1024, 2048, grad=True)
    backward(function("liger_kernel.ops.mlp:LigerMLPFunction").apply(x, gate, up, down))
