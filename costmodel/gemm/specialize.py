"""From a code class and a configuration to a Triton source, its binary, and that one's identity.

Triton would specialise integer arguments on their values at a launch. Here nothing depends on
values: strides that the layout makes 1 are constants, and the alignment class is given to Triton as
divisibility. So the number of binaries is finite, and each is known without a GPU.

The identity of a kernel is read from its file: a process that only looks up what was tuned before
needs neither Triton nor the kernels.
"""

import ast
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from costmodel.compile.compile_pool import CompilePool, as_compiled
from costmodel.compile.compiler import Artifact, compile_source
from costmodel.compile.triton_private import build_launchers, cache_folder
from costmodel.errors import InvalidInput
from costmodel.files import Named, cached_fact, digest
from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.dtypes import DATA_TYPES
from costmodel.gemm.family import families, family
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target, Toolchain
from costmodel.processes import IDLE_S

SOURCES = sorted(Path(__file__).parent.rglob("*.py"))
"""All files of this folder. If one changes, remembered grids and binaries are worked out again."""

REPACK_BLOCK = (16, 256)
"""Rows and columns that one program of ``repack_operands`` copies."""


@dataclass(frozen=True)
class Repacking:
    """The input of the binary that copies operands into aligned rows; see :class:`Specialization`.

    Attributes:
        dtype: of the elements.
        a_unit, b_unit: True if the elements of a row are contiguous in the source; None for an
            operand that is not copied. Rows are those in memory: the columns of a ``col`` operand.
    """

    dtype: str
    a_unit: bool | None
    b_unit: bool | None

    def constants(self) -> Named:
        """Return the arguments of ``repack_operands`` that are part of the binary."""
        baked: Named = {"BLOCK_ROWS": REPACK_BLOCK[0], "BLOCK_COLS": REPACK_BLOCK[1]}
        for operand, unit in (("a", self.a_unit), ("b", self.b_unit)):
            if unit is None:
                baked |= {f"{operand}_{name}": None for name in _REPACK_TYPES} | {"a_blocks": None}
            elif unit:
                baked[f"{operand}_col_stride"] = 1
        return baked


_REPACK_TYPES = {
    "ptr": "*{element}", "copy_ptr": "*{element}", "rows": "i32", "cols": "i32",
    "row_stride": "i64", "col_stride": "i64", "copy_stride": "i64",
}  # fmt: skip


def specialize(workload: Workload, config: GemmConfig) -> Specialization:
    """Return the specialization by which this configuration runs this workload."""
    # What TMA reads past K is zero: one binary serves every K.
    even_k = family(config.kernel).is_masked and workload.k % config.block_k == 0
    code = workload.code.repacked() if config.repack else workload.code
    return Specialization(config.binary, code, even_k)


def source(spec: Specialization | Repacking) -> tuple[Any, Named]:
    """Return the Triton source and the compile options of a specialization.

    Arguments are typed in the order of the kernel's signature; ``constexpr`` ones are baked in.
    """
    if isinstance(spec, Repacking):
        from triton.compiler import ASTSource

        from costmodel.kernels.repack import repack_operands as fn

        types, divides = _repack_arguments(spec.dtype)
        baked, make = spec.constants(), ASTSource
        options = {"num_warps": 4, "num_stages": 1}
    else:
        fn, of = kernel_function(spec.kernel), family(spec.kernel)
        types, divides = _arguments(spec)
        baked, make, options = constants(spec), of.source_class(), of.options(spec.config_binary)
    names = fn.arg_names
    if wrong := {*names} - baked.keys() - types.keys() | baked.keys() - {*names}:
        raise InvalidInput(
            f"{fn.__module__}:{fn.__name__} and its family differ in {', '.join(sorted(wrong))}: "
            f"expected each argument to be a constant of the family or to have a type in "
            f"{Path(__file__).name}, and each constant of the family to be an argument"
        )
    signature = {name: "constexpr" if name in baked else types[name] for name in names}
    attributes = {
        (place,): [["tt.divisibility", divides[name]]]
        for place, name in enumerate(names)
        if name not in baked and divides.get(name, 1) > 1
    }
    return make(fn, signature, baked, attributes), options


def constants(spec: Specialization) -> Named:
    """Return the arguments whose value is part of the binary."""
    baked = family(spec.kernel).constants(spec) | {"ACTIVATION": spec.code.activation}
    return baked if spec.code.bias else baked | {"bias_ptr": None}


def _arguments(spec: Specialization) -> tuple[dict[str, str], dict[str, int]]:
    """Return the Triton types of the arguments, and their divisors (pointers in bytes)."""
    code, of = spec.code, family(spec.kernel)
    types = dict.fromkeys(("M", "N", "K", "GROUP_M", "SPLIT_K"), "i32") | {
        "bias_ptr": f"*{DATA_TYPES[code.out_dtype].triton}",
        "partial_ptr": f"*{code.data_type.accumulator}", "arrivals_ptr": "*i32",
    }  # fmt: skip
    divides = {"bias_ptr": code.out_itemsize, "partial_ptr": 16, "arrivals_ptr": 4}
    for x in code.matrices:
        pointer = f"{x.name}_ptr"
        types[pointer], divides[pointer] = f"*{DATA_TYPES[x.dtype].triton}", x.align
        lead, extent = x.in_memory
        strides = [f"stride_{x.name}{lead}", f"stride_{x.name}{extent}"]
        types |= dict.fromkeys(strides, "i64" if code.wide else "i32")
        # The class also divides the leading stride and the extent of the contiguous dimension, but
        # not of operands read by descriptor: these may be padded copies, with any extent.
        if x.layout != "strided" and not (of.reads_by_descriptor and x.name != "c"):
            share = x.align // x.itemsize
            divides[strides[0]] = share
            divides[extent.upper()] = max(divides.get(extent.upper(), 1), share)
    for name, block in of.descriptor_blocks(spec).items():
        dtype = code.out_dtype if name.startswith("c") else code.dtype
        types[name] = of.descriptor_type(dtype, DATA_TYPES[dtype].triton, block)
    return types, divides


def _repack_arguments(dtype: str) -> tuple[dict[str, str], dict[str, int]]:
    """Return the same for ``repack_operands``: rows of copies are whole vectors of 16 bytes."""
    row = DATA_TYPES[dtype]
    types = {"a_blocks": "i32"}
    divides: dict[str, int] = {}
    for x in "ab":
        types |= {f"{x}_{name}": t.format(element=row.triton) for name, t in _REPACK_TYPES.items()}
        divides |= {f"{x}_copy_ptr": 16, f"{x}_copy_stride": 16 // row.bytes}
    return types, divides


# --- the identity of a binary ---------------------------------------------------------------------


def artifact_key(spec: Specialization | Repacking, target: Target) -> str:
    """Return the identity of a binary: its kernel, configuration, code class and toolchain."""
    parts: tuple[object, ...]
    if isinstance(spec, Repacking):
        parts = (kernel_hash("tma"), "repack", spec.dtype, (spec.a_unit, spec.b_unit))
    else:
        parts = (kernel_hash(spec.kernel), spec.config_binary, spec.code.key(), spec.even_k)
    toolchain = target.toolchain
    parts = (*parts, target.device.arch, toolchain.triton, toolchain.ptxas)
    return digest(repr(parts), 24)


@cache
def kernel_function(name: str) -> Any:
    """Return the kernel of a family; Triton is imported when the first is asked for.

    Raises:
        ImportError, AttributeError: the installed Triton lacks what this kernel uses.
    """
    module, function = family(name).kernel.split(":")
    return getattr(import_module(module), function)


def import_kernels() -> None:
    """Import all kernels that this Triton supports, and let it hash them: 0.1 s each."""
    for name in families():
        with suppress(ImportError, AttributeError):
            _ = kernel_function(name).cache_key


@cache
def kernel_trouble(name: str, toolchain: Toolchain) -> str:
    """Return why a toolchain lacks a kernel; empty if it has it, or if it is not installed here."""
    import triton

    if triton.__version__ != toolchain.triton:
        return ""
    try:
        kernel_function(name)
    except (ImportError, AttributeError) as error:  # Gluon is experimental: its names may go
        return f"toolchain: Triton {triton.__version__} has no {name} kernel ({error})"
    return ""


def kernel_hash(name: str) -> str:
    """Return the hash of a kernel's code and of all it uses, without comments and names of files.

    The kernel that copies operands, which a launch may run before, is part of the hash.
    """
    return kernel_hashes()[name]


@cache
def kernel_hashes() -> Mapping[str, str]:
    """Return :func:`kernel_hash` of every kernel, by name."""
    # Parsing takes 20 ms: a program that only looks up a winner should not wait for it.
    modules = {one.kernel.split(":")[0] for one in families().values()}
    kernels = {_file(module): "." in module for module in modules}
    folders = {file.parent for file, in_package in kernels.items() if in_package}
    files = {Path(__file__), *kernels, *(x for folder in folders for x in folder.glob("*.py"))}

    def work_out() -> dict[str, str]:
        return {name: _hash((one.kernel, *one.beside)) for name, one in families().items()}

    found = cached_fact("kernels", files, work_out)
    return found if found.keys() == families().keys() else work_out()


def _hash(kernels: tuple[str, ...]) -> str:
    seen = {}
    queue = list(kernels)
    while queue:
        module, function = queue.pop().split(":")
        if function in seen:
            continue
        defined, scope = _module(module)
        if function not in defined:
            raise InvalidInput(f"{module} defines no {function}, which a kernel or its family uses")
        # Unparsed, since what ast.dump prints differs from one Python to the next.
        seen[function] = ast.unparse(defined[function])
        # All functions that are named, not only those called: a warp-specialised region gets its
        # functions by name.
        names = (node.id for node in ast.walk(defined[function]) if isinstance(node, ast.Name))
        queue += [scope[name] for name in names if name in scope]
    return digest("\n".join(f"{k}:{v}" for k, v in sorted(seen.items())))


@cache
def _module(name: str) -> tuple[dict[str, ast.stmt], dict[str, str]]:
    """Return what a file defines, without docstrings, and all that it knows by name.

    These are its own functions and constants, and those of files beside it, as ``module:function``.
    """
    defined: dict[str, ast.stmt] = {}
    scope = {}
    for node in ast.parse(_file(name).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                del node.body[0]
            defined[node.name], scope[node.name] = node, f"{name}:{node.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    defined[target.id], scope[target.id] = node, f"{name}:{target.id}"
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            source = f"{name.rpartition('.')[0]}.{node.module}" if node.level else node.module
            if node.level == 1 or source.startswith("costmodel.kernels."):
                scope |= {x.asname or x.name: f"{source}:{x.name}" for x in node.names}
    return defined, scope


def _file(module: str) -> Path:
    """Return the file of a module without importing it."""
    found = find_spec(module)
    if found is None or found.origin is None:
        raise InvalidInput(f"no file of {module}, which a kernel family names")
    return Path(found.origin)


# --- compiling -----------------------------------------------------------------------------------


def submit(
    pool: CompilePool,
    spec: Specialization,
    target: Target,
    *,
    dump: Path | None = None,
    cache: Path | None = None,
) -> Future[Artifact]:
    """Queue a specialization in a pool.

    Args:
        dump: as in :func:`costmodel.compile.compiler.compile_source`.
        cache: as in :meth:`CompilePool.submit`.
    """
    key, make_source = artifact_key(spec, target), partial(source, spec)
    compile_ = partial(compile_source, make_source, target.device.arch, key, spec, dump)
    return pool.submit(key, spec, compile_, cache=cache)


def compile_many(
    specs: Iterable[Specialization],
    target: Target,
    *,
    n_jobs: int | None = None,
    dump: Path | None = None,
    cache: Path | None = None,
) -> Generator[Artifact, None, None]:
    """Compile each distinct specialization once, in a new pool; a terminal shows a progress bar.

    Args:
        specs, target, dump, cache: as in :func:`submit`.
        n_jobs: as in :class:`CompilePool`.

    Yields:
        One artifact per distinct specialization, in the order in which they are done. Closing the
        iterator before its end kills the children.
    """
    with CompilePool(n_jobs, preload=import_kernels) as pool:
        futures = [
            submit(pool, spec, target, dump=dump, cache=cache) for spec in dict.fromkeys(specs)
        ]
        yield from as_compiled(futures, progress=True)


@cache
def device_compilers() -> CompilePool:
    """Return the pool of this process that compiles what is to be launched."""
    return CompilePool(idle_s=IDLE_S, preload=import_kernels)


def compile_for_device(
    specs: Sequence[Specialization], target: Target, pool: CompilePool | None = None
) -> Generator[Artifact, None, None]:
    """Begin to compile into Triton's cache, where every process finds the binaries.

    Their launchers are built too, in the background.

    Args:
        pool: default: :func:`device_compilers`.

    Returns:
        The artifacts, in the order in which they are done.
    """
    pool = pool or device_compilers()
    specs = list(dict.fromkeys(specs))
    sources = []
    for spec in specs:
        # Where a kernel cannot be compiled, the child that compiles says so.
        with suppress(ImportError, AttributeError, InvalidInput):
            sources.append(source(spec)[0])
    build_launchers(sources)
    cache = cache_folder()
    return as_compiled([submit(pool, spec, target, cache=cache) for spec in specs])
