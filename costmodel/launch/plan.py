"""From a configuration to a launch: the grid, the arguments, the scratch memory and the copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from costmodel.files import Named
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import family, partial_bytes, repack_elements
from costmodel.gemm.specialize import REPACK_BLOCK, Repacking, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.kernel import load

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_COUNTERS = 2**20

Pair = tuple["Tensor", "Tensor"]
"""A and B, or the scratch memory of split-K: its partial sums and arrival counters."""


class Plan:
    """The launch of one configuration on one workload; each call fills in the addresses.

    Args:
        workload, config: what is launched; m and n must not be 0.
        sm_count: multiprocessors of the device.

    Attributes:
        workload, config, spec: what is launched, and which binary it takes.
        blocks: number of programs.
        tiles: tiles of C (the arrival counters of split-K).
        workspace_bytes: memory for split-K partial sums.
        repacked: elements of the aligned copies of A and of B; 0 without a copy.
        repacking: the binary that makes the copies; None without a copy.
    """

    def __init__(self, workload: Workload, config: GemmConfig, sm_count: int):
        m, n = workload.m, workload.n
        self._matrices = workload.code.matrices
        self.workload, self.config = workload, config
        self.spec = specialize(workload, config)
        self.tiles = -(-m // config.block_m) * -(-n // config.block_n)
        is_persistent = family(config.kernel).is_persistent
        self.blocks = min(self.tiles, sm_count) if is_persistent else self.tiles * config.split_k
        self.workspace_bytes = int(partial_bytes(config, m, n))
        self.repacked = repack_elements(workload) if config.repack else (0, 0)
        self.repacking: Repacking | None = None
        if any(self.repacked):
            a, b = (
                x.layout != "strided" if elements else None
                for x, elements in zip(self._matrices, self.repacked, strict=False)
            )
            self.repacking = Repacking(workload.code.dtype, a, b)

    def aligned(self, a: Tensor, b: Tensor, workspace: Workspace) -> Pair:
        """Return the operands that the kernel addresses: A and B, or the places of their copies."""
        code, (a_size, b_size) = self.workload.code, self.repacked
        return (
            workspace.copy_of("a", a, code.a_layout, a_size) if a_size else a,
            workspace.copy_of("b", b, code.b_layout, b_size) if b_size else b,
        )

    def scratch(self, workspace: Workspace) -> Pair | None:
        """Return the scratch memory of split-K; None without a split."""
        return workspace.get(self.workspace_bytes, self.tiles) if self.workspace_bytes else None

    def arguments(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
        scratch: Pair | None = None,
    ) -> Named:
        """Return the run-time arguments of any kernel by name; each kernel takes those that it has.

        Args:
            a, b: as :meth:`aligned` returned them.
        """
        w, c = self.workload, self.config
        (a_m, a_k), (b_k, b_n), (c_m, c_n) = map(_used_strides, (a, b, out))
        partial_sums, arrivals = scratch or (None, None)
        return self._descriptors(a, b, out) | {
            "a_ptr": a, "b_ptr": b, "c_ptr": out, "bias_ptr": bias,
            "partial_ptr": partial_sums, "arrivals_ptr": arrivals,
            "M": w.m, "N": w.n, "K": w.k, "GROUP_M": c.group_m, "SPLIT_K": c.split_k,
            "stride_am": a_m, "stride_ak": a_k, "stride_bk": b_k, "stride_bn": b_n,
            "stride_cm": c_m, "stride_cn": c_n,
        }  # fmt: skip

    def repack_arguments(self, operands: Pair, copies: Pair) -> tuple[int, Named]:
        """Return how many programs make the copies, and their run-time arguments by name.

        Args:
            operands: A and B.
            copies: as :meth:`aligned` returned them.
        """
        blocks = []
        arguments: Named = {}
        for matrix, x, copy, elements in zip(
            self._matrices, operands, copies, self.repacked, strict=False
        ):
            if not elements:
                continue
            if matrix.layout == "col":
                x, copy = x.T, copy.T
            rows, width = copy.shape[0], copy.stride(0)
            blocks.append(-(-rows // REPACK_BLOCK[0]) * -(-width // REPACK_BLOCK[1]))
            name = matrix.name
            arguments |= {
                f"{name}_ptr": x, f"{name}_copy_ptr": copy,
                f"{name}_rows": rows, f"{name}_cols": x.shape[1],
                f"{name}_row_stride": x.stride(0), f"{name}_col_stride": x.stride(1),
                f"{name}_copy_stride": width,
            }  # fmt: skip
        if len(blocks) == 2:
            arguments["a_blocks"] = blocks[0]
        return sum(blocks), arguments

    def _descriptors(self, a: Tensor, b: Tensor, out: Tensor) -> Named:
        """Return the tensor descriptors by argument name; a pointer kernel has none."""
        in_memory = {
            matrix.name: x.T if matrix.layout == "col" else x
            for matrix, x in zip(self._matrices, (a, b, out))
        }
        return {
            name: _descriptor(in_memory[name[0]], list(block))
            for name, block in family(self.spec.kernel).descriptor_blocks(self.spec).items()
        }


def _used_strides(x: Tensor) -> list[int]:
    """Return the strides; 0 for a single row or column, whose stride may be any number."""
    return [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride())]


def _descriptor(x: Tensor, block: list[int]) -> Any:
    """Return a host-side tensor descriptor of a matrix whose last dimension is contiguous."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, cols = x.shape
    # The stride of a single row is never used, but the descriptor wants a legal one.
    per_16_bytes = 16 // x.element_size()
    stride = x.stride(0) if rows > 1 else -(-cols // per_16_bytes) * per_16_bytes
    return TensorDescriptor(x, [rows, cols], [stride, 1], block)


class Repack:
    """The copies that a plan makes before its kernel, in at most one launch."""

    def __init__(self, plan: Plan, target: Target, device_index: int):
        self._plan = plan
        spec = plan.repacking
        self._kernel = load(spec, target, device_index) if spec else None

    def __call__(self, a: Tensor, b: Tensor, workspace: Workspace, stream: int) -> Pair:
        """Queue the copies and return the operands for the kernel."""
        aligned = self._plan.aligned(a, b, workspace)
        if self._kernel is not None:
            blocks, arguments = self._plan.repack_arguments((a, b), aligned)
            self._kernel(blocks, stream, arguments)
        return aligned


class Workspace:
    """Scratch memory of one stream: split-K's partial sums and arrival counters, aligned copies.

    It grows and is kept, so that a launch allocates nothing. Launches on one stream may share it;
    two streams may not.

    Args:
        apart: allocate outside a memory pool of the calling thread, such as one of CUDA graphs
            (``torch.cuda.use_mem_pool``): the pool is for results, and this memory is kept.
        counters: those of the device. A workspace that is apart makes them, another takes from
            them.
    """

    def __init__(
        self, device: torch.device, *, apart: bool = False, counters: Counters | None = None
    ):
        self._device, self._apart, self._counters = device, apart, counters
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self._scratch: tuple[Pair | None, int, int] = (None, 0, 0)

    def get(self, size_bytes: int, tiles: int) -> Pair:
        """Return float32 [size_bytes / 4], uninitialised, and int32 [tiles] of zeros; or longer."""
        scratch, most_bytes, most_tiles = self._scratch
        if scratch is not None and size_bytes <= most_bytes and tiles <= most_tiles:
            return scratch
        import torch

        partial_sums = self._at_least("partial", size_bytes // 4, torch.float32)
        arrivals = None
        if self._counters is not None:
            if self._apart:
                self._counters.make()
            else:
                arrivals = self._counters.take(tiles)
        if arrivals is None:
            arrivals = self._at_least("arrivals", tiles, torch.int32, torch.zeros)
        scratch = partial_sums, arrivals
        # Every launch asks for the pair, so it is kept.
        self._scratch = scratch, 4 * scratch[0].numel(), scratch[1].numel()
        return scratch

    def copy_of(self, name: str, x: Tensor, code_layout: str, elements: int) -> Tensor:
        """Return a matrix like ``x`` with aligned rows, or columns for a ``col`` layout.

        Args:
            name: which operand: each has a place of its own.
            elements: its size with the padding, from :func:`costmodel.gemm.family.repack_elements`.
        """
        memory = self._at_least(name, elements, x.dtype)[:elements]
        rows, cols = x.shape
        if code_layout == "col":
            return memory.view(cols, -1)[:, :rows].T
        return memory.view(rows, -1)[:, :cols]

    def _at_least(
        self, name: str, elements: int, dtype: torch.dtype, new: Callable[..., Tensor] | None = None
    ) -> Tensor:
        import torch

        key = name, dtype
        found = self._memory.get(key)
        if found is None or found.numel() < elements:
            make = partial(new or torch.empty, elements, dtype=dtype, device=self._device)
            found = _outside_pools(make, self._device) if self._apart else make()
            self._memory[key] = found
        return found


class Counters:
    """Zeros on one device, for the arrival counters of launches that a CUDA graph captures.

    Filling some with zeros in the graph would take as long as a small product, at each replay. Each
    captured launch has its own, since its graph may be replayed at any time, and keeps them: 4
    bytes a tile. The kernels leave them zero.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._lock = threading.Lock()
        self._zeros: Tensor | None = None
        self._used = 0

    def make(self) -> None:
        """Make the zeros, outside a capture: inside, they cannot be made."""
        import torch

        with self._lock:
            if self._zeros is None:
                new = partial(torch.zeros, _COUNTERS, dtype=torch.int32, device=self._device)
                self._zeros = _outside_pools(new, self._device)
                if self._device.type == "cuda":  # any stream may come to use them
                    torch.cuda.current_stream(self._device).synchronize()

    def take(self, tiles: int) -> Tensor | None:
        """Return int32 [tiles] of zeros for one launch; None if there are none or no more."""
        with self._lock:
            first, last = self._used, self._used + tiles
            if self._zeros is None or last > _COUNTERS:
                return None
            self._used = last
            return self._zeros[first:last]


def _outside_pools(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Allocate on this thread's stream, in another thread: a memory pool belongs to a thread."""
    import torch

    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def run() -> Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1, "costmodel-allocate") as threads:
        try:
            made = threads.submit(run)
        except RuntimeError:  # this process may start no more threads
            return make()
        return made.result()
