"""What the compiler is told: from a code class and a configuration to one Triton source.

Triton would specialise integer arguments on what their values happen to be. Here nothing depends
on values: strides that the layout makes 1 are constants, and what the alignment class promises is
said as divisibility. So the number of binaries is finite, and each is known before a GPU is.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from costmodel.config import GemmConfig
from costmodel.target import Target
from costmodel.workload import DTYPES, CodeClass, Workload

if TYPE_CHECKING:
    from triton.compiler import ASTSource

__all__ = [
    "REPACK_BLOCK",
    "Specialization",
    "artifact_key",
    "constants",
    "kernel_function",
    "kernel_hash",
    "repack_source",
    "source",
    "specialize",
    "stores_by_descriptor",
]

_TRITON_TYPE = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Specialization:
    """One binary's worth of input: hashable, JSON-ready, independent of sizes.

    Attributes:
        config_binary: :attr:`GemmConfig.binary` of the configurations that share it.
        code: the code class.
        even_k: K is a multiple of BLOCK_K (``pointer`` only; the TMA kernels never mask).
    """

    config_binary: tuple[Any, ...]
    code: CodeClass
    even_k: bool

    @property
    def kernel(self) -> str:
        return str(self.config_binary[0])


def specialize(workload: Workload, config: GemmConfig) -> Specialization:
    """The specialization that this configuration runs this workload with."""
    # The TMA kernels zero-fill past K: one binary serves every K.
    even_k = config.kernel == "pointer" and workload.k % config.block_k == 0
    code = workload.code.repacked() if config.repack else workload.code
    return Specialization(config.binary, code, even_k)


def source(spec: Specialization) -> tuple[ASTSource, dict[str, Any]]:
    """The Triton source and compile options of a specialization.

    Arguments are typed in the order of the kernel's signature; ``constexpr`` ones are baked in.
    """
    from triton.compiler import ASTSource

    kernel, _, _, _, num_warps, num_stages, maxnreg, _, _, _ = spec.config_binary
    fn = kernel_function(kernel)
    types, attrs = _arguments(spec)
    baked = constants(spec)
    signature = {name: "constexpr" if name in baked else types[name] for name in fn.arg_names}
    index = {name: i for i, name in enumerate(fn.arg_names)}
    attributes = {
        (index[name],): [["tt.divisibility", value]]
        for name, value in attrs.items()
        if name in index and name not in baked and value > 1
    }
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if maxnreg:
        options["maxnreg"] = maxnreg
    return ASTSource(fn, signature, constexprs=baked, attrs=attributes), options


REPACK_BLOCK = (16, 256)
"""Rows and columns that one program of ``repack_rows`` copies."""


def repack_source(dtype: str, unit_stride: bool) -> tuple[ASTSource, dict[str, Any]]:
    """The Triton source and compile options of the copy into aligned rows.

    Args:
        dtype: of the elements.
        unit_stride: the columns of the source are contiguous.
    """
    from triton.compiler import ASTSource

    from costmodel.kernels.repack import repack_rows

    element = _TRITON_TYPE[dtype]
    signature = {
        "src_ptr": f"*{element}", "dst_ptr": f"*{element}", "rows": "i32", "cols": "i32",
        "src_row_stride": "i64", "src_col_stride": "i64", "dst_row_stride": "i64",
    }  # fmt: skip
    baked: dict[str, Any] = {"BLOCK_ROWS": REPACK_BLOCK[0], "BLOCK_COLS": REPACK_BLOCK[1]}
    if unit_stride:
        baked["src_col_stride"] = 1
    signature |= dict.fromkeys(baked, "constexpr")
    index = {name: i for i, name in enumerate(repack_rows.arg_names)}
    # The rows of the copy are whole vectors of 16 bytes.
    attributes = {
        (index["dst_ptr"],): [["tt.divisibility", 16]],
        (index["dst_row_stride"],): [["tt.divisibility", 16 // DTYPES[dtype]]],
    }
    source = ASTSource(repack_rows, signature, constexprs=baked, attrs=attributes)
    return source, {"num_warps": 4, "num_stages": 1}


def constants(spec: Specialization) -> dict[str, Any]:
    """Arguments whose value is part of the binary."""
    kernel, bm, bn, bk, _, _, _, halves, flatten, split = spec.config_binary
    code = spec.code
    baked: dict[str, Any] = {
        "BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk, "WIDE": code.wide,
        "ACTIVATION": code.activation,
    }  # fmt: skip
    if not code.bias:
        baked["bias_ptr"] = None
    if code.c_layout != "strided":
        baked["stride_cn" if code.c_layout == "row" else "stride_cm"] = 1
    if kernel == "pointer":
        item = code.itemsize
        baked |= {
            "EVEN_K": spec.even_k,
            "SPLIT": split,
            "A_CONTIGUOUS": code.a_align // item if code.a_layout == "col" else 1,
            "B_CONTIGUOUS": code.b_align // item if code.b_layout == "row" else 1,
        }
        if code.a_layout != "strided":
            baked["stride_ak" if code.a_layout == "row" else "stride_am"] = 1
        if code.b_layout != "strided":
            baked["stride_bn" if code.b_layout == "row" else "stride_bk"] = 1
    else:
        baked |= {
            "A_COL": code.a_layout == "col", "B_COL": code.b_layout == "col", "HALVES": halves,
        }  # fmt: skip
        baked["c_ptr" if stores_by_descriptor(code) else "c_desc"] = None
        if kernel == "tma_persistent":
            baked["FLATTEN"] = flatten
        else:
            baked["SPLIT"] = split
    if kernel != "tma_persistent" and not split:
        baked |= {"partial_ptr": None, "arrivals_ptr": None, "SPLIT_K": 1}
    return baked


def _arguments(spec: Specialization) -> tuple[dict[str, str], dict[str, int]]:
    """Triton types of the arguments, and what divides them (pointers in bytes)."""
    _, bm, bn, bk, _, _, _, halves, _, _ = spec.config_binary
    code = spec.code
    in_type, out_type = _TRITON_TYPE[code.dtype], _TRITON_TYPE[code.out_dtype]
    item, out_item = code.itemsize, 2
    types = dict.fromkeys(
        ("M", "N", "K", "GROUP_M", "SPLIT_K", "stride_am", "stride_ak", "stride_bk", "stride_bn",
         "stride_cm", "stride_cn"), "i64" if code.wide else "i32",
    )  # fmt: skip
    types |= dict.fromkeys(("M", "N", "K", "GROUP_M", "SPLIT_K"), "i32")
    types |= {
        "a_ptr": f"*{in_type}", "b_ptr": f"*{in_type}", "c_ptr": f"*{out_type}",
        "bias_ptr": f"*{out_type}", "partial_ptr": "*fp32", "arrivals_ptr": "*i32",
    }  # fmt: skip
    a_block = (bk, bm) if code.a_layout == "col" else (bm, bk)
    b_block = (bn, bk) if code.b_layout == "col" else (bk, bn)
    c_width = bn // 2 if halves else bn
    types |= {
        "a_desc": f"tensordesc<{in_type}[{a_block[0]}, {a_block[1]}]>",
        "b_desc": f"tensordesc<{in_type}[{b_block[0]}, {b_block[1]}]>",
        "c_desc": f"tensordesc<{out_type}[{bm}, {c_width}]>",
    }
    divides = {
        "a_ptr": code.a_align, "b_ptr": code.b_align, "c_ptr": code.c_align,
        "bias_ptr": out_item, "partial_ptr": 16, "arrivals_ptr": 4,
    }  # fmt: skip
    # The class also divides the leading stride and the extent of the contiguous dimension. Not so
    # the descriptors' operands: their rows may be padded copies, whose extents are still any.
    for layout, align, size, lead_row, extent_row, lead_col, extent_col in (
        (code.a_layout, code.a_align, item, "stride_am", "K", "stride_ak", "M"),
        (code.b_layout, code.b_align, item, "stride_bk", "N", "stride_bn", "K"),
        (code.c_layout, code.c_align, out_item, "stride_cm", "N", "stride_cn", "M"),
    )[0 if spec.kernel == "pointer" else 2 :]:
        if layout == "strided":
            continue
        lead, extent = (lead_row, extent_row) if layout == "row" else (lead_col, extent_col)
        divides[lead] = align // size
        divides[extent] = max(divides.get(extent, 1), align // size)
    return types, divides


def stores_by_descriptor(code: CodeClass) -> bool:
    """Whether TMA may write C: row-major and 16-byte aligned."""
    return code.c_layout == "row" and code.c_align == 16


@functools.cache
def kernel_function(name: str) -> Any:
    from costmodel.kernels import pointer, tma

    return {
        "pointer": pointer.gemm_pointer,
        "tma": tma.gemm_tma,
        "tma_persistent": tma.gemm_tma_persistent,
    }[name]


def _launched(name: str) -> list[Any]:
    """What a measurement of this kernel may launch: itself, and before it the copies it needs."""
    from costmodel.kernels.repack import repack_rows

    kernel = kernel_function(name)
    return [kernel] if name == "pointer" else [kernel, repack_rows]


@functools.cache
def kernel_hash(name: str) -> str:
    """Hash of a kernel's code and of all it calls: comments, names of files and lines left out."""
    seen: dict[str, str] = {}
    queue = _launched(name)
    while queue:
        fn = queue.pop()
        if fn.__name__ in seen:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn.fn)))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        # Unparsed, since what ast.dump prints differs from one Python to the next.
        seen[fn.__name__] = ast.unparse(tree)
        called = (getattr(n.func, "id", "") for n in ast.walk(tree) if isinstance(n, ast.Call))
        scope = fn.fn.__globals__
        queue += [scope[c] for c in called if hasattr(scope.get(c), "arg_names")]
    text = "\n".join(f"{k}:{v}" for k, v in sorted(seen.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def artifact_key(spec: Specialization, target: Target) -> str:
    """The identity of a binary: what it was made of, and what made it."""
    parts = (
        kernel_hash(spec.kernel), spec.config_binary, spec.code.key(), spec.even_k,
        target.device.arch, target.toolchain.triton, target.toolchain.ptxas,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
