"""Calls of tuned kernels with further sizes: their second to fifth keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from autotune_cases import Tensors, backward, function, gated_norm

KEYS: dict[str, list[Callable[[Tensors], None]]] = {}
"""Four calls for each case; each has another size in the key that the kernel's author chose."""


def _hgrn(t: Tensors, width: int) -> None:
    x, g = t(4, 512, width, grad=True), t.decay(4, 512, width, grad=True)
    backward(function("fla.ops.hgrn.fused_recurrent:fused_recurrent_hgrn")(x, g))


def _keys(name: str, make: Callable[..., Any], *sizes: Any) -> None:
    KEYS[name] = [lambda t, size=size: make(t, *size) for size in sizes]  # type: ignore[misc]


def _gems(name: str, path: str, make: Callable[..., tuple[Any, ...]], *sizes: Any) -> None:
    called = f"flag_gems.ops.{path}"
    _keys(f"flag_gems_{name}", lambda t, *size: function(called)(*make(t, *size)), *sizes)


# The first of the drawn kernels that have a size in their key and that stock tunes within 10 s.
_keys("fla_layer_norm_gated_2048", gated_norm, (1024,), (1536,), (3072,), (4096,))
_keys("fla_fused_recurrent_hgrn", _hgrn, (1024,), (1536,), (3072,), (4096,))
_keys("liger_dyt_fwd", lambda t, n: function("liger_kernel.ops.dyt:liger_dyt_fwd")(
    t(4096, n), t(1), t(n), t(n)), (1024,), (2048,), (3072,), (8192,))  # fmt: skip
_gems("scaled_softmax_bwd", "scaled_softmax:scaled_softmax_backward",
      lambda t, q, k: (t(4, 8, q, k), t(4, 8, q, k), 0.125),
      (512, 1024), (1024, 512), (2048, 1024), (1024, 2048))  # fmt: skip
_gems("softmax_bwd_inner", "softmax:softmax_backward",
      lambda t, m, n: (t(m, n), t(m, n), -1, torch.bfloat16),
      (4096, 2048), (8192, 1024), (2048, 4096), (16384, 1024))  # fmt: skip
_gems("upsample_nearest2d", "upsample_nearest2d:upsample_nearest2d",
      lambda t, n, c, size: (t(n, c, size, size), [2 * size, 2 * size]),
      (16, 64, 56), (32, 32, 56), (32, 64, 28), (8, 64, 112))  # fmt: skip
_gems("upsample_bicubic2d_aa", "upsample_bicubic2d_aa:_upsample_bicubic2d_aa",
      lambda t, n, c, size: (t(n, c, 128, 128), [size, size]),
      (4, 16, 80), (4, 16, 64), (4, 32, 96), (2, 16, 96))  # fmt: skip
_gems("layer_norm_loop", "layernorm:layer_norm", lambda t, m, n: (t(m, n), [n], t(n), t(n)),
      (1024, 8192), (4096, 8192), (2048, 16384), (1024, 12288))  # fmt: skip

# Kernels with 32 configurations and more; these sizes change nothing but timings.
_MATRICES = (2048, 4096), (4096, 2048), (8192, 4096), (2048, 8192)
_gems("addmv", "addmv:addmv", lambda t, m, n: (t(m), t(m, n), t(n)), *_MATRICES)
_gems("mv", "mv:mv", lambda t, m, n: (t(m, n), t(n)), *_MATRICES)
_gems("weight_norm_first", "weightnorm:weight_norm_interface",
      lambda t, m, n: (t(m, n), t(m, 1)), *_MATRICES)  # fmt: skip
_gems("weight_norm_last", "weightnorm:weight_norm_interface",
      lambda t, m, n: (t(m, n), t(1, n), 1), *_MATRICES)  # fmt: skip
_gems("attention", "attention:scaled_dot_product_attention_forward",
      lambda t, n: (t(2, 16, n, 128), t(2, 16, n, 128), t(2, 16, n, 128)),
      (1024,), (1536,), (3072,), (4096,))  # fmt: skip
