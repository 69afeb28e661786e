"""Launches of each kernel, or of torch, by the configuration that the tuner asks for."""

import copy
import functools
from collections.abc import Callable, Sequence
from math import ceil
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from costmodel.autotune.tuner import autotune
from costmodel.errors import CompileError
from costmodel.files import Named
from costmodel.gemm.kernels.warp_specialized import (
    COPY_REGISTERS,
    entry_registers,
    multiply_registers,
)
from costmodel.launch.fast import activated, workspace_of
from costmodel.launch.plan import Workspace
from costmodel.scaled.configs import BY_BLOCK, BY_ROW, LIBRARIES, ROW, STEP, TENSOR, prune

BLOCK_ROWS = {TENSOR: 0, ROW: 0, BY_ROW: 1, BY_BLOCK: 128}
"""Rows that share a scale in each block of K; 0: one scale for all of K."""

_GROUP_M = 8
_OPERANDS = "a", "b", "scale_a", "scale_b", "bias", "c"  # of kernels; c is `out`
_SCRATCH = slice(8, 10)  # places of `partial_ptr` and `arrivals_ptr`
_PLAIN = ("m", "stride_sak", "stride_sbk")


def scaled_product(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out: Any, m: int, n: int, k: int,
    lda: int, ldb: int, ldc: int, stride_sam: int, stride_sak: int, stride_sbn: int,
    stride_sbk: int, recipe_a: int, recipe_b: int, fast: bool, activation: str, bucket: int,
    torchs: bool,
) -> None:  # fmt: skip
    """Stand for all kernels: their name and arguments, under which choices are kept.

    Args:
        a, b: [m, k] and [n, k], K contiguous, ``lda`` and ``ldb`` elements from row to row.
        scale_a, scale_b: float32 as the caller gave them, or None.
        recipe_a, recipe_b: keys of ``BLOCK_ROWS``.
        bucket: the largest m that shares the choice.
        torchs: scales, operands and result lie in memory as torch wants them.
    """


class Launch(NamedTuple):
    """A launch of a kernel of Triton.

    Attributes:
        values: its arguments in order, except constants; None for memory of the workspace.
        scratch: bytes and counters of the workspace; (): it needs none.
    """

    function: Any
    values: tuple[Any, ...]
    constants: Named
    programs: int
    options: Named
    scratch: tuple[int, ...] = ()


class Kernels:
    """All kernels behind one name, launched like a Triton function."""

    fn = staticmethod(scaled_product)
    arg_names = scaled_product.__code__.co_varnames
    # Read by the tuner: torch has no code that shows what is written, and these products have a
    # model of their own.
    writes, head = ("out",), "scaled"
    # No kernel is compiled for these arguments: the tuner need not tell their values apart.
    params = tuple(
        SimpleNamespace(name=x, do_not_specialize=x in _PLAIN, do_not_specialize_on_alignment=False)
        for x in arg_names
    )

    @property
    def cache_key(self) -> str:
        """Return a hash of all kernels."""
        from costmodel.kernels.scaled import scaled_tiles
        from costmodel.kernels.scaled_hopper import scaled_warp_specialized

        return f"{scaled_tiles.cache_key}-{scaled_warp_specialized.cache_key}"

    @staticmethod
    def must_try(config: Any) -> bool:
        """Tell the tuner which configurations it must time: a library is never left out."""
        return config in LIBRARIES

    def run(
        self, *args: Any, kernel: str, grid: Any = None, warmup: bool = False, **meta: Any
    ) -> Any:
        """Launch a configuration, or only load it (``warmup``).

        Raises:
            CompileError: torch or DeepGEMM does not compute this.
        """
        named = dict(zip(self.arg_names, args, strict=True))
        if kernel in _KERNELS:
            launch: Launch = _KERNELS[kernel](named, **meta)
            values = [*launch.values]
            if launch.scratch:
                values[_SCRATCH] = _scratch(named["a"], *launch.scratch)
            return launch.function.run(
                *values, **launch.constants, **launch.options,
                grid=(launch.programs,), warmup=warmup,
            )  # fmt: skip
        try:
            return None if warmup else _BY_LIBRARY[kernel](named)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever it says: it is one candidate of many
            raise CompileError(f"{kernel} does not compute this: {error}") from error


def _by_torch(call: Named) -> None:
    a, b, out, bias = call["a"], call["b"].T, call["out"], call["bias"]
    scales = call["scale_a"], call["scale_b"]
    if a.dtype == torch.int8:
        if scales[0] is None:
            torch._int_mm(a, b, out=out)
            return
        value = torch._int_mm(a, b) * scales[0] * scales[1]
        out.copy_(activated(value if bias is None else value + bias, call["activation"]))
        return
    torch.ops.aten._scaled_mm_v2.out(
        a, b, [scales[0]], [call["recipe_a"]], [], [scales[1]], [call["recipe_b"]], [], bias,
        out.dtype, [], call["fast"], out=out,
    )  # fmt: skip
    if call["activation"] != "none":
        out.copy_(activated(out, call["activation"]))


def _by_deep_gemm(call: Named) -> None:
    import deep_gemm

    scale_b = call["scale_b"].T[:, : ceil(call["k"] / STEP)]
    deep_gemm.fp8_gemm_nt((call["a"], call["scale_a"]), (call["b"], scale_b), call["out"])


def _by_tiles(
    call: Named, *, block_m: int, block_n: int, step: int, splits: int,
    by_tma: bool = False, swap: bool | None = None, **options: Any,
) -> Launch:  # fmt: skip
    from triton.tools.tensor_descriptor import TensorDescriptor

    from costmodel.kernels.scaled import scaled_tiles

    m, n, k, a, b = (call[name] for name in ("m", "n", "k", "a", "b"))
    tiles = ceil(m / block_m) * ceil(n / block_n)
    if swap is None:  # the tensor cores' tile has 64 rows at least
        swap = block_n >= 64 and (block_m <= 64 or block_m > block_n)
    a_desc = b_desc = None
    scratch = (4 * tiles * splits * block_m * block_n, tiles) if splits > 1 else ()
    if by_tma:
        a_desc = TensorDescriptor(a, [*a.shape], [call["lda"], 1], [block_m, step])
        b_desc = TensorDescriptor(b, [*b.shape], [call["ldb"], 1], [block_n, step])
    values = (
        a_desc, b_desc, a, b, call["out"], call["scale_a"], call["scale_b"], call["bias"], None,
        None, m, n, k, call["lda"], call["ldb"], call["ldc"], *_strides(call), splits,
    )  # fmt: skip
    constants = _constants(call) | {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": step, "SWAP": swap,
        "SPLIT": splits > 1, "EVEN_K": k % step == 0,
    }  # fmt: skip
    return Launch(scaled_tiles, values, constants, tiles * splits, options, scratch)


def _by_warps(
    call: Named, *, block_m: int, block_n: int, step: int, groups: int, parts: int,
    num_stages: int, num_warps: int, **options: Any,
) -> Launch:  # fmt: skip
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from costmodel.kernels.scaled_hopper import scaled_warp_specialized

    m, n, k = call["m"], call["n"], call["k"]
    rows, columns = block_m // groups, block_n // parts
    width = min(columns, 128 // call["out"].itemsize)
    blocks = (
        ("a", "lda", [rows, step]),
        ("b", "ldb", [columns, step]),
        ("out", "ldc", [rows, width]),
    )
    descriptors = []
    for name, stride, block in blocks:
        x = call[name]
        kind = getattr(gl, _GLUON.get(x.dtype) or str(x.dtype).removeprefix("torch."))
        layout = gl.NVMMASharedLayout.get_default_for(block, kind)
        descriptors.append(TensorDescriptor(x, [*x.shape], [call[stride], 1], block, layout))
    tiles = ceil(m / block_m) * ceil(n / block_n)
    properties = torch.cuda.get_device_properties(call["a"].get_device())
    programs = min(tiles, properties.multi_processor_count)
    scales = call["scale_a"], call["scale_b"], call["bias"]
    constants = _constants(call) | {
        "ROWS": rows, "BLOCK_N": columns, "BLOCK_K": step, "STAGES": num_stages, "GROUPS": groups,
        "PARTS": parts, "COPY_REGISTERS": COPY_REGISTERS,
        "MULTIPLY_REGISTERS": int(multiply_registers(4 * groups)),
    }  # fmt: skip
    options |= {"num_warps": num_warps, "maxnreg": int(entry_registers(4 * groups))}
    values = *descriptors, *scales, m, n, k, *_strides(call)
    return Launch(scaled_warp_specialized, values, constants, programs, options)


_BY_LIBRARY = {"torch": _by_torch, "deep_gemm": _by_deep_gemm}
_KERNELS: dict[str, Callable[..., Launch]] = {
    "pointer": _by_tiles,
    "tma": functools.partial(_by_tiles, by_tma=True),
    "warps": _by_warps,
}
_GLUON = {torch.float8_e4m3fn: "float8e4nv", torch.float8_e5m2: "float8e5"}
"""Types of other names there."""


def repeated(
    call: tuple[Any, ...], kernel: str, loaded: Any, **meta: Any
) -> Callable[[Sequence[Any]], object]:
    """Return a function that launches again, with other tensors that lie in memory as the first.

    Triton takes longer to bind the arguments than everything else takes.

    Args:
        call: the arguments of the first launch; the tensors come first.
        loaded: Triton's object of the binary; not of a library.
    """
    numbers = call[len(_OPERANDS) :]
    if kernel in _BY_LIBRARY:
        return lambda tensors: Kernels().run(*tensors, *numbers, kernel=kernel)
    launch: Launch = _KERNELS[kernel](dict(zip(Kernels.arg_names, call)), **meta)
    own, scratch = launch.function.arg_names, launch.scratch
    kept = [*launch.values, *(launch.constants[name] for name in own[len(launch.values) :])]
    start, plain, described = loaded[launch.programs, 1, 1], list[Any](), list[Any]()
    for place, name in enumerate(own):
        operand, _, kind = name.rpartition("_")
        if operand not in _OPERANDS or kept[place] is None:
            continue
        of = _OPERANDS.index(operand)
        if kind == "desc":
            kept[place].base = None  # this keeps no tensor alive
            described.append((place, of))
        else:
            kept[place] = None
            plain.append((place, of))

    def again(tensors: Sequence[Any]) -> None:
        torch.cuda.is_current_stream_capturing()  # a new thread has no context for descriptors yet
        values = kept.copy()
        for place, of in plain:
            values[place] = tensors[of]
        for place, of in described:
            values[place] = copy.copy(kept[place])
            values[place].base = tensors[of]
        if scratch:
            values[_SCRATCH] = _scratch(tensors[0], *scratch)
        start(*values)

    return again


def _scratch(a: torch.Tensor, size_bytes: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scratch memory of the current stream, or new memory for the interpreter."""
    if a.device.type == "cpu":
        found = Workspace(a.device)
    else:
        index = a.get_device()
        found = workspace_of(index, torch.cuda.current_stream(index).cuda_stream)
    partial, arrivals = found.get(size_bytes, tiles)
    return partial.view(torch.int32) if a.dtype == torch.int8 else partial, arrivals


def _strides(call: Named) -> tuple[int, ...]:
    return call["stride_sam"], call["stride_sak"], call["stride_sbn"], call["stride_sbk"]


def _constants(call: Named) -> Named:
    return {
        "GROUP_M": _GROUP_M, "ROWS_A": BLOCK_ROWS[call["recipe_a"]],
        "ROWS_B": BLOCK_ROWS[call["recipe_b"]], "ACTIVATION": call["activation"],
        "PROMOTE": call["a"].dtype != torch.int8 and not call["fast"],
    }  # fmt: skip


_KEY = "n k recipe_a recipe_b fast activation bucket torchs"

tuned = autotune([*LIBRARIES], _KEY.split(), prune_configs_by={"early_config_prune": prune})(
    Kernels()
)
"""The tuner of all scaled products."""
