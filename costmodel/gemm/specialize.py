"""What the compiler is told: from a code class and a configuration to one Triton source.

Triton would specialise integer arguments on what their values happen to be. Here nothing depends
on values: strides that the layout makes 1 are constants, and what the alignment class promises is
said as divisibility. So the number of binaries is finite, and each is known before a GPU is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from costmodel.gemm.config import GemmConfig, n_parts, stored_columns
from costmodel.gemm.dtypes import DATA_TYPES
from costmodel.gemm.kernel_code import kernel_function, kernel_hash
from costmodel.gemm.workload import CodeClass, Workload
from costmodel.hardware.architectures import SM_REGISTERS
from costmodel.hardware.target import Target

if TYPE_CHECKING:
    from triton.compiler import ASTSource

__all__ = [
    "REPACK_BLOCK",
    "Specialization",
    "artifact_key",
    "constants",
    "descriptor_blocks",
    "entry_registers",
    "multiply_registers",
    "repack_constants",
    "repack_key",
    "repack_source",
    "source",
    "specialize",
    "stores_by_descriptor",
]


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
    fn = kernel_function(spec.kernel)
    types, attrs = _arguments(spec)
    baked = constants(spec)
    signature = {name: "constexpr" if name in baked else types[name] for name in fn.arg_names}
    index = {name: i for i, name in enumerate(fn.arg_names)}
    attributes = {
        (index[name],): [["tt.divisibility", value]]
        for name, value in attrs.items()
        if name in index and name not in baked and value > 1
    }
    return _source_class(spec)(fn, signature, baked, attributes), _options(spec)


def _source_class(spec: Specialization) -> type[ASTSource]:
    if spec.kernel == "warp_specialized":
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource  # type: ignore[no-any-return]
    from triton.compiler import ASTSource

    return ASTSource  # type: ignore[no-any-return]


def _options(spec: Specialization) -> dict[str, Any]:
    """Compile options."""
    _, _, _, _, num_warps, num_stages, maxnreg, *_ = spec.config_binary
    if spec.kernel == "warp_specialized":
        # One group of four is launched, and its warp-specialised region adds the others.
        return {"num_warps": 4, "maxnreg": entry_registers(num_warps)}
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    return options | ({"maxnreg": maxnreg} if maxnreg else {})


COPY_REGISTERS = 24
"""Registers of a thread that only copies (``warp_specialized``): the least there is."""


def entry_registers(num_warps: int) -> int:
    """Registers of every thread at entry (``warp_specialized``), before they are dealt out anew.

    The copying warp takes the place of four. ptxas compiles each instruction for so many.
    """
    return SM_REGISTERS // (32 * (num_warps + 4)) // 8 * 8


def multiply_registers(num_warps: int) -> int:
    """Registers of a thread that multiplies (``warp_specialized``), in units of 8."""
    per_group = SM_REGISTERS // 128 - COPY_REGISTERS
    return per_group // (num_warps // 4) // 8 * 8


REPACK_BLOCK = (16, 256)
"""Rows and columns that one program of ``repack_operands`` copies."""

_REPACK_TYPES = {
    "ptr": "*{element}", "copy_ptr": "*{element}", "rows": "i32", "cols": "i32",
    "row_stride": "i64", "col_stride": "i64", "copy_stride": "i64",
}  # fmt: skip


def repack_constants(a_unit: bool | None, b_unit: bool | None) -> dict[str, Any]:
    """Arguments of ``repack_operands`` that are part of the binary; see :func:`repack_source`."""
    baked: dict[str, Any] = {"BLOCK_ROWS": REPACK_BLOCK[0], "BLOCK_COLS": REPACK_BLOCK[1]}
    for operand, unit in (("a", a_unit), ("b", b_unit)):
        if unit is None:
            baked |= {f"{operand}_{name}": None for name in _REPACK_TYPES} | {"a_blocks": None}
        elif unit:
            baked[f"{operand}_col_stride"] = 1
    return baked


def repack_source(
    dtype: str, a_unit: bool | None, b_unit: bool | None
) -> tuple[ASTSource, dict[str, Any]]:
    """The Triton source and compile options of the copies into aligned rows.

    Args:
        dtype: of the elements.
        a_unit, b_unit: the elements of a row are contiguous in the source; None for an operand
            that is not copied. Rows are those of memory: a ``col`` operand's are its columns.
    """
    from triton.compiler import ASTSource

    from costmodel.kernels.repack import repack_operands

    element = DATA_TYPES[dtype].triton
    baked = repack_constants(a_unit, b_unit)
    signature = {"a_blocks": "i32"}
    signature |= {
        f"{operand}_{name}": type_.format(element=element)
        for operand in "ab" for name, type_ in _REPACK_TYPES.items()
    }  # fmt: skip
    signature |= dict.fromkeys(baked, "constexpr")
    # In the order of the kernel's own; the rows of a copy are whole vectors of 16 bytes.
    names = repack_operands.arg_names
    divides = {"copy_ptr": 16, "copy_stride": 16 // DATA_TYPES[dtype].bytes}
    attributes = {
        (names.index(f"{operand}_{name}"),): [["tt.divisibility", value]]
        for operand in "ab" for name, value in divides.items()
        if f"{operand}_{name}" not in baked
    }  # fmt: skip
    ordered = {name: signature[name] for name in names}
    source = ASTSource(repack_operands, ordered, constexprs=baked, attrs=attributes)
    return source, {"num_warps": 4, "num_stages": 1}


def constants(spec: Specialization) -> dict[str, Any]:
    """Arguments whose value is part of the binary."""
    code = spec.code
    if spec.kernel == "warp_specialized":
        baked = _warp_specialized_constants(spec)
    elif spec.kernel == "pointer":
        baked = _tile_constants(spec) | _pointer_constants(spec)
    else:
        baked = _tile_constants(spec) | _tma_constants(spec)
    baked["ACTIVATION"] = code.activation
    if not code.bias:
        baked["bias_ptr"] = None
    return baked


def _tile_constants(spec: Specialization) -> dict[str, Any]:
    """Of the Triton kernels."""
    kernel, bm, bn, bk, _, _, _, _, _, split = spec.config_binary
    baked: dict[str, Any] = {
        "BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk, "WIDE": spec.code.wide,
        "PRECISION": spec.code.data_type.precision,
    }  # fmt: skip
    if spec.code.c_layout != "strided":
        baked["stride_cn" if spec.code.c_layout == "row" else "stride_cm"] = 1
    if kernel != "tma_persistent":
        baked["SPLIT"] = split
        if not split:
            baked |= {"partial_ptr": None, "arrivals_ptr": None, "SPLIT_K": 1}
    return baked


def _pointer_constants(spec: Specialization) -> dict[str, Any]:
    code, item = spec.code, spec.code.itemsize
    baked: dict[str, Any] = {
        "EVEN_K": spec.even_k,
        "A_CONTIGUOUS": code.a_align // item if code.a_layout == "col" else 1,
        "B_CONTIGUOUS": code.b_align // item if code.b_layout == "row" else 1,
    }
    if code.a_layout != "strided":
        baked["stride_ak" if code.a_layout == "row" else "stride_am"] = 1
    if code.b_layout != "strided":
        baked["stride_bn" if code.b_layout == "row" else "stride_bk"] = 1
    return baked


def _tma_constants(spec: Specialization) -> dict[str, Any]:
    *_, halves, flatten, _ = spec.config_binary
    baked: dict[str, Any] = {
        "A_COL": spec.code.a_layout == "col", "B_COL": spec.code.b_layout == "col",
        "HALVES": halves,
    }  # fmt: skip
    baked["c_ptr" if stores_by_descriptor(spec.code) else "c_desc"] = None
    if spec.kernel == "tma_persistent":
        baked["FLATTEN"] = flatten
    return baked


def _warp_specialized_constants(spec: Specialization) -> dict[str, Any]:
    _, bm, bn, bk, num_warps, num_stages, *_ = spec.config_binary
    first, rest = n_parts(bn)
    baked: dict[str, Any] = {
        "ROWS": bm // (num_warps // 4), "BLOCK_N1": first, "BLOCK_N2": rest, "BLOCK_K": bk,
        "STAGES": num_stages, "GROUPS": num_warps // 4,
        "A_COL": spec.code.a_layout == "col", "B_COL": spec.code.b_layout == "col",
        "COPY_REGISTERS": COPY_REGISTERS, "MULTIPLY_REGISTERS": multiply_registers(num_warps),
    }  # fmt: skip
    return baked if rest else baked | {"b2_desc": None}


def _arguments(spec: Specialization) -> tuple[dict[str, str], dict[str, int]]:
    """Triton types of the arguments, and what divides them (pointers in bytes)."""
    code = spec.code
    in_type, out_type = (DATA_TYPES[name].triton for name in (code.dtype, code.out_dtype))
    item, out_item = code.itemsize, code.out_itemsize
    types = dict.fromkeys(
        ("M", "N", "K", "GROUP_M", "SPLIT_K", "stride_am", "stride_ak", "stride_bk", "stride_bn",
         "stride_cm", "stride_cn"), "i64" if code.wide else "i32",
    )  # fmt: skip
    types |= dict.fromkeys(("M", "N", "K", "GROUP_M", "SPLIT_K"), "i32")
    types |= {
        "a_ptr": f"*{in_type}", "b_ptr": f"*{in_type}", "c_ptr": f"*{out_type}",
        "bias_ptr": f"*{out_type}", "partial_ptr": f"*{code.data_type.accumulator}",
        "arrivals_ptr": "*i32",
    }  # fmt: skip
    for name, block in descriptor_blocks(spec).items():
        types[name] = _descriptor_type(spec, name, block)
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


def descriptor_blocks(spec: Specialization) -> dict[str, tuple[int, int]]:
    """Shapes of the blocks that descriptors copy, in the order of memory, by argument name.

    In the order of the kernel's arguments; none for the pointer kernel.
    """
    kernel, bm, bn, bk, num_warps, _, _, halves, _, _ = spec.config_binary
    if kernel == "pointer":
        return {}
    grouped = kernel == "warp_specialized"
    rows = bm // (num_warps // 4) if grouped else bm
    first, rest = n_parts(bn) if grouped else (bn, 0)
    b_turned = spec.code.b_layout == "col"
    blocks = {
        "a_desc": (bk, rows) if spec.code.a_layout == "col" else (rows, bk),
        "b_desc": (first, bk) if b_turned else (bk, first),
    }
    if rest:
        blocks["b2_desc"] = (rest, bk) if b_turned else (bk, rest)
    if stores_by_descriptor(spec.code):
        blocks["c_desc"] = (rows, stored_columns(kernel, bn, halves))
    return blocks


def _descriptor_type(spec: Specialization, name: str, block: tuple[int, int]) -> str:
    dtype = spec.code.out_dtype if name.startswith("c") else spec.code.dtype
    text = f"{DATA_TYPES[dtype].triton}[{block[0]}, {block[1]}]"
    if spec.kernel != "warp_specialized":
        return f"tensordesc<{text}>"
    # Gluon wants the layout in shared memory said, here the widest swizzle of the elements.
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, dtype))
    return f"tensordesc<{text},{layout!r}>"


def stores_by_descriptor(code: CodeClass) -> bool:
    """Whether TMA may write C: row-major and 16-byte aligned."""
    return code.c_layout == "row" and code.c_align == 16


def artifact_key(spec: Specialization, target: Target) -> str:
    """The identity of a binary: what it was made of, and what made it."""
    return _key(kernel_hash(spec.kernel), spec.config_binary, spec.code.key(), spec.even_k, target)


def repack_key(dtype: str, a_unit: bool | None, b_unit: bool | None, target: Target) -> str:
    """As :func:`artifact_key`, of what :func:`repack_source` gives the source of."""
    return _key(kernel_hash("tma"), "repack", dtype, (a_unit, b_unit), target)


def _key(code: str, what: object, kind: str, rest: object, target: Target) -> str:
    toolchain = target.toolchain
    parts = (code, what, kind, rest, target.device.arch, toolchain.triton, toolchain.ptxas)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
