"""The calls of torchao that are recorded: quantization, and products of what is quantized."""

from __future__ import annotations

from typing import Any

import torch
from recorded_calls import BF16, F16, F32, FP8, HALVES, Call, Maker, Shapes, Typed, family

PRODUCTS: Shapes = [(2048, 2048, 2048), (512, 512, 1024), (4096, 1024, 4096), (128, 4096, 2048)]
BLOCKS: Shapes = [(4096, 2048), (512, 1024), (16384, 4096), (1024, 7168)]

_calls: list[list[Call]] = []


def add(name: str, path: str, shapes: Shapes, make: Maker, **options: Any) -> None:
    _calls.append(family(f"torchao_{name}", f"torchao.{path}", shapes, make, **options))


def one(t: Typed, *s: int) -> tuple[Any, ...]:
    return (t(*s),)


# --- Products -------------------------------------------------------------------------------------

add("matmul", "prototype.common.triton.matmul:matmul", PRODUCTS,
    lambda t, m, n, k: (t(m, k), t(k, n), None, "tf32", True, None))  # fmt: skip
add("matmul_odd", "prototype.common.triton.matmul:matmul", [(1000, 777, 1111)],
    lambda t, m, n, k: (t(m, k), t(k, n), None, "tf32", True, None))  # fmt: skip


def _int8(t: Typed, m: int, n: int, k: int) -> tuple[Any, ...]:
    return t.int8(m, k), t.int8(n, k).t(), t.share(m, 1), t.share(1, n)


_INT8_MM = "prototype.quantized_training.int8_mm:scaled_int8_mm_cuda"
add("int8_mm", _INT8_MM, PRODUCTS, _int8)
add("int8_mm_rows", _INT8_MM, PRODUCTS,
    lambda t, m, n, k: (t.int8(m, k), t.int8(k, n), t.share(m, 1), t.share(1, n)),
    dtypes=(BF16,))  # fmt: skip


def _int4(t: Typed, m: int, n: int, k: int) -> tuple[Any, ...]:
    groups = t.share(k // 128, n), t.share(k // 128, n)
    return t(m, k), t.whole(255, k // 2, n).to(torch.uint8), *groups, 128


_MIXED_MM = "prototype.hqq.mixed_mm:triton_mixed_mm"
for _kind in ("compute_bound", "max_autotune"):
    add(f"mixed_mm_{_kind}", _MIXED_MM, [(16, 2048, 2048), *PRODUCTS[:2]],
        lambda t, *s, kind=_kind: (*_int4(t, *s), {"kernel_type": kind}),
        dtypes=HALVES)  # fmt: skip

_BLOCKWISE = "prototype.blockwise_fp8_training.kernels"


def _column_major(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


add("fp8_mm_128x128", f"{_BLOCKWISE}:triton_fp8_gemm_1x128_128x128", PRODUCTS,
    lambda t, m, n, k: (t.fp8(m, k), t.fp8(n, k).t(), _column_major(t(m, k // 128, dtype=F32)),
                        _column_major(t(k // 128, n // 128, dtype=F32))),
    dtypes=(BF16,))  # fmt: skip
add("fp8_mm_128x1", f"{_BLOCKWISE}:triton_fp8_gemm_1x128_128x1", PRODUCTS,
    lambda t, m, n, k: (t.fp8(m, k), t.fp8(n, k).t(), _column_major(t(m, k // 128, dtype=F32)),
                        t(k // 128, n, dtype=F32)), dtypes=(BF16,))  # fmt: skip
add("fp8_mm", "kernel.blockwise_quantization:blockwise_fp8_gemm", PRODUCTS,
    lambda t, m, n, k: (t.fp8(m, k), t(m, k // 128, dtype=F32), t.fp8(n, k),
                        t(n // 128, k // 128, dtype=F32)), dtypes=(BF16,))  # fmt: skip

# --- Quantization ---------------------------------------------------------------------------------

for _name in ("act_quant_lhs", "act_quant_rhs", "act_quant_transposed_lhs", "weight_quant_rhs",
              "weight_quant_transposed_rhs"):  # fmt: skip
    add(_name, f"{_BLOCKWISE}:triton_fp8_blockwise_{_name}", BLOCKS, one, dtypes=(BF16, F32))
_DEEP = "prototype.blockwise_fp8_training.deepgemm_quant"
for _name in ("grouped_transposed_rhs", "grouped_rhs"):
    add(f"weight_quant_{_name}", f"{_DEEP}:triton_fp8_blockwise_weight_quant_{_name}_deepgemm",
        [(8, 1024, 2048), (4, 512, 512), (16, 2048, 1024)],
        lambda t, g, n, k: (t(g, n, k).transpose(1, 2),), dtypes=(BF16, F32))  # fmt: skip


def _groups(t: Typed, n: int, count: int) -> torch.Tensor:
    ends = torch.arange(1, count + 1, device=t.device, dtype=torch.int32)
    return ends * (n // count)


add("act_quant_k_grouped", f"{_DEEP}:triton_fp8_blockwise_act_quant_k_grouped_deepgemm", BLOCKS,
    lambda t, n, d: (t(n, d), _groups(t, n, 4)), dtypes=(BF16, F32))  # fmt: skip
_MOE = "prototype.moe_training.kernels"
_JAGGED = f"{_MOE}.jagged_float8_scales:triton_fp8_per_group"
for _count in (8, 1):  # short groups have a kernel of their own
    add(f"rowwise_scales_{_count}", f"{_JAGGED}_rowwise_scales",
        BLOCKS, lambda t, m, n, count=_count: (t(m, n), _groups(t, n, count)),
        dtypes=(BF16, F32))  # fmt: skip
    add(f"colwise_scales_{_count}", f"{_JAGGED}_colwise_scales",
        BLOCKS, lambda t, m, n, count=_count: (t(m, n), _groups(t, m, count)),
        dtypes=(BF16, F32))  # fmt: skip
    add(f"colwise_scales_dual_{_count}",
        f"{_JAGGED}_colwise_scales_dual", BLOCKS,
        lambda t, m, n, count=_count: (t(m, n), t(m, n // 2), _groups(t, m, count)),
        dtypes=(BF16, F32))  # fmt: skip
_EXPERTS: Shapes = [(8, 1024, 2048), (4, 512, 512), (16, 2048, 1024), (3, 1000, 1504)]
for _name in ("rowwise_3d_transpose_rhs", "rowwise_3d_transpose_rhs_fused_reduction"):
    add(_name, f"{_MOE}.float8_rowwise:triton_fp8_{_name}", _EXPERTS,
        lambda t, g, n, k: (t(g, n, k).transpose(1, 2),), dtypes=(BF16, F32))  # fmt: skip
add("colwise_3d", f"{_MOE}.float8_rowwise:triton_fp8_colwise_3d_scale_and_cast", _EXPERTS, one,
    dtypes=(BF16, F32))  # fmt: skip
add("rowwise_2d", f"{_MOE}.float8_rowwise:triton_fp8_rowwise_2d_scale_and_cast",
    [*BLOCKS, (1000, 3008)], one, dtypes=(BF16, F32))  # fmt: skip
_TENSORWISE = "prototype.float8nocompile.kernels.fp8_dynamic_tensorwise"
for _name in ("row_major", "row_major_t", "col_major", "col_major_t", "row_and_col_major",
              "row_major_t_and_non_t", "col_major_t_and_non_t"):  # fmt: skip
    add(f"to_{_name}", f"{_TENSORWISE}:hp_to_fp8_{_name}", BLOCKS[:3],
        lambda t, *s: (t(*s), FP8, None), dtypes=(BF16, F32))  # fmt: skip

# --- Quantization for attention -------------------------------------------------------------------

_HEADS: Shapes = [(2, 8, 2048, 64), (1, 16, 8192, 128), (3, 5, 1000, 128)]
_ATTENTION = "prototype.attention.quantization"
for _name, _path, _rotated in (
    ("sdpa", f"{_ATTENTION}.triton_qkv_quantization:triton_fp8_sdpa_quantize", False),
    ("hadamard", f"{_ATTENTION}.triton_hadamard_qkv_quantization:triton_fp8_hadamard_sdpa_quantize",
     False),
    ("inference", "prototype.fp8_sdpa_inference.fp8_sdpa_quantization:fp8_sdpa_quantize_func",
     False),
    ("rope", f"{_ATTENTION}.triton_rope_qkv_quantization:triton_fp8_rope_sdpa_quantize", True),
    ("hadamard_rope",
     f"{_ATTENTION}.triton_hadamard_rope_qkv_quantization:triton_fp8_hadamard_rope_sdpa_quantize",
     True),
):  # fmt: skip

    def _qkv(t: Typed, b: int, h: int, n: int, d: int, rotated: bool = _rotated) -> tuple[Any, ...]:
        if not rotated:
            return t(b, h, n, d), t(b, h, n, d), t(b, h, n, d)
        angles = t(n, d, dtype=F32), t(n, d, dtype=F32)
        return t(b, n, h, d), t(b, n, h, d), t(b, n, h, d), *angles

    add(f"quantize_{_name}", _path, _HEADS, _qkv, dtypes=(BF16, F16))


def torchao_calls() -> list[list[Call]]:
    return _calls
