"""From a configuration to a launch: the grid, the arguments and the scratch memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from costmodel.gemm.config import GemmConfig
from costmodel.gemm.family import family
from costmodel.gemm.space import launch_blocks, repack_elements, workspace_bytes
from costmodel.gemm.specialize import Specialization, specialize
from costmodel.gemm.workload import Workload

if TYPE_CHECKING:
    import torch

    from costmodel.launch.workspace import Workspace

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
        return cls(
            workload,
            config,
            specialize(workload, config),
            launch_blocks(config, m, n, sm_count),
            -(-m // config.block_m) * -(-n // config.block_n),
            workspace_bytes(config, m, n),
            repack_elements(workload) if config.repack else (0, 0),
        )

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
        partial, arrivals = scratch or (None, None)
        return self.numbers(a, b, out) | self.descriptors(a, b, out) | {
            "a_ptr": a, "b_ptr": b, "c_ptr": out, "bias_ptr": bias,
            "partial_ptr": partial, "arrivals_ptr": arrivals,
        }  # fmt: skip

    def numbers(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> dict[str, int]:
        """Return the arguments that depend on sizes and strides only."""
        w, c = self.workload, self.config
        (a_m, a_k), (b_k, b_n), (c_m, c_n) = map(_used_strides, (a, b, out))
        return {
            "M": w.m, "N": w.n, "K": w.k, "GROUP_M": c.group_m, "SPLIT_K": c.split_k,
            "stride_am": a_m, "stride_ak": a_k, "stride_bk": b_k, "stride_bn": b_n,
            "stride_cm": c_m, "stride_cn": c_n,
        }  # fmt: skip

    def descriptors(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
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


def make_context() -> None:
    """Give this thread a CUDA context on the current device; safe in a capture.

    A thread that has done nothing on a device yet has no context there, and the driver then makes
    no tensor map. Triton's launcher makes the context itself, but only after the maps.
    """
    import torch

    torch.cuda.is_current_stream_capturing()  # any call of CUDA's runtime makes one


def _descriptor(x: torch.Tensor, block: list[int]) -> Any:
    """Return a host-side tensor descriptor of a matrix whose last dimension is contiguous."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, cols = x.shape
    # The stride of a single row is never used, but the descriptor wants a legal one.
    per_16_bytes = 16 // x.element_size()
    stride = x.stride(0) if rows > 1 else -(-cols // per_16_bytes) * per_16_bytes
    return TensorDescriptor(x, [rows, cols], [stride, 1], block)
