"""From a code class and a configuration to one Triton source.

Triton would specialise integer arguments on what their values happen to be. Here nothing depends
on values: strides that the layout makes 1 are constants, and what the alignment class promises is
said as divisibility. So the number of binaries is finite, and each is known before a GPU is.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.dtypes import DATA_TYPES
from costmodel.gemm.family import family
from costmodel.gemm.kernel_code import kernel_function, kernel_hash
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target

if TYPE_CHECKING:
    from triton.compiler import ASTSource

__all__ = [
    "REPACK_BLOCK",
    "Specialization",
    "artifact_key",
    "constants",
    "repack_constants",
    "repack_key",
    "repack_source",
    "source",
    "specialize",
]


def specialize(workload: Workload, config: GemmConfig) -> Specialization:
    """Return the specialization by which this configuration runs this workload."""
    # What TMA reads past K is zero: one binary serves every K.
    even_k = family(config.kernel).is_masked and workload.k % config.block_k == 0
    code = workload.code.repacked() if config.repack else workload.code
    return Specialization(config.binary, code, even_k)


def source(spec: Specialization) -> tuple[ASTSource, dict[str, Any]]:
    """Return the Triton source and the compile options of a specialization.

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
    of = family(spec.kernel)
    return of.source_class()(fn, signature, baked, attributes), of.options(spec.config_binary)


REPACK_BLOCK = (16, 256)
"""Rows and columns that one program of ``repack_operands`` copies."""

_REPACK_TYPES = {
    "ptr": "*{element}", "copy_ptr": "*{element}", "rows": "i32", "cols": "i32",
    "row_stride": "i64", "col_stride": "i64", "copy_stride": "i64",
}  # fmt: skip


def repack_constants(a_unit: bool | None, b_unit: bool | None) -> dict[str, Any]:
    """Return the arguments of ``repack_operands`` that are part of the binary."""
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
    """Return the Triton source and the compile options of the copies into aligned rows.

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
    """Return the arguments whose value is part of the binary."""
    baked = family(spec.kernel).constants(spec) | {"ACTIVATION": spec.code.activation}
    return baked if spec.code.bias else baked | {"bias_ptr": None}


def _arguments(spec: Specialization) -> tuple[dict[str, str], dict[str, int]]:
    """Return the Triton types of the arguments, and their divisors (pointers in bytes)."""
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
    of = family(spec.kernel)
    for name, block in of.descriptor_blocks(spec).items():
        dtype = code.out_dtype if name.startswith("c") else code.dtype
        types[name] = of.descriptor_type(dtype, DATA_TYPES[dtype].triton, block)
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
    )[2 if of.reads_by_descriptor else 0 :]:
        if layout == "strided":
            continue
        lead, extent = (lead_row, extent_row) if layout == "row" else (lead_col, extent_col)
        divides[lead] = align // size
        divides[extent] = max(divides.get(extent, 1), align // size)
    return types, divides


def artifact_key(spec: Specialization, target: Target) -> str:
    """Return the identity of a binary: its kernel, configuration, code class and toolchain."""
    return _key(kernel_hash(spec.kernel), spec.config_binary, spec.code.key(), spec.even_k, target)


def repack_key(dtype: str, a_unit: bool | None, b_unit: bool | None, target: Target) -> str:
    """Return the identity of the binary of :func:`repack_source`."""
    return _key(kernel_hash("tma"), "repack", dtype, (a_unit, b_unit), target)


def _key(code: str, what: object, kind: str, rest: object, target: Target) -> str:
    toolchain = target.toolchain
    parts = (code, what, kind, rest, target.device.arch, toolchain.triton, toolchain.ptxas)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
