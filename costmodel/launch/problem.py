"""A matrix product as something to time: its operands, its launches, and what they should give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Workload
from costmodel.hardware.target import Target
from costmodel.launch.kernel import load
from costmodel.launch.plan import Plan, Repack, Workspace

if TYPE_CHECKING:
    from torch import Tensor

_GRAIN_BYTES = 512  # as torch allocates: cuBLAS takes up to 14 % longer with A only 16-byte aligned

Operands = tuple["Tensor", "Tensor", "Tensor", "Tensor | None"]
"""(a[m, k], b[k, n], out[m, n], bias[n] or None) of one launch."""


@dataclass(frozen=True)
class GemmProblem:
    """A workload for :class:`costmodel.measure.session.Session`; a choice is a configuration."""

    workload: Workload

    def __str__(self) -> str:
        return str(self.workload)

    @property
    def set_bytes(self) -> int:
        """Device memory of one set of operands."""
        return sum(extent.size_bytes for extent in _extents(self.workload))

    @property
    def check_bytes(self) -> int:
        """Device memory to check a result: float32 operands, and their product twice."""
        m, n, k = self.workload.sizes
        return 4 * (m * k + k * n + 2 * m * n)

    @property
    def precision(self) -> str:
        """The name of its tolerances in :class:`costmodel.measure.protocol.TimingProtocol`."""
        code = self.workload.code
        return code.kind if code.out_dtype == code.dtype else "16-bit>float32"

    @property
    def terms(self) -> int:
        """Number of products that are added up in one element."""
        return self.workload.k

    def operands(self, draw: Callable[[str, int], Tensor], count: int) -> list[Operands]:
        """Make disjoint sets of operands, with the layouts and alignments of the workload.

        Args:
            draw: returns at least a number of random values of a type.
        """
        import torch

        code = self.workload.code
        extents = _extents(self.workload)
        in_data = draw(code.dtype, self.set_bytes * count // code.itemsize)
        out_data = in_data.view(getattr(torch, code.out_dtype))
        result = []
        start = 0
        for _ in range(count):
            views = []
            for extent, data in zip(extents, (in_data, in_data, out_data, out_data)):
                views.append(extent.view(data, start))
                start += extent.size_bytes
            a, b, out, bias = views
            if out_data.dtype != in_data.dtype and code.bias:
                bias.normal_()  # the bits of the other type would be any number
            result.append((a, b, out, bias if code.bias else None))
        return result

    def output(self, operands: Operands) -> Tensor:
        """The operand that a launch writes."""
        return operands[2]

    def reference(self, operands: Operands) -> Tensor:
        """Return the right result in float32, contiguous."""
        from costmodel.launch.fast import reference_product

        a, b, _, bias = operands
        return reference_product(a, b, bias, self.workload.code.activation).contiguous()

    def launcher(
        self,
        config: GemmConfig | None,
        target: Target,
        device_index: int,
        stream: int,
        scratch: dict[str, Any],
    ) -> Callable[[Operands], None]:
        """Return what queues one launch of a configuration; None is torch, the baseline.

        Args:
            stream: the raw handle of the current stream.
            scratch: a dictionary that a session keeps between its launches, for memory.

        Raises:
            CompileError, LaunchError: the configuration cannot be loaded.
        """
        import torch

        if config is None:
            from costmodel.launch.fast import torch_product

            code = self.workload.code
            return lambda operands: torch_product(*operands, code.activation, code.tf32)

        workspace = scratch.setdefault("workspace", Workspace(torch.device("cuda", device_index)))
        plan = Plan(self.workload, config, target.device.sm_count)
        kernel = load(plan.spec, target, device_index, remember=False)
        repack = Repack(plan, target, device_index) if config.repack else None
        prepared = {}

        def launch(operands: Operands) -> None:
            a, b, out, bias = operands
            if repack is not None:
                a, b = repack(a, b, workspace, stream)
            key = id(operands)
            if key not in prepared:
                prepared[key] = plan.arguments(a, b, out, bias, plan.scratch(workspace))
            kernel(plan.blocks, stream, prepared[key])

        return launch


def _extents(workload: Workload) -> list[_Extent]:
    """Return the extents of A, B, the result and the bias, which may be empty."""
    code = workload.code
    if code.is_strided:
        raise InvalidInput("operands without a contiguous dimension cannot be drawn for timing")
    found = []
    for x in code.matrices:
        rows, cols = (getattr(workload, name) for name in x.in_memory)
        found.append(_Extent(rows, cols, x.layout == "col", x.align % 16, x.itemsize))
    item = code.out_itemsize
    return [*found, _Extent(1 if code.bias else 0, workload.n, False, item, item)]


class _Extent(NamedTuple):
    """The place of one operand: its rows in memory, shifted to have exactly the alignment asked."""

    rows: int
    cols: int
    is_transposed: bool
    shift_bytes: int
    item: int

    @property
    def size_bytes(self) -> int:
        size_bytes = self.rows * self.cols * self.item + self.shift_bytes
        return -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES

    def view(self, data: Tensor, start_bytes: int) -> Tensor:
        first = (start_bytes + self.shift_bytes) // self.item
        x = data[first : first + self.rows * self.cols].view(self.rows, self.cols)
        return x.T if self.is_transposed else x
