"""What a kernel is compared with: torch's product, in speed, and one in float32, in result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from costmodel.gemm.workload import Workload
from costmodel.measure.operands import Operands

if TYPE_CHECKING:
    import torch

__all__ = ["reference_product", "torch_launcher"]


def torch_launcher(workload: Workload) -> Callable[[Operands], None]:
    """What queues the product by ``torch.mm`` (cuBLAS) on the current stream."""
    from costmodel.launch.torch_product import torch_product

    activation, tf32 = workload.code.activation, workload.code.tf32

    def launch(operands: Operands) -> None:
        torch_product(*operands, activation, tf32)

    return launch


def reference_product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """act(A @ B + bias) in IEEE float32, whatever torch's switch for TF32 says."""
    from costmodel.launch.torch_product import float32_precision

    with float32_precision(tf32=False):
        product = a.float() @ b.float()
    if bias is not None:
        product += bias.float()
    function = _activation(activation)
    return product if function is None else function(product)


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    from torch.nn import functional

    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu,
    }  # fmt: skip
    return functions.get(name)
