"""From a configuration to a launch: the grid, the arguments, the scratch memory and the copies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from costmodel.gemm.config import GemmConfig, Specialization
from costmodel.gemm.family import family, partial_bytes, repack_elements
from costmodel.gemm.specialize import REPACK_BLOCK, Repacking, specialize
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.kernel import Kernel, load

if TYPE_CHECKING:
    import torch

Scratch = tuple["torch.Tensor", "torch.Tensor"]
"""Partial sums and arrival counters of split-K."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The launch of one configuration on one workload; each call fills in the addresses.

    Attributes:
        workload, config, spec: what is launched, and which binary it takes.
        blocks: number of programs.
        tiles: tiles of C (the arrival counters of split-K).
        workspace_bytes: memory for split-K partial sums.
        repacked: elements of the aligned copies of A and of B; 0 without a copy.
    """

    workload: Workload
    config: GemmConfig
    spec: Specialization
    blocks: int
    tiles: int
    workspace_bytes: int
    repacked: tuple[int, int]

    @classmethod
    def of(cls, workload: Workload, config: GemmConfig, sm_count: int) -> Plan:
        """Work out the launch; m and n must not be 0."""
        m, n = workload.m, workload.n
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        is_persistent = family(config.kernel).is_persistent
        return cls(
            workload,
            config,
            specialize(workload, config),
            min(tiles, sm_count) if is_persistent else tiles * config.split_k,
            tiles,
            int(partial_bytes(config, m, n)),
            repack_elements(workload) if config.repack else (0, 0),
        )

    @property
    def repacking(self) -> Repacking | None:
        """The binary that makes the copies; None without a copy."""
        if not any(self.repacked):
            return None
        code = self.workload.code
        a, b = (
            x.layout != "strided" if elements else None
            for x, elements in zip(code.matrices, self.repacked, strict=False)
        )
        return Repacking(code.dtype, a, b)

    def aligned(
        self, a: torch.Tensor, b: torch.Tensor, workspace: Workspace
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the operands that the kernel addresses: A and B, or the places of their copies."""
        code, (a_size, b_size) = self.workload.code, self.repacked
        return (
            workspace.copy_of("a", a, code.a_layout, a_size) if a_size else a,
            workspace.copy_of("b", b, code.b_layout, b_size) if b_size else b,
        )

    def scratch(self, workspace: Workspace) -> Scratch | None:
        """Return the scratch memory of split-K; None without a split."""
        return workspace.get(self.workspace_bytes, self.tiles) if self.workspace_bytes else None

    def arguments(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        scratch: Scratch | None = None,
    ) -> dict[str, Any]:
        """Return the run-time arguments of any kernel by name; each takes those that it has.

        Args:
            a, b: as :meth:`aligned` gave them.
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

    def repack_arguments(
        self,
        operands: tuple[torch.Tensor, torch.Tensor],
        copies: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[int, dict[str, Any]]:
        """Return how many programs make the copies, and their run-time arguments by name.

        Args:
            operands: A and B.
            copies: as :meth:`aligned` gave them.
        """
        blocks: list[int] = []
        arguments: dict[str, Any] = {}
        for matrix, x, copy, elements in zip(
            self.workload.code.matrices, operands, copies, self.repacked, strict=False
        ):
            if not elements:
                continue
            if matrix.layout == "col":
                x, copy = x.T, copy.T
            rows, width = copy.shape[0], copy.stride(0)
            blocks.append(-(-rows // REPACK_BLOCK[0]) * -(-width // REPACK_BLOCK[1]))
            values = {
                "ptr": x, "copy_ptr": copy, "rows": rows, "cols": x.shape[1],
                "row_stride": x.stride(0), "col_stride": x.stride(1), "copy_stride": width,
            }  # fmt: skip
            arguments |= {f"{matrix.name}_{name}": value for name, value in values.items()}
        if len(blocks) == 2:
            arguments["a_blocks"] = blocks[0]
        return sum(blocks), arguments

    def _descriptors(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
        """Return the tensor descriptors by argument name; a pointer kernel has none."""
        code = self.spec.code
        matrices = {
            "a": a if code.a_layout == "row" else a.T,
            "b": b if code.b_layout == "row" else b.T,
            "c": out,
        }
        return {
            name: _descriptor(matrices[name[0]], list(block))
            for name, block in family(self.spec.kernel).descriptor_blocks(self.spec).items()
        }


def _used_strides(x: torch.Tensor) -> list[int]:
    """Return the strides; 0 for a single row or column, whose stride may be any number."""
    return [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]


def _descriptor(x: torch.Tensor, block: list[int]) -> Any:
    """Return a host-side tensor descriptor of a matrix whose last dimension is contiguous."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, cols = x.shape
    # The stride of a single row is never used, but the descriptor wants a legal one.
    per_16_bytes = 16 // x.element_size()
    stride = x.stride(0) if rows > 1 else -(-cols // per_16_bytes) * per_16_bytes
    return TensorDescriptor(x, [rows, cols], [stride, 1], block)


class Repack:
    """The copies that a plan makes before its kernel, in at most one launch."""

    def __init__(self, plan: Plan, target: Target, device_index: int) -> None:
        self._plan = plan
        spec = plan.repacking
        self._kernel: Kernel | None = load(spec, target, device_index) if spec else None

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, workspace: Workspace, stream: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
    """

    def __init__(self, device: torch.device, *, apart: bool = False) -> None:
        self._device, self._apart = device, apart
        self._memory: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._scratch: tuple[tuple[torch.Tensor, torch.Tensor] | None, int, int] = (None, 0, 0)

    def get(self, size_bytes: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 [size_bytes / 4] of anything, and int32 [tiles] of zeros; or more."""
        scratch, most_bytes, most_tiles = self._scratch
        if scratch is not None and size_bytes <= most_bytes and tiles <= most_tiles:
            return scratch
        import torch

        partial_sums = self._at_least("partial", size_bytes // 4, torch.float32)
        scratch = partial_sums, self._at_least("arrivals", tiles, torch.int32)
        # Every launch asks, so that the found pair is kept.
        self._scratch = scratch, 4 * scratch[0].numel(), scratch[1].numel()
        return scratch

    def copy_of(self, name: str, x: torch.Tensor, code_layout: str, elements: int) -> torch.Tensor:
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

    def _at_least(self, name: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
        import torch

        key = name, dtype
        found = self._memory.get(key)
        if found is None or found.numel() < elements:
            make = partial(torch.zeros, elements, dtype=dtype, device=self._device)
            found = _outside_pools(make, self._device) if self._apart else make()
            self._memory[key] = found
        return found


def _outside_pools(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Allocate on this thread's stream, in another thread: a memory pool belongs to a thread."""
    import torch

    stream = torch.cuda.current_stream(device)

    def run() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1, "costmodel-allocate") as threads:
        try:
            made = threads.submit(run)
        except RuntimeError:  # this process may start no more threads
            return make()
        return made.result()
