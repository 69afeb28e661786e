"""A matrix product as something to time: its operands, its launches, and what they should give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from costmodel.errors import InvalidInput
from costmodel.gemm.config import GemmConfig
from costmodel.gemm.workload import Layout, Workload
from costmodel.hardware.target import Target
from costmodel.launch.kernel import load
from costmodel.launch.plan import Plan
from costmodel.launch.repacking import Repack
from costmodel.launch.workspace import Workspace

if TYPE_CHECKING:
    import torch

_GRAIN_BYTES = 256

Operands = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor | None"]
"""(a[m, k], b[k, n], out[m, n], bias[n] or None) of one launch."""


@dataclass(frozen=True, slots=True)
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
        w = self.workload
        return 4 * (w.m * w.k + w.k * w.n + 2 * w.m * w.n)

    @property
    def precision(self) -> str:
        """The name of its tolerances in :class:`costmodel.measure.protocol.TimingProtocol`."""
        code = self.workload.code
        return code.kind if code.out_dtype == code.dtype else "16-bit>float32"

    @property
    def terms(self) -> int:
        """Products that are added up in one element."""
        return self.workload.k

    def operands(self, draw: Callable[[str, int], torch.Tensor], count: int) -> list[Operands]:
        """Make disjoint sets of operands, with the layouts and alignments of the workload.

        Args:
            draw: gives at least so many random numbers of a type.
        """
        import torch

        code = self.workload.code
        extents = _extents(self.workload)
        in_data = draw(code.dtype, self.set_bytes * count // code.itemsize)
        out_data = in_data.view(getattr(torch, code.out_dtype))
        result: list[Operands] = []
        start = 0
        for _ in range(count):
            views = []
            for extent, data in zip(extents, (in_data, in_data, out_data, out_data), strict=True):
                views.append(extent.view(data, start))
                start += extent.size_bytes
            a, b, out, bias = views
            if out_data.dtype != in_data.dtype and code.bias:
                bias.normal_()  # the bits of the other type would be any number
            result.append((a, b, out, bias if code.bias else None))
        return result

    def output(self, operands: Operands) -> torch.Tensor:
        """The operand that a launch writes."""
        return operands[2]

    def reference(self, operands: Operands) -> torch.Tensor:
        """Return the right result in float32, contiguous."""
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
            scratch: kept between the launches of a session, for memory.

        Raises:
            CompileError, LaunchError: it cannot be loaded.
        """
        if config is None:
            return self._torch_launcher()
        import torch

        workspace: Workspace = scratch.setdefault(
            "workspace", Workspace(torch.device("cuda", device_index))
        )
        plan = Plan.of(self.workload, config, target.device.sm_count)
        kernel = load(plan.spec, target, device_index, remember=False)
        repack = Repack(plan, target, device_index) if config.repack else None
        prepared: dict[int, dict[str, Any]] = {}

        def launch(operands: Operands) -> None:
            a, b, out, bias = operands
            if repack is not None:
                a, b = repack(a, b, workspace, stream)
            key = id(operands)
            if key not in prepared:
                prepared[key] = plan.arguments(a, b, out, bias, plan.scratch(workspace))
            kernel(plan.blocks, stream, prepared[key])

        return launch

    def _torch_launcher(self) -> Callable[[Operands], None]:
        from costmodel.launch.torch_product import torch_product

        activation, tf32 = self.workload.code.activation, self.workload.code.tf32

        def launch(operands: Operands) -> None:
            torch_product(*operands, activation, tf32)

        return launch


def reference_product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Return act(A @ B + bias) in IEEE float32, whatever torch's switch for TF32 says."""
    from costmodel.launch.torch_product import activated, float32_precision

    with float32_precision(tf32=False):
        product = a.float() @ b.float()
    if bias is not None:
        product += bias.float()
    return activated(product, activation)


def _extents(workload: Workload) -> tuple[_Extent, _Extent, _Extent, _Extent]:
    """Return the extents of A, B, the result and the bias, which may be empty."""
    w, code = workload, workload.code
    return (
        _Extent(w.m, w.k, code.a_layout, code.a_align, code.itemsize),
        _Extent(w.k, w.n, code.b_layout, code.b_align, code.itemsize),
        _Extent(w.m, w.n, code.c_layout, code.c_align, code.out_itemsize),
        _Extent(1 if code.bias else 0, w.n, "row", code.out_itemsize, code.out_itemsize),
    )


class _Extent:
    """The place of one operand: rows of ``lead`` elements, shifted to be aligned as asked."""

    def __init__(self, rows: int, cols: int, layout: Layout, align: int, item: int) -> None:
        if layout == "strided":
            raise InvalidInput("operands without a contiguous dimension cannot be drawn for timing")
        self._shape = (rows, cols) if layout == "row" else (cols, rows)
        self._transposed = layout == "col"
        # A shift of `align` bytes is aligned to that, and to no wider class below 16.
        self._shift = (align % 16) // item
        self._item = item
        size_bytes = (self._shape[0] * self._shape[1] + self._shift) * item
        self.size_bytes = -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES

    def view(self, data: torch.Tensor, start_bytes: int) -> torch.Tensor:
        rows, cols = self._shape
        first = start_bytes // self._item + self._shift
        x = data[first : first + rows * cols].view(rows, cols)
        return x.T if self._transposed else x
