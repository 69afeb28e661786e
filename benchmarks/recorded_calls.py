"""The form of a call to be recorded, and the recorded calls of Flash Linear Attention.

A table of calls is made of families: one function, several shapes, several dtypes. The first shape
is called with every dtype, the others with the first dtype only. A further shape costs only timings
if the program stays the same; a further dtype costs a compile of each configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import Any

import torch
from autotune_cases import ALLOWED, CASES, Tensors, backward, within

from costmodel.autotune.dataset import role_of

OURS = ("recorded_tutorials", "recorded_products")
CALLED = (*ALLOWED, "hopper.ops", "torchao", *OURS)
"""Modules whose kernels are called; FlagGems loads those for Hopper as ``hopper``."""

LEFT_OUT = (
    *(f"flag_gems.fused.{name}" for name in ("moe_align_block_size", "cutlass_scaled_mm")),
    "flag_gems.ops.w8a8_block_fp8_matmul", "hopper.ops.w8a8_block_fp8_matmul",
)  # fmt: skip
"""Modules whose kernels vLLM has too."""

JUDGING_CASES = ("fla_chunk_gsa", "fla_parallel_nsa", "liger_")
"""Beginnings of the names of those in CASES that judge."""

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FLOATS, HALVES = (BF16, F16, F32), (BF16, F16)
FP8 = torch.float8_e4m3fn


def may_learn(module: str) -> bool:
    """Return True if a model may learn from the kernels of a module."""
    return within(module, CALLED) and not within(module, LEFT_OUT) and role_of(module) == "train"


def may_judge(module: str) -> bool:
    """Return True if the kernels of a module judge what was learned from others."""
    return within(module, CALLED) and role_of(module) == "eval"


class Typed(Tensors):
    """Makes random arguments of one dtype."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.dtype = dtype

    def __call__(
        self, *shape: int, dtype: torch.dtype | None = None, grad: bool = False
    ) -> torch.Tensor:
        return super().__call__(*shape, dtype=dtype or self.dtype, grad=grad)

    def unit(self, *shape: int, grad: bool = False) -> torch.Tensor:
        return super().unit(*shape).to(self.dtype).requires_grad_(grad)

    def share(self, *shape: int, grad: bool = False) -> torch.Tensor:
        return super().share(*shape).to(self.dtype).requires_grad_(grad)

    def fp8(self, *shape: int) -> torch.Tensor:
        return self(*shape, dtype=F32).clamp(-8, 8).to(FP8)

    def int8(self, *shape: int) -> torch.Tensor:
        return (self.whole(255, *shape) - 127).to(torch.int8)


@dataclass(frozen=True)
class Call:
    """One call of a function with random arguments.

    Args:
        name: of the call: package, function, shape and dtype.
        make: calls the function with arguments that the given :class:`Typed` makes.
        path: of the function, ``module:name``; empty for one of CASES.
    """

    name: str
    dtype: torch.dtype
    make: Callable[[Typed], None]
    path: str = ""

    @property
    def package(self) -> str:
        return {"flag": "flag_gems"}.get(first := self.name.split("_")[0], first)

    def __call__(self, device: str = "cuda") -> None:
        self.make(Typed(device, self.dtype))


Maker = Callable[..., tuple[Any, ...]]
Shapes = Sequence[tuple[Any, ...]]


def resolve(path: str) -> Any:
    """The function at ``module:name``, where the name may have dots."""
    module, names = path.split(":")
    if module.startswith("hopper."):
        import_module("flag_gems")
    found = import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def family(
    name: str,
    path: str,
    shapes: Shapes,
    make: Maker,
    dtypes: Sequence[torch.dtype] = FLOATS,
    grad: bool = False,
) -> list[Call]:
    """Calls of one function.

    Args:
        make: takes a :class:`Typed` and the sizes of a shape, and returns the arguments; a dict at
            the end holds keyword arguments.
        grad: call backward too, with gradients of all floating arguments.
    """

    def call(t: Typed, shape: tuple[Any, ...]) -> None:
        args, named = make(t, *shape), {}
        if args and isinstance(args[-1], dict):
            *args, named = args
        if grad:
            for value in (*args, *named.values()):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.requires_grad_()
        result = resolve(path)(*args, **named)
        if grad:
            backward(result)

    kinds = [(shapes[0], dtype) for dtype in dtypes[:1]]
    kinds += [(shape, dtypes[0]) for shape in shapes[1:]]
    kinds += [(shapes[0], dtype) for dtype in dtypes[1:]]
    return [
        Call(f"{name}:{'x'.join(map(str, shape))}:{str(dtype)[6:]}", dtype,
             lambda t, shape=shape: call(t, shape), path)  # type: ignore[misc]
        for shape, dtype in kinds
    ]  # fmt: skip


def combined(
    sizes: dict[str, Iterable[int]], warps: Iterable[int], stages: Iterable[int] = (3,)
) -> list[Any]:
    """All combinations of sizes, warps and stages."""
    from triton import Config

    return [
        Config(dict(zip(sizes, values, strict=True)), num_warps=w, num_stages=s)
        for *values, w, s in product(*sizes.values(), warps, stages)
    ]


def of_cases(judges: bool = False, dtypes: Sequence[torch.dtype] = FLOATS) -> list[list[Call]]:
    """Calls of CASES, those that judge or the others."""
    return [
        [Call(f"{name}:{str(dtype)[6:]}", dtype, make) for dtype in dtypes]
        for name, make in CASES.items()
        if name.startswith(JUDGING_CASES) == judges
    ]


def by_turns(families: Iterable[list[Call]]) -> list[Call]:
    """Order calls: the first of each family, then the second of each; a cut takes later ones."""
    families = list(families)
    longest = max(map(len, families), default=0)
    return [calls[i] for i in range(longest) for calls in families if i < len(calls)]


HEADS: Shapes = [(2, 2048, 8, 64), (1, 512, 4, 64), (2, 8192, 8, 128), (3, 1000, 5, 64),
                 (1, 4096, 16, 128)]  # fmt: skip
ROWS: Shapes = [(8192, 2048), (512, 1024), (1000, 3001), (16384, 4096), (64, 16384)]
NARROW: Shapes = [(65536, 128), (4096, 64), (30000, 100), (200000, 256)]


def _qkv(t: Typed, *s: int) -> tuple[Any, ...]:
    return t(*s), t(*s), t(*s)


def _unit(t: Typed, *s: int) -> tuple[Any, ...]:
    return t.unit(*s), t.unit(*s), t(*s)


def _dplr(t: Typed, *s: int) -> tuple[Any, ...]:
    a = t.unit(*s)
    return t.unit(*s), t.unit(*s), t(*s), -a, a * t.share(*s), t.decay(*s)


def _operations() -> list[list[Call]]:
    """Whole operations, forward and backward where there is one."""
    ops = "fla.ops"
    broad = [*HEADS, (1, 1024, 4, 512)]
    short = [(b, min(n, 1024), h, d) for b, n, h, d in HEADS]
    found = []
    for name, path, make, shapes, grad in (
        ("gla", "gla:chunk_gla", lambda t, *s: (*_qkv(t, *s), t.decay(*s)), broad, True),
        ("gdr", "gated_delta_rule:chunk_gated_delta_rule",
         lambda t, *s: (*_unit(t, *s), t.decay(*s[:3]), t.share(*s[:3])), HEADS, True),
        ("delta", "delta_rule:chunk_delta_rule",
         lambda t, *s: (*_unit(t, *s), t.share(*s[:3])), HEADS, True),
        ("simple_gla", "simple_gla:chunk_simple_gla",
         lambda t, *s: (*_qkv(t, *s), t.decay(*s[:3])), HEADS, True),
        ("simple_gla_parallel", "simple_gla.parallel:parallel_simple_gla",
         lambda t, *s: (*_qkv(t, *s), t.decay(*s[:3])), HEADS, True),
        ("simple_gla_fused", "simple_gla.fused_chunk:fused_chunk_simple_gla",
         lambda t, *s: (*_qkv(t, *s), t.decay(*s[:3])), HEADS, True),
        ("retention", "retention:chunk_retention", _qkv, HEADS, True),
        ("linear_attn", "linear_attn:chunk_linear_attn", _qkv, HEADS, True),
        ("rwkv6", "rwkv6.chunk:chunk_rwkv6",
         lambda t, *s: (*_qkv(t, *s), t.decay(*s), t(*s[2:])), broad, True),
        ("rwkv6_recurrent", "rwkv6:fused_recurrent_rwkv6",
         lambda t, *s: (*_qkv(t, *s), t.decay(*s), t(*s[2:])), short, True),
        ("delta_product", "gated_delta_product:chunk_gated_delta_product",
         lambda t, b, n, h, d: (t(b, n, h, d), t.unit(b, 2 * n, h, d), t(b, 2 * n, h, d),
                                t.decay(b, n, h), t.share(b, 2 * n, h), 2), HEADS, False),
        ("dplr", "generalized_delta_rule.dplr.chunk:chunk_dplr_delta_rule", _dplr, HEADS, True),
        ("dplr_safe", "generalized_delta_rule.dplr.chunk:chunk_dplr_delta_rule",
         lambda t, *s: (*_dplr(t, *s), {"safe_gate": True, "chunk_size": 64, "lower_bound": -0.5}),
         HEADS, True),
        ("dplr_recurrent",
         "generalized_delta_rule.dplr.fused_recurrent:fused_recurrent_dplr_delta_rule", _dplr,
         short, False),
        ("iplr", "generalized_delta_rule.iplr.chunk:chunk_iplr_delta_rule",
         lambda t, *s: (*_unit(t, *s), t.unit(*s), t.unit(*s)), HEADS, False),
        ("iplr_recurrent",
         "generalized_delta_rule.iplr.fused_recurrent:fused_recurrent_iplr_delta_rule",
         lambda t, *s: (*_unit(t, *s), t.unit(*s), t.unit(*s)), short, True),
        ("gla_recurrent", "gla:fused_recurrent_gla",
         lambda t, *s: (*_qkv(t, *s), t.decay(*s)), short, True),
    ):  # fmt: skip
        found.append(family(f"fla_{name}", f"{ops}.{path}", shapes, make, FLOATS, grad))
    width = [(4, 2048, 2048), (2, 512, 1024), (3, 1000, 1500), (8, 4096, 2048)]
    for kind in ("chunk", "fused_recurrent"):
        path = f"{ops}.hgrn.{kind}:{kind}_hgrn"
        found.append(family(f"fla_hgrn_{kind}", path, width[1:],
                            lambda t, *s: (t(*s), t.decay(*s)), FLOATS, True))  # fmt: skip
    return found


def _parts() -> list[list[Call]]:
    """Functions around one kernel of ``common`` and ``utils``."""
    found = []
    common, utils, gdr = "fla.ops.common", "fla.ops.utils", "fla.ops.gated_delta_rule"

    def add(name: str, path: str, shapes: Shapes, make: Maker, **options: Any) -> None:
        found.append(family(f"fla_{name}", path, shapes, make, **options))

    heads = [s for s in HEADS[1:] if s[1] % 64 == 0]

    def states(t: Typed, b: int, n: int, h: int, d: int) -> torch.Tensor:
        return t(b, n // 64, h, d, d)

    add("fwd_h", f"{common}.chunk_h:chunk_fwd_h", heads,
        lambda t, *s: (t(*s), t(*s), t.decay(*s[:3])))  # fmt: skip
    add("bwd_dh", f"{common}.chunk_h:chunk_bwd_dh", heads,
        lambda t, *s: (t(*s), t(*s), t(*s), t(*s), None, None, 0.125, t.decay(*s[:3])))  # fmt: skip
    add("fwd_o", f"{common}.chunk_o:chunk_fwd_o", heads,
        lambda t, *s: (*_qkv(t, *s), states(t, *s), t.decay(*s[:3])))  # fmt: skip
    add("bwd_dv", f"{common}.chunk_o:chunk_bwd_dv", heads,
        lambda t, *s: (*_qkv(t, *s), states(t, *s), t.decay(*s[:3])))  # fmt: skip
    add("bwd_dv_local", f"{common}.chunk_o:chunk_bwd_dv_local", heads,
        lambda t, *s: (*_qkv(t, *s), t.decay(*s[:3])))  # fmt: skip
    add("kkt", f"{common}.chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd", HEADS[1:],
        lambda t, *s: (t(*s), t.decay(*s[:3]), t.share(*s[:3])))  # fmt: skip
    add("gated_fwd_h", f"{common}.chunk_delta_h:chunk_gated_delta_rule_fwd_h", heads,
        lambda t, *s: (*_unit(t, *s), t.decay(*s[:3])))  # fmt: skip
    add("gated_wy_bwd", f"{gdr}.wy_fast:prepare_wy_repr_bwd", heads,
        lambda t, *s: (t(*s), t(*s), t.share(*s[:3]), t(*s[:3], 64), t(*s), t(*s),
                       t.decay(*s[:3])))  # fmt: skip
    for kind, more in (("scalar", 3), ("vector", 4)):
        add(f"local_cumsum_{kind}", f"{utils}.cumsum:chunk_local_cumsum_{kind}", HEADS[1:],
            lambda t, *s, more=more: (t.decay(*s[:more]), 64), dtypes=(BF16,))  # fmt: skip
        add(f"global_cumsum_{kind}", f"{utils}.cumsum:chunk_global_cumsum_{kind}", HEADS[1:],
            lambda t, *s, more=more: (t.decay(*s[:more]),), dtypes=(BF16,))  # fmt: skip
    add("logsumexp", f"{utils}.logsumexp:logsumexp_fwd", ROWS[1:], lambda t, *s: (t(*s),))
    add("softmax_fwd", f"{utils}.softmax:softmax_fwd", ROWS[1:], lambda t, *s: (t(*s),))
    add("softmax_bwd", f"{utils}.softmax:softmax_bwd", ROWS[1:], lambda t, *s: (t(*s), t(*s)))
    products = [(512, 512, 512), (4096, 1024, 2048), (1000, 777, 1111), (64, 4096, 4096)]
    add("matmul", f"{utils}.matmul:matmul", products, lambda t, m, n, k: (t(m, k), t(k, n)))
    add("addmm", f"{utils}.matmul:addmm", products,
        lambda t, m, n, k: (t(m, n), t(m, k), t(k, n)))  # fmt: skip
    add("mean_pooling", f"{utils}.pooling:mean_pooling", HEADS[1:], lambda t, *s: (t(*s), 64),
        grad=True)  # fmt: skip
    for size in (16, 32, 64):
        add(f"solve_tril_{size}", f"{utils}.solve_tril:solve_tril", HEADS[1:],
            lambda t, b, n, h, _, size=size: (t(b, n, h, size, dtype=F32) / 64,),
            dtypes=(BF16,))  # fmt: skip
    add("gdn_gate", f"{gdr}.gate:fused_gdn_gate", HEADS,
        lambda t, b, n, h, _: (t(b, n, h), t(h, dtype=F32)), grad=True)  # fmt: skip
    add("pack", f"{utils}.pack:pack_sequence", [(4096, 2048), (1000, 777), (16384, 1024)],
        lambda t, n, d: (t(3, n, d), torch.tensor([0, n // 4, n // 2, n], device=t.device,
                                               dtype=torch.int32)))  # fmt: skip
    return found


def _modules() -> list[list[Call]]:
    """Activations, norms and other parts of fla's models."""
    found = []

    def add(name: str, path: str, shapes: Shapes, make: Maker, **options: Any) -> None:
        found.append(family(f"fla_{name}", f"fla.modules.{path}", shapes, make, **options))

    for name in ("sigmoid", "logsigmoid", "swish", "elu_p1"):
        more = {"temperature": 1.0} if name == "logsigmoid" else {}
        add(f"{name}_fwd", f"activations.ops:{name}_fwd", ROWS[1:4], lambda t, *s: (t(*s),))
        add(f"{name}_bwd", f"activations.ops:{name}_bwd", ROWS[1:4],
            lambda t, *s, more=more: (t(*s), t(*s), more))  # fmt: skip
    for name in ("swiglu", "sigmoidglu", "powglu"):
        add(f"{name}_fwd", f"activations.ops:{name}_fwd", ROWS[1:4], lambda t, *s: (t(*s), t(*s)))
        add(f"{name}_bwd", f"activations.ops:{name}_fwdbwd", ROWS[1:4],
            lambda t, *s: (t(*s), t(*s), t(*s)))  # fmt: skip
    for size, shapes in (("narrow", NARROW), ("wide", [ROWS[1], ROWS[3], (1000, 3000)])):
        add(f"layer_norm_{size}", "norm.layernorm:layer_norm", shapes,
            lambda t, m, n: (t(m, n), t(n), t(n)), grad=True)  # fmt: skip
        add(f"rms_norm_{size}", "norm.layernorm:rms_norm", shapes,
            lambda t, m, n: (t(m, n), t(n), None), grad=True)  # fmt: skip
        add(f"gated_norm_{size}", "norm.fused_norm_gate:layer_norm_gated", shapes,
            lambda t, m, n: (t(m, n), t(m, n), t(n), t(n)), grad=True)  # fmt: skip
        add(f"gated_rms_{size}", "norm.fused_norm_gate:rms_norm_gated", shapes,
            lambda t, m, n: (t(m, n), t(m, n), t(n), None), grad=True)  # fmt: skip
        add(f"l2norm_{size}", "norm.l2norm:l2norm", shapes, lambda t, *s: (t(*s),), grad=True)
        add(f"quant_norm_{size}", "norm.layernorm_quant:layer_norm_quant_fwd", shapes,
            lambda t, m, n: (t(m, n), t(n), t(n), 1e-5))  # fmt: skip
    texts = [(1, 512, 1024), (4, 8192, 1024), (3, 1000, 1504)]
    add("token_shift", "token_shift:token_shift", texts, lambda t, *s: (t(*s),), grad=True)
    add("conv1d", "causal_conv1d.ops:causal_conv1d", texts,
        lambda t, b, n, d: (t(b, n, d), {"weight": t(d, 4), "activation": "silu"}),
        grad=True)  # fmt: skip
    add("conv1d_update", "causal_conv1d.ops:causal_conv1d_update",
        [(64, 2048), (8, 1024), (256, 4096)],
        lambda t, b, d: (t(b, 1, d), t(b, d, 4), {"weight": t(d, 4)}))  # fmt: skip
    add("rotary", "rotary.ops:rotary_embedding_fwdbwd", HEADS[1:],
        lambda t, b, n, h, d: (t(b, n, h, d), t(n, d // 2), t(n, d // 2)))  # fmt: skip
    return found


def fla_calls() -> list[list[Call]]:
    return [*_parts(), *_modules(), *_operations()]
